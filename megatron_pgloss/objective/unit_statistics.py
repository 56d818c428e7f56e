"""Statistics over units that a term may ask for; they know packing and context parallelism. `N` positions."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss.errors import SpecError
from megatron_pgloss.maths import Asked, UnitSums, running
from megatron_pgloss.maths.segments import How
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec.functions import Function
from megatron_pgloss.spec.levels import KEYED

Over = Literal["sampled", "members"]


class UnitStatistics:
    """Statistics over the sequences and turns of one micro-batch, for one component.

    ``over`` says which tokens of a unit enter: ``"sampled"`` its action tokens as sampled, ``"members"`` those that the
    component trains on.
    """

    group: Any
    """The process group over which the statistics of a unit are summed: the context-parallel group of the micro-batch,
    None where there is none."""
    answers: dict[Hashable, Tensor]
    """Statistics taken before the loss ran, by key. Those of all components travel together, in one collective for each
    link of the chain."""
    _caller: Hashable
    _micro: MicroBatch
    _sampled: Tensor
    members: Tensor
    logp: Tensor
    lost: Tensor | None
    """bool [N]: sampled tokens outside the members whose value a statistic should have read and could not, since it is
    not finite; None: there is none. They are faults."""
    _doubtful: dict[str, Tensor]

    def _units(self, unit: str) -> UnitSums:
        micro = self._micro
        if unit not in micro.units:
            raise SpecError(
                f"statistics over {unit!r} are not known inside a micro-batch",
                expected="'sequence' or 'turn'",
                fix="prompts and episodes straddle micro-batches: take a Ratio, gate or correction over them, or put "
                "what depends on them into advantages or weights",
            )
        ids_N = {"sequence": micro.seq_N, "turn": micro.turn_N}[unit].to(self.logp.device, non_blocking=True)
        chunk_N = None if micro.chunk_N is None else micro.chunk_N.to(self.logp.device, non_blocking=True)
        return UnitSums(ids_N, micro.units[unit], self.group, chunk_N, micro.chunks)

    def _voters(self, over: str, value_N: Tensor, unit: str | None = None) -> Tensor:
        # Outside the members a stream may hold anything, so a token whose value is not finite has no vote. A member
        # has one even then, so that all members of its unit are found broken with it. The plan has checked every
        # sampled token of the streams that it knows to be read; what a user's function reads beside them is found here.
        if over != "sampled":
            return self.members
        finite_N = value_N.detach().isfinite()
        if unit in self._doubtful:
            lost_N = self._doubtful[unit] & self._sampled & ~finite_N
            self.lost = lost_N if self.lost is None else self.lost | lost_N
        return self._sampled & (self.members | finite_N)

    def ask(self, how: How, value_N: Tensor, unit: str = "sequence", over: Over = "sampled") -> Asked:
        """A statistic over the unit's action tokens as sampled (or members), to be taken together with others. For a
        prompt or episode, which only the statistics pass asks for, it is the part of each row, in float64.
        """
        if unit in KEYED:
            unit, value_N = "sequence", value_N.double()
        return self._units(unit).asked(how, value_N, self._voters(over, value_N, unit))

    def ask_prefix_min(self, value_N: Tensor, unit: str, over: Over, *, inclusive: bool) -> Asked:
        """The statistic of `prefix_min`, to be taken together with others."""
        found = running.asked_minimum(
            self._units(unit), value_N, self._voters(over, value_N, unit), inclusive=inclusive
        )
        return Asked(found.part, lambda part: _or_zero(found.finish(part)), found.op)

    def ask_discounted_sum(self, value_N: Tensor, gamma: float) -> Asked:
        """`discounted_sum` over the sequence's tokens as sampled, to be taken together with others."""
        position_N = self._micro.position_N.to(self.logp.device, non_blocking=True)
        return running.asked_discounted(
            self._units("sequence"), value_N, self._voters("sampled", value_N, "sequence"), position_N, gamma
        )

    def answer(self, key: Hashable) -> Tensor:
        """The answer to what was asked under this key before the loss ran (`megatron_pgloss.objective.links`)."""
        return self.answers[key]

    def call(self, key: Hashable, part: Function) -> Any:
        """What the user's function of ``part`` returns; it reads the statistics that were declared under ``key``."""
        self._caller = key
        return part.fn(self)

    def statistic(self, name: str) -> Tensor:
        """A statistic that the function declares, at each position."""
        if (self._caller, name) not in self.answers:
            declared = [key[1] for key in self.answers if isinstance(key, tuple) and key[0] == self._caller]
            raise SpecError(
                f"the function declares no statistic {name!r}", expected=", ".join(map(str, declared)) or "some",
                fix=f"statistics=(pg.Statistic(name={name!r}, of=..., how=...),)",
            )  # fmt: skip
        return self.answers[self._caller, name]

    def unit_mean(self, value_N: Tensor, unit: str = "sequence", over: Over = "sampled") -> Tensor:
        """Mean of ``value_N`` over the unit's action tokens as sampled (or the component's members), at each
        position.
        """
        return self._units(unit).mean(value_N, self._voters(over, value_N, unit))

    def unit_sum(self, value_N: Tensor, unit: str = "sequence", over: Over = "sampled") -> Tensor:
        """Sum over the unit's action tokens as sampled (or members), at each position."""
        return self._units(unit).total(value_N, self._voters(over, value_N, unit))

    def prefix_sum(self, value_N: Tensor, unit: str = "sequence", over: Over = "sampled") -> Tensor:
        """Sum over the unit's tokens up to and including each position."""
        return self._units(unit).prefix(value_N, self._voters(over, value_N, unit))

    def prefix_min(
        self, value_N: Tensor, unit: str = "sequence", over: Over = "sampled", *, inclusive: bool = True
    ) -> Tensor:
        """Smallest value of the unit's tokens up to each position, with that position's own value if ``inclusive``; 0
        where there is no token. A constant.
        """
        return _or_zero(
            running.minimum(self._units(unit), value_N, self._voters(over, value_N, unit), inclusive=inclusive)
        )

    def discounted_sum(self, value_N: Tensor, gamma: float, unit: str = "sequence", over: Over = "sampled") -> Tensor:
        """``sum_{k >= t} gamma^(k - t) value_k`` over the unit's tokens from each position t on; k - t counts positions
        of the sequence. A constant.
        """
        position_N = self._micro.position_N.to(self.logp.device, non_blocking=True)
        return running.discounted(self._units(unit), value_N, self._voters(over, value_N, unit), position_N, gamma)


def _or_zero(least_N: Tensor) -> Tensor:
    return torch.where(least_N < torch.inf, least_N, 0)
