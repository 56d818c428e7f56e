"""Logits between the forward and the backward pass, in the memory that a mode gives them.

Shapes: `N` wanted rows, `R` rows of one chunk, `Vl` columns of the shard.

With u = z/tau and m the largest u of the row over the whole vocabulary, an entry is one of

    exact          z itself, in the dtype that the head's GEMM gave it
    from the peak  u - m, rounded to the weight's 16 bits: the likelier a token, the finer
    byte           q = round(48 sqrt(m - u)) in 8 bits, read back as u = m - (q/48)^2; from 255 on (m - u > 28) p = 0

Log-prob, entropy and lse are those of the unrounded logits in every case, and so is the target's own entry of the
gradient. m is the same number on every layout, so the rounding does not know how the vocabulary is cut.

Why the root: steps of 1/8 of m - u over the same byte err by up to 1/16 in the log-prob of *every* token; here the step
is 1/24 of the root of the distance, so likely tokens are exact to 0.002 and unlikely ones, which matter as their
probability, to 0.1. `tools/head_errors.py` prints both beside each other.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Store = Literal["none", "model", "exact", "byte"]
"""What is stored: nothing; logits in the model's dtype; exact ones; one byte each."""
CODES = 48.0
NOTHING = 255


class Stored(NamedTuple):
    """What stands for the logits of all wanted rows."""

    code_NV: Tensor
    lse_N: Tensor | None
    """The exact log-sum-exp less m, float64; None where ``code_NV`` holds the logits themselves."""


class Readable(NamedTuple):
    """Logits of some rows as the row passes take them: softmax(rate z) with log-sum-exp ``lse_R``."""

    z_RV: Tensor
    lse_R: Tensor
    inverse_tau_R: Tensor | None


def empty_store(count: int, weight: Tensor, logits: torch.dtype, store: Store) -> Stored | None:
    """Memory for ``count`` rows of logits that come in dtype ``logits``."""
    if store == "none":
        return None
    shape = (count, weight.size(0))
    if store == "byte":
        return Stored(weight.new_empty(shape, dtype=torch.uint8), weight.new_empty(count, dtype=torch.float64))
    if store == "exact" or logits.itemsize <= weight.dtype.itemsize:
        return Stored(weight.new_empty(shape, dtype=logits), None)
    return Stored(weight.new_empty(shape), weight.new_empty(count, dtype=torch.float64))


def encode(code_RV: Tensor, u_RV: Tensor, peak_R: Tensor) -> None:
    """Write u as codes; ``peak_R`` is m, float64. ``u_RV`` is used up."""
    u_RV.sub_(peak_R[:, None].to(u_RV.dtype))
    if code_RV.dtype != torch.uint8:
        code_RV.copy_(u_RV)
        return
    code_RV.copy_(u_RV.neg_().sqrt_().mul_(CODES).round_().clamp_(max=NOTHING))


def decode(
    stored: Stored, index: slice | Tensor, lse_N: Tensor, inverse_tau_N: Tensor | None, maths: torch.dtype
) -> Readable:
    """Some rows as logits: a view of the store where ``index`` is a slice and it holds no bytes; those are read into
    new memory of dtype ``maths``.
    """
    code_RV = stored.code_NV[index]
    if stored.lse_N is None:
        return Readable(code_RV, lse_N[index], None if inverse_tau_N is None else inverse_tau_N[index])
    if code_RV.dtype == torch.uint8:
        u_RV = code_RV.to(maths).div_(CODES).square_().neg_()
        return Readable(u_RV.masked_fill_(code_RV == NOTHING, -math.inf), stored.lse_N[index], None)
    return Readable(code_RV, stored.lse_N[index], None)
