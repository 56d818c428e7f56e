"""What a term sees of one micro-batch: its streams, with everything outside replaced before any arithmetic. `N`
positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import beyond, bounded, finite, flags, selected
from megatron_pgloss.objective.unit_statistics import Over, UnitStatistics
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.rules.corrections import Evidence
from megatron_pgloss.spec import Component, LossSpec

__all__ = ["Over", "Streams"]
_FIX = {"advantages": "advantage"}


class Streams(UnitStatistics):
    """Streams ``[N]`` of one component; the ``x`` of a user's function.

    Only what the model computed has a gradient (``logp``, ``entropy``, ``value``, ``kl``, ``chosen``, and ratios of
    ``logp``); the other streams are constant. A position outside ``visible`` reads as 0. The visible positions are the
    component's members and, where a statistic over units may be asked for, the sampled tokens whose log-prob is finite.
    """

    def __init__(
        self,
        micro: MicroBatch,
        component: Component,
        spec: LossSpec,
        logp_N: Tensor,
        entropy_N: Tensor | None,
        **computed: Tensor | None,
    ) -> None:
        self._micro, self._spec, self.component = micro, spec, component
        self.group = micro.group
        self.answers = {}
        self.evidence: dict[str | None, Evidence] = {}
        """What corrections look at, by whose ratio to the sampler's they read."""
        self._caller = None
        self._axis: Tensor | None = None
        self.ratio_was_read = False
        """Whether ``ratio`` was read: of a user's function nothing else tells whether the bound may hold its term."""
        self._chosen = computed.pop("chosen", None)
        given = {"entropy": entropy_N} | computed
        self._given = {name: stream for name, stream in given.items() if stream is not None}
        kept_N, outside_N = self._given.pop("kept", None), self._given.pop("outside", None)
        usable_N = finite(logp_N)
        for name, stream in self._given.items():
            if name in component.reads:
                usable_N = usable_N & finite(stream)
        member_N = micro.members(component.name).reshape(-1)
        self.broken = member_N & ~usable_N
        self.kept: Tensor | None = kept_N
        """The size of the kept set over the vocabulary's, constant."""
        self.outside: Tensor | None = None
        """bool [N]: the component's tokens that lie outside their kept sets, where the spec has any."""
        if spec.kept is not None and component.over == "action":
            # A token outside its kept set has probability 0 on that set. Where the spec drops such tokens, a log-prob
            # of minus infinity is therefore expected, and no fault of the model's.
            lost_N = logp_N == -torch.inf
            self.outside = member_N & (lost_N if outside_N is None else outside_N)
            self.broken = self.broken & ~lost_N if spec.kept.outside == "drop" else self.broken
        self.members: Tensor = member_N & usable_N
        """bool [N]: the component's tokens."""
        self._sampled = _flat(micro, "action") & usable_N
        self.visible = self.members | self._sampled if _reads_units(component, spec) else self.members
        self._visible = flags(self.visible, logp_N.dtype)
        self.logp: Tensor = selected(self._visible, logp_N)
        """log pi of the target token, differentiable."""
        self.computed: dict[str, Tensor] = {}
        """Outputs of the model beside ``logp`` that were read, by name, differentiable."""

    def _constant(self, stream: str) -> Tensor:
        given = self._micro.stream(stream)
        if given is None:
            if self._micro.table["tokens"].numel() == 0:  # a rank without rows takes the same path
                return torch.zeros_like(self.logp)
            name = _FIX.get(stream, stream)
            raise DataError(
                f"a term reads {name}, which this step does not have",
                expected=f"the {stream} stream",
                fix=f"give it to the TokenBatch; a function says needs=({name!r},) so that the plan checks it",
            )
        if given.dim() > len(self._micro.shape):
            raise DataError(f"stream {stream!r} has several numbers a token", expected="one", fix="x.wide(name)")
        return self._seen(given)

    def _seen(self, given: Tensor) -> Tensor:
        given_N = given.reshape(-1)
        return selected(self._visible, given_N) if given.is_floating_point() else torch.where(self.visible, given_N, 0)

    def stream(self, name: str) -> Tensor:
        """A constant stream of the batch by name: one of the user's own (``streams={name: ...}``), or a known one."""
        return self._constant(name)

    def wide(self, name: str) -> Tensor:
        """A constant stream of several numbers per token, [N, k]: int64 ids, -1 for none and outside ``visible``; or
        one float for each of these ids. k is 0 on a rank without rows.
        """
        given = self._micro.wide(name)
        given_Nk = given.reshape(self.logp.numel(), given.size(-1))
        return torch.where(self.visible[:, None], given_Nk, 0 if given.is_floating_point() else -1)

    def number(self, given: float | str) -> float | Tensor:
        """The value of a parameter that is a number, or the name of a stream of numbers."""
        return self._constant(given) if isinstance(given, str) else given

    @property
    def group_term(self) -> tuple[Tensor, Tensor]:
        """Value and slope of the component's group of rollouts at every token, constant, from the statistics pass."""
        found = self._micro.group_term(self.component.name)
        assert found is not None  # `late.check_decided` looked
        return self._seen(found.value), self._seen(found.slope)

    @property
    def advantage(self) -> Tensor:
        """Advantage of the token, constant; 0 where a token outside the members has no finite one."""
        given_N = self._constant("advantages")
        if self.visible is self.members:
            return given_N
        return selected(self.members | finite(given_N), given_N)

    @property
    def old(self) -> Tensor:
        """log-prob of the base of the ratio, constant; the spec's ``old`` says whose it is."""
        source = self._spec.old
        if source == "policy":
            return self.logp.detach()  # on-policy: the base is the policy itself, held fixed
        if source == "record":
            recorded = self._micro.stream("recorded")
            assert recorded is not None
            return torch.where(recorded.reshape(-1), self._constant("old"), self.logp.detach())
        if source == "interpolate":
            rollout_N = self._constant("rollout")
            return rollout_N + self._constant("interpolation") * (self.logp.detach() - rollout_N)
        return self._constant({"given": "old", "rollout": "rollout"}[source])

    @property
    def rollout(self) -> Tensor:
        """The sampler's log-prob, constant."""
        return self._constant("rollout")

    def policy(self, name: str) -> Tensor:
        """The log-prob of another policy, constant: ``old`` (by the spec's), or that of the stream of this name."""
        return self.old if name == "old" else self._constant(name)

    @property
    def ref(self) -> Tensor:
        """The reference's log-prob, constant."""
        return self._constant("ref")

    def _model(self, name: str, expected: str, fix: str) -> Tensor:
        if name not in self._given:
            raise DataError(f"a term reads {name}, which was not computed", expected=expected, fix=fix)
        if name not in self.computed:
            self.computed[name] = selected(self._visible, self._given[name])
        return self.computed[name]

    @property
    def entropy(self) -> Tensor:
        """Exact entropy of pi at the position, differentiable."""
        return self._model(
            "entropy",
            "token_logprobs(..., entropy=True)",
            "a function says needs=('entropy',); then spec.needs_entropy is true",
        )

    @property
    def value(self) -> Tensor:
        """The value head's output at the position, differentiable."""
        return self._model("value", "policy_loss(..., value=V)", "give the critic's output")

    @property
    def kl(self) -> Tensor:
        """Exact KL(pi || ref) at the position, differentiable."""
        return self._model("kl", "token_logprobs(..., ref_logits=...)", "score with the reference's logits")

    @property
    def chosen(self) -> Tensor:
        """The policy's log-probs at a teacher's ids, [N, k], differentiable; minus infinity where there is no id."""
        if self._chosen is None:
            fix = "token_logprobs(..., chosen_ids=micro.wide(spec.chosen))"
            raise DataError("a term reads log-probs at chosen ids, which were not computed", fix=fix)
        if "chosen" not in self.computed:
            self.computed["chosen"] = torch.where(self.visible[:, None], self._chosen, -torch.inf)
        return self.computed["chosen"]

    @property
    def has_entropy(self) -> bool:
        """Whether the entropy was computed."""
        return "entropy" in self._given

    @property
    def bound(self) -> float:
        """The spec's ``log_ratio_bound``."""
        return self._spec.log_ratio_bound

    def has(self, stream: str) -> bool:
        """Whether the step carries this optional stream."""
        return self._micro.stream(stream) is not None

    @property
    def token_log_ratio(self) -> Tensor:
        """log pi - log old of the token."""
        return self.logp - self.old

    @property
    def log_ratio(self) -> Tensor:
        """Log of the component's ratio: a policy gradient's is made by its ratio axis, any other is the token's own.
        It is unbounded: ``log_ratio_bound`` acts where it is exponentiated, in `ratio`.
        """
        return self.token_log_ratio if self._axis is None else self._axis

    @log_ratio.setter
    def log_ratio(self, value_N: Tensor | None) -> None:
        self._axis = value_N

    @property
    def axis(self) -> Tensor | None:
        """``log_ratio`` as it was set; None where nothing was."""
        return self._axis

    def bounded(self, log_N: Tensor) -> Tensor:
        """A logarithm held within the spec's ``log_ratio_bound``, for exp: constant beyond it."""
        fixed_N = log_N.detach()
        # An infinite logarithm is no ratio, and must not come out of the bound as a number: its difference from itself
        # is NaN, that of a finite one is 0.
        return bounded(log_N, self.bound) + (fixed_N - fixed_N)

    def beyond(self, log_N: Tensor) -> Tensor:
        """bool [N]: where `bounded` holds a logarithm."""
        return beyond(log_N, self.bound)

    @property
    def ratio(self) -> Tensor:
        """exp of ``log_ratio``, held within the spec's ``log_ratio_bound``; its gradient beyond the bound is 0."""
        self.ratio_was_read = True
        return self.bounded(self.log_ratio).exp()


def _flat(micro: MicroBatch, name: str) -> Tensor:
    stream: Any = micro.stream(name)
    return stream.reshape(-1)  # type: ignore[no-any-return]


def _reads_units(component: Component, spec: LossSpec) -> bool:
    """Whether a statistic over units, which runs over more than the members, may be asked for."""
    parts = [*component.parts, *(gate for gate in spec.gates if gate.acts_on(component))]
    return any(part.asks_units for part in parts) or bool(spec.corrections_on(component, late=True))
