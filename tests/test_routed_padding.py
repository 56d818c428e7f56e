"""Padding never changes what a router counts: masked rows give the gradients of rows without padding.

One world of two processes, tiny mixtures of experts. Each micro-batch holds the same rows both ways: once padded or
filled up to one shape, once as they are (``variable_seq_lengths``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.verify.layouts.reshard import full_gradients
from support import jobs, layouts
from support.faulty import outcome
from support.jobs import Job
from support.worlds import world_fixture

AUX = dict(layers=2, hidden=16, ffn=16, experts=4, topk=2, moe_aux_coeff=0.1)
Z = AUX | dict(moe_z_coeff=0.01)
BIAS = AUX | dict(moe_aux_coeff=0.0) | dict(
    extra=dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", moe_router_dtype="fp64")
)  # fmt: skip
ONE, TWO = pg.Split(sequences=1), pg.Split(sequences=2)
MASKED = {
    "dp2": Job(model=Z, split=ONE),
    "dp2, per-token": Job(model=Z, split=ONE, per_token=True),
    "dp2, packed": Job(model=Z, split=pg.Split(max_tokens=40)),
    "pp2": Job(pp=2, model=Z, split=ONE),
    "cp2": Job(cp=2, model=AUX, split=ONE),
}
REFUSED = {
    "cp2, z-loss": (Job(cp=2, model=Z, split=TWO), "the z-loss averages over each tensor- and context-parallel rank"),
    "cp2, per-token": (Job(cp=2, model=AUX, split=TWO, per_token=True), "counts masked tokens twice"),
    "selection bias": (Job(model=BIAS), "padding_mask does not help the selection bias of experts"),
    "capacity": (
        Job(model=AUX | dict(extra=dict(moe_expert_capacity_factor=1.0))),
        "who finds a place under moe_expert_capacity_factor",
    ),
}
SPEC = pg.LossSpec(components=[pg.PolicyGradient()])


def dealt(rows: list[Any], where: Any) -> list[pg.TokenBatch]:
    """As many rows on every data-parallel rank, so that no micro-batch is empty."""
    return [jobs.batch_of(rows[where.dp_rank :: where.dp])]


def gradients(job: Job, rows: list[Any], **options: Any) -> tuple[dict[str, Any], bool]:
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split, **options)
    step.begin(dealt(rows, where))
    masked = step.masked
    step.finish(jobs.run_schedule(step, chunks))
    found = full_gradients(chunks)
    layouts.leave(chunks)
    return found, masked


def refused(job: Job, rows: list[Any]) -> dict[str, Any]:
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split)
    allowed = pgm.PolicyLossStep(SPEC, chunks, split=job.split, allow_routed_padding=True)
    even = [row for row in rows if len(row["tokens"]) == 12][:4]
    found = {
        "padded": outcome(lambda: step.begin(dealt(rows, where)))[:2],
        "allowed": outcome(lambda: allowed.begin(dealt(rows, where)))[:2],
        "without padding": outcome(lambda: step.begin(dealt(even, where)))[:2],
        "masked": step.masked or allowed.masked,
    }
    layouts.leave(chunks)
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    rows = jobs.rows_of_step(0, max_length=12)
    found: dict[str, Any] = {}
    for name, job in MASKED.items():
        plain, plain_masked = gradients(replace(job, variable_lengths=True), multiple_of(rows, job))
        masked, is_masked = gradients(job, multiple_of(rows, job))
        routed, _ = gradients(job, multiple_of(rows, job), allow_routed_padding=True)
        found[name] = {
            "masked": (plain_masked, is_masked),
            "masked against none": jobs.worst(masked, plain),
            "routed against none": jobs.worst(routed, plain),
        }
    return found | {name: refused(job, full(rows)) for name, (job, _) in REFUSED.items()}


def multiple_of(rows: list[Any], job: Job) -> list[Any]:
    """Rows that the layout does not pad by itself: of a multiple of 2 cp tokens."""
    return [row for row in rows if len(row["tokens"]) % 4 == 0] if job.cp > 1 else rows[:10]


def full(rows: list[Any]) -> list[Any]:
    """With four rows of exactly 12 tokens among them."""
    longest = max(rows, key=lambda row: len(row["tokens"]))
    return [*rows[:10], *([longest] * 4)]


found = world_fixture(tour, 2)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", MASKED)
def test_masked_padding_gives_the_gradients_of_rows_without_padding(name: str, found: Any) -> None:
    for seen in (by_rank[name] for by_rank in found):
        assert seen["masked"] == (False, True)
        error, parameter = seen["masked against none"]
        assert error < 1e-6, parameter  # Megatron's router sums float32 scores, here over other shapes: 2e-8 was seen
        assert seen["routed against none"][0] > 1e-3  # the rows can tell


@pytest.mark.multiproc
@pytest.mark.parametrize("name", REFUSED)
def test_padding_that_would_be_routed_is_refused_unless_allowed_by_name(name: str, found: Any) -> None:
    ((kind, text),) = {by_rank[name]["padded"] for by_rank in found}
    assert kind == "LayoutError"
    assert "padding would be routed" in text and REFUSED[name][1] in text and "allow_routed_padding=True" in text
    assert {by_rank[name]["allowed"] for by_rank in found} == {("fine", "")}
    assert {by_rank[name]["without padding"] for by_rank in found} == {("fine", "")}
    assert not any(by_rank[name]["masked"] for by_rank in found)
