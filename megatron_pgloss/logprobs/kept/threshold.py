"""From top-k, top-p and min-p to one threshold per token on the logits themselves.

Shapes: `T` rows (tokens, in memory order). Each of the three rules keeps the columns that are likely enough, so each is
a threshold on the logits, and the largest of the thresholds applies all of them. The kept set is ``{v: z_v >= limit}``
without columns of -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_pgloss.logprobs.kept.radix import Rows, count_one, floats, keys, masses, peaks, search
from megatron_pgloss.maths.kept import TopPOf


def limits(
    rows: Rows, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, *, top_p_of: TopPOf = "top_k"
) -> Tensor:
    """The least logit of every row's kept set, exact under vocabulary parallelism.

    Collectives over the shards: top-k and top-p each take one all-reduce of ``[T, 256]`` per byte of a logit (2 for
    bf16 and fp16, 4 for fp32), and top-p and min-p share one all-reduce of ``[T]``, the row's maximum.

    Args:
        rows: the logits of this shard.
        top_k: int64 [T], 0 or less where the rule is off; None: it is off everywhere.
        top_p: float [T], 1 or more where the rule is off; None likewise.
        min_p: float [T], 0 or less where the rule is off; None likewise.
        top_p_of: the set whose probability top-p takes a share of (`Kept.top_p_of`).

    Returns:
        [T] in the logits' dtype, -inf where every column is kept. All columns tied with the threshold are kept.
    """
    dtype, shard = rows.logits.dtype, rows.shard
    limit_T = rows.logits.new_full((rows.order.rows,), -math.inf)
    if top_k is not None:
        need_T = torch.where(top_k > 0, top_k, shard.vocab).clamp(max=shard.vocab)
        limit_T = torch.where(top_k > 0, floats(search(rows, need_T, count_one), dtype), limit_T)
    if top_p is None and min_p is None:
        return limit_T
    peak_T = peaks(rows)
    floor_T = limit_T if min_p is None else torch.maximum(limit_T, _above(_floor(rows, peak_T, min_p), dtype))
    if top_p is not None:
        least_T = {"top_k": limit_T, "top_k_min_p": floor_T, "all": torch.full_like(limit_T, -math.inf)}
        nucleus_T = _nucleus(rows, peak_T, least_T[top_p_of], top_p)
        floor_T = torch.maximum(floor_T, torch.where(top_p < 1, nucleus_T, -math.inf))
    return floor_T


def _floor(rows: Rows, peak_T: Tensor, min_p: Tensor) -> Tensor:
    """min-p's threshold max z + tau log(min_p), float64 [T]; -inf where min-p is off."""
    log_T = torch.where(min_p > 0, min_p.double(), 1.0).log()
    if rows.inverse_tau_T is not None:
        log_T = log_T / rows.inverse_tau_T
    return torch.where(min_p > 0, peak_T + log_T, -math.inf)


def _above(value_T: Tensor, dtype: torch.dtype) -> Tensor:
    """The least number of ``dtype`` that is not below the float64 ``value_T``."""
    near_T = value_T.to(dtype)
    return torch.where(near_T.double() < value_T, floats(keys(near_T) + 1, dtype), near_T)


def _nucleus(rows: Rows, peak_T: Tensor, base_T: Tensor, top_p: Tensor) -> Tensor:
    """The least logit of the nucleus of the columns with logits of at least ``base_T``, in the logits' dtype."""
    share_T = top_p.double().clamp(max=1)
    return floats(search(rows, share_T, masses(rows, peak_T, base_T)), rows.logits.dtype)
