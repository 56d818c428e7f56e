"""The phase of every rank of a job, shared through the job's store, so that a rank that waits can say for which one.

A rank notes its phase (`Watch.during`, `Watch.note`); a thread of its own writes it to the store that
``init_process_group`` made, at most once a second, and again as a sign of life. Nothing here is a collective, and
nothing waits for another rank. A rank that fails says so in one line, in its log and in the store. The others name that
rank, or a rank that gives no sign of life or is behind, once they have waited for `Watch.patience` seconds.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_pgloss.errors import PGLossError
from megatron_pgloss.megatron.job_store import ask, job_store, no_answer, world_timeout
from megatron_pgloss.megatron.whereabouts import State, look

_LOG = logging.getLogger(__name__)
_PAUSE = 1.0
"""Least number of seconds between two writes."""
_UNSEEN = torch.cuda.is_available()
"""Whether a rank may wait for others without a line of Python that shows it: for a kernel of its device."""
_SILENT = 3
"""Signs of life that a rank misses before it is called silent."""
_PATIENCE = 120.0
"""Seconds in one phase after which a rank says for whom it waits, in jobs with long timeouts."""
_ANSWER = 5.0
"""Seconds after which a store that has not answered counts as one that does not."""


class Watch:
    """This rank's phase, and a look at the others'.

    Args:
        rank, size: this rank's number, and the number of ranks in the world.
        patience: seconds in one phase after which this rank says for whom it waits; None: 120, or half of the
            world's timeout if that is less.
    """

    def __init__(self, rank: int, size: int, patience: float | None = None) -> None:
        if patience is None:
            patience = min(_PATIENCE, world_timeout().total_seconds() / 2) if size > 1 else _PATIENCE
        self.rank, self.size, self.patience = rank, size, patience
        self._store = job_store() if size > 1 else None
        self._state = self._written = State(since=time.time(), alive=time.time())
        self._thread = threading.get_ident()
        self._asked: float | None = None  # when the thread asked the store what it has not answered yet
        self._told: set[object] = set()
        self._wake = threading.Event()
        self._beat = max(2.0, size / 500)  # in a large world the store must not have to serve many writes a second
        if self._store is not None:
            # Ranks make their steps in one order, so that a rank's second one is every rank's second one.
            self._key = f"megatron_pgloss/watch/{self._store.add(f'megatron_pgloss/watches/{rank}', 1)}"
            self._write()  # at once: a rank that never said anything could not be missed
            threading.Thread(target=_work, args=(weakref.ref(self), self._wake), daemon=True).start()

    # ---- this rank ------------------------------------------------------------------------------------------------

    def note(self, phase: str, micro: int = -1, *, opens: bool = False) -> None:
        """Note that this rank enters a phase; ``opens`` says that the next step begins. Nothing is sent from here."""
        now = time.time()
        self._state = State(step=self._state.step + opens, phase=phase, micro=micro, since=now, alive=now)
        self._thread = threading.get_ident()
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
                # The first one counts.
                said = json.dumps({"rank": self.rank, "text": text, "at": time.time()})
                self._store.compare_set(self._failed(self._state.step), "", said)
            except RuntimeError as gone:
                _LOG.error("the other ranks cannot be told: %s", no_answer(gone))

    def _blamed(self) -> str:
        """The text of `behind`, as soon as a rank has said that it failed or has been silent for too long; the first
        text, if none has: whoever was late then has an error of its own by now.
        """
        late = time.monotonic() + _SILENT * self._beat + 2 * _PAUSE
        first = text = self.behind()
        while "is behind" in text or "no rank" in text:
            if time.monotonic() > late:
                return first
            time.sleep(self._beat / 4)
            text = self.behind()
        return text

    # ---- the others -----------------------------------------------------------------------------------------------

    def behind(self) -> str:
        """A text: which rank failed, gives no sign of life, or is behind; or that the store does not answer."""
        if self._store is None:
            return "there is no store in which ranks could say where they are"
        asked = self._asked
        rest = _ANSWER if asked is None else max(0.5, _ANSWER - (time.monotonic() - asked))
        return ask(self._look, rest) or no_answer()

    def _look(self) -> str:
        try:
            if text := self._failure():
                return text
            states = {rank: self._read(rank) for rank in range(self.size) if rank != self.rank}
        except RuntimeError as error:
            return no_answer(error)
        now = time.time()
        silent = [rank for rank, one in states.items() if one is not None and now - one.alive > _SILENT * self._beat]
        if silent:
            last = states[silent[0]]
            assert last is not None
            text = f"gives no sign of life for {now - last.alive:.0f} s, last heard {last}"
            return f"rank {silent[0]}{_more(silent)} {text}"
        if missing := [rank for rank, one in states.items() if one is None]:
            return f"rank {missing[0]}{_more(missing)} has not begun yet"
        known = {rank: one for rank, one in states.items() if one is not None}
        late = self._late(known)
        if not late:
            one = min(known, key=lambda rank: known[rank].order)
            return f"no rank is behind: rank {one} is {known[one]}"
        return f"rank {late[0]}{_more(late)} is behind: {known[late[0]]}, since {now - known[late[0]].since:.0f} s"

    def _late(self, known: dict[int, State]) -> list[int]:
        """Ranks that do not wait for others, in the part of the step that is furthest back; where all of them wait, or
        where none is known to, those whose place is behind this rank's. By place.
        """
        ranks = sorted(known, key=lambda rank: known[rank].order)
        back = min(self._state.stage, known[ranks[0]].stage)
        busy = [rank for rank in ranks if known[rank].stage == back and not known[rank].waits]
        if busy and (look(self._thread)[1] or any(one.waits for one in known.values())):
            return busy
        least = known[ranks[0]].order
        return [rank for rank in ranks if known[rank].order == least < self._state.order]

    def _failed(self, step: int) -> str:
        return f"{self._key}/failed/{step}"

    def _failure(self) -> str:
        """What a rank said as it failed in this step or the one before, or the empty string; a rank that has gone on
        since (the step was tried again, say) has not failed.
        """
        assert self._store is not None
        for key in (self._failed(self._state.step), self._failed(self._state.step - 1)):
            if self._store.check([key]):
                said = json.loads(self._store.get(key))
                one = self._read(said["rank"])
                if one is None or one.since <= said["at"] or one.phase == "idle":
                    return str(said["text"])
        return ""

    def _read(self, rank: int) -> State | None:
        assert self._store is not None
        key = f"{self._key}/{rank}"
        return State(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def tick(self) -> None:
        """One round of the thread: write this rank's state, and log for whom it waits if it has waited for long."""
        state, now = self._state, time.time()
        written = self._written
        changed = (state.step, state.phase, state.micro) != (written.step, written.phase, written.micro)
        self._asked = time.monotonic()
        if changed or now - written.alive > 0.9 * self._beat:
            self._write()
        waited = now - state.since
        if state.phase == "idle" or waited < min(self._beat, self.patience):
            self._asked = None
            return
        text = self._failure()
        self._asked = None
        if text and text not in self._told:
            self._told.add(text)
            if not text.startswith(f"rank {self.rank} "):
                _LOG.error("rank %d waits %s: %s", self.rank, state, text)
        if waited > self.patience and state not in self._told and (look(self._thread)[1] or _UNSEEN):
            self._told.add(state)
            _LOG.warning("rank %d has waited %.0f s %s: %s", self.rank, waited, state, self.behind())

    def pause(self) -> float:
        """Seconds until the thread has something to do, if the phase does not change."""
        now = time.time()
        waited = now - self._state.since
        rest = [self._beat - (now - self._written.alive), *([self.patience - waited] if waited < self.patience else [])]
        return max(0.05, min(rest))

    def _write(self) -> None:
        """A sign of life."""
        assert self._store is not None
        at, waits = look(self._thread)
        self._written = replace(self._state, alive=time.time(), at=at, waits=waits)
        self._store.set(f"{self._key}/{self.rank}", json.dumps(asdict(self._written)))


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


def _work(of: weakref.ref[Watch], wake: threading.Event) -> None:
    while True:
        watch = of()
        if watch is None:
            return
        pause = watch.pause()
        del watch
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
        rest = min(_PAUSE, watch.pause())  # patience may end sooner
        del watch
        time.sleep(rest)
