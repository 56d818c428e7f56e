"""Statistics over units that a term may ask for; they know packing and context parallelism. `N` positions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss.errors import SpecError
from megatron_pgloss.maths import UnitSums, running
from megatron_pgloss.planning import MicroBatch

Over = Literal["sampled", "members"]


class UnitStatistics:
    """Sequences and turns of one micro-batch, for one component.

    ``over="sampled"``: the unit's action tokens as sampled; ``"members"``: those that the component trains on.
    """

    group: Any
    """The process group over which the statistics of a unit are summed: the context-parallel group of the micro-batch,
    None where there is none, or a `Together` that collects the sums of all components for one collective."""
    _micro: MicroBatch
    _sampled: Tensor
    members: Tensor
    logp: Tensor

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
        return UnitSums(ids_N, micro.units[unit], self.group, chunk_N, micro.chunks)

    def _voters(self, over: str, value_N: Tensor) -> Tensor:
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

    def prefix_min(
        self, value_N: Tensor, unit: str = "sequence", over: Over = "sampled", *, inclusive: bool = True
    ) -> Tensor:
        """Smallest value of the unit's tokens up to each position (with it, or before it); 0 where there is none.
        A constant.
        """
        least_N = running.minimum(self._units(unit), value_N, self._voters(over, value_N), inclusive=inclusive)
        return torch.where(least_N < torch.inf, least_N, 0)

    def discounted_sum(self, value_N: Tensor, gamma: float, unit: str = "sequence", over: Over = "sampled") -> Tensor:
        """``sum_{k >= t} gamma^(k - t) value_k`` over the unit's tokens from each position t on; k - t counts positions
        of the sequence. A constant.
        """
        position_N = self._micro.position_N.to(self.logp.device, non_blocking=True)
        return running.discounted(self._units(unit), value_N, self._voters(over, value_N), position_N, gamma)
