"""Where the head's weight gradient goes: straight into Megatron's ``main_grad``, or out through autograd.

Shapes: `R` rows of one token chunk, `Vl` columns of the vocabulary shard, `H` hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class WeightGrad:
    """Sums ``dZ^T h`` over token chunks.

    Args:
        weight: [Vl, H] the head's weight.
        direct: add into ``weight.main_grad``. Megatron's contract then asks that the parameter is marked
            ``grad_added_to_main_grad`` and that autograd gets some tensor, so that the parameter's hooks run; nobody
            reads its values (where ``zero_out_wgrad`` says that somebody will, it is zeros).
        chunks: how many `add` calls will follow. A single chunk's gradient is written by one GEMM in the weight's
            dtype; several are summed in float32 (float64) and rounded once.
    """

    def __init__(self, weight: Tensor, direct: bool, chunks: int) -> None:
        self._weight: Any = weight
        self._direct, self._single = direct, chunks == 1
        self._sum: Tensor | None = weight.main_grad if direct else None  # type: ignore[attr-defined]

    def add(self, dz_RV: Tensor, hidden_RH: Tensor, scale: float = 1.0) -> None:
        """Add ``scale dZ^T h``; both operands have the weight's dtype."""
        if self._sum is None:
            if self._single and scale == 1.0:
                self._sum = dz_RV.t().mm(hidden_RH)
                return
            wide = torch.promote_types(self._weight.dtype, torch.float32)
            self._sum = torch.zeros_like(self._weight, dtype=wide)
        accumulate(self._sum, dz_RV, hidden_RH, scale)

    def add_sum(self, total_VH: Tensor, factor: Tensor) -> None:
        """Add a gradient that was summed before its upstream factor (0-d) was known."""
        if self._sum is None:
            self._sum = total_VH.mul_(factor)
        else:
            self._sum.addcmul_(total_VH.to(self._sum.dtype), factor.to(self._sum.dtype))

    def result(self) -> Tensor:
        """The tensor that backward returns for the weight."""
        weight = self._weight
        if not self._direct:
            return torch.zeros_like(weight) if self._sum is None else self._sum.to(weight.dtype)
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight)


def accumulate(total_VH: Tensor, dz_RV: Tensor, hidden_RH: Tensor, scale: float = 1.0) -> None:
    """``total += scale dZ^T h`` in the precision of ``total``, by the fastest kernel that offers it."""
    if dz_RV.dtype == total_VH.dtype:
        total_VH.addmm_(dz_RV.t(), hidden_RH, alpha=scale)
        return
    kernel = _fused_kernel(total_VH) if scale == 1.0 else None
    if kernel is not None:
        kernel(hidden_RH, dz_RV, total_VH)
    elif total_VH.is_cuda and total_VH.dtype == torch.float32:
        # The operands are 16-bit; the product comes in float32 out of the tensor cores' accumulators.
        total_VH.add_(torch.mm(dz_RV.t(), hidden_RH, out_dtype=torch.float32), alpha=scale)
    else:
        wide = total_VH.dtype
        total_VH.addmm_(dz_RV.t().to(wide), hidden_RH.to(wide), alpha=scale)


def _fused_kernel(total_VH: Tensor) -> Callable[[Tensor, Tensor, Tensor], Any] | None:
    """NVIDIA apex's accumulating GEMM, where it is installed and has a kernel for the accumulator's dtype."""
    if not total_VH.is_cuda:
        return None
    try:
        import fused_weight_gradient_mlp_cuda as apex
    except ImportError:
        return None
    names = {torch.float32: "wgrad_gemm_accum_fp32", torch.bfloat16: "wgrad_gemm_accum_fp16"}
    return getattr(apex, names.get(total_VH.dtype, ""), None)
