"""The GEMM of the LM head, and the numbers in which its logits come out.

Shapes: `R` rows of one chunk, `H` hidden, `Vl` columns of the vocabulary shard.

| name | logits are | made on a CPU by | on CUDA (written against torch 2.13, not run by this project so far) |
|---|---|---|---|
| `fp32` | float32 sums of the products, not rounded | operands widened a block at a time | `mm(out_dtype=float32)` |
| `tf32` | the same of operands rounded to 10 bits; all 16-bit numbers have no more | rounding to even | TF32 cores |
| `bf16`, `fp16` | `fp32`'s, rounded to that type | the GEMM's own rounding | the GEMM's own rounding |

On float64 operands `fp32` and `tf32` are float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_pgloss.errors import SpecError

HeadDtype = Literal["fp32", "tf32", "bf16", "fp16"]
HEAD_DTYPES: tuple[HeadDtype, ...] = get_args(HeadDtype)
COLUMNS = 8192
"""How many columns of the weight are widened at a time."""

_ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WIDE_OUT = hasattr(torch.ops.aten.mm, "dtype_out")
"""Whether torch has GEMMs of 16-bit operands that give float32; before, operands are widened on CUDA too."""
_TF32_DROPPED = 13
"""Bits of a float32's 23 that TF32 does not have."""


def check_head_dtype(name: str, argument: str = "head_dtype") -> None:
    """Refuse an unknown name.

    Raises:
        SpecError: it is none of `HEAD_DTYPES`.
    """
    if name not in HEAD_DTYPES:
        raise SpecError(f"{argument}={name!r}", expected=" | ".join(HEAD_DTYPES))


def logit_dtype(weight: torch.dtype, head: HeadDtype) -> torch.dtype:
    """The dtype that holds the logits of a head on operands of dtype ``weight``."""
    return _ROUNDED.get(head, torch.promote_types(weight, torch.float32))


def same_numbers(one: HeadDtype, other: HeadDtype, weight: torch.dtype) -> bool:
    """Whether two heads give the same logits on operands of dtype ``weight``, up to the order of sums."""
    if weight != torch.float32:  # 16-bit operands lose nothing to TF32, and float64 ones stay float64
        one, other = ("fp32" if name == "tf32" else name for name in (one, other))
    return one == other


def write_logits(hidden_RH: Tensor, weight_VH: Tensor, head: HeadDtype, out_RV: Tensor) -> None:
    """Write ``hidden weight^T`` into ``out_RV``, of dtype `logit_dtype`.

    Both operands have one dtype. Every sum runs in float32 (float64 of float64) and is rounded once, if at all.
    """
    if out_RV.dtype == weight_VH.dtype != torch.float32:
        torch.mm(hidden_RH, weight_VH.t(), out=out_RV)
        return
    if hidden_RH.is_cuda and weight_VH.dtype.itemsize == 2 and out_RV.dtype == torch.float32 and _WIDE_OUT:
        torch.mm(hidden_RH, weight_VH.t(), out_dtype=torch.float32, out=out_RV)
        return
    with _full_precision(hidden_RH.device, "tf32" if head == "tf32" and hidden_RH.is_cuda else "ieee"):
        wide_RH = _wide(hidden_RH, head)
        for start in range(0, weight_VH.size(0), COLUMNS):
            columns = slice(start, min(start + COLUMNS, weight_VH.size(0)))
            wide_VH = _wide(weight_VH[columns], head)
            if out_RV.dtype == wide_RH.dtype:
                torch.mm(wide_RH, wide_VH.t(), out=out_RV[:, columns])
            else:
                out_RV[:, columns] = torch.mm(wide_RH, wide_VH.t())


def _wide(operand: Tensor, head: HeadDtype) -> Tensor:
    """The operand in float32 (float64 of float64), with TF32's bits alone where a CPU stands in for its cores."""
    wide = operand.to(torch.promote_types(operand.dtype, torch.float32))
    return round_to_tf32(wide) if head == "tf32" and not operand.is_cuda and operand.dtype == torch.float32 else wide


def round_to_tf32(x: Tensor) -> Tensor:
    """float32 numbers rounded to the nearest with 10 bits after the leading one, ties to even; NaN and infinity stay.

    Kernels differ in how they drop the other 13 bits (some cut them off), so that another device agrees to 2^-11 of a
    number and not to its bits.
    """
    bits = x.view(torch.int32)
    odd = (bits >> _TF32_DROPPED) & 1
    rounded = (bits + (odd + (1 << (_TF32_DROPPED - 1)) - 1)) & -(1 << _TF32_DROPPED)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


@contextmanager
def _full_precision(device: torch.device, precision: str) -> Iterator[None]:
    """float32 GEMMs as ``precision`` says, whatever a host has allowed for its own (``set_float32_matmul_precision``
    lets oneDNN and cuBLAS round operands to bfloat16 or TF32).
    """
    matmul = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul
    if not hasattr(matmul, "fp32_precision"):  # torch before 2.9, whose CPU GEMMs have no such switch of their own
        if device.type != "cuda":
            yield
            return
        allowed, matmul.allow_tf32 = matmul.allow_tf32, precision == "tf32"
        try:
            yield
        finally:
            matmul.allow_tf32 = allowed
        return
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before
