"""Statistics of the tokens of a unit that lie before or after each token, without gradient.

Shapes: `N` positions of this rank's shard, `U` units, `C` chunks of a sequence under context parallelism. Positions of
one unit must be in order and unbroken within each chunk, as they are in every arrangement of this package. Ranks
exchange `[U, C]` tables, never tokens. A *voter* is a position that counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.maths.segments import Asked, UnitSums, taken


def minimum(unit: UnitSums, values_N: Tensor, voters_N: Tensor, *, inclusive: bool = True) -> Tensor:
    """Smallest value among the voters of the unit up to each position, plus infinity where there is none yet. ``[N]``.

    Args:
        unit: which unit each position belongs to.
        values_N: float [N].
        voters_N: bool [N]: the positions that count.
        inclusive: whether a position's own value is among the values up to it.
    """
    return taken([asked_minimum(unit, values_N, voters_N, inclusive=inclusive)], unit.group)[0]


def asked_minimum(unit: UnitSums, values_N: Tensor, voters_N: Tensor, *, inclusive: bool = True) -> Asked:
    """`minimum`, to be taken together with others."""
    values_N = values_N.detach()
    voters_N = voters_N & (unit.unit_N >= 0)
    least_N = torch.where(voters_N, values_N, torch.inf)
    piece_N = _pieces(unit)
    for step in _doublings(piece_N):
        earlier_N = torch.where(piece_N[step:] == piece_N[:-step], least_N[:-step], torch.inf)
        least_N = torch.cat([least_N[:step], torch.minimum(least_N[step:], earlier_N)])
    if not inclusive:
        same_N = piece_N[1:] == piece_N[:-1]
        least_N = torch.cat([torch.full_like(least_N[:1], torch.inf), torch.where(same_N, least_N[:-1], torch.inf)])
    part = values_N.new_zeros(0)
    if unit.chunks > 1:
        table = torch.full((max(unit.units, 1) * unit.chunks,), torch.inf, dtype=values_N.dtype, device=values_N.device)
        whole_N = torch.where(voters_N, values_N, torch.inf)
        part = table.scatter_reduce(0, piece_N.clamp(min=0), torch.where(piece_N >= 0, whole_N, torch.inf), "amin")

    def finish(table: Tensor) -> Tensor:
        found_N = least_N
        if unit.chunks > 1:
            before_UC = table.reshape(-1, unit.chunks).cummin(1).values.roll(1, 1)
            before_UC[:, 0] = torch.inf
            found_N = torch.minimum(found_N, before_UC.reshape(-1)[piece_N.clamp(min=0)])
        return torch.where(piece_N >= 0, found_N, torch.inf)

    return Asked(part, finish, "min")


def discounted(unit: UnitSums, values_N: Tensor, voters_N: Tensor, position_N: Tensor, gamma: float) -> Tensor:
    """Discounted sum ``sum_{k >= t} gamma^(position_k - position_t) v_k`` over the voters k of the unit, at every
    position t. ``[N]``, in the dtype of ``values_N``; 0 at a position without a unit.

    Args:
        unit: which unit each position belongs to.
        values_N: float [N]: v.
        voters_N: bool [N]: the positions that count.
        position_N: int64 [N], position inside the sequence; it rises by one within a piece.
        gamma: discount in (0, 1].
    """
    return taken([asked_discounted(unit, values_N, voters_N, position_N, gamma)], unit.group)[0]


def asked_discounted(unit: UnitSums, values_N: Tensor, voters_N: Tensor, position_N: Tensor, gamma: float) -> Asked:
    """`discounted`, to be taken together with others."""
    voters_N = voters_N & (unit.unit_N >= 0)
    voted_N = torch.where(voters_N, values_N.detach(), 0).double()
    piece_N, after_N = _pieces(unit), voted_N
    for step in _doublings(piece_N):
        later_N = torch.where(piece_N[:-step] == piece_N[step:], after_N[step:], 0) * gamma**step
        after_N = torch.cat([after_N[:-step] + later_N, after_N[-step:]])
    part = after_N.new_zeros(0) if unit.chunks == 1 else _heads(unit, after_N, piece_N, position_N)

    def finish(table_3P: Tensor) -> Tensor:
        found_N = after_N
        if unit.chunks > 1:
            found_N = found_N + _later_chunks(unit, table_3P, position_N, gamma)
        return torch.where(piece_N >= 0, found_N, 0).to(values_N.dtype)

    return Asked(part, finish)


def _heads(unit: UnitSums, after_N: Tensor, piece_N: Tensor, position_N: Tensor) -> Tensor:
    """For each piece of this rank: the value at its first position, that position, and 1. ``[3, P]``."""
    first_N = torch.ones_like(piece_N, dtype=torch.bool)
    first_N[1:] = piece_N[1:] != piece_N[:-1]
    first_N = first_N & (piece_N >= 0)
    index_K = piece_N[first_N]
    table_3P = torch.zeros(3, max(unit.units, 1) * unit.chunks, dtype=torch.float64, device=after_N.device)
    values_3K = torch.stack([after_N[first_N], position_N[first_N].double(), torch.ones_like(after_N[first_N])])
    # Each piece lies on one rank, so that a sum is its number.
    return table_3P.index_add(1, index_K, values_3K)


def _later_chunks(unit: UnitSums, table_3P: Tensor, position_N: Tensor, gamma: float) -> Tensor:
    head_UC, start_UC, there_UC = table_3P.reshape(3, -1, unit.chunks)
    unit_N = unit.unit_N.clamp(min=0)
    chunk_N = unit.chunk_N if unit.chunk_N is not None else torch.zeros_like(unit_N)
    total_N = torch.zeros_like(position_N, dtype=torch.float64)
    for chunk in range(1, unit.chunks):
        later_N = (chunk_N < chunk) & (there_UC[unit_N, chunk] > 0)
        distance_N = torch.where(later_N, start_UC[unit_N, chunk] - position_N, 0)
        total_N = total_N + torch.where(later_N, gamma**distance_N * head_UC[unit_N, chunk], 0)
    return total_N


def _pieces(unit: UnitSums) -> Tensor:
    chunk_N = unit.chunk_N if unit.chunk_N is not None else torch.zeros_like(unit.unit_N)
    return torch.where(unit.unit_N >= 0, unit.unit_N * unit.chunks + chunk_N, -1)


def _doublings(piece_N: Tensor) -> list[int]:
    """Steps 1, 2, 4, ... below the number of positions: joined one after the other, they span any piece."""
    return [1 << bit for bit in range(max(piece_N.numel() - 1, 0).bit_length())]
