"""One rank of a cell of tools/kill_matrix.py: a training step, or the command ``verify``, and the fault in it."""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, dict[str, int]] = {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
MESSAGE = "put in by tools/kill_matrix.py"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job of two ranks, of which one has a fault."""

    fault: str
    """``raise``, ``kill``, ``stop``, ``late``, ``cut`` (the guilty rank's machine loses its network)."""
    layout: str
    guilty: int
    phase: str
    """``begin`` and ``finish``: inside them; ``forward``, ``loss``, ``backward``, ``score``, ``verify``: at micro-batch
    1.
    """
    store: str = "launcher"
    """Who holds the job's store: the launcher, as with torchrun, or rank 0."""

    @property
    def name(self) -> str:
        """The cell's name in the JSON."""
        holds = "" if self.store == "launcher" else ", which holds the store"
        return f"{self.fault}, {self.layout}, rank {self.guilty}{holds}, {self.phase}"


def run_rank(cell: Cell, limit: float, folder: Path, rank: int) -> None:
    """Run this rank, print what a user would see, and leave in ``folder`` how and when it ended."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr, force=True)
    happen = Fault(cell, limit, folder) if rank == cell.guilty else lambda: None
    _meet(folder, rank)
    error = ""
    try:
        (_verify if cell.phase == "verify" else _step)(cell, limit, happen)
    except BaseException as caught:  # noqa: BLE001  whatever it is, it is what the rank says
        error = "; ".join([f"{type(caught).__name__}: {caught}", *getattr(caught, "__notes__", [])])
        traceback.print_exception(caught)
    sys.stdout.flush()
    sys.stderr.flush()
    write(folder / f"ended{rank}", {"error": error, "at": time.time()})


def write(file: Path, found: Any) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(file)


def _meet(folder: Path, rank: int) -> None:
    """A slow start is no fault: only what comes after it has to end in time."""
    (folder / f"here{rank}").touch()
    while not all((folder / f"here{one}").exists() for one in range(2)):
        time.sleep(0.02)


class Fault:
    """What happens on the guilty rank, once; the time at which it does is left in the folder."""

    def __init__(self, cell: Cell, limit: float, folder: Path) -> None:
        self.cell, self.limit, self.folder = cell, limit, folder
        self.done = False

    def __call__(self) -> None:
        """Let it happen."""
        if self.done:
            return
        self.done = True
        write(self.folder / "fault", time.time())
        kind = self.cell.fault
        if kind == "raise":
            raise ValueError(MESSAGE if self.cell.phase in ("begin", "finish") else f"{MESSAGE}\nand a second line")
        if kind == "late":
            time.sleep(0.8 * self.limit)
        elif kind == "cut":
            # Both ends lose every packet, and neither is told: what a dead switch does.
            drop = ["tc", "qdisc", "replace", "dev", "veth0", "root", "pfifo", "limit", "0"]
            subprocess.run(["nsenter", "-t", str(os.getppid()), "-n", *drop], check=True)
            subprocess.run(drop, check=True)
        else:
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def _step(cell: Cell, limit: float, happen: Callable[[], None]) -> None:
    """A training step on a small model, with a scoring pass before it where the fault lies in that."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from megatron_pgloss import LossSpec, Split, Term, presets
    from megatron_pgloss.megatron import PolicyLossStep
    from megatron_pgloss.verify.data.batches import batch_of, rows_of_step, share
    from megatron_pgloss.verify.layouts.models import build_gpt, init_parallel
    from megatron_pgloss.verify.run.drive import run_schedule

    store, rank, size = next(iter(rendezvous("env://", timeout=datetime.timedelta(seconds=60))))
    seconds = datetime.timedelta(seconds=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
    where = init_parallel(**LAYOUTS[cell.layout])
    chunks = build_gpt(vocab_size=32, seq_length=64, layers=2, hidden=16, ffn=16)

    seen: list[int] = []

    def run(model: Any, micro: Any, inputs: Any) -> Any:
        seen[:] = [micro.number]
        here = micro.number == 1
        if here and cell.phase in ("forward", "score"):
            happen()
        output = model(**inputs)
        if here and cell.phase == "backward" and output.requires_grad:
            output.register_hook(lambda grad: happen())
        return output

    def term(x: Any) -> Any:
        if seen == [1]:
            happen()
        return -x.logp * x.advantage

    own = LossSpec(components=[Term("own", term, needs=("advantages",))])
    spec = own if cell.phase == "loss" else presets.reinforce()
    step = PolicyLossStep(spec, chunks, split=Split(sequences=2), forward=run)
    batches = [batch_of(share(rows_of_step(0, max_length=13), where.dp_rank, where.dp))]
    if cell.phase == "score":
        step.score(batches, into="ref")
    step.begin(_broken(batches[0], happen) if cell.phase == "begin" else batches)
    losses = run_schedule(step, chunks)
    step.finish(_Reports(losses, happen) if cell.phase == "finish" else losses)


def _broken(batch: Any, happen: Callable[[], None]) -> list[Any]:
    """The batch, with a fault that shows when `begin` reads it."""

    class Broken(type(batch)):  # type: ignore[misc]
        def __len__(self) -> int:
            happen()
            return int(super().__len__())

    found = Broken.__new__(Broken)
    for name in batch.__dataclass_fields__:
        object.__setattr__(found, name, getattr(batch, name))
    return [found]


class _Reports(list):  # type: ignore[type-arg]
    """What the schedule returned, with a fault that shows when `finish` reads it."""

    def __init__(self, losses: list[Any], happen: Callable[[], None]) -> None:
        super().__init__(losses)
        self.happen = happen

    def __iter__(self) -> Any:
        self.happen()
        return super().__iter__()


def _verify(cell: Cell, limit: float, happen: Callable[[], None]) -> None:
    """The command, on this layout and one spec; the fault lies in the second forward pass inside a schedule."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    from megatron_pgloss.cli import main

    seen: list[int] = []

    def hook(module: Any, args: Any) -> None:
        frames = (frame.name for frame in traceback.extract_stack())
        if type(module).__name__ == "GPTModel" and any(name.startswith("forward_backward_") for name in frames):
            seen.append(1)
            if len(seen) == 2:
                happen()

    register_module_forward_pre_hook(hook)
    axes = [text for axis, size in LAYOUTS[cell.layout].items() for text in (f"--{axis}", str(size))]
    code = main(["verify", *axes, "--sequences", "2", "--spec", "dapo", "--timeout", f"{limit:.0f}"])
    if code:
        raise SystemExit(code)
