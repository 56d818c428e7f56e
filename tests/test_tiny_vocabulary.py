"""A vocabulary that fits into one tensor-parallel shard: the same gradients as without tensor parallelism.

One world of two processes. Five tokens, padded to 16 columns: each of two shards has 8, the second none of them.
"""

from __future__ import annotations

from typing import Any

import pytest

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.verify.layouts.reshard import full_gradients
from support import jobs, layouts
from support.faulty import outcome
from support.jobs import Job
from support.worlds import world_fixture

TINY = dict(hidden=16, ffn=16)
SPEC = pg.LossSpec(components=[pg.PolicyGradient(), pg.Entropy(coef=0.1)])
HEADS = ("given", "keep", "recompute")


def visit(job: Job, rows: list[Any], head: Any) -> tuple[float, dict[str, Any]]:
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split, vocab_size=5, head=head)
    step.begin(jobs.batches_of(job, where, SPEC, rows))
    metrics = step.finish(jobs.run_schedule(step, chunks))
    found = metrics["loss"], full_gradients(chunks)
    layouts.leave(chunks)
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    rows = jobs.rows_of_step(0, max_length=13, vocab=5)
    loss, plain = visit(Job(vocab=5, model=TINY), rows, "given")
    found: dict[str, Any] = {"largest": max(float(grad.abs().max()) for grad in plain.values())}
    for head in HEADS:
        other, grads = visit(Job(tp=2, vocab=5, model=TINY | dict(vocab_multiple=8)), rows, head)
        found[head] = (abs(other - loss), *jobs.worst(grads, plain))
    chunks, _ = jobs.build(Job(tp=2, model=TINY))
    del chunks[0].module.vocab_size
    found["silent"] = outcome(lambda: pgm.PolicyLossStep(SPEC, chunks, split=pg.Split(sequences=2)))[:2]
    layouts.leave(chunks)
    return found


found = world_fixture(tour, 2)


@pytest.mark.multiproc
@pytest.mark.parametrize("head", HEADS)
def test_shards_as_wide_as_the_vocabulary_are_shards(head: str, found: Any) -> None:
    for by_rank in found:
        loss, gradient, parameter = by_rank[head]
        assert loss < 1e-12
        assert gradient < 1e-10, parameter
        assert by_rank["largest"] > 1e-3


@pytest.mark.multiproc
def test_a_model_that_does_not_say_its_vocabulary_is_asked_for_it(found: Any) -> None:
    for kind, text in (by_rank["silent"] for by_rank in found):
        assert kind == "SpecError"
        assert "vocab_size" in text
