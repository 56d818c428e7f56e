"""``doctor``: what is installed here, what of it the loss can use, and what would go wrong.

Looks, and imports nothing but torch: an impostor must not run. The C++ compiler is tried once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pgloss.logprobs import backend_report

_OLDEST_CORE = (0, 16)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    name: str
    found: str
    means: str
    wrong: bool = False
    """Whether it must be mended."""


def add(subparsers: Any) -> None:
    """Declare the command."""
    subparsers.add_parser(
        "doctor",
        help="versions of what is installed, what is fused and what is not, and what would go wrong",
        description="Exit code 1 where something must be mended.",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 where something is wrong."""
    findings = examine()
    width = max(len(row.name) for row in findings)
    for row in findings:
        print(f"{'! ' if row.wrong else '  '}{row.name:{width}}  {row.found:24}  {row.means}")
    return int(any(row.wrong for row in findings))


def examine() -> list[Finding]:
    """Everything that the package can use, in the order of its importance."""
    return [
        Finding("Python", platform.python_version(), "tested: 3.11 and 3.12"),
        *_torch(),
        _core(),
        _te(),
        _apex(),
        _optional("fused_weight_gradient_mlp_cuda", "head gradients accumulate inside NVIDIA apex's GEMM",
                  "head gradients accumulate by torch"),
        _optional("triton", "for kernels on a GPU", "plain torch is used"),
        *(Finding(f"log-probs on {device}", said.split(";")[0], "; ".join(said.split("; ")[1:]) or "all that there is")
          for device, said in backend_report().items()),
        _optional("rich", "terminal views", "pip install 'megatron_pgloss[cli]' for terminal views"),
        _optional("jinja2", "the token page", "pip install 'megatron_pgloss[cli]' for the token page"),
        _optional("matplotlib", "curves", "pip install 'megatron_pgloss[cli]' for curves"),
    ]  # fmt: skip


def _torch() -> list[Finding]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = f"{count} x {torch.cuda.get_device_name(0)}" if count else "none"
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    return [
        Finding("torch", torch.__version__, f"process groups: {', '.join(backends) or 'none'}"),
        Finding("GPU", device, "NCCL" if count else "everything runs on CPU, Megatron-Core by megatron.cpu"),
    ]


def _core() -> Finding:
    version = _version("megatron-core")
    if version is None:
        return Finding("megatron-core", "absent", "the plain torch API works; megatron_pgloss.megatron does not")
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < _OLDEST_CORE:
        return Finding("megatron-core", version, "too old: 0.16 is the oldest that is supported", wrong=True)
    return Finding("megatron-core", version, "tested: 0.16.1 and 0.19.2")


def _te() -> Finding:
    version = _version("transformer-engine") or _version("transformer_engine")
    if version is None:
        return Finding("Transformer Engine", "absent", "Megatron-Core's local layers; no FP8 through TE")
    if importlib.util.find_spec("transformer_engine_torch") is None:
        return Finding("Transformer Engine", version, "its torch part is not installed", wrong=True)
    return Finding("Transformer Engine", version, "its layers; the LM head stays in the model's own precision")


def _apex() -> Finding:
    place = importlib.util.find_spec("apex")
    if place is None:
        return Finding("NVIDIA apex", "absent", "torch's optimizers and gradient accumulation are used")
    folders = [Path(folder) for folder in place.submodule_search_locations or ()]
    # PyPI's apex is a toolkit for web servers; NVIDIA's is built from source and has optimizers.
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return Finding("NVIDIA apex", "an impostor", "another project named apex: pip uninstall apex", wrong=True)
    return Finding("NVIDIA apex", _version("apex") or "from source", "Megatron-Core's fused optimizers")


def _optional(module: str, there: str, absent: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(module, "absent", absent)
    return Finding(module, _version(module) or "there", there)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
