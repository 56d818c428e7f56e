#!/usr/bin/env python3
"""Hold the emulated FP8 quantisers to Transformer Engine's own references in Python, bit for bit.

    git clone --depth 1 https://github.com/NVIDIA/TransformerEngine te
    python tools/te_reference.py te/tests/pytorch/references

Their code runs unchanged; the two names that it takes from the compiled package (an enumeration of dtypes) are put in
its place. No GPU and no installed Transformer Engine is needed. `--freeze` prints what `tests/test_fp8.py` holds: the
digests of *their* bytes and scales on the inputs of `sample`. There is no such reference for MXFP8.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

import torch
from torch import Tensor

from megatron_pgloss.logprobs.fp8.blocks import E4M3, E5M2, Quantised, quantise

SHAPES = ((64, 384), (130, 300), (1, 128), (257, 1))
DTYPES = (torch.bfloat16, torch.float32)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def sample(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers of both signs over 60 powers of two, with a block of zeros and one of 2^-140, from integers alone: the
    same on every machine.
    """
    i = torch.arange(rows * columns)
    mantissa = ((i * 2654435761 + 12345) % 2**32).double() / 2**31 - 1
    exponent = (i // 7 * 40503 % 61 - 40).double()
    x = (mantissa * torch.exp2(exponent)).reshape(rows, columns)
    x[: rows // 4, : columns // 3] = 0
    x[rows // 2 :, : columns // 3] = 2.0**-140
    return x.to(dtype)


def digest(*parts: Tensor) -> str:
    """Of the bytes of some tensors."""
    found = hashlib.sha256()
    for part in parts:
        found.update(bytes(part.contiguous().view(torch.uint8).flatten().tolist()))
    return found.hexdigest()[:16]


def load(folder: Path) -> tuple[Any, Any]:
    """TE's block quantiser and its per-tensor cast, from their files."""
    kinds = types.SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2")
    for name, content in {
        "transformer_engine": {}, "transformer_engine.pytorch": {"DType": kinds},
        "transformer_engine.pytorch.constants": {"TE_DType_To_Torch": FORMATS},
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    sys.path.insert(0, str(folder.resolve().parent))
    from references.blockwise_quantizer_reference import BlockwiseQuantizerReference  # type: ignore[import-not-found]
    from references.ref_per_tensor_cs import ref_per_tensor_cs_cast  # type: ignore[import-not-found]

    return BlockwiseQuantizerReference(), ref_per_tensor_cs_cast


def cases(folder: Path) -> Iterator[tuple[str, Quantised, Tensor, Tensor]]:
    """Name, ours, and their bytes and scales."""
    blocks, whole = load(folder)
    for rows, columns in SHAPES:
        for dtype in DTYPES:
            x = sample(rows, columns, dtype)
            for form, fp8 in FORMATS.items():
                for pow2 in (True, False):
                    where = f"{rows}x{columns} {str(dtype)[6:]} {form} {'pow2' if pow2 else 'fp32'}"
                    for role, tile in (("rows", (1, 128)), ("weight", (128, 128))):
                        theirs = blocks.quantize(
                            x, fp8, pow_2_scales=pow2, quant_tile_shape=tile, munge_scale_shapes=False
                        )
                        ours = quantise(x, "blockwise", role, fp8=fp8, pow2=pow2)  # type: ignore[arg-type]
                        yield f"blockwise {role} {where}", ours, theirs.data, theirs.scale
                    data, scale, *_ = whole(x, form, force_pow_2_scales=pow2)
                    yield (
                        f"tensorwise {where}",
                        quantise(x, "tensorwise", fp8=fp8, pow2=pow2),
                        data,
                        scale.reshape(1, 1),
                    )


def main() -> int:
    """Compare; the exit code is 1 where a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("references", type=Path, help="tests/pytorch/references of a checkout of Transformer Engine")
    parser.add_argument("--freeze", action="store_true", help="print digests of their bytes and scales")
    given = parser.parse_args()
    off = total = 0
    for name, ours, data, scale in cases(given.references):
        total += 1
        mine, theirs = (digest(*pair) for pair in ((ours.data_MK, ours.scale_inv_PQ), (data, scale)))
        if given.freeze:
            print(f'    "{name}": "{theirs}",')
        elif mine != theirs:
            off += 1
            wrong = (ours.data_MK.view(torch.uint8) != data.view(torch.uint8)).sum()
            print(f"{name}: {int(wrong)} bytes and {int((ours.scale_inv_PQ != scale).sum())} scales differ")
    if not given.freeze:
        print(f"{total} cases, {off} off")
    return int(off > 0)


if __name__ == "__main__":
    raise SystemExit(main())
