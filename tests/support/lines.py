"""Which lines of the package a test runs: the map by which a mutant is judged by the tests that execute its line.

Python 3.12's `sys.monitoring` reports each line once and is told to be silent about it until the next test, so the cost
is small. On an earlier Python there is no map.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "megatron_pgloss") + os.sep
WANTED = "PGLOSS_LINES"
"""Environment variable: the file to write the map to."""
Line = tuple[str, int]
"""File below the package, and line."""


class Recorder:
    """Lines of the package that run between `begin` and `end`."""

    def __init__(self) -> None:
        if sys.version_info < (3, 12):
            raise RuntimeError("a map of lines needs Python 3.12 (sys.monitoring)")
        self._monitor: Any = sys.monitoring
        self._tool = self._monitor.COVERAGE_ID
        self._seen: set[Line] = set()
        self._monitor.use_tool_id(self._tool, "megatron_pgloss lines")
        self._monitor.register_callback(self._tool, self._monitor.events.LINE, self._line)
        self._monitor.set_events(self._tool, self._monitor.events.LINE)

    def _line(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(PACKAGE):
            self._seen.add((code.co_filename.removeprefix(PACKAGE), line))
        return self._monitor.DISABLE

    def begin(self) -> None:
        """Forget what ran before."""
        self._seen = set()
        self._monitor.restart_events()

    def end(self) -> set[Line]:
        """What ran since `begin`."""
        return self._seen


def recorder() -> Recorder | None:
    """One, where the run asks for a map."""
    return Recorder() if os.environ.get(WANTED) else None


class Map:
    """Test to the lines that it runs, in its own process and in the worlds that it waits for."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tests: dict[str, dict[str, Any]] = {}
        self._started = 0.0

    def begin(self) -> None:
        """A test begins."""
        self._started = time.perf_counter()
        self._recorder.begin()

    def end(self, name: str, worlds: Iterable[Any]) -> None:
        """It has ended; ``worlds`` are those that it waited for."""
        worlds = list(worlds)
        seconds = time.perf_counter() - self._started
        lines = self._recorder.end().union(*(world.lines for world in worlds))
        cost = sum(world.busy for world in worlds) + (0.0 if worlds else seconds)
        self._tests[name] = {"seconds": round(cost, 4), "worlds": len(worlds), "lines": lines}

    def write(self, file: Path) -> None:
        """As JSON: each line of the package once, and by each test the numbers of its lines."""
        every = sorted(set().union(*(test["lines"] for test in self._tests.values())))
        number = {line: index for index, line in enumerate(every)}
        tests = {
            name: test | {"lines": sorted(number[line] for line in test["lines"])} for name, test in self._tests.items()
        }
        file.write_text(json.dumps({"lines": [f"{path}:{line}" for path, line in every], "tests": tests}))
