"""Modes and factors are looked at again before every step: trainers fill their config after the step is made.

One world of two processes, on real models.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_refusals import wrapped_by

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.verify.layouts.reshard import full_gradients
from support import jobs, layouts
from support.faulty import outcome
from support.jobs import Job
from support.worlds import run_world

SPLIT = pg.Split(sequences=2)
SPEC = pg.presets.dapo()


def begun(step: pgm.PolicyLossStep, job: Job, where: Any) -> str:
    """What the next `begin` says: "fine", or its error."""
    rows = jobs.rows_of_step(0)
    kind, text, _ = outcome(lambda: step.begin(jobs.batches_of(job, where, step.spec, rows)))
    return kind if kind == "fine" else f"{kind}: {text}"


def late_config(rank: int) -> dict[str, Any]:
    """Fields, config object and wrapper change after the step was made, and change back."""
    job, found = Job(), {}
    chunks, where = jobs.build(job)
    models = list(chunks)
    step, config = pgm.PolicyLossStep(SPEC, models, split=SPLIT), chunks[0].config

    config.hybrid_context_parallel = True
    found["before the first step"] = begun(step, job, where)
    config.hybrid_context_parallel = False
    found["put right"] = begun(step, job, where)
    config.hybrid_context_parallel = True
    found["after a step"] = begun(step, job, where)
    config.hybrid_context_parallel = rank == 1
    found["on the second rank alone"] = begun(step, job, where)
    config.hybrid_context_parallel = False

    other = copy.copy(config)
    other.overlap_moe_expert_parallel_comm = True
    chunks[0].config = other
    found["another config"] = begun(step, job, where)
    chunks[0].config = config

    models[:] = wrapped_by("torch")(chunks)
    found["another wrapper"] = begun(step, job, where)
    models[:] = chunks
    found["all put right"] = begun(step, job, where)
    layouts.leave(chunks)
    return found


def late_layer(rank: int) -> str:
    """On two stages: only the last one has the output layer that gets a bias."""
    job = Job(pp=2)
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(SPEC, chunks, split=SPLIT, head="auto")
    if step.layout.last_stage:
        chunks[0].module.output_layer.bias = torch.nn.Parameter(torch.zeros(jobs.VOCAB))
    said = begun(step, job, where)
    layouts.leave(chunks)
    return said


def late_flag(rank: int) -> tuple[float, str, tuple[bool, bool]]:
    """Largest difference between gradients before and after ``calculate_per_token_loss`` is turned on."""
    job = Job()
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(SPEC, chunks, split=SPLIT)
    gradients, flags = [], []
    for flag in (False, True):
        chunks[0].config.calculate_per_token_loss = flag
        step.begin(jobs.batches_of(job, where, step.spec, jobs.rows_of_step(0)))
        step.finish(jobs.run_schedule(step, chunks))
        gradients.append(full_gradients(chunks))
        flags.append(step.per_token)
    layouts.leave(chunks)
    return *jobs.worst(*gradients), tuple(flags)  # type: ignore[return-value]


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    return {"config": late_config(rank), "layer": late_layer(rank), "flag": late_flag(rank)}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_world(tour, 2, timeout=150)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("when", "mode"),
    [
        ("before the first step", "hybrid context parallelism"),
        ("put right", None),
        ("after a step", "hybrid context parallelism"),
        ("on the second rank alone", "hybrid context parallelism"),
        ("another config", "expert-parallel overlap (combined 1F1B)"),
        ("another wrapper", "torch FSDP2"),
        ("all put right", None),
    ],
)
def test_a_mode_that_comes_late_is_refused_by_the_next_begin_on_every_rank(
    when: str, mode: str | None, found: Any
) -> None:
    for by_rank in found:
        said = by_rank["config"][when]
        if mode is None:
            assert said == "fine"
        else:
            assert said.startswith("UnsupportedError: ") and f"{mode} is refused: " in said


@pytest.mark.multiproc
def test_what_one_stage_alone_can_see_is_raised_on_all(found: Any) -> None:
    for by_rank in found:
        assert "a fused head on an output layer with a bias is refused: " in by_rank["layer"]


@pytest.mark.multiproc
def test_factors_follow_a_flag_that_is_set_late(found: Any) -> None:
    for error, parameter, flags in (by_rank["flag"] for by_rank in found):
        assert flags == (False, True)
        assert error < 1e-10, parameter
