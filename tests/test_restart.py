"""A rank is killed in the middle of a step, and the job starts again from its last checkpoint: in the middle of a
rollout's updates, on as many data-parallel ranks or on others.

One world of four processes. Each job runs in forks of them, which a kill may end. A rollout batch gives two updates;
the checkpoint is saved after the first update of the first batch.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from megatron_pgloss import presets
from megatron_pgloss.megatron import PolicyLossStep
from megatron_pgloss.verify.layouts.models import build_gpt, init_parallel
from megatron_pgloss.verify.layouts.reshard import full_gradients
from megatron_pgloss.verify.layouts.weights import deterministic_weights
from support import jobs, layouts
from support.worlds import world_fixture

ROOT = Path(__file__).resolve().parents[1]
UPDATES, EACH, SAVED = 3, 2, 1
"""Updates of the whole run, updates of each rollout batch, and updates before the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job, all of whose ranks are data-parallel."""

    ranks: int
    saves: bool = False
    killed: bool = False
    """The second rank is killed in the step after the checkpoint."""
    loads: bool = False
    distributed: bool = False
    """Megatron's distributed optimizer, in float32; else its plain Adam, in float64."""


RUNS = {
    "whole": Run(ranks=2),
    "killed": Run(ranks=2, saves=True, killed=True),
    "dp 2": Run(ranks=2, loads=True),
    "dp 4": Run(ranks=4, loads=True),
    "dp 1": Run(ranks=1, loads=True),
    "distributed, whole": Run(ranks=2, saves=True, distributed=True),
    "distributed, dp 2": Run(ranks=2, loads=True, distributed=True),
}


def updates(rank: int, size: int, done: int) -> Iterator[tuple[int, list[pg.TokenBatch]]]:
    """The run's mini-batches from update number ``done`` on: a rollout batch is a function of its number, and its deal
    of sample ids and of that number.
    """
    for iteration in range(done // EACH, -(-UPDATES // EACH)):
        mine = jobs.share(jobs.rows_of_step(iteration, max_length=13), rank, size)
        dealt = pg.minibatches([jobs.batch_of(mine)], EACH, by="sequence", seed=iteration)
        for number, batches in enumerate(dealt, iteration * EACH):
            if done <= number < UPDATES:
                yield number, batches


def train(run: Run, rank: int, folder: Path) -> dict[int, Any]:
    """The job on this rank: of each update the sample ids of the whole job, the loss and every gradient."""
    import checkpoints
    from optimizers import Optimizer

    dtype = torch.float32 if run.distributed else torch.float64
    where = init_parallel()
    tiny = dict(vocab_size=jobs.VOCAB, seq_length=64, layers=2, hidden=16, ffn=16, dtype=dtype)
    chunks = build_gpt(distributed_optimizer=run.distributed, **tiny)
    deterministic_weights(chunks, seed=1)
    optimizer = Optimizer("megatron", chunks, lr=1e-2, eps=1e-8, clip=0.0, distributed=run.distributed)
    armed, done, found = False, 0, {}
    if run.loads and run.distributed:
        import try_checkpoints

        done = try_checkpoints.load(chunks, optimizer.inner, "dp_reshardable", str(folder / "distributed"))
    elif run.loads:
        done = checkpoints.load(str(folder / "plain"), chunks, optimizer)["updates"]

    def forward(model: Any, micro: Any, inputs: Any) -> Any:
        if armed and micro.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(**inputs)

    step = PolicyLossStep(presets.grpo(kl=0.1), chunks, split=pg.Split(sequences=2), forward=forward, patience=1.0)
    for number, batches in updates(where.dp_rank, where.dp, done):
        armed = run.killed and rank == 1 and number == SAVED
        optimizer.zero_grad()
        step.begin(batches)
        metrics = step.finish(jobs.run_schedule(step, chunks))
        ids: list[Any] = [None] * run.ranks
        dist.all_gather_object(ids, [name for batch in batches for name in batch.sample_ids])
        gradients = full_gradients(chunks)
        found[number] = (sorted(name for of in ids for name in of), metrics["loss"], gradients)
        optimizer.step(0.0)
        if run.saves and number == SAVED - 1:
            if run.distributed:
                import try_checkpoints

                try_checkpoints.save(chunks, optimizer.inner, "dp_reshardable", str(folder / "distributed"), SAVED)
            else:
                checkpoints.save(str(folder / "plain"), chunks, optimizer, {"updates": SAVED})
    return found


def rank_of(name: str, rank: int, folder: Path) -> None:
    """One rank of one job, which leaves what it found, or its error, in a file."""
    run = RUNS[name]
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tools")]
    try:
        store = dist.FileStore(str(folder / f"store of {name}"), run.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=run.ranks)
        found: Any = train(run, rank, folder)
    except Exception:  # noqa: BLE001  the tests read what it was
        found = traceback.format_exc()
    (folder / f"{name}, {rank}").write_bytes(pickle.dumps(found))
    for child in mp.active_children():  # Megatron's writer of checkpoints would keep us
        child.kill()
    os._exit(0)


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    folder, found = Path(os.environ["PGLOSS_WORLD"]), {}
    for name, run in RUNS.items():
        if rank < run.ranks:
            one = mp.get_context("fork").Process(target=rank_of, args=(name, rank, folder))
            one.start()
            one.join()
            file = folder / f"{name}, {rank}"
            found[name] = pickle.loads(file.read_bytes()) if file.exists() else one.exitcode
        (folder / f"{name} is over for {rank}").touch()
        while not all((folder / f"{name} is over for {one}").exists() for one in range(world)):
            time.sleep(0.02)
    return found


found = world_fixture(tour, 4, grouped=False, early=True)


def distance(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest error of a parameter's gradient, relative to its largest element, or a thousandth of the largest."""
    largest = max(float(one.abs().max()) for one in theirs.values())
    assert mine.keys() == theirs.keys() and largest > 1e-3
    return max(
        float((mine[name] - one).abs().max()) / max(float(one.abs().max()), 1e-3 * largest)
        for name, one in theirs.items()
    )


@pytest.mark.multiproc
def test_a_killed_rank_ends_the_job_after_its_checkpoint(found: Any) -> None:
    assert found[1]["killed"] == -signal.SIGKILL
    assert "rank 1 gives no sign of life" in found[0]["killed"], found[0]["killed"]


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", ["", "distributed, "])
def test_a_restart_on_as_many_ranks_gives_the_same_gradients_to_the_bit(found: Any, kind: str) -> None:
    whole, again = (found[0][f"{kind}{name}"] for name in ("whole", "dp 2"))
    assert sorted(again) == list(range(SAVED, UPDATES))
    for number, (ids, loss, gradients) in again.items():
        assert ids == whole[number][0] and loss == whole[number][1], number
        for name, value in gradients.items():
            assert torch.equal(value, whole[number][2][name]), (number, name)
        # The data can tell: the update before has another gradient.
        assert distance(gradients, whole[number - 1][2]) > 1e-2


@pytest.mark.multiproc
@pytest.mark.parametrize("size", [1, 4])
def test_a_restart_on_other_ranks_takes_the_same_minibatches_and_the_same_gradients(found: Any, size: int) -> None:
    whole, again = found[0]["whole"], found[0][f"dp {size}"]
    assert sorted(again) == list(range(SAVED, UPDATES))
    for number, (ids, loss, gradients) in again.items():
        assert ids == whole[number][0] and 3 <= len(ids) < 10, number
        assert loss == pytest.approx(whole[number][1], rel=1e-12)
        assert distance(gradients, whole[number][2]) < 1e-12, number
