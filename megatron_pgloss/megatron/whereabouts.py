"""Where one rank is: the phase of its step, the line that its thread runs, and whether that waits for other ranks."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_ORDER = ("idle", "visit", "score", "begin", "statistics pass", "forward", "loss", "schedule", "finish")
"""Phases in the order in which a step goes through them; ``schedule``: between two calls of ours, backward too;
``visit``: a layout of ``verify``, in which ``step`` counts layouts.
"""
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = (f"{_TORCH}/distributed/", "p2p_communication.py")
_OTHERS = (_TORCH, sysconfig.get_paths()["stdlib"] + "/", "<frozen", str(Path(__file__).parent / "cpu"))
"""Files whose lines say little: the next one outwards is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a rank is."""

    step: int = 0
    phase: str = "idle"
    micro: int = -1
    since: float = 0.0
    """Time of day at which the phase began."""
    alive: float = 0.0
    """Time of day of the last sign of life."""
    waits: bool = False
    """Whether the rank was inside a collective or a message, at the last sign of life."""
    at: str = ""
    """The line of code that it was running then, or the empty string."""

    @property
    def stage(self) -> tuple[int, int]:
        """Step and part of it: smaller is behind. What a schedule does is one part."""
        return self.step, _ORDER.index("forward" if self._inside else self.phase)

    @property
    def order(self) -> tuple[int, int, int]:
        """Smaller is behind. Micro-batches count before what is done with them."""
        part = ("forward", "loss", "schedule").index(self.phase) if self._inside else 0
        return *self.stage, 3 * self.micro + part

    @property
    def _inside(self) -> bool:
        return self.phase in ("forward", "loss", "schedule")

    def __str__(self) -> str:
        place = {"schedule": "in the schedule, after", "forward": "in forward of", "loss": "in the loss of"}
        where = f"{place[self.phase]} micro-batch {self.micro}" if self.phase in place else f"in {self.phase}"
        where = f"in layout {self.step} of verify" if self.phase == "visit" else f"{where}, step {self.step}"
        return where + (f", at {self.at}" if self.at else "")


def look(thread: int) -> tuple[str, bool]:
    """The line that a thread of this process runs, and whether it waits for other ranks there.

    It waits where its innermost lines are torch's collectives, Megatron's messages between stages, or a ``wait()``. On
    a GPU collectives run beside the thread, which waits for the device instead: then this says False.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None or thread == threading.get_ident():
        return "", False
    inner = frame.f_code.co_filename
    waits = inner.startswith(_COLLECTIVES[0]) or inner.endswith(_COLLECTIVES[1])
    waits = waits or ".wait(" in linecache.getline(inner, frame.f_lineno)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", waits
