"""tools/gpu_check.sh at sizes that take seconds on a CPU; a GPU runs the same parts, and its tests before them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.mark.slow
def test_every_part_of_the_gpu_check_runs_on_a_cpu_at_small_sizes() -> None:
    command = ["bash", str(TOOLS / "gpu_check.sh"), "--device", "cpu", "--small"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHON": sys.executable}, check=False
    )
    assert ran.returncode == 0, ran.stderr
    for title in ("logits 64x512 bf16", "logits 64x1024 bf16", "head 64x32x512 bf16, tokens a chunk"):
        assert title in ran.stdout
    for mode in ("keep", "forward", "recompute"):
        for chunk in (16, 32):
            assert f"ours, {mode}, {chunk} " in ran.stdout
    for row in ("ours, eager", "naive, torch.compile", "plan, once a step", "metrics", "backward"):
        assert row in ran.stdout
    assert "ours, triton" in ran.stdout and "skipped: " in ran.stdout  # named with its reason
