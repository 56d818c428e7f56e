"""The two passes over a logits shard: blocks of rows in, statistics or gradient out.

Shapes: `T` rows (tokens, in memory order), `R` rows of one block, `Vl` columns of the shard, `V`
<= Vl of them no padding, `C` statistics per row. All per-row arithmetic is done once on [T], outside
the loops; only a backend (`RowKernels`) computes on [R, V].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_pgloss.logprobs.rows.backends import choose, make_rows
from megatron_pgloss.logprobs.rows.per_row import RowMarks, RowSums, exp2_rate, maths_dtype, row_factors, shard_stats
from megatron_pgloss.logprobs.vocab.order import RowOrder


def measure(
    logits: Tensor,
    target_T: Tensor,
    inverse_tau_T: Tensor | None,
    *,
    order: RowOrder,
    width: int,
    entropy: bool,
    backend: str | None = None,
    chunk_elements: int,
) -> Tensor:
    """Statistics (lse_r, [H_r,] u_target) of all rows, float64 [T, C].

    ``target_T`` counts from the shard's first column, ``width`` is V. u_target is an arbitrary number
    where another shard holds the target. ``backend=None`` picks one as `token_logprobs` does.
    """
    stats_TC = logits.new_zeros(order.rows, 3 if entropy else 2, dtype=torch.float64)
    if width == 0:
        stats_TC[:, 0] = -math.inf
        return stats_TC
    rows = make_rows(choose(logits, backend), logits, width, order.rows, chunk_elements)
    dtype = maths_dtype(logits)
    sums = RowSums.empty(logits, dtype, rows.pieces, order.rows, entropy)
    rate = exp2_rate(inverse_tau_T, dtype)
    _, column_T = _columns(target_T, width)
    target_z = logits.new_empty(order.rows, 1)
    for first, z_RV in order.blocks(logits[..., :width]):
        block = slice(first, first + z_RV.size(0))
        target_z[block] = z_RV.gather(1, column_T[block, None])
        rows.sums(z_RV, None if rate is None else rate[block], sums.take(block))
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
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    chunk_elements: int,
) -> Tensor:
    """Write the gradient p_v (a + b log p_v), with ``entry_T`` in the target's column where ``hit_T``.

    The result lies in the logits' own memory (``reuse``) or in one new tensor of ``dtype``, None for theirs. Rows that
    are not ``live_T`` get 0, whatever their logits hold. ``a_T``, ``b_T``, ``entry_T``, ``lse_T`` and
    ``inverse_tau_T`` are float64.
    """
    dtype = logits.dtype if reuse or dtype is None else dtype
    flat_TV = None if reuse else logits.new_empty(order.rows, logits.size(-1), dtype=dtype)
    factors = row_factors(a_T, b_T, lse_T, inverse_tau_T, maths_dtype(logits))
    inside_T, column_T = _columns(target_T, width)
    marks = RowMarks(live_T, column_T, inside_T & hit_T, entry_T.to(dtype))
    rows = (
        make_rows(choose(logits, backend), logits, width, order.rows, chunk_elements) if width and order.rows else None
    )
    # detach() shares the version counter, so that torch refuses any other backward that needs the logits unchanged.
    for first, z_RV in order.blocks(logits.detach()):
        block = slice(first, first + z_RV.size(0))
        out_RV = z_RV if flat_TV is None else flat_TV[block]
        out_RV[:, width:].zero_()
        if rows is not None:
            rows.gradient(z_RV[:, :width], out_RV[:, :width], factors.take(block), marks.take(block))
    return logits.detach() if flat_TV is None else order.unflatten(flat_TV)


def _columns(target_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whether each target is a column of this shard, and a legal column for each, both [T]."""
    return (target_T >= 0) & (target_T < width), target_T.clamp(0, max(width - 1, 0))
