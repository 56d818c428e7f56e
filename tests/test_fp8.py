"""FP8 scales, casts, blocks and products: by hand, and bit for bit against Transformer Engine's own references.

`FROZEN` was printed by ``tools/te_reference.py FOLDER --freeze`` from Transformer Engine d0067d0d: digests of the bytes
and scales that *its* code in Python gives. Shapes: operands [M, K].
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.logprobs.fp8 import blocks, products, scale
from megatron_pgloss.logprobs.fp8.blocks import E4M3, E5M2, quantise
from support.steps import refused

TOOL = Path(__file__).resolve().parent.parent / "tools" / "te_reference.py"
FROZEN = {
    "blockwise rows 130x300 bfloat16 e4m3 pow2": "54278d3bb9600e40",
    "blockwise weight 130x300 bfloat16 e4m3 pow2": "8becf9b251c9b86e",
    "tensorwise 130x300 bfloat16 e4m3 pow2": "a7442758a8563dd6",
    "blockwise rows 130x300 bfloat16 e4m3 fp32": "1ff891a82f08e35a",
    "blockwise weight 130x300 bfloat16 e4m3 fp32": "561525277f76e0c4",
    "tensorwise 130x300 bfloat16 e4m3 fp32": "f6b87e68f0ec8f0e",
    "blockwise rows 130x300 bfloat16 e5m2 pow2": "9f90d794eee6191c",
    "blockwise weight 130x300 bfloat16 e5m2 pow2": "ab6af2e0886d773d",
    "tensorwise 130x300 bfloat16 e5m2 pow2": "9f916d892ce34a77",
    "blockwise rows 130x300 bfloat16 e5m2 fp32": "e1ee789441a1a811",
    "blockwise weight 130x300 bfloat16 e5m2 fp32": "ffaab14631b2747c",
    "tensorwise 130x300 bfloat16 e5m2 fp32": "96fb2e2a944e8af4",
    "blockwise rows 130x300 float32 e4m3 pow2": "60f2bd6b525530ae",
    "blockwise weight 130x300 float32 e4m3 pow2": "639da1fee87986d3",
    "tensorwise 130x300 float32 e4m3 pow2": "df8f24a7c4e4f28b",
    "blockwise rows 130x300 float32 e4m3 fp32": "3a5b491c38d2ce7d",
    "blockwise weight 130x300 float32 e4m3 fp32": "b3369c87cfb1d6f0",
    "tensorwise 130x300 float32 e4m3 fp32": "08805fa79f1a8f00",
    "blockwise rows 130x300 float32 e5m2 pow2": "cd54efea2828647e",
    "blockwise weight 130x300 float32 e5m2 pow2": "3ab1d1ce44c6984c",
    "tensorwise 130x300 float32 e5m2 pow2": "cecc75a7851fee96",
    "blockwise rows 130x300 float32 e5m2 fp32": "e6b3031c23ee7c7e",
    "blockwise weight 130x300 float32 e5m2 fp32": "4eef6354dc63d73e",
    "tensorwise 130x300 float32 e5m2 fp32": "90c728138f42bfd5",
}
INF, NAN = math.inf, math.nan


def tool() -> Any:
    """tools/te_reference.py, whose inputs the digests are of."""
    spec = importlib.util.spec_from_file_location("te_reference", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_bytes_and_scales_are_those_of_transformer_engine() -> None:
    made, seen = tool(), 0
    for name, want in FROZEN.items():
        recipe, *role, _, dtype, form, kind = name.split()
        x = made.sample(130, 300, getattr(torch, dtype))
        ours = quantise(x, recipe, *role, fp8=made.FORMATS[form], pow2=kind == "pow2")  # type: ignore[arg-type]
        assert made.digest(ours.data_MK, ours.scale_inv_PQ) == want, name
        seen += 1
    assert seen == 24


def test_a_scale_by_hand() -> None:
    """448 / amax: 1, 448, 448/3, and of 1e-40 more than float32 holds. As powers of two: 1, 256, 128, 2^127."""
    amax = floats(448, 1, 3, 1e-40, 0, INF, NAN)
    third = float(floats(448) / floats(3))
    found = scale.scale_of(amax, E4M3, pow2=False).tolist()
    assert found == [1, 448, third, scale.FLOAT_MAX, 1, 1, 1]
    assert scale.scale_of(amax, E4M3, pow2=True).tolist() == [1, 256, 128, 2.0**127, 1, 1, 1]
    assert scale.scale_of(floats(1e-40), E4M3, pow2=True, for_inf=65504.0).tolist() == [2.0**15]  # float16's largest
    assert scale.scale_of(floats(0, 1), E5M2, pow2=False, epsilon=2.0).tolist() == [28672, 28672]


def test_an_mx_exponent_is_rounded_up() -> None:
    """amax/448 of 448 is 1 (127), of 449 a little more (128), of 896 2 (128); 2^-8 / 448 lies between 2^-17 and 2^-16
    (111). Zero, infinity and NaN: 0, 254, 255. Read back: 1, 2, 2, 2^-16, 2^-127, 2^127, NaN.
    """
    found = scale.e8m0_of(floats(448, 449, 896, 2.0**-8, 0, INF, NAN), E4M3)
    assert found.tolist() == [127, 128, 128, 111, 0, 254, 255]
    assert scale.power_of(found)[:-1].tolist() == [1, 2, 2, 2.0**-16, 2.0**-127, 2.0**127]
    assert scale.reciprocal_power_of(found)[:-1].tolist() == [1, 0.5, 0.5, 2.0**16, 2.0**127, 2.0**-127]
    assert scale.power_of(found)[-1].isnan() and scale.reciprocal_power_of(found)[-1].isnan()


def test_delayed_scaling_looks_at_the_calls_before() -> None:
    """History 2, 8, 4: by the largest 448/8, by the most recent 448/2; with a margin of one half of that. The history
    moves on, with room for the next call in front. Nothing known: the scale stays.
    """
    history = floats(2, 8, 4)
    found, rolled = scale.delayed_scale(history, floats(3)[0], E4M3)
    assert float(found) == 56 and rolled.tolist() == [0, 4, 2] and history.tolist() == [2, 8, 4]
    assert float(scale.delayed_scale(history, floats(3)[0], E4M3, most_recent=True)[0]) == 224
    assert float(scale.delayed_scale(history, floats(3)[0], E4M3, margin=1)[0]) == 28
    for nothing in (0.0, INF, NAN):
        assert float(scale.delayed_scale(floats(nothing), floats(3)[0], E4M3)[0]) == 3
    late = quantise(floats(1.0, 100.0)[None], "delayed", scale=floats(56)[0])
    assert late.data_MK.float().tolist() == [[56, 448]]  # 5,600 saturates: it is in no scale of its own call


def test_a_cast_saturates_and_rounds_ties_to_even() -> None:
    """e4m3 has steps of 1/8 from 1 to 2 and of 2^-9 near 0: 1.0625, 1.1875 and 2^-10 are ties."""
    x = floats(447, 449, 1e9, -INF, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, NAN)
    found = blocks.saturated(x, E4M3)
    assert found.float()[:-1].tolist() == [448, 448, 448, -448, 1, 1.25, 0, 2.0**-8]
    assert found.view(torch.uint8).tolist()[:6] == [0x7E, 0x7E, 0x7E, 0xFE, 0x38, 0x3A] and found[-1].isnan()
    assert blocks.saturated(floats(61440, INF, -1e9), E5M2).float().tolist() == [57344, 57344, -57344]


def test_blocks_by_hand() -> None:
    """Two rows of 160, ones but for one 3 in the first row's second block, which has 32 columns. 1 x 128 and powers of
    two: scale 256, and 128 where the 3 is. 128 x 128: the 3 is in both rows' block. MX: 1/448 rounds up to 2^-8, 3/448
    to 2^-7. By rows: 448/3 and 448; 448/3 casts to 144 or 160, whichever is nearer: 149.33 to 144.
    """
    x = torch.ones(2, 160, dtype=torch.bfloat16)
    x[0, 130] = 3
    rows, weight, mx, row = (
        quantise(x, *which)  # type: ignore[arg-type]
        for which in (("blockwise",), ("blockwise", "weight"), ("mxfp8",), ("rowwise",))
    )
    assert rows.scale_inv_PQ.tolist() == [[2.0**-8, 2.0**-7], [2.0**-8, 2.0**-8]]
    assert weight.scale_inv_PQ.tolist() == [[2.0**-8, 2.0**-7]]
    assert mx.exponent_PQ is not None
    assert mx.exponent_PQ.tolist() == [[119, 119, 119, 119, 120], [119] * 5]
    assert rows.data_MK.float()[0, 127:132].tolist() == [256, 128, 128, 384, 128]
    assert weight.data_MK.float()[1, 127:130].tolist() == [256, 128, 128]
    assert row.data_MK.float()[0, 128:131].tolist() == [144, 144, 448]
    for found in (rows, weight, mx):
        assert torch.equal(found.dequantised(), x.float())  # nothing here needs more than a power of two
    # 448 / 2^-130 is in no float32: blocks take the largest number of the input's type, a whole tensor float32's.
    tiny = torch.full((1, 128), 2.0**-130, dtype=torch.bfloat16)
    for recipe, largest in (("blockwise", torch.finfo(torch.bfloat16).max), ("tensorwise", scale.FLOAT_MAX)):
        found = quantise(tiny, recipe, pow2=False)  # type: ignore[arg-type]
        assert float(found.scale_inv_PQ) == float(floats(1.0) / floats(largest))
    assert quantise(x[:, :0], "blockwise").data_MK.shape == (2, 0)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "rowwise"])
def test_a_shard_of_128_rows_has_the_bytes_that_it_has_in_the_whole(recipe: Any) -> None:
    """So neither tensor parallelism nor the order of tokens is seen in an operand; of `tensorwise` it is."""
    x = tool().sample(384, 256, torch.bfloat16)
    for role in ("rows", "weight"):
        whole, shard = quantise(x, recipe, role), quantise(x[128:256], recipe, role)
        assert torch.equal(whole.data_MK[128:256].view(torch.uint8), shard.data_MK.view(torch.uint8))
        first, last = (128 // whole.block[0], 256 // whole.block[0])
        assert torch.equal(whole.scale_inv_PQ[first:last], shard.scale_inv_PQ)
    plain = torch.arange(1.0, 257).repeat(384, 1) * torch.linspace(0.1, 1, 384)[:, None]
    cut, uncut = quantise(plain[:128], "tensorwise"), quantise(plain, "tensorwise")
    assert not torch.equal(cut.dequantised(), uncut.dequantised()[:128])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_are_those_of_scaled_mm(recipe: Any) -> None:
    """To 1e-6 of the largest; bit for bit where operands are small integers and scales powers of two, so that every
    partial sum is a float32.
    """
    dice = torch.Generator().manual_seed(0)
    given = torch.randn(48, 256, generator=dice).bfloat16(), torch.randn(64, 256, generator=dice).bfloat16()
    a, b = (quantise(x, recipe) for x in given)
    found, want = _scaled_mm(a, b), products.product(a, b)
    assert float((found.double() - want).abs().max()) <= 1e-6 * float(want.abs().max())
    whole = [torch.randint(-7, 8, x.shape, generator=dice).bfloat16() for x in given]
    for x in whole:
        x[:, 0] = 7  # one largest number everywhere: 448/7 = 64
    a, b = (quantise(x, recipe) for x in whole)
    assert torch.equal(_scaled_mm(a, b), products.product(a, b).float())
    assert torch.equal(products.product(a, b), whole[0].double() @ whole[1].double().t())


def _scaled_mm(a: blocks.Quantised, b: blocks.Quantised) -> Tensor:
    """torch's own FP8 GEMM, float32 out."""
    return torch._scaled_mm(
        a.data_MK, b.data_MK.t(), a.scale_inv_PQ, b.scale_inv_PQ.t().contiguous(), out_dtype=torch.float32
    )


