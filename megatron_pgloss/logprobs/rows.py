"""The row maths in plain torch: statistics forward, gradient backward, one chunk at a time.

Shapes: `R` rows of one chunk, `V` columns of this shard that are no padding, `T` rows in all.
Nothing here knows of collectives or autograd: another backend replaces `row_stats` and
`row_gradient` alone.

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


class RowGradient(NamedTuple):
    """Per-row factors of dz_v = e_v (a + b d_v) + c 1[v = target], all [T]."""

    a: Tensor
    b: Tensor | None
    c: Tensor
    shift: Tensor
    target: Tensor
    inverse_tau: Tensor | None

    @staticmethod
    def of(
        a: Tensor,
        b: Tensor | None,
        c: Tensor,
        *,
        lse: Tensor,
        target: Tensor,
        inverse_tau: Tensor | None,
        dtype: torch.dtype,
    ) -> RowGradient:
        """Factors, in ``dtype``, of dz_v = p_v (a + b log p_v) + c 1[v = target].

        All [T] float64; ``lse`` over the whole vocabulary, ``target`` (int64) counted from this
        shard's first column.
        """
        shift = (lse if inverse_tau is None else lse / inverse_tau).to(dtype)
        # The shift is rounded, so e = p exp(gap): the small gap is put right here, in float64.
        gap = lse - _scaled(shift, inverse_tau)
        weight = (-gap).exp()
        if b is not None:
            a, b = a - b * gap, (b * weight * LN2).to(dtype)
        return RowGradient((a * weight).to(dtype), b, c.to(dtype), shift, target, inverse_tau)

    def take(self, rows: slice | Tensor) -> RowGradient:
        """The factors of some rows."""
        b, tau = self.b, self.inverse_tau
        return RowGradient(
            self.a[rows],
            None if b is None else b[rows],
            self.c[rows],
            self.shift[rows],
            self.target[rows],
            None if tau is None else tau[rows],
        )


def row_stats(
    z_RV: Tensor, target_R: Tensor, inverse_tau_R: Tensor | None, entropy: bool, scratch: Scratch
) -> Tensor:
    """(lse_r, [H_r,] u_target) of each row of one chunk, float64 [R, 2 or 3].

    With u = z/tau, m = max u, S = sum e: lse_r = m + log S and H_r = log S - sum (e/S)(u - m), all
    terms of which are >= 0. ``target_R`` counts from this shard's first column; targets of other
    shards give 0. A row of -inf alone gives lse_r = -inf and H_r = 0.
    """
    d_RV, e_RV = scratch.pair(z_RV.size(0))
    wide_RV = _widened(z_RV, d_RV)
    peak_R = wide_RV.amax(-1)
    padding_R = peak_R == -math.inf
    _shifted(wide_RV, torch.where(padding_R, 0.0, peak_R), inverse_tau_R, d_RV)
    sum_R = torch.exp2(d_RV, out=e_RV).sum(-1).double()
    lse_R = _scaled(peak_R, inverse_tau_R) + sum_R.log()
    parts = [torch.where(padding_R, -math.inf, lse_R)]
    if entropy:
        mean_R = d_RV.clamp_(min=FLOOR).mul_(e_RV).sum(-1).double() * LN2 / sum_R
        parts += [torch.where(padding_R, 0.0, sum_R.log() - mean_R)]
    inside_R, column_R1 = _column(target_R, z_RV.size(1))
    u_R = _scaled(z_RV.gather(1, column_R1)[:, 0], inverse_tau_R)
    parts += [torch.where(inside_R, u_R, 0.0)]
    return torch.stack(parts, -1)


def row_gradient(z_RV: Tensor, rows: RowGradient, scratch: Scratch) -> Tensor:
    """Gradient of one chunk, [R, V] in the dtype of the maths; it lies in ``scratch``."""
    d_RV, e_RV = scratch.pair(z_RV.size(0))
    _shifted(_widened(z_RV, d_RV), rows.shift, rows.inverse_tau, d_RV)
    torch.exp2(d_RV, out=e_RV)
    if rows.b is None:
        grad_RV = e_RV.mul_(rows.a[:, None])
    else:
        d_RV.clamp_(min=FLOOR).mul_(rows.b[:, None]).add_(rows.a[:, None])
        grad_RV = e_RV.mul_(d_RV)
    inside_R, column_R1 = _column(rows.target, z_RV.size(1))
    here_R1 = torch.where(inside_R, rows.c, 0.0)[:, None]
    # One column per row, so no two writes meet: same bits with and without deterministic mode.
    return grad_RV.scatter_(1, column_R1, grad_RV.gather(1, column_R1) + here_R1)


def _widened(z_RV: Tensor, buffer_RV: Tensor) -> Tensor:
    """The logits in the dtype of the maths: themselves, or copied into ``buffer_RV``."""
    return z_RV if z_RV.dtype == buffer_RV.dtype else buffer_RV.copy_(z_RV)


def _shifted(
    wide_RV: Tensor, shift_R: Tensor, inverse_tau_R: Tensor | None, out_RV: Tensor
) -> None:
    """out = (z - shift)/tau log2(e). The difference comes first: near the shift it is exact."""
    torch.sub(wide_RV, shift_R[:, None], out=out_RV)
    if inverse_tau_R is None:
        out_RV.mul_(1 / LN2)
    else:
        out_RV.mul_((inverse_tau_R / LN2)[:, None].to(out_RV.dtype))


def _scaled(z_R: Tensor, inverse_tau_R: Tensor | None) -> Tensor:
    return z_R.double() if inverse_tau_R is None else z_R.double() * inverse_tau_R


def _column(target_R: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    inside_R = (target_R >= 0) & (target_R < columns)
    return inside_R, target_R.clamp(0, columns - 1)[:, None]
