"""Processes that end with their parent, so that a killed test run leaves none behind."""

from __future__ import annotations

import ctypes
import signal
import sys


def end_with_parent() -> None:
    """Have this process killed when its parent ends, in whatever way. It works on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
