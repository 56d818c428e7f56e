"""What a term sees of one micro-batch: its streams, with everything outside replaced before any arithmetic. `N`
positions.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import Component, LossSpec
from megatron_pgloss.terms import UnitSums, bounded

Over = Literal["sampled", "members"]


class Streams:
    """Streams ``[N]`` of one component; the ``x`` of a user's term.

    ``logp`` is the only one with a gradient (and ``entropy``). Positions outside ``visible`` read as 0. Visible are the
    component's members, and beside them, for statistics over units, the sampled tokens of finite log-prob.
    """

    def __init__(
        self, micro: MicroBatch, component: Component, spec: LossSpec, logp_N: Tensor, entropy_N: Tensor | None
    ) -> None:
        self._micro, self._spec = micro, spec
        member_N = micro.members(component.name).reshape(-1)
        self.broken = member_N & ~logp_N.detach().isfinite()
        if entropy_N is not None and _reads_entropy(component):
            self.broken = self.broken | (member_N & ~entropy_N.detach().isfinite())
        self.members: Tensor = member_N & ~self.broken
        """bool [N]: the component's tokens."""
        sampled_N = _flat(micro, "action")
        voters_N = sampled_N & logp_N.detach().isfinite()
        if entropy_N is not None and _reads_entropy(component):
            voters_N = voters_N & entropy_N.detach().isfinite()
        self._constants: dict[str, Tensor] = {}
        for name in ("advantages", "old", "rollout", "ref"):
            stream = micro.stream(name)
            if stream is not None:
                self._constants[name] = stream.reshape(-1)
        self._sampled = voters_N
        self.visible = self.members | voters_N if component.kind == "term" else self.members  # type: ignore[attr-defined]
        self.logp: Tensor = torch.where(self.visible, logp_N, 0)
        """log pi of the target token, differentiable."""
        self._entropy = None if entropy_N is None else torch.where(self.visible, entropy_N, 0)

    def _constant(self, name: str, stream: str) -> Tensor:
        if stream not in self._constants:
            raise DataError(
                f"a term reads {name}, which this step does not have",
                expected=f"the {stream} stream",
                fix=f"give it to the TokenBatch; a Term says needs=({name!r},) so that the plan checks it",
            )
        return torch.where(self.visible, self._constants[stream], 0)

    @property
    def advantage(self) -> Tensor:
        """Advantage of the token, constant."""
        return self._constant("advantage", "advantages")

    @property
    def old(self) -> Tensor:
        """log-prob of the base of the ratio, constant: by the spec's ``old``."""
        if self._spec.old == "policy":
            return self.logp.detach()  # on-policy: the base is the policy itself, held fixed
        return self._constant("old", {"given": "old", "rollout": "rollout"}[self._spec.old])

    @property
    def rollout(self) -> Tensor:
        """The sampler's log-prob, constant."""
        return self._constant("rollout", "rollout")

    @property
    def ref(self) -> Tensor:
        """The reference's log-prob, constant."""
        return self._constant("ref", "ref")

    @property
    def entropy(self) -> Tensor:
        """Exact entropy of pi at the position, differentiable."""
        if self._entropy is None:
            raise DataError(
                "a term reads entropy, which was not computed",
                expected="token_logprobs(..., entropy=True)",
                fix="a Term says needs=('entropy',); then spec.needs_entropy is true",
            )
        return self._entropy

    @property
    def has_entropy(self) -> bool:
        """Whether the entropy was computed."""
        return self._entropy is not None

    @property
    def bound(self) -> float:
        """The spec's ``log_ratio_bound``."""
        return self._spec.log_ratio_bound

    def has(self, stream: str) -> bool:
        """Whether the step carries this optional stream."""
        return stream in self._constants

    @property
    def raw_log_ratio(self) -> Tensor:
        """log pi - log old before the bound."""
        return self.logp - self.old

    @property
    def log_ratio(self) -> Tensor:
        """log pi - log old, bounded to the spec's ``log_ratio_bound`` (gradient 0 beyond)."""
        return bounded(self.raw_log_ratio, self._spec.log_ratio_bound)

    @property
    def ratio(self) -> Tensor:
        """exp of ``log_ratio``."""
        return self.log_ratio.exp()

    def _units(self, unit: str) -> UnitSums:
        micro = self._micro
        if unit not in micro.units:
            raise SpecError(
                f"statistics over {unit!r} are not known inside a micro-batch",
                expected="'sequence' or 'turn'",
                fix="prompts and episodes straddle micro-batches: put what depends on them into advantages or weights",
            )
        ids_N = {"sequence": micro.seq_N, "turn": micro.turn_N}[unit].to(self.logp.device, non_blocking=True)
        chunk_N = None if micro.chunk_N is None else micro.chunk_N.to(self.logp.device, non_blocking=True)
        return UnitSums(ids_N, micro.units[unit], micro.group, chunk_N, micro.chunks)

    def _voters(self, over: Over, value_N: Tensor) -> Tensor:
        # Outside the members a stream may hold anything: a token whose value it broke cannot vote. A broken member
        # does, so that the members of its unit are found broken with it.
        return self._sampled & (self.members | value_N.detach().isfinite()) if over == "sampled" else self.members

    def unit_mean(self, value_N: Tensor, unit: str = "sequence", over: Over = "sampled") -> Tensor:
        """Mean of ``value_N`` over the unit's action tokens as sampled (or the component's members), at each
        position.
        """
        return self._units(unit).mean(value_N, self._voters(over, value_N))

    def unit_sum(self, value_N: Tensor, unit: str = "sequence", over: Over = "sampled") -> Tensor:
        """Sum over the unit's action tokens as sampled (or members), at each position."""
        return self._units(unit).total(value_N, self._voters(over, value_N))

    def prefix_sum(self, value_N: Tensor, unit: str = "sequence", over: Over = "sampled") -> Tensor:
        """Sum over the unit's tokens up to and including each position."""
        return self._units(unit).prefix(value_N, self._voters(over, value_N))


def _flat(micro: MicroBatch, name: str) -> Tensor:
    stream: Any = micro.stream(name)
    return stream.reshape(-1)  # type: ignore[no-any-return]


def _reads_entropy(component: Component) -> bool:
    return component.kind == "entropy" or "entropy" in getattr(component, "needs", ())  # type: ignore[attr-defined]
