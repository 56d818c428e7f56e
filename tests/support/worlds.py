"""Worlds of gloo processes for tests: forked from one warm process, run side by side, each with a deadline.

Torch and Megatron-Core take seconds to import, which was most of the suite's time. They are imported once, by a process
that does nothing else (``support.warm``), and every rank of every world is a fork of it: a rank starts within
milliseconds, shares the memory of the imported modules, and ends with its world. So nothing that a test patches, sets,
draws or leaves behind can reach the next test.

The world of a fixture made by `world_fixture` starts when the tests have been collected, and runs beside single-process
tests; `run_world` starts a world and waits for it. At most `SEATS` ranks are alive at a time.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.lines import Line, recorder
from support.orphans import end_with_parent

SEATS = int(os.environ.get("PGLOSS_SEATS", "8"))
"""The number of ranks that may be alive at a time."""
RESERVED = SEATS // 2
"""How many seats are reserved: worlds take them only while some test waits for a world."""
RARE = (50_000, 20, 20)
"""Thresholds of the garbage collector. Python's own have it search all objects of a test some hundred times a step."""
TIMEOUT = 300.0
"""Seconds that a world may take from its start. Other worlds and tests run beside it."""


Report = tuple[float, str | None, bytes, tuple[float, float], set[Line]]
"""A rank's end time, error text or None, pickled result, (processor seconds, MiB), and lines of the package that it
ran.
"""


