"""The phase of every rank of a job, shared through the job's store, so that a rank that waits can say for which one.

A rank notes its phase (`Watch.during`, `Watch.note`); a thread of its own writes it to the store that
``init_process_group`` made, at most once a second, and again as a sign of life. Nothing here is a collective, and
nothing waits for another rank. A rank that fails says so in one line, in its log and in the store. The others name that
rank, or a rank that gives no sign of life or is behind, once they have waited for `Watch.patience` seconds.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megatron_pgloss.errors import PGLossError

_LOG = logging.getLogger(__name__)
_NUMBER = itertools.count()
_ORDER = ("idle", "score", "begin", "statistics pass", "forward", "loss", "schedule", "finish")
"""Phases in the order of a step; ``schedule`` is the time between two calls into this package, backward included."""
_PAUSE = 1.0
"""Least number of seconds between two writes."""
_SILENT = 3
"""Signs of life that a rank misses before it is called silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The step, phase and micro-batch that a rank is in."""

    step: int = 0
    phase: str = "idle"
    micro: int = -1
    since: float = 0.0
    """Time of day at which the phase began."""
    alive: float = 0.0
    """Time of day of the last sign of life."""

    @property
    def order(self) -> tuple[int, int, int]:
        """A key for comparing ranks: the smaller one is behind. The micro-batch counts before the phase inside it."""
        inside = self.phase in ("forward", "loss", "schedule")
        return self.step, _ORDER.index("forward" if inside else self.phase), 3 * self.micro + (
            ("forward", "loss", "schedule").index(self.phase) if inside else 0
        )  # fmt: skip

    def __str__(self) -> str:
        place = {"schedule": "in the schedule, after", "forward": "in forward of", "loss": "in the loss of"}
        where = f"{place[self.phase]} micro-batch {self.micro}" if self.phase in place else f"in {self.phase}"
        return f"{where}, step {self.step}"


class Watch:
    """This rank's phase, and a look at the others'.

    Args:
        rank, size: this rank's number, and the number of ranks in the world.
        patience: seconds in one phase after which this rank says for whom it waits.
    """

    def __init__(self, rank: int, size: int, patience: float) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self._key = f"megatron_pgloss/watch/{next(_NUMBER)}"
        self._store = _job_store() if size > 1 else None
        self._state, self._written = State(since=time.time()), State()
        self._told: set[object] = set()
        self._wake = threading.Event()
        self._beat = max(2.0, size / 500)  # in a large world the store must not have to serve many writes a second
        if self._store is not None:
            threading.Thread(
                target=_work, args=(weakref.ref(self), self._wake, min(self._beat, patience)), daemon=True
            ).start()

    # ---- this rank ------------------------------------------------------------------------------------------------

    def note(self, phase: str, micro: int = -1, *, opens: bool = False) -> None:
        """Note that this rank enters a phase; ``opens`` says that the next step begins. Nothing is sent from here."""
        now = time.time()
        self._state = State(step=self._state.step + opens, phase=phase, micro=micro, since=now, alive=now)
        self._wake.set()

    @contextmanager
    def during(self, phase: str, micro: int = -1, *, then: str, opens: bool = False) -> Iterator[None]:
        """Be in ``phase`` for the length of the block, and in phase ``then`` after it. An error in the block is told to
        the other ranks, except for a PGLossError outside of forward and loss, which all ranks raise alike.
        """
        self.note(phase, micro, opens=opens)
        try:
            yield
        except Exception as error:
            if phase in ("forward", "loss") or not isinstance(error, PGLossError):
                self.fail(error)
            self.note("idle")
            raise
        self.note(then, micro)

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """A context for Megatron's schedule: an error of a message between ranks gets a note that names the rank at
        fault.
        """
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Say in one line what ended this rank's step, or for which rank the collective that failed was waiting."""
        if getattr(error, "_pgloss_told", False):  # an inner block has told it
            return
        error._pgloss_told = True  # type: ignore[attr-defined]
        if collective(error):
            text = f"rank {self.rank}: a collective failed {self._state}: {self._blamed()}"
            error.add_note(text)
            _LOG.error(text)
            return
        cause = str(error).splitlines()[0] if str(error) else "no message"
        text = f"rank {self.rank} failed {self._state}: {type(error).__name__}: {cause[:400]}"
        _LOG.error(text)
        if self._store is not None:
            try:
                self._store.compare_set(f"{self._key}/failed/{self._state.step}", "", text)  # the first one counts
            except RuntimeError as gone:
                _LOG.error("the job's store is gone, the other ranks cannot be told: %s", gone)

    def _blamed(self) -> str:
        """The text of `behind`, as soon as a rank has said that it failed or has been silent for too long; whatever it
        is after a few seconds otherwise.
        """
        late = time.monotonic() + _SILENT * self._beat + 2 * _PAUSE
        text = self.behind()
        while "is behind" in text or "no rank" in text:
            if time.monotonic() > late:
                break
            time.sleep(self._beat / 4)
            text = self.behind()
        return text

    # ---- the others -----------------------------------------------------------------------------------------------

    def behind(self) -> str:
        """A text: which rank failed, gives no sign of life, or is behind; or that the store does not answer."""
        if self._store is None:
            return "there is no store in which ranks could say where they are"
        found: list[str] = []
        # By a thread: a store whose process was stopped never answers, whatever its timeout.
        asking = threading.Thread(target=lambda: found.append(self._look()), daemon=True)
        asking.start()
        asking.join(timeout=5 * _PAUSE)
        return found[0] if found else "the job's store does not answer: its process (rank 0, mostly) has stopped"

    def _look(self) -> str:
        try:
            if text := self._failure():
                return text
            states = {rank: self._read(rank) for rank in range(self.size) if rank != self.rank}
        except RuntimeError as error:
            return f"the job's store is gone, so the process that held it (rank 0, mostly) has ended: {error}"
        now = time.time()
        silent = [rank for rank, one in states.items() if one is not None and now - one.alive > _SILENT * self._beat]
        if silent:
            one = states[silent[0]]
            assert one is not None
            return f"rank {silent[0]}{_more(silent)} gives no sign of life for {now - one.alive:.0f} s; it was {one}"
        if missing := [rank for rank, one in states.items() if one is None]:
            return f"rank {missing[0]}{_more(missing)} has not begun yet"
        known = {rank: one for rank, one in states.items() if one is not None}
        least = min(one.order for one in known.values())
        late = [rank for rank, one in known.items() if one.order == least]
        if least >= self._state.order:
            return f"no rank is behind: rank {late[0]}{_more(late)} is {known[late[0]]}"
        return f"rank {late[0]}{_more(late)} is behind: {known[late[0]]}, since {now - known[late[0]].since:.0f} s"

    def _failure(self) -> str:
        """What a rank said as it failed in this step, or the empty string."""
        assert self._store is not None
        key = f"{self._key}/failed/{self._state.step}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _read(self, rank: int) -> State | None:
        assert self._store is not None
        key = f"{self._key}/{rank}"
        return State(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def tick(self) -> None:
        """One round of the thread: write this rank's state, and log for whom it waits if it has waited for long."""
        assert self._store is not None
        state, now = self._state, time.time()
        written = self._written
        changed = (state.step, state.phase, state.micro) != (written.step, written.phase, written.micro)
        if changed or now - written.alive > self._beat:
            self._written = State(**{**asdict(state), "alive": now})
            self._store.set(f"{self._key}/{self.rank}", json.dumps(asdict(self._written)))
        waited = now - state.since
        if state.phase == "idle" or waited < min(self._beat, self.patience):
            return
        if (text := self._failure()) and text not in self._told:
            self._told.add(text)
            if not text.startswith(f"rank {self.rank} "):
                _LOG.error("rank %d waits %s: %s", self.rank, state, text)
        if waited > self.patience and state not in self._told:
            self._told.add(state)
            _LOG.warning("rank %d has waited %.0f s %s: %s", self.rank, waited, state, self.behind())


Method = TypeVar("Method", bound=Callable[..., Any])


def watched(phase: str, *, then: str) -> Callable[[Method], Method]:
    """A decorator: the method is a phase of its object's ``watch``; ``begin`` opens the next step."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **more: Any) -> Any:
            with self.watch.during(phase, then=then, opens=phase == "begin"):
                return method(self, *args, **more)

        return cast("Method", run)

    return wrap


def collective(error: BaseException) -> bool:
    """Whether ``error`` comes from a collective or from a message between ranks."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "NCCL", "Connection "))
    )


def _more(ranks: list[int]) -> str:
    return f" (and {len(ranks) - 1} more: {', '.join(map(str, ranks[1:6]))})" if len(ranks) > 1 else ""


def _job_store() -> Any:
    """The store of the default process group, by a connection of its own where it has one."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _work(of: weakref.ref[Watch], wake: threading.Event, pause: float) -> None:
    while True:
        wake.wait(timeout=pause)
        wake.clear()
        watch = of()
        if watch is None:
            return
        try:
            watch.tick()
        except RuntimeError as error:  # of the store: the job is ending, or the process that holds it has
            _LOG.info("rank %d no longer says where it is: %s", watch.rank, error)
            return
        del watch
        time.sleep(_PAUSE)
