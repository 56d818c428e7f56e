"""The two passes over a logits shard: chunks of rows in, statistics or gradient out.

Shapes: `T` rows (tokens, in memory order), `R` rows of one block or chunk, `Vl` columns of the
shard, `V` <= Vl of them no padding, `C` statistics per row. All per-row arithmetic is done once on
[T], outside the loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .order import RowOrder
from .rows import (
    RowFactors,
    RowSums,
    Scratch,
    exp2_rate,
    row_factors,
    row_gradient,
    row_sums,
    shard_stats,
)


def measure(
    logits: Tensor,
    target_T: Tensor,
    inverse_tau_T: Tensor | None,
    *,
    order: RowOrder,
    width: int,
    entropy: bool,
    chunk_elements: int,
) -> Tensor:
    """Statistics (lse_r, [H_r,] u_target) of all rows, float64 [T, C].

    ``target_T`` counts from the shard's first column, ``width`` is V. Targets of other shards
    give some number.
    """
    stats_TC = logits.new_zeros(order.rows, 3 if entropy else 2, dtype=torch.float64)
    if width == 0:
        stats_TC[:, 0] = -math.inf
        return stats_TC
    scratch = _scratch(logits, width, order.rows, chunk_elements)
    dtype = maths_dtype(logits)
    peak, total, moment = logits.new_empty(3, order.rows, 1, dtype=dtype)
    sums = RowSums(peak, total, moment if entropy else None)
    rate = exp2_rate(inverse_tau_T, dtype)
    _, column_T1 = _columns(target_T, width)
    target_z = logits.new_empty(order.rows, 1)
    for first, z_RV in order.blocks(logits[..., :width]):
        block = slice(first, first + z_RV.size(0))
        target_z[block] = z_RV.gather(1, column_T1[block])
        for rows in _chunks(z_RV.size(0), scratch.rows):
            token = slice(first + rows.start, first + rows.stop)
            row_sums(z_RV[rows], None if rate is None else rate[token], sums.take(token), scratch)
    stats_TC[:, 0], entropy_T = shard_stats(sums, inverse_tau_T)
    if entropy_T is not None:
        stats_TC[:, 1] = entropy_T
    u_T = target_z[:, 0].double()
    stats_TC[:, -1] = u_T if inverse_tau_T is None else u_T * inverse_tau_T
    return stats_TC


def write_gradient(
    logits: Tensor,
    a_T: Tensor,
    b_T: Tensor | None,
    *,
    entry_T: Tensor,
    hit_T: Tensor,
    live_T: Tensor,
    target_T: Tensor,
    lse_T: Tensor,
    inverse_tau_T: Tensor | None,
    order: RowOrder,
    width: int,
    reuse: bool,
    chunk_elements: int,
) -> Tensor:
    """Gradient p_v (a + b log p_v), with ``entry_T`` in the target's column where ``hit_T``.

    It lies in the logits' own memory (``reuse``) or in one new tensor of their dtype. Rows that
    are not ``live_T`` get 0 and are not looked at. ``a_T``, ``b_T``, ``entry_T``, ``lse_T`` and
    ``inverse_tau_T`` are float64.
    """
    flat_TV = None if reuse else logits.new_empty(order.rows, logits.size(-1))
    scratch = _scratch(logits, width, order.rows, chunk_elements)
    factors = row_factors(a_T, b_T, lse_T, inverse_tau_T, maths_dtype(logits))
    inside_T, column_T1 = _columns(target_T, width)
    hit_T1, entry_T1 = (inside_T & hit_T)[:, None], entry_T[:, None].to(logits.dtype)
    fill = _fill_live if logits.device.type == "cpu" else _fill_all
    # detach() shares the version counter: torch refuses whoever still needs the logits unchanged.
    for first, z_RV in order.blocks(logits.detach()):
        block = slice(first, first + z_RV.size(0))
        out_RV = z_RV if flat_TV is None else flat_TV[block]
        out_RV[:, width:].zero_()
        if width:
            z_RV, out_RV, column_R1 = z_RV[:, :width], out_RV[:, :width], column_T1[block]
            fill(z_RV, out_RV, factors.take(block), live_T[block], scratch)
            # One column per row, so no two writes meet; the other rows write back what they have.
            kept_R1 = out_RV.gather(1, column_R1)
            out_RV.scatter_(1, column_R1, kept_R1.where(~hit_T1[block], entry_T1[block]))
    return logits.detach() if flat_TV is None else order.unflatten(flat_TV)


def maths_dtype(logits: Tensor) -> torch.dtype:
    """Maths is float32, or float64 on float64 logits."""
    return torch.promote_types(logits.dtype, torch.float32)


def _fill_live(z_RV: Tensor, out_RV: Tensor, factors: RowFactors, live_R: Tensor, scratch: Scratch) -> None:
    """Work on live rows alone. Knowing which they are costs a host sync: free on a CPU only."""
    out_RV.index_fill_(0, (~live_R).nonzero()[:, 0], 0)
    live = live_R.nonzero()[:, 0]
    for chunk in _chunks(live.numel(), scratch.rows):
        index = live[chunk]
        run = slice(int(index[0]), int(index[-1]) + 1)
        if run.stop - run.start == index.numel():  # no holes: a view will do
            out_RV[run].copy_(row_gradient(z_RV[run], factors.take(run), scratch))
        else:
            part_RV = row_gradient(z_RV.index_select(0, index), factors.take(index), scratch)
            out_RV.index_copy_(0, index, part_RV.to(out_RV.dtype))


def _fill_all(z_RV: Tensor, out_RV: Tensor, factors: RowFactors, live_R: Tensor, scratch: Scratch) -> None:
    """Work on every row and select the live ones, without a host sync."""
    for chunk in _chunks(z_RV.size(0), scratch.rows):
        part_RV = row_gradient(z_RV[chunk], factors.take(chunk), scratch)
        out_RV[chunk].copy_(part_RV.masked_fill_(~live_R[chunk, None], 0))


def _columns(target_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Which targets are columns of this shard [T], and a legal column for each [T, 1]."""
    return (target_T >= 0) & (target_T < width), target_T.clamp(0, max(width - 1, 0))[:, None]


def _chunks(rows: int, step: int) -> Iterator[slice]:
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _scratch(logits: Tensor, width: int, rows: int, chunk_elements: int) -> Scratch:
    return Scratch(logits, maths_dtype(logits), width, chunk_elements, rows)
