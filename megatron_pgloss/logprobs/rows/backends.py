"""Which backend runs the row passes: picked by device, dtype and width, or named by the caller.

Shapes: `V` columns of the local shard.

| name | where | float64 | scratch memory |
|---|---|---|---|
| `triton` | CUDA with Triton; Triton's interpreter (`TRITON_INTERPRET=1`) in tests | no | none |
| `compiled` | CPU with a C++ compiler that Inductor can use | no | none |
| `eager` | everywhere | yes | two chunks |

`compiled` costs some seconds per process, dtype and kind of pass before the first token, so a CPU picks
it by itself only from `COMPILE_FROM` columns on. The number of columns does not change from one
micro-batch to the next, so all log-probs of a model come from one backend.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from megatron_pgloss.errors import SpecError, UnsupportedError
from megatron_pgloss.logprobs.rows.cache import cache_problem
from megatron_pgloss.logprobs.rows.compiler import cpp_compiler_problem
from megatron_pgloss.logprobs.rows.per_row import RowFactors, RowMarks, RowSums

Backend = Literal["triton", "compiled", "eager"]
COMPILE_FROM = 16_384


class RowKernels(Protocol):
    """The passes over one block of rows. No other code touches [R, V]."""

    pieces: int
    """S: into how many pieces the columns are cut for `RowSums`."""

    def sums(self, z_RV: Tensor, rate_R1: Tensor | None, out: RowSums) -> None:
        """Fill ``out`` for one block. ``rate_R1`` is log2(e)/tau, None at tau = 1."""

    def gradient(self, z_RV: Tensor, out_RV: Tensor, factors: RowFactors, marks: RowMarks) -> None:
        """Write the gradient of one block to ``out_RV``, which may be ``z_RV`` itself."""


def make_rows(backend: str, logits: Tensor, width: int, rows: int, chunk_elements: int) -> RowKernels:
    """The passes of ``backend`` for ``rows`` rows of ``width`` columns."""
    if backend == "triton":
        from megatron_pgloss.logprobs.rows.triton import TritonRows

        return TritonRows(logits, width, rows)
    if backend == "compiled":
        from megatron_pgloss.logprobs.rows.compiled import CompiledRows

        return CompiledRows(logits, width, rows, chunk_elements)
    from megatron_pgloss.logprobs.rows.eager import EagerRows

    return EagerRows(logits, width, rows, chunk_elements)


def choose(logits: Tensor, name: str | None) -> Backend:
    """The backend for these logits: ``name`` if it can run them (refused if not), else the best that can."""
    if name is None:
        return _best(logits.dtype, logits.device, logits.size(-1))
    if name not in get_args(Backend):
        raise SpecError("unknown log-prob backend", expected=" | ".join(get_args(Backend)), got=name)
    problem = backend_problem(name, logits.device)
    if problem is None and name != "eager" and logits.dtype == torch.float64:
        problem = "it computes in float32, and these logits are float64"
    if problem is not None:
        raise UnsupportedError(
            f"the log-prob backend {name!r} cannot run here",
            got=problem,
            fix="backend='eager', or None to have one picked",
        )
    return name  # type: ignore[return-value]


def _best(dtype: torch.dtype, device: torch.device, columns: int) -> Backend:
    if dtype == torch.float64:
        return "eager"
    if device.type == "cuda" and backend_problem("triton", device) is None:
        return "triton"
    if device.type == "cpu" and columns >= COMPILE_FROM and backend_problem("compiled", device) is None:
        return "compiled"
    return "eager"


def backend_problem(name: str, device: torch.device | str = "cpu") -> str | None:
    """The reason why backend ``name`` cannot run on ``device``, or None where it can."""
    return _problem(name, torch.device(device).type)


@functools.cache
def _problem(name: str, device: str) -> str | None:
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if device == "cuda" or interpreted else f"Triton has no compiler for device {device!r}"
    if name == "compiled":
        if device != "cpu":
            return "its loops are compiled for a CPU only"
        return cpp_compiler_problem() or cache_problem()
    return None


def backend_report() -> dict[str, str]:
    """The backends that can run on each device of this machine, and why the others cannot; `doctor` prints it."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    report = {}
    for device in devices:
        problems = {name: backend_problem(name, device) for name in get_args(Backend)}
        ready = [name for name, problem in problems.items() if problem is None]
        report[device] = ", ".join(ready) + "".join(
            f"; no {name}: {problem}" for name, problem in problems.items() if problem is not None
        )
    return report
