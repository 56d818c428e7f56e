"""The quickstart runs as a newcomer runs it, and what it says is learned is learned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_quickstart_learns_to_count() -> None:
    """From the printed lines: the plan's report, ratios that move, and greedy answers that become exact."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mean(token)" in done.stdout and "64 sequences" in done.stdout
    largest = [float(value) for value in re.findall(r"max ([\d.]+)", done.stdout)]
    assert max(largest) > 1.01, "the second update of a batch has ratios other than 1"
    before, after = map(float, re.search(r"before (-?[\d.]+), after (-?[\d.]+) \(best", done.stdout).groups())
    assert before < 0 < 0.95 <= after, done.stdout
