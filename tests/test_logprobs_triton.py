"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for sm_90 without a spilled register."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cover import EXHAUSTIVE

pytest.importorskip("triton", reason="Triton is not installed: its kernels have nothing to run in")
if torch.cuda.is_available():
    pytest.skip("a GPU runs the kernels themselves: tests/test_gpu.py", allow_module_level=True)

HERE = Path(__file__).parent
INTEGERS = ("row_stride", "out_row_stride", "columns", "piece_columns")


@pytest.mark.slow
def test_kernels_pass_the_tests_of_every_backend_in_the_interpreter() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "PGLOSS_TEST_BACKENDS": "triton"}
    file = str(HERE / "test_logprobs_backends.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    # The shards' sums are merged by the same code for every backend, and the interpreter is slow.
    command += [] if EXHAUSTIVE else ["-k", "not float32 and not float16 and not four_shards or bfloat16"]
    ran = subprocess.run(command, cwd=HERE.parent, env=env, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", ran.stdout)[1]) > (25 if EXHAUSTIVE else 22) and "skipped" not in ran.stdout


def compiled_for_hopper(kernel: Any, z: str, folder: Path, **constants: Any) -> tuple[str, str]:
    """(PTX, what ptxas says of it) of a kernel as a launch with aligned pointers and sizes specialises it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"z": z, "out": z, "entry": z, "live": "u8", "hit": "u8", "column": "i64"}
    constants |= {name: 1 for name in kernel.arg_names if name.endswith("column_stride")}
    signature = {
        name: "constexpr"
        if name in constants
        else f"*{kinds.get(name.removesuffix('_ptr'), 'fp32')}"
        if name.endswith("_ptr")
        else "i32"
        for name in kernel.arg_names
    }
    aligned = [i for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr") or name in INTEGERS]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    path = folder / "kernel.ptx"
    path.write_text(made.asm["ptx"])
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(path), "-o", str(folder / "kernel.cubin")]
    return made.asm["ptx"], subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("z", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("full", [True, False], ids=["entropy, temperature", "plain"])
def test_kernels_compile_for_sm_90_without_spills_and_with_wide_loads(z: str, full: bool, tmp_path: Path) -> None:
    from megatron_pgloss.logprobs.rows import triton as rows

    sums = dict(HAS_RATE=full, HAS_MOMENT=full, BLOCK=rows.FORWARD_BLOCK)
    gradient = dict(HAS_RATE=full, HAS_B=full, BLOCK=rows.BACKWARD_BLOCK)
    for kernel, constants, stores in ((rows.sums_kernel, sums, False), (rows.gradient_kernel, gradient, True)):
        ptx, said = compiled_for_hopper(kernel, z, tmp_path, **constants)
        assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", said), said
        assert int(re.search(r"Used (\d+) registers", said)[1]) <= 64
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx), "logits are not read 128 bits at a time"
        assert not stores or re.search(r"st\.global\S*\.v4\.b32", ptx), "gradients are not written 128 bits at a time"
