"""``doctor``: what is installed here, what of it the loss can use, and what would go wrong.

It imports nothing but torch, where that is installed: a package that only has the right name must not run. The C++
compiler is tried once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OLDEST_CORE = (0, 16)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    name: str
    found: str
    means: str
    wrong: bool = False
    """Whether this must be mended."""


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
        _needed("pydantic"),
        _needed("packaging"),
        _core(),
        _te(),
        _apex(),
        _optional("fused_weight_gradient_mlp_cuda", "head gradients accumulate inside NVIDIA apex's GEMM",
                  "head gradients accumulate by torch"),
        _optional("triton", "for kernels on a GPU", "plain torch is used"),
        *_log_probs(),
        _optional("rich", "terminal views", "pip install 'megatron_pgloss[cli]' for terminal views"),
        _optional("jinja2", "the token page", "pip install 'megatron_pgloss[cli]' for the token page"),
        _optional("matplotlib", "curves", "pip install 'megatron_pgloss[cli]' for curves"),
    ]  # fmt: skip


def _torch() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", "absent", "nothing of the package works without it: pip install torch", wrong=True)]
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = f"{count} x {torch.cuda.get_device_name(0)}" if count else "none"
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    return [
        Finding("torch", torch.__version__, f"process groups: {', '.join(backends) or 'none'}"),
        Finding("GPU", device, "NCCL" if count else "everything runs on CPU, Megatron-Core by megatron.cpu"),
    ]


def _needed(module: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(module, "absent", f"the package needs it: pip install {module}", wrong=True)
    return Finding(module, _version(module) or "there", "needed")


def _log_probs() -> list[Finding]:
    """Backends of the log-probs on each device; none where what they need is absent."""
    if any(importlib.util.find_spec(module) is None for module in ("torch", "pydantic")):
        return []
    from megatron_pgloss.logprobs import backend_report

    return [
        Finding(f"log-probs on {device}", said.split(";")[0], "; ".join(said.split("; ")[1:]) or "all that there is")
        for device, said in backend_report().items()
    ]


def _core() -> Finding:
    version = _core_on_path() or _version("megatron-core")
    if version is None:
        return Finding("megatron-core", "absent", "the plain torch API works; megatron_pgloss.megatron does not")
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < _OLDEST_CORE:
        return Finding("megatron-core", version, "too old: 0.16 is the oldest that is supported", wrong=True)
    return Finding("megatron-core", version, "tested: 0.16.1 and 0.19.2")


def _core_on_path() -> str | None:
    """The version that the files of megatron.core on the path state, read without importing them. It may differ from
    that of the installed distribution, since a source tree on the path comes first.
    """
    place = importlib.util.find_spec("megatron")
    for folder in () if place is None else place.submodule_search_locations or ():
        file = Path(folder) / "core" / "package_info.py"
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            numbers = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
            return ".".join(found[1] for found in numbers if found) or None
    return None


def _te() -> Finding:
    version = _version("transformer-engine") or _version("transformer_engine")
    if version is None:
        return Finding("Transformer Engine", "absent", "Megatron-Core's local layers")
    if importlib.util.find_spec("transformer_engine_torch") is None:
        return Finding("Transformer Engine", version, "its torch part is not installed", wrong=True)
    return Finding("Transformer Engine", version, "its layers; no LM head of this package runs in FP8 (docs/fp8.md)")


def _apex() -> Finding:
    place = importlib.util.find_spec("apex")
    if place is None:
        return Finding("NVIDIA apex", "absent", "torch's optimizers and gradient accumulation are used")
    folders = [Path(folder) for folder in place.submodule_search_locations or ()]
    # PyPI's apex is another project, a toolkit for web servers; NVIDIA's is built from source and has optimizers.
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
