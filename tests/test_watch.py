"""A rank that fails, stops or is late is named by its peers, within the timeout of the groups that they wait in.

One world of two processes, which makes its process groups anew for each case, all with a timeout of 8 s.
"""

from __future__ import annotations

import datetime
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.verify.layouts.models import build_gpt, init_parallel
from support import jobs, layouts
from support.jobs import Job
from support.worlds import FIXTURES, World

TINY = dict(hidden=16, ffn=16)
LIMIT = 8.0
"""Seconds: timeout of every group."""


@dataclass(frozen=True)
class Case:
    job: Job
    fault: str
    """``raise``, ``stop`` or ``late``, on the second rank."""
    phase: str
    words: str
    """What the first rank says of it."""


CASES = {
    "raise in forward, tp2": Case(Job(tp=2), "raise", "forward", "rank 1 failed in forward of micro-batch 1, step 1: "),
    "raise in the loss, pp2": Case(Job(pp=2), "raise", "loss", "rank 1 failed in the loss of micro-batch 1, step 1: "),
    "raise in backward, dp2": Case(
        Job(), "raise", "backward", "rank 1 failed in the schedule, after micro-batch 1, step 1: "
    ),
    "stop in forward, tp2": Case(Job(tp=2), "stop", "forward", "rank 1 gives no sign of life"),
    "stop in backward, cp2": Case(Job(cp=2), "stop", "backward", "rank 1 gives no sign of life"),
    "late to begin, dp2": Case(Job(), "late", "begin", "rank 1 is behind: in idle, step 0"),
}
MESSAGE = "no more memory\nand a second line"


class Said(logging.Handler):
    """What the package logged in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fault(case: Case, folder: Path, rank: int) -> Callable[[], None]:
    def happen() -> None:
        if rank == 1 and case.fault == "raise":
            raise ValueError(MESSAGE)
        if rank == 1 and case.fault == "stop":
            (folder / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    return happen


def step_of(case: Case, chunks: list[Any], folder: Path, rank: int) -> pgm.PolicyLossStep:
    happen, seen = fault(case, folder, rank), []

    def run(model: Any, micro: Any, inputs: Any) -> Any:
        seen[:] = [micro.number]
        if case.phase == "forward" and micro.number == 1:
            happen()
        output = model(**inputs)
        if case.phase == "backward" and micro.number == 1 and output.requires_grad:
            output.register_hook(lambda grad: happen())
        return output

    def term(x: Any) -> torch.Tensor:
        if case.phase == "loss" and seen == [1]:
            happen()
        return -x.logp * x.advantage

    spec = pg.LossSpec(components=[pg.Term("own", term, needs=("advantages",))])
    return pgm.PolicyLossStep(spec, chunks, split=pg.Split(sequences=2), forward=run, patience=1.0)


def visit(case: Case, folder: Path, rank: int, rows: list[Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    said = Said()
    logging.getLogger("megatron_pgloss").addHandler(said)
    limit = datetime.timedelta(seconds=LIMIT)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    job = case.job
    where = init_parallel(tp=job.tp, pp=job.pp, cp=job.cp)
    chunks = build_gpt(vocab_size=jobs.VOCAB, seq_length=64, **TINY)
    error: BaseException | None = None
    step = step_of(case, chunks, folder, rank)
    batches = [jobs.batch_of(jobs.share(rows, where.dp_rank, where.dp))]
    began = time.monotonic()
    try:
        if case.fault == "late" and rank == 1:
            time.sleep(2.5)
        step.begin(batches)
        began = time.monotonic()
        losses = jobs.run_schedule(step, chunks)
        step.finish(losses)
    except (ValueError, RuntimeError) as caught:
        error = caught
    took = time.monotonic() - began
    notes = "; ".join(getattr(error, "__notes__", []))
    found = {"error": type(error).__name__ if error is not None else "", "notes": notes, "took": took}
    if case.fault == "stop" and rank == 0:
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
    error = None
    del step, chunks
    gc.collect()
    parallel_state.destroy_model_parallel()  # without a last meeting: the groups are broken
    dist.destroy_process_group()
    logging.getLogger("megatron_pgloss").removeHandler(said)
    return found | {"said": said.lines}


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    rows, found = jobs.rows_of_step(0, max_length=13), {}
    for number, (name, case) in enumerate(CASES.items()):
        folder = Path(os.environ["PGLOSS_WORLD"]) / f"case{number}"
        folder.mkdir(exist_ok=True)
        found[name] = visit(case, folder, rank, rows)
        (folder / f"over{rank}").touch()
        while not (folder / f"over{1 - rank}").exists():
            time.sleep(0.05)
    return found


def worlds() -> Any:
    world = World(tour, 2, grouped=False)

    def results() -> list[Any]:
        return world.results()

    FIXTURES[results] = world
    return pytest.fixture(scope="module")(results)


found = worlds()


@pytest.mark.multiproc
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fault != "late"])
def test_the_peer_of_a_rank_that_fails_or_stops_ends_in_time_and_names_it(name: str, found: Any) -> None:
    peer = found[0][name]
    assert peer["error"]
    assert CASES[name].words in peer["notes"], peer
    assert peer["took"] < LIMIT + 10
    assert any(CASES[name].words in line for line in peer["said"])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fault == "raise"])
def test_the_rank_that_fails_says_so_in_one_line(name: str, found: Any) -> None:
    guilty = found[1][name]
    assert guilty["error"] == "ValueError"
    assert f"{CASES[name].words}ValueError: no more memory" in guilty["said"]


@pytest.mark.multiproc
def test_a_late_rank_is_named_while_the_others_wait_and_nothing_fails(found: Any) -> None:
    name = "late to begin, dp2"
    assert found[0][name]["error"] == found[1][name]["error"] == ""
    (line,) = [line for line in found[0][name]["said"] if "has waited" in line]
    assert CASES[name].words in line and "rank 0 has waited" in line and "in begin, step 1" in line
