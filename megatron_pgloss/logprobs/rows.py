"""The row maths in plain torch: the passes over one chunk, and what they need and give per row.

Shapes: `R` rows of one chunk, `V` columns of this shard that are no padding, `T` rows in all.
Nothing here knows of collectives or autograd. `row_sums` and `row_gradient` are the only functions
that touch [R, V] and all that another backend has to replace.

Both work on d = (z - shift)/tau log2(e) and e = 2^d, the shift being the row's maximum (forward)
or tau lse (backward). exp2 is chosen for its steady cost on CPUs (torch.exp falls to a slow path
where results underflow) and exp2 + sum for accuracy (the sum inside torch.softmax loses 1e-5 at
V = 150k in float32); plain in-place passes beat the fused operators there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LN2 = math.log(2.0)
# 2^FLOOR is 0 in float64 as well: it stands in for -inf where a product with probability 0 is 0.
FLOOR = -1500.0


class Scratch:
    """Two buffers for one chunk, allocated once per pass: all the memory that grows with V."""

    def __init__(self, like: Tensor, dtype: torch.dtype, columns: int, elements: int, rows: int):
        self.columns = columns
        self.rows = max(1, min(elements // max(columns, 1), rows))
        self._flat = like.new_empty(2, self.rows * columns, dtype=dtype)

    def pair(self, rows: int) -> tuple[Tensor, Tensor]:
        """Two [rows, V] buffers of undefined content."""
        first, second = self._flat[:, : rows * self.columns]
        return first.view(rows, self.columns), second.view(rows, self.columns)


class RowSums(NamedTuple):
    """What the forward pass finds per row, in the dtype of the maths, each [T, 1]."""

    peak: Tensor
    """m = max z."""
    total: Tensor
    """S = sum e."""
    moment: Tensor | None
    """sum e d, for the entropy."""

    def take(self, rows: slice) -> RowSums:
        """Views of some rows."""
        moment = None if self.moment is None else self.moment[rows]
        return RowSums(self.peak[rows], self.total[rows], moment)


class RowFactors(NamedTuple):
    """What the backward pass needs per row, in the dtype of the maths, each [T, 1].

    dz_v = e_v (a + b d_v).
    """

    a: Tensor
    b: Tensor | None
    shift: Tensor
    rate: Tensor | None

    def take(self, rows: slice | Tensor) -> RowFactors:
        """The factors of some rows."""
        b, rate = self.b, self.rate
        return RowFactors(
            self.a[rows],
            None if b is None else b[rows],
            self.shift[rows],
            None if rate is None else rate[rows],
        )


def row_sums(z_RV: Tensor, rate_R1: Tensor | None, out: RowSums, scratch: Scratch) -> None:
    """Fill ``out`` for one chunk. ``rate_R1`` is log2(e)/tau, None at tau = 1.

    A row of -inf alone has no maximum to subtract: its sums are NaN, which `shard_stats` expects.
    """
    d_RV, e_RV = scratch.pair(z_RV.size(0))
    wide_RV = _widened(z_RV, d_RV)
    torch.amax(wide_RV, -1, keepdim=True, out=out.peak)
    _shifted(wide_RV, out.peak, rate_R1, d_RV)
    torch.sum(torch.exp2(d_RV, out=e_RV), -1, keepdim=True, out=out.total)
    if out.moment is not None:
        torch.sum(d_RV.clamp_(min=FLOOR).mul_(e_RV), -1, keepdim=True, out=out.moment)


def row_gradient(z_RV: Tensor, rows: RowFactors, scratch: Scratch) -> Tensor:
    """p_v (a + b log p_v) of one chunk, [R, V] in the dtype of the maths, lying in ``scratch``."""
    d_RV, e_RV = scratch.pair(z_RV.size(0))
    _shifted(_widened(z_RV, d_RV), rows.shift, rows.rate, d_RV)
    torch.exp2(d_RV, out=e_RV)
    if rows.b is None:
        return e_RV.mul_(rows.a)
    return e_RV.mul_(d_RV.clamp_(min=FLOOR).mul_(rows.b).add_(rows.a))


def shard_stats(sums: RowSums, inverse_tau_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(lse_r, H_r or None) of the shard's own distribution, float64 [T].

    lse_r = m/tau + log S,  H_r = log S - ln 2 (sum e d)/S, both parts of which are >= 0. A row of
    -inf alone has lse_r = -inf and no H_r (NaN).
    """
    log_total_T = sums.total[:, 0].double().log()
    peak_T = _scaled(sums.peak[:, 0].double(), inverse_tau_T)
    lse_T = torch.where(peak_T == -math.inf, -math.inf, peak_T + log_total_T)
    if sums.moment is None:
        return lse_T, None
    mean_T = sums.moment[:, 0].double() * LN2 / sums.total[:, 0].double()
    return lse_T, log_total_T - mean_T


def row_factors(
    a_T: Tensor,
    b_T: Tensor | None,
    lse_T: Tensor,
    inverse_tau_T: Tensor | None,
    dtype: torch.dtype,
) -> RowFactors:
    """Factors, in ``dtype``, for dz_v = p_v (a + b log p_v); all given in float64.

    ``lse_T`` is of the whole vocabulary.
    """
    shift_T = (lse_T if inverse_tau_T is None else lse_T / inverse_tau_T).to(dtype)
    # The shift is rounded, so e = p exp(gap): the small gap is put right here, in float64.
    gap_T = lse_T - _scaled(shift_T.double(), inverse_tau_T)
    weight_T = (-gap_T).exp()
    if b_T is not None:
        a_T, b_T = a_T - b_T * gap_T, (b_T * weight_T * LN2).to(dtype)[:, None]
    a_T = (a_T * weight_T).to(dtype)
    return RowFactors(a_T[:, None], b_T, shift_T[:, None], exp2_rate(inverse_tau_T, dtype))


def exp2_rate(inverse_tau_T: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """log2(e)/tau as [T, 1], or None at tau = 1."""
    return None if inverse_tau_T is None else (inverse_tau_T / LN2).to(dtype)[:, None]


def _widened(z_RV: Tensor, buffer_RV: Tensor) -> Tensor:
    """The logits in the dtype of the maths: themselves, or copied into ``buffer_RV``."""
    return z_RV if z_RV.dtype == buffer_RV.dtype else buffer_RV.copy_(z_RV)


def _shifted(wide_RV: Tensor, shift_R1: Tensor, rate_R1: Tensor | None, out_RV: Tensor) -> None:
    """out = (z - shift) rate. The difference comes first: near the shift it is exact."""
    torch.sub(wide_RV, shift_R1, out=out_RV).mul_(1 / LN2 if rate_R1 is None else rate_R1)


def _scaled(z_T: Tensor, inverse_tau_T: Tensor | None) -> Tensor:
    return z_T if inverse_tau_T is None else z_T * inverse_tau_T
