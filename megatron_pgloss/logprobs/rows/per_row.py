"""The per-row inputs and outputs of the two passes over a logits shard, the same for every backend.

Shapes: `T` rows, `R` rows of one block or chunk, `V` columns of this shard that are no padding, `S`
pieces into which a backend cuts the columns (each is summed by itself, and the sums are joined in float64).
Apart from `put_one_per_row`, nothing here touches [R, V]; nothing here knows of collectives or autograd.

All backends compute d = (z - shift)/tau log2(e) and e = 2^d, where the shift is the piece's maximum
(forward) or tau lse (backward). The subtraction comes first: near the shift it is exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pgloss.logprobs.vocab.join import join_entropy, join_lse

LN2 = math.log(2.0)
# 2^FLOOR is 0 even in float64. FLOOR replaces d = -inf, so that its product with probability 0 is 0 and not NaN.
FLOOR = -1500.0


class RowSums(NamedTuple):
    """Results of the forward pass per piece and row, in the dtype of the maths, each [S, T]."""

    peak: Tensor
    """m = max z."""
    total: Tensor
    """sum e."""
    moment: Tensor | None
    """sum e d, for the entropy."""

    @staticmethod
    def empty(like: Tensor, dtype: torch.dtype, pieces: int, rows: int, entropy: bool) -> RowSums:
        """Memory for a backend to fill."""
        peak, total, *moment = like.new_empty(3 if entropy else 2, pieces, rows, dtype=dtype)
        return RowSums(peak, total, moment[0] if moment else None)

    def take(self, rows: slice) -> RowSums:
        """Views of some rows."""
        moment = None if self.moment is None else self.moment[:, rows]
        return RowSums(self.peak[:, rows], self.total[:, rows], moment)


class RowFactors(NamedTuple):
    """Inputs of the backward pass per row, in the dtype of the maths, each [T, 1].

    The gradient is dz_v = e_v (a + b d_v).
    """

    a: Tensor
    b: Tensor | None
    shift: Tensor
    rate: Tensor | None
    """log2(e)/tau, None at tau = 1."""

    def take(self, rows: slice | Tensor) -> RowFactors:
        """The factors of some rows."""
        return RowFactors(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class RowMarks(NamedTuple):
    """Which rows have a gradient at all, and the one entry per row that is not e (a + b d)."""

    live: Tensor
    """bool [T]: the row has a gradient. Other rows get 0, whatever their logits hold."""
    column: Tensor
    """int64 [T]: a legal column for every row, the target's where ``hit``."""
    hit: Tensor
    """bool [T]: the target is a column of this shard, and its log-prob has a gradient."""
    entry: Tensor
    """[T] in the gradient's dtype: the gradient of the target's logit."""

    def take(self, rows: slice) -> RowMarks:
        """Views of some rows."""
        return RowMarks(*(x[rows] for x in self))


def shard_stats(sums: RowSums, inverse_tau_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(lse_r, H_r or None) of the shard's own distribution, float64 [T].

    With Z = sum e, a piece has lse = m/tau + log Z and H = log Z - ln 2 (sum e d)/Z; both terms of H are >= 0.
    A row of -inf alone has lse_r = -inf; its H_r is meaningless and may be any number.
    """
    log_total_ST = sums.total.double().log()
    peak_ST = scaled(sums.peak.double(), inverse_tau_T)
    lse_ST = torch.where(peak_ST == -math.inf, -math.inf, peak_ST + log_total_ST)
    if sums.moment is None:
        return join_lse(lse_ST), None
    mean_ST = sums.moment.double() * LN2 / sums.total.double()
    lse_T = join_lse(lse_ST)
    return lse_T, join_entropy(lse_ST, log_total_ST - mean_ST, lse_T)


def row_factors(
    a_T: Tensor,
    b_T: Tensor | None,
    lse_T: Tensor,
    inverse_tau_T: Tensor | None,
    dtype: torch.dtype,
) -> RowFactors:
    """Factors, in ``dtype``, of dz_v = p_v (a + b log p_v). All arguments are float64.

    ``lse_T`` is the log-sum-exp over the whole vocabulary.
    """
    shift_T = (lse_T if inverse_tau_T is None else lse_T / inverse_tau_T).to(dtype)
    # The shift is rounded, so that e = p exp(gap). The small gap is corrected here, in float64.
    gap_T = lse_T - scaled(shift_T.double(), inverse_tau_T)
    weight_T = (-gap_T).exp()
    if b_T is not None:
        a_T, b_T = a_T - b_T * gap_T, (b_T * weight_T * LN2).to(dtype)[:, None]
    a_T = (a_T * weight_T).to(dtype)
    return RowFactors(a_T[:, None], b_T, shift_T[:, None], exp2_rate(inverse_tau_T, dtype))


def exp2_rate(inverse_tau_T: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """log2(e)/tau as [T, 1], or None at tau = 1."""
    return None if inverse_tau_T is None else (inverse_tau_T / LN2).to(dtype)[:, None]


def maths_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of the maths: float32, or float64 on float64 logits."""
    return torch.promote_types(logits.dtype, torch.float32)


def scaled(z_T: Tensor, inverse_tau_T: Tensor | None) -> Tensor:
    """z/tau."""
    return z_T if inverse_tau_T is None else z_T * inverse_tau_T


def put_one_per_row(out_RV: Tensor, column_R: Tensor, value_R: Tensor) -> None:
    """``out[r, column[r]] = value[r]`` in place.

    ``scatter_`` is not used: on a CPU it copies the whole of a bfloat16 or float16 tensor to float32 and back.
    """
    out_RV.index_put_((torch.arange(out_RV.size(0), device=out_RV.device), column_R), value_R)