def test_a_block_product_is_the_exact_one_to_float32() -> None:
    dice = torch.Generator().manual_seed(0)
    h, w = (torch.randn(rows, 300, generator=dice).bfloat16() for rows in (40, 130))
    for recipe in ("blockwise", "mxfp8"):
        a, b = quantise(h, recipe), quantise(w, recipe, "weight")  # type: ignore[arg-type]
        want = products.product(a, b)
        assert float((products.block_product(a, b).double() - want).abs().max()) <= 1e-6 * float(want.abs().max())
        exact = h.double() @ w.double().t()
        assert 1e-3 < float((want - exact).norm() / exact.norm()) < 5e-2  # FP8 does round


def test_refusals() -> None:
    x = torch.ones(2, 32)
    refused(pg.UnsupportedError, lambda: quantise(x, "nvfp4"), "rounds at random")  # type: ignore[arg-type]
    refused(pg.SpecError, lambda: quantise(x, "blocks"), "blockwise | mxfp8")  # type: ignore[arg-type]
    refused(pg.SpecError, lambda: quantise(x, "delayed"), "a scale is given")
    refused(pg.SpecError, lambda: quantise(x, "tensorwise", scale=floats(1)[0]), "a scale is given")
    refused(pg.DataError, lambda: quantise(x.double(), "mxfp8"), "float32")
    refused(pg.DataError, lambda: products.product(quantise(x, "rowwise"), quantise(x[:, 1:], "rowwise")), "depths")
