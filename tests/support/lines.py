"""Record which lines of the package each test runs. `tools/mutate.py` uses this map to judge a mutant by the tests that
execute its line.

Python 3.12's `sys.monitoring` reports each line once and is told not to report it again until the next test, so the
cost is small. On an earlier Python there is no map.
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
"""Name of an environment variable: the file to write the map to."""
Line = tuple[str, int]
"""(Path below the package, line number)."""


class Recorder:
    """Records the lines of the package that run between `begin` and `end`."""

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
        """Forget the lines that ran before."""
        self._seen = set()
        self._monitor.restart_events()

    def end(self) -> set[Line]:
        """The lines that ran since `begin`."""
        return self._seen


def recorder() -> Recorder | None:
    """A `Recorder` if the run asks for a map, else None."""
    return Recorder() if os.environ.get(WANTED) else None


class Map:
    """Test to the lines that it runs, in its own process and in the worlds that it waits for."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tests: dict[str, dict[str, Any]] = {}
        self._started = 0.0

    def begin(self) -> None:
        """Start recording a test."""
        self._started = time.perf_counter()
        self._recorder.begin()

    def end(self, name: str, worlds: Iterable[Any]) -> None:
        """Store the test's lines and time; ``worlds`` are the worlds that it waited for."""
        worlds = list(worlds)
        seconds = time.perf_counter() - self._started
        lines = self._recorder.end().union(*(world.lines for world in worlds))
        cost = sum(world.busy for world in worlds) + (0.0 if worlds else seconds)
        self._tests[name] = {"seconds": round(cost, 4), "worlds": len(worlds), "lines": lines}

    def write(self, file: Path) -> None:
        """Write the map as JSON: each line of the package once, and for each test the numbers of its lines."""
        every = sorted(set().union(*(test["lines"] for test in self._tests.values())))
        number = {line: index for index, line in enumerate(every)}
        tests = {
            name: test | {"lines": sorted(number[line] for line in test["lines"])} for name, test in self._tests.items()
        }
        file.write_text(json.dumps({"lines": [f"{path}:{line}" for path, line in every], "tests": tests}))
