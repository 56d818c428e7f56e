"""The two passes over a logits shard: chunks of rows in, statistics or gradient out.

Shapes: `T` rows (tokens, in memory order), `R` rows of one block or chunk, `Vl` columns of the
shard, `V` <= Vl of them no padding, `C` statistics per row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .order import RowOrder
from .rows import RowGradient, Scratch, row_gradient, row_stats


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

    ``target_T`` counts from the shard's first column, ``width`` is V.
    """
    stats_TC = logits.new_zeros(order.rows, 3 if entropy else 2, dtype=torch.float64)
    if width == 0:
        stats_TC[:, 0] = -math.inf
        return stats_TC
    scratch = _scratch(logits, width, order.rows, chunk_elements)
    for first, z_RV in order.blocks(logits[..., :width]):
        for rows in _chunks(z_RV.size(0), scratch.rows):
            token = slice(first + rows.start, first + rows.stop)
            tau_R = None if inverse_tau_T is None else inverse_tau_T[token]
            stats_TC[token] = row_stats(z_RV[rows], target_T[token], tau_R, entropy, scratch)
    return stats_TC


def write_gradient(
    logits: Tensor,
    rows: RowGradient,
    live_T: Tensor,
    *,
    order: RowOrder,
    width: int,
    reuse: bool,
    chunk_elements: int,
) -> Tensor:
    """Gradient of the logits, in their own memory (``reuse``) or in one new tensor of their dtype.

    Rows that are not ``live_T`` get 0 and are not looked at.
    """
    flat_TV = None if reuse else logits.new_empty(order.rows, logits.size(-1))
    scratch = _scratch(logits, width, order.rows, chunk_elements)
    # detach() shares the version counter: torch refuses whoever still needs the logits unchanged.
    for first, z_RV in order.blocks(logits.detach()):
        block = slice(first, first + z_RV.size(0))
        out_RV = z_RV if flat_TV is None else flat_TV[block]
        out_RV[:, width:].zero_()
        if width:
            fill = _fill_live if logits.device.type == "cpu" else _fill_all
            fill(z_RV[:, :width], out_RV[:, :width], rows.take(block), live_T[block], scratch)
    return logits.detach() if flat_TV is None else order.unflatten(flat_TV)


def _fill_live(
    z_RV: Tensor, out_RV: Tensor, rows: RowGradient, live_R: Tensor, scratch: Scratch
) -> None:
    """Work on live rows alone. Knowing which they are costs a host sync: free on a CPU only."""
    out_RV.index_fill_(0, (~live_R).nonzero()[:, 0], 0)
    live = live_R.nonzero()[:, 0]
    for chunk in _chunks(live.numel(), scratch.rows):
        index = live[chunk]
        run = slice(int(index[0]), int(index[-1]) + 1)
        if run.stop - run.start == index.numel():  # no holes: a view will do
            out_RV[run].copy_(row_gradient(z_RV[run], rows.take(run), scratch))
        else:
            part_RV = row_gradient(z_RV.index_select(0, index), rows.take(index), scratch)
            out_RV.index_copy_(0, index, part_RV.to(out_RV.dtype))


def _fill_all(
    z_RV: Tensor, out_RV: Tensor, rows: RowGradient, live_R: Tensor, scratch: Scratch
) -> None:
    """Work on every row and select the live ones, without a host sync."""
    for chunk in _chunks(z_RV.size(0), scratch.rows):
        part_RV = row_gradient(z_RV[chunk], rows.take(chunk), scratch)
        out_RV[chunk].copy_(part_RV.masked_fill_(~live_R[chunk, None], 0))


def _chunks(rows: int, step: int) -> Iterator[slice]:
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _scratch(logits: Tensor, width: int, rows: int, chunk_elements: int) -> Scratch:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return Scratch(logits, dtype, width, chunk_elements, rows)
