"""Order statistics of every row of vocabulary-parallel logits, without a sort and without moving a logit.

Shapes: `T` rows (tokens, in memory order), `R` rows of one chunk, `V` columns of this shard that are no padding.

A float's bits, put into order, are its key. Keys are searched from the top 8 bits at a time: each pass counts (or adds
the probability of) the columns that share the digits found so far in 256 bins, and one all-reduce of ``[T, 256]`` int64
joins the shards. A search takes as many passes as the logits have bytes. Probabilities are fixed-point numbers
relative to the row's maximum, so that sums are exact and the same on every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.logprobs.vocab.order import RowOrder
from megatron_pgloss.logprobs.vocab.shard import VocabShard

_BINS = 256
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Weigh = Callable[[Tensor, slice], Tensor]
"""(logits [R, V], their rows) to int64 [R, V]: what each column adds to its bin."""


class Rows(NamedTuple):
    """Logits as rows of this shard, and how they are walked over."""

    logits: Tensor
    order: RowOrder
    shard: VocabShard
    step: int
    """Rows per chunk."""
    inverse_tau_T: Tensor | None
    """float64 [T]."""


def keys(z: Tensor) -> Tensor:
    """int64 of the same shape, in the order of the floats; -0 is 0."""
    bits = (z + 0.0).view(_INTEGERS[z.element_size()]).long()
    top = 8 * z.element_size() - 1
    return bits ^ ((bits >> 63) & ((1 << top) - 1))


def floats(key: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `keys`."""
    top = 8 * dtype.itemsize - 1
    return (key ^ ((key >> 63) & ((1 << top) - 1))).to(_INTEGERS[dtype.itemsize]).view(dtype)


def count_one(z_RV: Tensor, rows: slice) -> Tensor:
    """Every column counts."""
    return torch.ones((), dtype=torch.int64, device=z_RV.device).expand(z_RV.shape)


def search(rows: Rows, need_T: Tensor, weigh: Weigh) -> Tensor:
    """Key of the first value, from the largest down, at which the weights of all columns of at least that value reach
    ``need_T``. A collective over the shards: one all-reduce of ``[T, 256]`` for each byte of a logit.

    Args:
        need_T: int64 [T], 1 to the sum of the row's weights; or float64 [T], a share of that sum.

    Returns:
        int64 [T], see `keys`; the smallest value of the row's bins where the weights do not reach.
    """
    total = 8 * rows.logits.element_size()
    found_T = torch.zeros_like(need_T, dtype=torch.int64)
    for shift in range(total - 8, -8, -8):
        bins_TB = joined(_histogram(rows, shift, None if shift == total - 8 else found_T, weigh), rows.shard)
        if need_T.is_floating_point():  # the first pass has every column in some bin
            sum_T = bins_TB.sum(1)
            need_T = torch.minimum((need_T * sum_T).ceil().long(), sum_T).clamp(min=1)
        falling_TB = bins_TB.flip(1).cumsum(1)
        at_T1 = (falling_TB < need_T[:, None]).sum(1, keepdim=True).clamp(max=_BINS - 1)
        above_T = falling_TB.gather(1, at_T1)[:, 0] - bins_TB.flip(1).gather(1, at_T1)[:, 0]
        digit_T = _BINS - 1 - at_T1[:, 0]
        need_T = need_T - above_T
        # The first digit carries the sign.
        found_T = digit_T - _BINS // 2 if shift == total - 8 else (found_T << 8) | digit_T
    return found_T


def _histogram(rows: Rows, shift: int, found_T: Tensor | None, weigh: Weigh) -> Tensor:
    """int64 [T, 256] of this shard: weights by the 8 bits of the key above ``shift``, of keys that begin so far."""
    bins_TB = rows.logits.new_zeros(rows.order.rows, _BINS + 1, dtype=torch.int64)  # the last one: none of these
    for part, z_RV in rows.order.chunks(rows.logits[..., : rows.shard.width], rows.step):
        high_RV = keys(z_RV) >> shift
        digit_RV = (high_RV & (_BINS - 1)) if found_T is not None else high_RV + _BINS // 2
        if found_T is not None:
            digit_RV = torch.where((high_RV >> 8) == found_T[part, None], digit_RV, _BINS)
        bins_TB[part].scatter_add_(1, digit_RV, weigh(z_RV, part))
    return bins_TB[:, :_BINS]


def joined(part_TX: Tensor, shard: VocabShard) -> Tensor:
    """Sum over the shards."""
    if shard.size > 1 and part_TX.numel():
        part_TX = part_TX.contiguous()
        dist.all_reduce(part_TX, group=shard.group)
    return part_TX


def peaks(rows: Rows) -> Tensor:
    """float64 [T]: the row's largest logit; one all-reduce of ``[T]``."""
    peak_T = rows.logits.new_full((rows.order.rows,), -math.inf, dtype=torch.float64)
    if rows.shard.width:
        for part, z_RV in rows.order.chunks(rows.logits[..., : rows.shard.width], rows.step):
            peak_T[part] = z_RV.amax(-1).double()
    if rows.shard.size > 1 and peak_T.numel():
        dist.all_reduce(peak_T, op=dist.ReduceOp.MAX, group=rows.shard.group)
    return peak_T


def masses(rows: Rows, peak_T: Tensor, limit_T: Tensor) -> Weigh:
    """Probabilities relative to that of the maximum, of columns of at least ``limit_T``, as fixed-point numbers."""
    scale = 2.0 ** (62 - (rows.shard.vocab - 1).bit_length())
    centre_T = torch.where(peak_T == -math.inf, 0.0, peak_T)

    def weigh(z_RV: Tensor, part: slice) -> Tensor:
        gap_RV = z_RV.double() - centre_T[part, None]
        if rows.inverse_tau_T is not None:
            gap_RV = gap_RV * rows.inverse_tau_T[part, None]
        return torch.where(z_RV >= limit_T[part, None], gap_RV.exp() * scale, 0.0).round().long()

    return weigh
