"""Products of FP8 operands, for reference: exact in float64, or in the order of the block GEMM.

Shapes: [M, K] and [N, K], contracted over K; the product is [M, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.logprobs.fp8.blocks import Quantised


def product(a: Quantised, b: Quantised, dtype: torch.dtype = torch.float64) -> Tensor:
    """``sum_k a_mk b_nk`` of the numbers that the operands stand for.

    In float64 products of two FP8 numbers and their scales are exact, and sums err by 1e-16: every engine is held to
    this. In float32 it is a stand-in for a GEMM with float32 accumulators.

    Raises:
        DataError: the operands do not have one K.
    """
    if a.data_MK.size(1) != b.data_MK.size(1):
        raise DataError(
            "FP8 operands of different depths", expected="[M, K] and [N, K]",
            got=f"{list(a.data_MK.shape)} and {list(b.data_MK.shape)}",
        )  # fmt: skip
    return a.dequantised(dtype) @ b.dequantised(dtype).t()


def block_product(a: Quantised, b: Quantised) -> Tensor:
    """`product` in float32, in the order of the GEMM on blocks of K: the unscaled sum of each block, times a's scale,
    times b's, added to what the blocks before gave.

    Source: Transformer Engine d0067d0d, `tests/pytorch/references/blockwise_fp8_gemm_reference.py`, whose last step is
    one fused multiply-add; here it is rounded twice, so that results differ in their last bit.
    """
    width = min(a.block[1], b.block[1])
    if a.block[1] != b.block[1]:
        raise DataError("blocks of different depths", got=f"{a.block} and {b.block}")
    total = a.data_MK.new_zeros(a.data_MK.size(0), b.data_MK.size(0), dtype=torch.float32)
    for place in range(a.scale_inv_PQ.size(1)):
        columns = slice(place * width, (place + 1) * width)
        partial = a.data_MK[:, columns].float() @ b.data_MK[:, columns].float().t()
        total += partial * _per_row(a, place)[:, None] * _per_row(b, place)
    return total


def _per_row(operand: Quantised, place: int) -> Tensor:
    """The scale of each row of the operand in one block of K, [M]."""
    return operand.scale_inv_PQ[:, place].repeat_interleave(operand.block[0])[: operand.data_MK.size(0)]
