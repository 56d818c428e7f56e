"""Sums over units (sequences, turns) of a micro-batch, exact under packing and context parallelism.

Shapes: `N` positions of this rank's shard, `U` units of the whole micro-batch. A unit's tokens may lie on several
context-parallel ranks; ranks exchange `[U]` sums, never tokens. Every rank of the group enters every collective,
whether or not it holds a token. A *voter* is a position that counts in a statistic of its unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Op = Literal["sum", "max", "min"]
How = Literal["mean", "sum", "prefix"]
_TAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A statistic over units of which this rank has its part: `taken` gives the answer, with those of others."""

    part: Tensor
    """What travels; empty where this rank holds whole sequences and nothing has to."""
    finish: Callable[[Tensor], Tensor]
    """From that number over all ranks to the statistic at each position."""
    op: Op = "sum"


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


class _Gathered(torch.autograd.Function):
    """One gather, then each segment's own operation over the ranks; the gradient is all-reduced."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, ops: Sequence[str], sizes: list[int]) -> Tensor:
        ctx.group = group
        out = part.new_empty(dist.get_world_size(group) * part.numel())
        dist.all_gather_into_tensor(out, part.contiguous(), group=group)
        pieces = out.reshape(-1, part.numel()).split(sizes, dim=1)
        return torch.cat([_TAKE[op](rows) for op, rows in zip(ops, pieces, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _SumOverRanks.backward(ctx, *grads)[0], None, None, None


def sum_over_ranks(part: Tensor, group: Any) -> Tensor:
    """Differentiable sum of ``part`` over ``group``."""
    return _SumOverRanks.apply(part, group)  # type: ignore[no-any-return]


def taken(asked: Sequence[Asked], group: Any) -> list[Tensor]:
    """The answers, by one collective over ``group`` for all of them together, and one in backward.

    Args:
        asked: the same number of the same sizes on every rank.
        group: None: this rank alone.
    """
    if group is None or not asked:
        return [one.finish(one.part) for one in asked]
    parts, ops = [one.part for one in asked], [one.op for one in asked]
    sizes = [part.numel() for part in parts]
    # In the widest dtype: a sum is none the worse for that.
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else parts[0].dtype
    flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
    alike = set(ops) == {"sum"}
    whole: Tensor = sum_over_ranks(flat, group) if alike else _Gathered.apply(flat, group, ops, sizes)
    answers = []
    for one, piece in zip(asked, whole.split(sizes), strict=True):
        piece = piece.to(one.part.dtype).reshape(one.part.shape)
        answers.append(one.finish(piece if one.op == "sum" else piece.detach()))
    return answers


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

    def spread(self, per_unit_U: Tensor) -> Tensor:
        """Every position gets its unit's number; 0 where it belongs to none. ``[N]``."""
        return torch.where(self.unit_N >= 0, per_unit_U[self.unit_N.clamp(min=0)], 0)

    def _sums(self, values_N: Tensor, voters_N: Tensor) -> Tensor:
        """This rank's part of the sum over the voters of each unit, and of their number. ``[2, U]``."""
        values_2N = torch.stack([values_N, voters_N.to(values_N.dtype)])
        return self._table(values_2N, voters_N, self.unit_N, max(self.units, 1))

    def asked(self, how: How, values_N: Tensor, voters_N: Tensor) -> Asked:
        """`mean`, `total` or `prefix`, to be taken together with others."""
        return {"mean": self.asked_mean, "sum": self.asked_total, "prefix": self.asked_prefix}[how](values_N, voters_N)

    def _now(self, one: Asked) -> Tensor:
        return taken([one], self.group)[0]

    def mean(self, values_N: Tensor, voters_N: Tensor) -> Tensor:
        """Each unit's mean over its voters, at every position of the unit; 0 for a unit without voters. ``[N]``."""
        return self._now(self.asked_mean(values_N, voters_N))

    def asked_mean(self, values_N: Tensor, voters_N: Tensor) -> Asked:
        """`mean`, to be taken together with others."""

        def finish(table_2U: Tensor) -> Tensor:
            total_U, count_U = table_2U
            # Select before dividing: no 0/0 reaches the gradient.
            return self.spread(torch.where(count_U > 0, total_U / torch.where(count_U > 0, count_U, 1), 0))

        return Asked(self._sums(values_N, voters_N), finish)

    def total(self, values_N: Tensor, voters_N: Tensor) -> Tensor:
        """Each unit's sum over its voters, at every position of the unit. ``[N]``."""
        return self._now(self.asked_total(values_N, voters_N))

    def asked_total(self, values_N: Tensor, voters_N: Tensor) -> Asked:
        """`total`, to be taken together with others."""
        return Asked(self._sums(values_N, voters_N), lambda table_2U: self.spread(table_2U[0]))

    def largest(self, values_N: Tensor, voters_N: Tensor) -> Tensor:
        """Each unit's largest value among its voters, at every position of the unit, without gradient; minus infinity
        for a unit without voters, 0 for a position without a unit. ``[N]``.
        """
        return self._now(self.asked_largest(values_N, voters_N))

    def asked_largest(self, values_N: Tensor, voters_N: Tensor) -> Asked:
        """`largest`, to be taken together with others."""
        voters_N = voters_N & (self.unit_N >= 0)
        picked_N = torch.where(voters_N, values_N.detach(), -torch.inf)
        top_U = torch.full((max(self.units, 1),), -torch.inf, dtype=values_N.dtype, device=values_N.device)
        top_U = top_U.scatter_reduce(0, torch.where(voters_N, self.unit_N, 0), picked_N, "amax")
        return Asked(top_U, self.spread, "max")

    def asked_joined(self, how: Literal["mean", "sum", "max"], values_N: Tensor, voters_N: Tensor) -> Asked:
        """Mean, sum or largest of the voters of each position's unit, 0 without any; and whether it has some, 1 or 0.
        ``[2, N]``, without gradient.
        """
        if how == "max":
            top = self.asked_largest(values_N, voters_N)

            def largest(top_U: Tensor) -> Tensor:
                told_N = (self.unit_N >= 0) & (self.spread(top_U) > -torch.inf)
                return torch.stack([torch.where(told_N, self.spread(top_U), 0), told_N.to(top_U.dtype)])

            return Asked(top.part, largest, "max")

        def finish(table_2U: Tensor) -> Tensor:
            total_U, count_U = table_2U
            if how == "mean":
                total_U = total_U / torch.where(count_U > 0, count_U, 1)
            return torch.stack([self.spread(total_U), (self.spread(count_U) > 0).to(total_U.dtype)])

        return Asked(self._sums(values_N.detach(), voters_N), finish)

    def prefix(self, values_N: Tensor, voters_N: Tensor) -> Tensor:
        """Sum over the voters of the unit up to and including each position. ``[N]``.

        Positions of one unit must be in order within each chunk, as they are in every arrangement of this package;
        positions of other units may lie between them.
        """
        return self._now(self.asked_prefix(values_N, voters_N))

    def asked_prefix(self, values_N: Tensor, voters_N: Tensor) -> Asked:
        """`prefix`, to be taken together with others."""
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
            return Asked(values_N.new_zeros(0), lambda _: torch.where(self.unit_N >= 0, inside_N.to(values_N.dtype), 0))
        size = max(self.units, 1) * self.chunks
        whole = torch.ones_like(voters_N)
        table_UC = self._table(picked_N[None].to(torch.float64), whole, piece_N.clamp(min=0), size)

        def finish(table_UC: Tensor) -> Tensor:
            before_UC = table_UC.cumsum(1) - table_UC
            before_N = before_UC.reshape(-1)[piece_N.clamp(min=0)]
            return torch.where(self.unit_N >= 0, (inside_N + before_N).to(values_N.dtype), 0)

        return Asked(table_UC.reshape(-1, self.chunks), finish)
