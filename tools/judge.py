"""Judge mutants by the default test suite: each by the tests that execute its line, the quickest first.

The suite is collected once; each mutant is a fork of that process, in which the tests that the map names for its line
run until one fails. The map is made by a run of the suite (Python 3.12):

    python -m pytest --lines lines.json
    python tools/mutate.py --judge suite --map lines.json --file planning/token_weights.py --file megatron/step.py
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mutants import Mutant, put_into

IN_PROCESS = ("tests/test_docs_tables.py",)
"""Test files that make a process group in their own process, from which no world can be forked afterwards."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mutant of a module, and the tests that judge it, the quickest first, with their seconds."""

    file: str
    module: ModuleType
    mutant: Mutant
    tests: list[tuple[str, float]]


class LineMap:
    """Which tests execute a line."""

    def __init__(self, file: Path) -> None:
        data = json.loads(file.read_text())
        self.seconds = {name: test["seconds"] for name, test in data["tests"].items()}
        self._by_line: dict[tuple[str, int], list[str]] = {}
        self._by_file: dict[str, set[str]] = {}
        for name, test in data["tests"].items():
            for index in test["lines"]:
                path, _, line = data["lines"][index].rpartition(":")
                self._by_line.setdefault((path, int(line)), []).append(name)
                self._by_file.setdefault(path, set()).add(name)

    def tests(self, file: str, mutant: Mutant, first: str = "") -> list[tuple[str, float]]:
        """The tests that execute a line of the mutant's statement, the quickest first; if none does (the statement runs
        at import), the tests that execute any line of the file.

        Args:
            file: the file's path below the package.
            mutant: a mutant of the file.
            first: names of test files whose tests come first whether or not they execute the line, because a default
                or a signature is used without a line being executed.
        """
        start, end = mutant.lines
        names = {name for line in range(start, end + 1) for name in self._by_line.get((file, line), ())}
        names = {name for name in names or self._by_file.get(file, set()) if not name.startswith(IN_PROCESS)}
        names |= {name for name in self.seconds if name.partition("::")[0] in first.split()}
        return sorted(
            ((name, self.seconds[name]) for name in names),
            key=lambda one: (one[0].partition("::")[0] not in first.split(), one[1], one[0]),
        )


@dataclass
class _Running:
    number: int
    started: float
    pipe: int


@dataclass
class Trial:
    """A pytest plugin that tries the mutants on the tests, instead of running the tests."""

    cases: Sequence[Case]
    jobs: int
    timeout: float
    budget: float
    """Seconds of tests for one mutant, by the map."""
    fates: dict[int, str] = field(default_factory=dict)
    _judged: dict[str, bool] = field(default_factory=dict)
    """Tests that killed a mutant, to whether they pass without one."""
    _running: dict[int, _Running] = field(default_factory=dict)
    _waiting: list[tuple[int, Case]] = field(default_factory=list)
    _items: dict[str, pytest.Item] = field(default_factory=dict)
    _failing: int | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try every mutant; the tests as they are must pass first."""
        items = {item.nodeid: item for item in session.items}
        waiting, running = list(enumerate(self.cases)), self._running
        self._waiting, self._items = waiting, items
        while waiting or running:
            while waiting and len(running) < self.jobs:
                number, case = waiting.pop(0)
                read, write = os.pipe()
                pid = self._fork(items, case, write)
                os.close(write)
                running[pid] = _Running(number, time.monotonic(), read)
            for pid, one in list(running.items()):
                self._look(pid, one, running)
            time.sleep(0.01)
        return True

    def _fit(self, name: str, case: Case) -> bool:
        """Whether a test that killed a mutant passes on the unchanged code, tried once per test."""
        if name not in self._judged:
            same = Mutant(0, "unchanged", ast.parse(Path(str(case.module.__file__)).read_text(encoding="utf-8")))
            unchanged = Case(file=case.file, module=case.module, mutant=same, tests=[(name, 0.0)])
            read, write = os.pipe()
            pid = self._fork(self._items, unchanged, write)
            os.close(write)
            os.waitpid(pid, 0)
            self._judged[name] = os.read(read, 1 << 16).decode().startswith("survived 1 of 1")
            os.close(read)
            if not self._judged[name]:
                print(f"no judge, for it fails without a mutant: {name}", flush=True)
        return self._judged[name]

    def _look(self, pid: int, one: _Running, running: dict[int, _Running]) -> None:
        done, _ = os.waitpid(pid, os.WNOHANG)
        took = time.monotonic() - one.started
        if not done and took < self.timeout:
            return
        if not done:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        told = os.read(one.pipe, 1 << 16).decode()
        os.close(one.pipe)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # ends the worlds that a failed test left
        del running[pid]
        killer = told.removeprefix("killed by ")
        if killer in self._items and not self._fit(killer, self.cases[one.number]):
            self._waiting.append((one.number, self.cases[one.number]))
            return
        self.fates[one.number] = told or ("killed by time" if not done else "killed: the process ended")
        case = self.cases[one.number]
        print(
            f"[{len(self.fates)}/{len(self.cases)}] {self.fates[one.number]}, {took:.1f} s: {case.file} {case.mutant}",
            flush=True,
        )

    def _fork(self, items: dict[str, pytest.Item], case: Case, pipe: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        try:
            put_into(case.module, case.mutant)
            self._failing = pipe
            chosen, spent, paid = [], 0.0, set()
            for name, seconds in case.tests:
                world = name.partition("::")[0], seconds  # tests that wait for one world take it together
                cost = 0.0 if world in paid and seconds > 0.5 else seconds
                if name in items and self._judged.get(name, True) and spent + cost <= self.budget:
                    chosen.append(items[name])
                    spent += cost
                    paid.add(world)
            for item, following in zip(chosen, [*chosen[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            os.write(pipe, f"survived {len(chosen)} of {len(case.tests)} tests".encode())
        except BaseException as error:  # noqa: BLE001  a mutant may break anything, pytest included
            os.write(pipe, f"killed by {type(error).__name__} outside of a test".encode())
        finally:
            os._exit(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Run the tests in a fork, until the first failure."""
        if self._failing is not None and report.failed:
            os.write(self._failing, f"killed by {report.nodeid}".encode())
            os._exit(0)
