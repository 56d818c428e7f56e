#!/usr/bin/env python3
"""What the look at the gradients costs in `PolicyLossStep.finish`, beside one reading of them and the norm of clipping.

    python tools/bench/gradients.py [--elements 50000000] [--json FILE]

One process, on the GPU where there is one. The gradients are those of plain torch modules, whose memory is read as that
of Megatron's buffers is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # runs from a checkout that is not installed

import torch

from megatron_pgloss.megatron import gradients

BUFFERS = 4
"""Gradient buffers of a rank: dense and expert, of a few chunks."""


def measure(elements: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Milliseconds of the look, of reading the memory once, and of the 2-norm that clipping takes; GB/s of the look."""
    parts = torch.nn.ParameterList()
    for _ in range(BUFFERS):
        part = torch.nn.Parameter(torch.empty(elements // BUFFERS, dtype=dtype, device=device))
        part.grad = torch.randn_like(part)
        parts.append(part)
    grads = [part.grad for part in parts if part.grad is not None]
    look = timed(lambda: gradients.largest([parts], device), device)
    return {
        "finish's look": look,
        "reading once (amax)": timed(lambda: [grad.amax() for grad in grads], device),
        "2-norm of clipping": timed(lambda: torch._foreach_norm(grads), device),
        "GB/s of the look": elements * grads[0].element_size() / look / 1e6,
    }


def timed(call: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Median milliseconds, the first call left out."""
    seen = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seen.append(1e3 * (time.perf_counter() - began))
    return statistics.median(seen[1:])


def main() -> None:
    """Measure and print; with ``--json`` write too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=50_000_000, help="gradients of one rank")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found[name] = measure(given.elements, dtype, device)
        print(f"{given.elements:,} {name} gradients on {device}, {torch.get_num_threads()} threads")
        for what, value in found[name].items():
            print(f"  {what:24} {value:8.1f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"elements": given.elements, "device": str(device), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