@dataclass(eq=False)
class World:
    """Processes that run ``fn(rank, size, *args)``, ``size`` of them.

    Args:
        fn: the function of each rank.
        size: the number of ranks.
        args: further arguments of ``fn``.
        timeout: seconds from the start to the deadline.
        grouped: whether the ranks begin in a default process group; without one, ``fn`` makes its own.
    """

    fn: Callable[..., Any]
    size: int
    args: tuple[Any, ...] = ()
    timeout: float = TIMEOUT
    grouped: bool = True
    early: bool = False
    """One of the longest: at the end of a run it would leave processors idle."""
    urgent: bool = False
    """A test waits for this world, so that it takes the next free seats."""
    _ranks: list[Any] = field(default_factory=list)
    _folder: Any = None
    _found: dict[int, Report] = field(default_factory=dict)
    _error: str | None = None
    _done: bool = False
    _started: float = 0.0
    seconds: float = 0.0
    """Seconds from the world's start to its end."""
    busy: float = 0.0
    """Processor seconds of all ranks."""
    lines: set[Line] = field(default_factory=set)
    """Lines of the package that the ranks ran, if the run asks for a map of lines."""
    memory: float = 0.0
    """Largest resident memory of a rank in MiB, shared memory included."""

    @property
    def name(self) -> str:
        """The world's name in messages."""
        return f"{self.fn.__module__}.{self.fn.__qualname__} on {self.size}"

    def results(self) -> list[Any]:
        """Wait for all ranks, and return their results by rank.

        Raises:
            AssertionError: a rank raised, died, or did not end in time. The message has the rank's traceback, or the
                place where it stood.
        """
        if not (self._done or self in RUN.waiting or self in RUN.running):
            RUN.submit(self)
        self.urgent = True
        while not self._done:
            RUN.pump(0.5)
        if self._error is not None:
            raise AssertionError(self._error)
        return [pickle.loads(self._found[rank][2]) for rank in range(self.size)]

    def start(self) -> None:
        """Fork the ranks."""
        self._folder = tempfile.TemporaryDirectory(prefix="pgloss-world-")
        self._started = time.monotonic()
        context = RUN.warm()
        for rank in range(self.size):
            given = (rank, self.size, self._folder.name, self.timeout, self.fn, self.args, self.grouped)
            process = context.Process(target=_rank, args=given)
            process.start()
            self._ranks.append(process)

    def look(self) -> None:
        """Collect the reports that are there; end the world if it is finished, has failed or is late."""
        late = time.monotonic() > self._started + self.timeout
        ended = {rank: process.exitcode for rank, process in enumerate(self._ranks)}  # before the files are looked for
        for rank in set(range(self.size)) - set(self._found):
            file = Path(self._folder.name) / f"{rank}.pkl"
            if file.exists():
                self._found[rank] = pickle.loads(file.read_bytes())
        errors = [(when, rank, error) for rank, (when, error, *_) in self._found.items() if error is not None]
        dead = [rank for rank, code in ended.items() if code is not None and rank not in self._found]
        if errors:  # the first error counts: later ones only say that a connection was closed
            _, rank, error = min(errors)
            self._end(f"rank {rank} of {self.name} failed:\n{error}\n{self._said(rank)}")
        elif dead:
            self._end(f"rank {dead[0]} of {self.name} died with exit code {ended[dead[0]]}\n{self._said(dead[0])}")
        elif None not in ended.values():
            self._end(None)
        elif late:
            missing = sorted(set(range(self.size)) - set(self._found))
            self._end(
                f"hang: ranks {missing} of {self.name} had not finished after {self.timeout:g} s\n"
                f"{self._stacks(missing)}"
            )

    def _stacks(self, ranks: Iterable[int]) -> str:
        """The stacks of these ranks, as they print them on a signal."""
        for rank in ranks:
            if self._ranks[rank].is_alive():
                os.kill(self._ranks[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(map(self._said, ranks))

    def _said(self, rank: int) -> str:
        """The end of a rank's output."""
        text = (Path(self._folder.name) / f"{rank}.log").read_text(errors="replace")
        return f"rank {rank} printed:\n{text[-3000:]}" if text else f"rank {rank} printed nothing"

    def _end(self, error: str | None) -> None:
        for process in self._ranks:
            if process.is_alive():
                process.kill()
            process.join()
        self._folder.cleanup()
        self._error, self._done = error, True
        self.seconds = time.monotonic() - self._started
        usages = [(0.0, 0.0), *(usage for _, _, _, usage, _ in self._found.values())]
        self.busy, self.memory = sum(busy for busy, _ in usages), max(memory for _, memory in usages)
        self.lines = set().union(*(lines for *_, lines in self._found.values()))
        RUN.ended.append(self)


class Run:
    """All worlds of one test run."""

    def __init__(self) -> None:
        self.method = "forkserver"
        self.waiting: list[World] = []
        self.running: list[World] = []
        self.ended: list[World] = []
        self.direct: list[World] = []
        """Worlds that a test started itself, not by a fixture, since this list was last emptied."""
        self.most = 0
        """The largest number of ranks that were alive at a time."""
        self._warm = False
        self._lock = threading.RLock()
        self._over = threading.Event()

    def warm(self) -> Any:
        """The multiprocessing context that starts ranks; at the first call the warm process starts its imports."""
        context = mp.get_context(self.method)
        if self.method == "forkserver" and not self._warm:
            self._warm = True
            context.set_forkserver_preload(["support.warm"])
            before = os.environ.get("PYTHONPATH")
            # Python before 3.12.8 does not set `sys.path` for modules that the fork server preloads.
            os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            forkserver.ensure_running()
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
        return context

    def submit(self, world: World) -> None:
        """Queue the world until there are seats for it: early ones first, then larger ones, then as they came."""
        if world.size > SEATS:
            raise ValueError(f"{world.name} needs more than PGLOSS_SEATS={SEATS} processes")
        with self._lock:
            self.waiting.append(world)
            self.waiting.sort(key=lambda one: (not one.early, -one.size))

    def pump_beside(self) -> None:
        """Pump from a thread too: a test that waits for a compiler or another program does not hold the worlds up."""

        def pump() -> None:
            while not self._over.wait(0.5):
                self.pump()

        threading.Thread(target=pump, name="worlds", daemon=True).start()

    def pump(self, patience: float = 0.0) -> None:
        """Collect worlds that have ended and start worlds that fit; wait up to ``patience`` seconds for an end."""
        with self._lock:
            self._fill()
            ends = [process.sentinel for world in self.running for process in world._ranks if process.is_alive()]
        if patience and ends:
            wait(ends, timeout=patience)
        with self._lock:
            for world in self.running:
                world.look()
            self.running = [world for world in self.running if not world._done]
            self._fill()

    def _fill(self) -> None:
        # While a single-process test runs, worlds leave it a core; while a test waits for a world, worlds have all
        # seats.
        seats = SEATS if any(one.urgent for one in (*self.waiting, *self.running)) else SEATS - RESERVED
        for world in sorted(self.waiting, key=lambda one: not one.urgent):
            taken = sum(one.size for one in self.running)
            if world.size <= seats - taken:
                self.waiting.remove(world)
                world.start()
                self.running.append(world)
                self.most = max(self.most, taken + world.size)
            elif world.urgent:
                return  # the next free seats are this world's

    def close(self) -> None:
        """End the worlds for which no test waits any more."""
        self._over.set()
        with self._lock:
            self.waiting.clear()
            for world in self.running:
                world._end("the run ended")
            self.running.clear()

    def summary(self) -> list[str]:
        """Lines for the end of the run: how many worlds there were, and what the longest took."""
        largest = max((world.memory for world in self.ended), default=0)
        lines = [
            f"{len(self.ended)} worlds, {sum(world.size for world in self.ended)} ranks, at most {self.most} alive; "
            f"{sum(world.busy for world in self.ended):.0f} s of processor; a rank takes up to {largest:.0f} MiB"
        ]
        for world in sorted(self.ended, key=lambda one: -one.seconds)[:12]:
            lines.append(
                f"  {world.seconds:6.1f} s, {world.busy:6.1f} s of processor, {world.memory:5.0f} MiB  {world.name}"
            )
        return lines if self.ended else []


RUN = Run()
FIXTURES: dict[Callable[[], Any], World] = {}
"""A fixture's function to the world that it waits for."""


def world_fixture(fn: Callable[..., Any], size: int, *args: Any, timeout: float = TIMEOUT, **more: bool) -> Any:
    """A module-scoped fixture: the results of ``fn(rank, size, *args)``, by rank; ``more`` goes to `World`."""
    world = World(fn, size, args, timeout, **more)

    def results() -> list[Any]:
        return world.results()

    FIXTURES[results] = world
    return pytest.fixture(scope="module")(results)


def run_world(fn: Callable[..., Any], size: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Call ``fn(rank, size, *args)`` in ``size`` processes, wait, and return the results by rank.

    Raises:
        AssertionError: as `World.results`.
    """
    world = World(fn, size, args, timeout)
    RUN.direct.append(world)
    return world.results()


def worlds_of(items: Iterable[pytest.Item]) -> list[World]:
    """The worlds that the fixtures of these tests wait for, in the order of the tests."""
    found: dict[World, None] = {}
    for item in items:
        info = getattr(item, "_fixtureinfo", None)
        for definitions in info.name2fixturedefs.values() if info else ():
            for one in definitions:
                if one.func in FIXTURES:
                    found[FIXTURES[one.func]] = None
    return list(found)


def _rank(rank: int, size: int, folder: str, timeout: float, fn: Callable, args: tuple, grouped: bool) -> None:
    """Run one rank in its own process, and write its `Report`."""
    end_with_parent()
    os.nice(5)  # single-process tests go first, and worlds use the rest of the machine
    said = os.open(str(Path(folder) / f"{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(said, stream)
    faulthandler.register(signal.SIGUSR1, file=said, all_threads=False)
    error, value = None, b""
    lines = recorder()
    gc.set_threshold(*RARE)
    try:
        os.environ.update(PGLOSS_WORLD=folder, OMP_NUM_THREADS="1")
        torch.set_num_threads(1)
        if grouped:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
            store = dist.FileStore(str(Path(folder) / "store"), size)
            # The world's own deadline comes first: it says where every rank stood.
            limit = datetime.timedelta(seconds=timeout + 60)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
            dist.barrier()  # a rank that ends at once must not leave while another still connects to it
        value = pickle.dumps(fn(rank, size, *args))
        if grouped:
            dist.destroy_process_group()
    except BaseException as raised:  # noqa: BLE001  the parent raises it again, with the traceback
        error = f"{type(raised).__name__}: {raised}\n{traceback.format_exc()}"
    used = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # a rank may have forks of its own
    usage = (used.ru_utime + used.ru_stime + ended.ru_utime + ended.ru_stime, used.ru_maxrss / 1024)
    part = Path(folder) / f"{rank}.part"
    part.write_bytes(pickle.dumps((time.time(), error, value, usage, lines.end() if lines else set())))
    part.rename(part.with_suffix(".pkl"))
    for child in mp.active_children():  # Megatron's writer of checkpoints would outlive us
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of exit handlers: those are the warm process's, and threads of gloo may still be there.
    os._exit(0 if error is None else 1)
