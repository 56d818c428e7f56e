"""Order statistics of every row of vocabulary-parallel logits, without a sort and without moving a logit.

Shapes: `T` rows (tokens, in memory order), `R` rows of one chunk, `V` columns of this shard that are no padding.

A float's key is an integer made of its bits such that keys are ordered as floats are. A search finds the key of a row's
statistic 8 bits at a time, from the top: each pass sorts the columns that share the digits found so far into 256 bins,
counts them or adds up their probabilities, and joins the shards by one all-reduce of ``[T, 256]`` int64. A search takes
as many passes as a logit has bytes. Probabilities are fixed-point numbers relative to that of the row's maximum, so
that sums are exact and the same on every layout.
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
"""A function from (logits [R, V], their row numbers) to int64 [R, V]: what each column adds to its bin."""


class Rows(NamedTuple):
    """This shard's logits as rows, and the order and step in which a pass walks over them."""

    logits: Tensor
    order: RowOrder
    shard: VocabShard
    step: int
    """Rows per chunk."""
    inverse_tau_T: Tensor | None
    """float64 [T]; None at temperature 1."""


def keys(z: Tensor) -> Tensor:
    """int64 keys of the same shape, ordered as the floats are; -0 has the key of 0."""
    bits = (z + 0.0).view(_INTEGERS[z.element_size()]).long()
    top = 8 * z.element_size() - 1
    return bits ^ ((bits >> 63) & ((1 << top) - 1))


def floats(key: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `keys`."""
    top = 8 * dtype.itemsize - 1
    return (key ^ ((key >> 63) & ((1 << top) - 1))).to(_INTEGERS[dtype.itemsize]).view(dtype)


def count_one(z_RV: Tensor, rows: slice) -> Tensor:
    """A `Weigh` under which every column counts as 1."""
    return torch.ones((), dtype=torch.int64, device=z_RV.device).expand(z_RV.shape)


def search(rows: Rows, need_T: Tensor, weigh: Weigh) -> Tensor:
    """Find the largest value x of each row such that the columns with values >= x weigh at least ``need_T``.

    A collective over the shards: one all-reduce of ``[T, 256]`` for each byte of a logit.

    Args:
        rows: the logits to search.
        need_T: int64 [T], from 1 to the sum of the row's weights; or float64 [T], a share of that sum.
        weigh: what each column weighs.

    Returns:
        int64 [T], the `keys` of these values; the smallest key of the row's bins where all columns together weigh less.
    """
    total = 8 * rows.logits.element_size()
    found_T = torch.zeros_like(need_T, dtype=torch.int64)
    for shift in range(total - 8, -8, -8):
        bins_TB = joined(_histogram(rows, shift, None if shift == total - 8 else found_T, weigh), rows.shard)
        if need_T.is_floating_point():  # the first pass sorts every column into a bin, so bins add up to the row's sum
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
    """This shard's weights, int64 [T, 256], binned by the 8 bits of the key above ``shift``; only keys that begin with
    the digits ``found_T`` count (None: all keys).
    """
    bins_TB = rows.logits.new_zeros(rows.order.rows, _BINS + 1, dtype=torch.int64)  # last: all other keys
    for part, z_RV in rows.order.chunks(rows.logits[..., : rows.shard.width], rows.step):
        high_RV = keys(z_RV) >> shift
        digit_RV = (high_RV & (_BINS - 1)) if found_T is not None else high_RV + _BINS // 2
        if found_T is not None:
            digit_RV = torch.where((high_RV >> 8) == found_T[part, None], digit_RV, _BINS)
        bins_TB[part].scatter_add_(1, digit_RV, weigh(z_RV, part))
    return bins_TB[:, :_BINS]


def joined(part_TX: Tensor, shard: VocabShard) -> Tensor:
    """Sum of ``part_TX`` over the shards, in place where it is contiguous."""
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
    """A `Weigh` by probability relative to the row's maximum, as fixed-point numbers; columns below ``limit_T`` weigh
    0.
    """
    scale = 2.0 ** (62 - (rows.shard.vocab - 1).bit_length())
    centre_T = torch.where(peak_T == -math.inf, 0.0, peak_T)

    def weigh(z_RV: Tensor, part: slice) -> Tensor:
        gap_RV = z_RV.double() - centre_T[part, None]
        if rows.inverse_tau_T is not None:
            gap_RV = gap_RV * rows.inverse_tau_T[part, None]
        return torch.where(z_RV >= limit_T[part, None], gap_RV.exp() * scale, 0.0).round().long()

    return weigh
