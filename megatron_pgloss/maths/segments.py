"""Sums over units (sequences, turns) of a micro-batch, exact under packing and context parallelism.

Shapes: `N` positions of this rank's shard, `U` units of the whole micro-batch. A unit's tokens may lie on several
context-parallel ranks; ranks exchange `[U]` sums, never tokens. Every rank of the group enters every collective,
whether or not it holds a token. A *voter* is a position that counts in a statistic of its unit.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor


class _SumOverRanks(torch.autograd.Function):
    """All-reduce SUM, forward and backward.

    Each rank uses the whole sum in the losses of its own tokens, and the losses of all ranks add up. So the gradient of
    one rank's part is the sum of the gradients that the whole sum gets on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class Deferred:
    """A group whose collectives run later, all at once: see `megatron_pgloss.maths.together`."""

    def ask(self, part: Tensor, op: Literal["sum", "max", "min"]) -> Tensor:
        """``part`` reduced over the ranks; or, until the collective has run, a placeholder of the same shape."""
        raise NotImplementedError


def sum_over_ranks(part: Tensor, group: Any) -> Tensor:
    """Differentiable sum of ``part`` over ``group`` (None: this rank alone)."""
    if group is None:
        return part
    return group.ask(part, "sum") if isinstance(group, Deferred) else _SumOverRanks.apply(part, group)  # type: ignore[no-any-return]


def extreme_over_ranks(part: Tensor, op: Literal["max", "min"], group: Any) -> Tensor:
    """Elementwise largest or smallest ``part`` over ``group`` (None: this rank alone), without gradient."""
    part = part.detach()
    if group is None:
        return part
    if isinstance(group, Deferred):
        return group.ask(part, op)
    whole = part.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.MIN, group=group)
    return whole


class UnitSums:
    """Statistics over the units of one kind.

    Args:
        unit_N: int64 [N]: the unit of each position, -1 where it belongs to none.
        units: U, the same on all ranks of ``group``.
        group: the ranks that share the units' tokens, or None.
        chunk_N: int64 [N]: which of ``chunks`` consecutive pieces of its unit's sequence a position lies in; None where
            this rank holds whole sequences.
        chunks: the number of these pieces.
    """

    def __init__(
        self, unit_N: Tensor, units: int, group: Any = None, chunk_N: Tensor | None = None, chunks: int = 1
    ) -> None:
        self.unit_N, self.units, self.group = unit_N, units, group
        self.chunk_N, self.chunks = chunk_N, chunks

    def _table(self, values_KN: Tensor, voters_N: Tensor, index_N: Tensor, size: int) -> Tensor:
        voters_N = voters_N & (self.unit_N >= 0)
        picked_KN = torch.where(voters_N, values_KN, 0)
        table = torch.zeros(values_KN.shape[0], size, dtype=values_KN.dtype, device=values_KN.device)
        return table.index_add(1, torch.where(voters_N, index_N, 0), picked_KN)

    def sums(self, values_N: Tensor, voters_N: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of ``values_N`` over the voters of each unit ``[U]``, and the number of voters ``[U]``; one collective
        for both.
        """
        values_2N = torch.stack([values_N, voters_N.to(values_N.dtype)])
        table_2U = sum_over_ranks(self._table(values_2N, voters_N, self.unit_N, max(self.units, 1)), self.group)
        return table_2U[0], table_2U[1]

    def spread(self, per_unit_U: Tensor) -> Tensor:
        """Every position gets its unit's number; 0 where it belongs to none. ``[N]``."""
        return torch.where(self.unit_N >= 0, per_unit_U[self.unit_N.clamp(min=0)], 0)

    def mean(self, values_N: Tensor, voters_N: Tensor) -> Tensor:
        """Each unit's mean over its voters, at every position of the unit; 0 for a unit without voters. ``[N]``."""
        total_U, count_U = self.sums(values_N, voters_N)
        # Select before dividing: no 0/0 reaches the gradient.
        mean_U = torch.where(count_U > 0, total_U / torch.where(count_U > 0, count_U, 1), 0)
        return self.spread(mean_U)

    def total(self, values_N: Tensor, voters_N: Tensor) -> Tensor:
        """Each unit's sum over its voters, at every position of the unit. ``[N]``."""
        return self.spread(self.sums(values_N, voters_N)[0])

    def largest(self, values_N: Tensor, voters_N: Tensor) -> Tensor:
        """Each unit's largest value among its voters, at every position of the unit, without gradient; minus infinity
        for a unit without voters, 0 for a position without a unit. ``[N]``.
        """
        voters_N = voters_N & (self.unit_N >= 0)
        picked_N = torch.where(voters_N, values_N.detach(), -torch.inf)
        top_U = torch.full((max(self.units, 1),), -torch.inf, dtype=values_N.dtype, device=values_N.device)
        top_U = top_U.scatter_reduce(0, torch.where(voters_N, self.unit_N, 0), picked_N, "amax")
        return self.spread(extreme_over_ranks(top_U, "max", self.group))

    def prefix(self, values_N: Tensor, voters_N: Tensor) -> Tensor:
        """Sum over the voters of the unit up to and including each position. ``[N]``.

        Positions of one unit must be in order within each chunk, as they are in every arrangement of this package;
        positions of other units may lie between them.
        """
        picked_N = torch.where(voters_N & (self.unit_N >= 0), values_N, 0)
        chunk_N = self.chunk_N if self.chunk_N is not None else torch.zeros_like(self.unit_N)
        piece_N = torch.where(self.unit_N >= 0, self.unit_N * self.chunks + chunk_N, -1)
        # Sorted by unit: a unit's tokens need not lie in an unbroken run (a turn id may come back).
        order_N = torch.argsort(piece_N, stable=True)
        sorted_N, values_N64 = piece_N[order_N], picked_N.to(torch.float64)[order_N]
        # In float64: the running total over the whole shard, minus its value where the piece began, must not lose
        # digits.
        running_N = values_N64.cumsum(0)
        begins_N = torch.ones_like(voters_N)
        begins_N[1:] = sorted_N[1:] != sorted_N[:-1]
        start_N = torch.where(begins_N, torch.arange(len(piece_N), device=piece_N.device), 0).cummax(0).values
        inside_N = torch.empty_like(running_N).index_copy(0, order_N, running_N - (running_N - values_N64)[start_N])
        if self.chunks == 1:
            return torch.where(self.unit_N >= 0, inside_N.to(values_N.dtype), 0)
        size = max(self.units, 1) * self.chunks
        whole = torch.ones_like(voters_N)
        table_UC = self._table(picked_N[None].to(torch.float64), whole, piece_N.clamp(min=0), size)
        table_UC = sum_over_ranks(table_UC.reshape(-1, self.chunks), self.group)
        before_UC = table_UC.cumsum(1) - table_UC
        before_N = before_UC.reshape(-1)[piece_N.clamp(min=0)]
        return torch.where(self.unit_N >= 0, (inside_N + before_N).to(values_N.dtype), 0)
