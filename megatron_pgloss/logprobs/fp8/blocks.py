"""Operands of an FP8 GEMM: which elements share a scale, what they are cast to, and what stands for them.

Shapes: operands [M, K], contracted over K. A block is ``(r, c)`` elements with one scale; the last block of a row or
column may be shorter. `P` = ceil(M / r), `Q` = ceil(K / c).

| recipe | hidden states, gradients | weights | scale | depends on |
|---|---|---|---|---|
| `blockwise` | 1 x 128 | 128 x 128 | power of two, float32 | the block: with powers of two, its rounding does not |
| `mxfp8` | 1 x 32 | 1 x 32 | e8m0 | the block, likewise |
| `rowwise` | 1 x K | 1 x K | float32 | the row |
| `tensorwise` | whole | whole | float32 | every element that the rank holds: not the same on every layout |
| `delayed` | whole | whole | float32, of earlier calls | the calls before: the same on no two runs |

Sources, Transformer Engine d0067d0d: `common/recipe/__init__.py` (defaults), `common/transpose/quantize_transpose_*`,
`common/cast/mxfp8/quantize_mxfp8.cuh`; `tests/pytorch/references/blockwise_quantizer_reference.py`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError, UnsupportedError
from megatron_pgloss.logprobs.fp8.scale import FLOAT_MAX, FP8_MAX, e8m0_of, power_of, reciprocal_power_of, scale_of

Recipe = Literal["blockwise", "mxfp8", "rowwise", "tensorwise", "delayed"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)
Role = Literal["rows", "weight"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Quantised(NamedTuple):
    """An FP8 operand: ``data * scale_inv`` of its block."""

    data_MK: Tensor
    """float8 [M, K]."""
    scale_inv_PQ: Tensor
    """float32 [P, Q]: what an element is multiplied with to read it."""
    exponent_PQ: Tensor | None
    """uint8 [P, Q]: the e8m0 scales of ``mxfp8``; None for other recipes."""
    block: tuple[int, int]

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that the operand stands for, exact in float64; [M, K]."""
        tiled, _ = _tiled(self.data_MK.to(dtype), self.block)
        whole = tiled * self.scale_inv_PQ.to(dtype)[:, None, :, None]
        rows, columns = self.data_MK.shape
        return whole.reshape(whole.size(0) * whole.size(1), -1)[:rows, :columns]


def quantise(
    x_MK: Tensor, recipe: Recipe, role: Role = "rows", *, fp8: torch.dtype = E4M3, pow2: bool | None = None,
    scale: Tensor | None = None,
) -> Quantised:  # fmt: skip
    """``x`` as the operand of an FP8 GEMM over its last dimension.

    q = cast(clamp(float32(x) scale, +-fp8_max)), to the nearest, ties to even; NaN stays NaN.

    Args:
        x_MK: bfloat16, float16 or float32.
        recipe: which elements share a scale, in the table of this module.
        role: ``weight`` for the operand that has blocks of 128 x 128 under ``blockwise``.
        fp8: float8_e4m3fn or float8_e5m2.
        pow2: scales rounded down to powers of two; None: as the recipe has it (``blockwise`` alone).
        scale: of ``delayed``, float32 0-d: from `scale.delayed_scale`.

    Raises:
        SpecError: an unknown recipe, or ``delayed`` without a scale (another with one).
        DataError: not a matrix of those dtypes.
        UnsupportedError: ``nvfp4``.
    """
    check_recipe(recipe)
    if x_MK.dim() != 2 or x_MK.dtype not in (torch.bfloat16, torch.float16, torch.float32) or fp8 not in FP8_MAX:
        raise DataError(
            "nothing that can be quantised", expected="a matrix of bfloat16, float16 or float32, to e4m3 or e5m2",
            got=f"{x_MK.dtype} {list(x_MK.shape)} to {fp8}",
        )  # fmt: skip
    if (recipe == "delayed") != (scale is not None):
        raise SpecError(
            "a scale is given for recipe 'delayed', and for it alone", got=recipe, fix="fp8.scale.delayed_scale"
        )
    block = block_of(recipe, role, x_MK.size(1), x_MK.size(0))
    tiled, amax_PQ = _tiled(x_MK.float(), block)
    exponent_PQ = None
    if recipe == "mxfp8":
        exponent_PQ = e8m0_of(amax_PQ, fp8)
        scale_PQ, scale_inv_PQ = reciprocal_power_of(exponent_PQ), power_of(exponent_PQ)
    else:
        # A quotient that float32 cannot hold becomes the largest number of the input's type in blocks, float32's else.
        for_inf = torch.finfo(x_MK.dtype).max if recipe == "blockwise" else FLOAT_MAX
        found_PQ = scale_of(amax_PQ, fp8, pow2=recipe == "blockwise" if pow2 is None else pow2, for_inf=for_inf)
        scale_PQ = found_PQ if scale is None else scale.expand(found_PQ.shape)
        scale_inv_PQ = torch.reciprocal(scale_PQ)
    data = saturated(tiled * scale_PQ[:, None, :, None], fp8)
    rows, columns = x_MK.shape
    data_MK = data.reshape(data.size(0) * data.size(1), -1)[:rows, :columns].contiguous()
    return Quantised(data_MK, scale_inv_PQ, exponent_PQ, block)


def saturated(x: Tensor, fp8: torch.dtype) -> Tensor:
    """float32 to ``fp8``, beyond its range the largest number; NaN stays. (torch's own cast saturates e4m3 in some
    versions, and e5m2 in none.)
    """
    return x.clamp(-FP8_MAX[fp8], FP8_MAX[fp8]).to(fp8)


def block_of(recipe: Recipe, role: Role, columns: int, rows: int) -> tuple[int, int]:
    """How many elements (down, across) share a scale."""
    if recipe == "blockwise":
        return (128, 128) if role == "weight" else (1, 128)
    if recipe == "mxfp8":
        return 1, 32
    return (1, max(columns, 1)) if recipe == "rowwise" else (max(rows, 1), max(columns, 1))


def check_recipe(recipe: str) -> None:
    """Refuse what is no recipe here.

    Raises:
        UnsupportedError: ``nvfp4``.
        SpecError: an unknown name.
    """
    if recipe == "nvfp4":
        raise UnsupportedError(
            "nvfp4 is not emulated: it rounds at random and rotates its inputs, so layouts give different numbers",
            fix="blockwise or mxfp8",
        )
    if recipe not in RECIPES:
        raise SpecError(f"no FP8 recipe {recipe!r}", expected=" | ".join(RECIPES))


def _tiled(x_MK: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[P, r, Q, c], filled up by zeros, and the largest magnitude of each block [P, Q]; NaN where a block has one."""
    (rows, columns), (r, c) = x_MK.shape, block
    filled = torch.nn.functional.pad(x_MK, (0, -columns % c, 0, -rows % r))
    tiled = filled.reshape(filled.size(0) // r, r, filled.size(1) // c, c)
    return tiled, tiled.abs().amax((1, 3))
