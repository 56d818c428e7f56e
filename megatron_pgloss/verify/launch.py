"""The launched processes, and worlds made of the first few of them: spare ranks wait."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_pgloss.errors import LayoutError

_LONG = datetime.timedelta(days=7)
"""For spare ranks, which wait while others work."""


class Launch:
    """Processes as torchrun (or any launcher that sets its variables) started them; one alone without.

    Args:
        device: ``cpu``: gloo. ``cuda``: NCCL, a GPU for each process of a machine.
        timeout: of collectives.
    """

    def __init__(self, device: str = "cpu", timeout: datetime.timedelta = datetime.timedelta(minutes=10)) -> None:
        self.backend = "nccl" if device == "cuda" else "gloo"
        self._timeout = timeout
        self._worlds = 0
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            self.store, self.rank, self.size = next(iter(rendezvous("env://", timeout=timeout)))
        else:
            self.store, self.rank, self.size = dist.HashStore(), 0, 1
        if device == "cuda":
            local = int(os.environ.get("LOCAL_RANK", 0))
            if local >= torch.cuda.device_count():
                raise LayoutError(
                    "a process has no GPU of its own", expected=f"more than {local} GPUs on this machine",
                    got=torch.cuda.device_count(), where=f"rank {self.rank}", fix="fewer processes per machine",
                )  # fmt: skip
            torch.cuda.set_device(local)

    @contextmanager
    def world(self, size: int) -> Iterator[bool]:
        """A default process group of the first ``size`` ranks. Every rank enters; False for those that stay outside.

        An error leaves the group open: the process is about to end, and its peers with it.
        """
        self._worlds += 1  # a store's keys are used once
        inside = self.rank < size
        if inside:
            store = dist.PrefixStore(f"verify/world/{self._worlds}", self.store)
            dist.init_process_group(
                self.backend, store=store, rank=self.rank, world_size=size, timeout=self._timeout
            )  # fmt: skip
        yield inside
        if inside:
            dist.destroy_process_group()

    def part(self) -> None:
        """Wait for all ranks, spare ones included; the store may live in the first."""
        self.store.set(f"verify/left/{self.rank}", "1")
        if self.rank == 0:
            self.store.wait([f"verify/left/{rank}" for rank in range(self.size)], _LONG)
            self.store.set("verify/end", "1")
        else:
            self.store.wait(["verify/end"], _LONG)
