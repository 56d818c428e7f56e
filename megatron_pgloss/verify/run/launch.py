"""The launched processes, and worlds made of the first few of them while the spare ranks wait."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_pgloss.errors import LayoutError
from megatron_pgloss.megatron.job_store import ask
from megatron_pgloss.megatron.watch import Watch

_SHORT = 3.0
"""Seconds in which a store has to answer once a run has broken."""
_LONG = datetime.timedelta(days=7)
"""Timeout of spare ranks, which wait while others work."""


class Launch:
    """The processes that torchrun (or a launcher that sets the same variables) started; without one, this process
    alone.

    Args:
        device: ``cpu`` uses gloo; ``cuda`` uses NCCL and one GPU for each process of a machine.
        timeout: the timeout of collectives.
    """

    def __init__(self, device: str = "cpu", timeout: datetime.timedelta = datetime.timedelta(minutes=10)) -> None:
        self.backend = "nccl" if device == "cuda" else "gloo"
        self._timeout = timeout
        self._worlds = 0
        self.answers = True
        """Whether the store answered when it was last asked."""
        self.watch: Watch
        """Says of the ranks of the present world who keeps the others waiting, outside of steps too."""
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            self.store, self.rank, self.size = next(iter(rendezvous("env://", timeout=timeout)))
        else:
            self.store, self.rank, self.size = dist.HashStore(), 0, 1
        if device == "cuda":
            local = int(os.environ.get("LOCAL_RANK", 0))
            if local >= torch.cuda.device_count():
                raise LayoutError(
                    "a process has no GPU of its own", expected=f"more than {local} GPUs on this machine",
                    got=torch.cuda.device_count(), where=f"rank {self.rank}", fix="launch fewer processes per machine",
                )  # fmt: skip
            torch.cuda.set_device(local)

    @contextmanager
    def world(self, size: int) -> Iterator[bool]:
        """A default process group of the first ``size`` ranks. Every rank enters the block, and ranks outside get
        False.

        An error leaves the group open, since this process and its peers are about to end.
        """
        self._worlds += 1  # a store's keys can be used once only
        inside = self.rank < size
        if inside:
            store = dist.PrefixStore(f"verify/world/{self._worlds}", self.store)
            dist.init_process_group(
                self.backend, store=store, rank=self.rank, world_size=size, timeout=self._timeout
            )  # fmt: skip
            self.watch = Watch(self.rank, size)
        yield inside
        if inside:
            dist.destroy_process_group()

    def last_words(self) -> LastWords:
        """A block in which an error ends the run. The error's text reaches the first rank, which goes on after the
        block.
        """
        return LastWords(self)

    def part(self, *, broken: bool = False) -> None:
        """Wait until all ranks, spare ones included, are done: the store may live in the first rank's process.

        ``broken`` says that some ranks have ended, so that the first rank does not wait for them.
        """
        if broken:
            if self.answers:
                self.store.set("verify/end", "1")
            return
        self.store.set(f"verify/left/{self.rank}", "1")
        if self.rank == 0:
            self.store.wait([f"verify/left/{rank}" for rank in range(self.size)], _LONG)
            self.store.set("verify/end", "1")
        else:
            self.store.wait(["verify/end"], _LONG)


class LastWords:
    """The error that ended a run, if one did.

    An error on one rank alone leaves its peers inside a collective. The failing rank writes its error into the store
    and ends; its connections close, so that gloo raises on the others, and the launcher ends them. The first rank stays
    alive to report: there ``text`` says which rank raised what, and the error is not raised again.
    """

    def __init__(self, launch: Launch) -> None:
        self.text = ""
        self._launch = launch
        self._key = "verify/error"

    def __enter__(self) -> LastWords:
        if self._launch.rank == 0:
            # When a process fails, torchrun ends its peers at once, by SIGTERM.
            self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by the launcher"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        launch = self._launch
        if launch.rank == 0:
            signal.signal(signal.SIGTERM, self._before if error is None else signal.SIG_IGN)
        if error is None:
            return False
        # The notes name whom a collective waited for.
        said = "; ".join([str(error), *getattr(error, "__notes__", [])])
        mine = f"rank {launch.rank}: {type(error).__name__}: {said}"
        if launch.rank != 0:
            ask(lambda: self._leave(mine), _SHORT)
            return False
        traceback.print_exception(error)
        told = ask(self._told, _SHORT) if launch.size > 1 else ""
        launch.answers = told is not None
        self.text = told or mine
        return True

    def _leave(self, mine: str) -> None:
        """The first rank to fail writes its error; later ones only report that a connection was closed."""
        if self._launch.store.add(f"{self._key}/count", 1) == 1:
            self._launch.store.set(self._key, mine)

    def _told(self) -> str:
        """What another rank wrote, or the empty string."""
        store, late = self._launch.store, time.monotonic() + 2
        while time.monotonic() < late and not store.check([self._key]):
            time.sleep(0.1)
        return str(store.get(self._key).decode()) if store.check([self._key]) else ""
