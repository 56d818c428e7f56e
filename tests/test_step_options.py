"""What `PolicyLossStep` does by default, how it lays out a step, and how one ends: what blind mutation found untested.

One world of two processes on small layouts; made-up streams, for nothing here is held against the oracle.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.verify.layouts.reshard import full_gradients
from support import jobs, layouts
from support.faulty import outcome, padded
from support.jobs import Job
from support.worlds import world_fixture

LONGEST = 13
"""Of the step's rows, in tokens: odd, so that rounding shows."""
TINY = dict(hidden=16, ffn=16)
EXPERTS = TINY | dict(experts=4, topk=2)
AUX = EXPERTS | dict(moe_aux_coeff=0.1)
WIDTHS = {
    "dp2": (Job(model=TINY), LONGEST),
    "tp2": (Job(tp=2, model=TINY), LONGEST),
    "tp2 sp": (Job(tp=2, sp=True, model=TINY), 14),  # a multiple of tp
    "cp2": (Job(cp=2, model=TINY), 16),  # of 2 cp: two chunks a rank
}
"""Layouts, and what the width of a row is rounded up to."""
COUNTS = {"pp2": (Job(pp=2, model=TINY), 3), "pp2 vpp2": (Job(pp=2, vpp=2, model=TINY), 4)}
"""Layouts, and what three micro-batches become: an interleaved schedule of two stages wants an even number."""
SHAPES = {
    "fixed": (Job(model=TINY), True),
    "variable": (Job(variable_lengths=True, model=TINY), False),
    "variable ep2": (Job(ep=2, variable_lengths=True, model=EXPERTS), True),
}
"""Layouts, and whether all micro-batches have one shape."""


def made(chunks: list[Any], split: pg.Split, spec: pg.LossSpec | None = None, **more: Any) -> pgm.PolicyLossStep:
    return pgm.PolicyLossStep(spec or pg.presets.dapo(), chunks, split=split, **more)


def batches(job: Job, where: Any, rows: list[Any]) -> list[pg.TokenBatch]:
    return jobs.batches_of(job, where, pg.presets.dapo(), rows)


def fresh(chunks: list[Any], rows: list[Any], rank: int) -> dict[str, Any]:
    """A step before it is begun, and one of rows that the caller padded on the left."""
    step = made(chunks, pg.Split(sequences=2))
    found = {"should_step": step.should_step, "no step": outcome(lambda: step.seq_length)[:2]}
    given = padded(jobs.share(rows, rank, 2))
    lengths, width = given.pop("lengths"), given["tokens"].shape[1]
    shift = width - torch.as_tensor(lengths)[:, None]
    index = (torch.arange(width) - shift) % width
    moved = {
        name: value.gather(1, index) if isinstance(value, torch.Tensor) and value.shape == index.shape else value
        for name, value in given.items()
    }
    moved["masks"] = {name: value.gather(1, index) for name, value in given["masks"].items()}
    step.begin([pg.TokenBatch.from_padded(**moved, attention_mask=torch.arange(width) >= shift)])
    micros = list(step.data_iterator())
    begins = [micro.input_ids[:, 0][micro.index_N.reshape(micro.shape)[:, 0] >= 0] for micro in micros]
    found["first tokens"] = torch.equal(torch.cat(begins), given["tokens"][:, 0])
    return found


def ways_to_score(chunks: list[Any], given: list[pg.TokenBatch]) -> list[list[torch.Tensor]]:
    """By the step's own chunks and by chunks handed over, in every form."""
    step = made(chunks, pg.Split(sequences=2))
    forms: list[Any] = [None, list(chunks), tuple(chunks), chunks[0]]
    return [[one.streams["ref"] for one in step.score(given, model, into="ref")] for model in forms]


def ended(job: Job, chunks: list[Any], where: Any, rows: list[Any], rule: str, old: str, case: str) -> dict[str, Any]:
    """One step with the logits of the first micro-batch ``poisoned``, or left alone (``update``, ``evaluation``)."""
    spec = pg.LossSpec(old=old, components=[pg.PolicyGradient()])  # type: ignore[arg-type]
    step = made(chunks, pg.Split(sequences=2), spec, on_nonfinite=rule)
    given = batches(job, where, rows)
    step.begin(given)

    def forward_step(data_iterator: Any, model: Any, *_: Any) -> Any:
        micro = next(data_iterator)
        loss_func, spoiled = step.loss_func(micro), case == "poisoned" and micro.number == 0

        def loss(logits: torch.Tensor, **more: Any) -> Any:
            return loss_func(torch.where(torch.tensor(spoiled), float("nan"), logits), **more)

        return step.run_model(micro, model), loss

    with torch.set_grad_enabled(case != "evaluation"):
        only = case in ("evaluation", "forward only")  # Megatron's forward-only schedules leave autograd on
        losses = jobs.run_schedule(step, chunks, only, forward_step_func=forward_step)
    results: dict[str, float] = {}
    miscounted = outcome(lambda: step.finish(losses[:-1]))[0]  # leaves the step open
    kind = outcome(lambda: results.update(step.finish(losses)))[0]
    records = [record for batch in given for record in batch.records_S]
    return {
        "miscounted": miscounted,
        "error": kind,
        "skipped": results.get("skipped"),
        "should_step": step.should_step,
        "gradient": any(bool(grad.any()) for grad in full_gradients(chunks).values()),
        "recorded": all(record.logp is not None for record in records),
        "updated": any(record.plan is not None for record in records),
        "pending": any(record.pending is not None for record in records),
    }


def forgotten(job: Job, chunks: list[Any], where: Any, rows: list[Any]) -> dict[str, Any]:
    """A step that is left without `finish`, one that is closed, and a schedule on a model that is not the step's."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("megatron_pgloss.megatron.step")
    log.addHandler(handler)
    step, seen = made(chunks, pg.Split(sequences=2)), {}
    for name, leave in (("fresh", None), ("forgotten", None), ("closed", step.close), ("finished", step.finish)):
        step.begin(batches(job, where, rows))
        seen[name], said[:] = list(said), []
        losses = jobs.run_schedule(step, chunks)
        if leave is not None:
            leave(losses) if leave == step.finish else leave()
    step.begin(batches(job, where, rows))
    seen["at the end"] = list(said)
    seen["stranger"] = outcome(lambda: step.forward_step(step.data_iterator(), torch.nn.Linear(1, 1)))[:2]
    step.close()
    log.removeHandler(handler)
    return seen


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    rows = jobs.rows_of_step(0, max_length=LONGEST)
    found: dict[str, Any] = {}

    def on(job: Job, look: Callable[[list[Any], list[pg.TokenBatch]], Any]) -> Any:
        chunks, where = jobs.build(job)
        seen = look(chunks, batches(job, where, rows))
        layouts.leave(chunks)
        return seen

    def begun(split: pg.Split, **more: Any) -> Callable[[list[Any], list[pg.TokenBatch]], pgm.PolicyLossStep]:
        def look(chunks: list[Any], given: list[pg.TokenBatch]) -> pgm.PolicyLossStep:
            step = made(chunks, split, **more)
            step.begin(given)
            return step

        return look

    for name, (job, _) in WIDTHS.items():
        found[name] = on(job, begun(pg.Split(sequences=2))).seq_length
    for name, (job, _) in SHAPES.items():
        plan = on(job, begun(pg.Split(sequences=2))).plan
        found[name] = len({micro.shape for micro in plan.microbatches()})
    for name, (job, _) in COUNTS.items():
        step = on(job, begun(pg.Split(microbatches=3)))
        iterators = step.data_iterator()
        found[name] = step.num_microbatches, len(iterators) if isinstance(iterators, list) else None
    empty = Job(model=AUX, empty_rank=True)
    found["allowed"] = on(empty, begun(pg.Split(sequences=2), allow_empty_microbatches=True)).num_microbatches
    found["refused"] = on(empty, lambda *given: outcome(lambda: begun(pg.Split(sequences=2))(*given))[:2])

    job = Job(model=TINY)
    chunks, where = jobs.build(job)
    found["fresh"] = fresh(chunks, rows, rank)
    found["scores"] = ways_to_score(chunks, batches(job, where, rows))
    found["forgotten"] = forgotten(job, chunks, where, rows)
    for case in ENDS:
        found["ended", case] = ended(job, chunks, where, rows, *case)
    layouts.leave(chunks)
    return found


UPDATED = {
    "error": "fine",
    "skipped": 0.0,
    "should_step": True,
    "gradient": True,
    "updated": True,
    "pending": False,
    "miscounted": "LayoutError",
}
STOPPED = UPDATED | {"error": "NonFiniteError", "skipped": None, "updated": False}
SKIPPED = UPDATED | {"skipped": 1.0, "should_step": False, "gradient": False, "updated": False}
LOOKED = UPDATED | {"recorded": False, "gradient": False, "should_step": False, "updated": False}
ENDS: dict[tuple[str, str, str], dict[str, Any]] = {
    ("raise", "record", "update"): UPDATED | {"recorded": True},
    ("skip", "record", "update"): UPDATED | {"recorded": True},
    ("report", "record", "update"): UPDATED | {"recorded": True},
    ("raise", "record", "poisoned"): STOPPED | {"recorded": False},
    ("skip", "record", "poisoned"): SKIPPED | {"recorded": False},
    ("report", "record", "poisoned"): UPDATED | {"recorded": True},
    ("raise", "record", "evaluation"): LOOKED,
    ("raise", "record", "forward only"): LOOKED,
    ("raise", "policy", "forward only"): LOOKED,
    ("raise", "given", "poisoned"): STOPPED | {"recorded": False},
    ("skip", "given", "poisoned"): SKIPPED | {"recorded": False},
}
"""(``on_nonfinite``, the spec's ``old``, what happened) to how the step ended."""


found = world_fixture(tour, 2)


def test_the_defaults_are_the_documented_ones() -> None:
    given = inspect.signature(pgm.PolicyLossStep).parameters
    defaults = {
        "pg_collection": None, "on_nonfinite": "raise", "allow_empty_microbatches": False, "reuse_logits": True,
        "vocab_size": None, "head": "given", "head_memory": 2 * 1024**3, "head_dtype": None, "sampler_head": None,
    }  # fmt: skip
    assert {name: given[name].default for name in defaults} == defaults
    called = inspect.signature(pgm.PolicyLossStep.forward_step).parameters  # Megatron calls it by position
    assert called["return_schedule_plan"].default is False


@pytest.mark.multiproc
@pytest.mark.parametrize("name", WIDTHS)
def test_a_row_is_as_wide_as_the_longest_and_no_wider_than_the_layout_asks(name: str, found: Any) -> None:
    assert [by_rank[name] for by_rank in found] == [WIDTHS[name][1]] * 2


@pytest.mark.multiproc
@pytest.mark.parametrize("name", SHAPES)
def test_micro_batches_have_one_shape_unless_lengths_may_vary(name: str, found: Any) -> None:
    for by_rank in found:
        assert (by_rank[name] == 1) == SHAPES[name][1]


@pytest.mark.multiproc
def test_an_interleaved_schedule_alone_gets_more_micro_batches_and_an_iterator_per_chunk(found: Any) -> None:
    for by_rank in found:
        assert by_rank["pp2"] == (3, None)
        assert by_rank["pp2 vpp2"] == (4, 2)


@pytest.mark.multiproc
def test_an_empty_micro_batch_beside_moe_losses_is_refused_unless_allowed(found: Any) -> None:
    for by_rank in found:
        kind, text = by_rank["refused"]
        assert kind == "LayoutError"
        assert "micro-batch would be empty" in text
        assert by_rank["allowed"] > 1


@pytest.mark.multiproc
def test_before_begin_there_is_no_step_and_rows_then_start_at_column_0(found: Any) -> None:
    for by_rank in found:
        assert by_rank["fresh"]["should_step"]
        assert by_rank["fresh"]["no step"][0] == "DataError"
        assert by_rank["fresh"]["first tokens"]


@pytest.mark.multiproc
def test_scores_are_the_same_however_the_model_is_handed_over(found: Any) -> None:
    for own, *others in (by_rank["scores"] for by_rank in found):
        assert any(bool(stream.any()) for stream in own)
        for other in others:
            assert all(torch.equal(one, two) for one, two in zip(own, other, strict=True))


@pytest.mark.multiproc
def test_a_step_that_was_left_without_finish_is_said_so_and_a_strange_model_is_refused(found: Any) -> None:
    for seen in (by_rank["forgotten"] for by_rank in found):
        # What is said at a begin is about the step before: the one named "fresh" was forgotten, then "forgotten" too.
        assert not seen["fresh"] and not seen["finished"] and not seen["at the end"]
        for name in ("forgotten", "closed"):
            (text,) = seen[name]
            assert "left without finish" in text and "step.close()" in text
        kind, text = seen["stranger"]
        assert kind == "DataError" and "not the step's" in text and "got Linear" in text


@pytest.mark.multiproc
@pytest.mark.parametrize("case", ENDS, ids=" ".join)
def test_how_a_step_ends(case: tuple[str, str, str], found: Any) -> None:
    assert [by_rank["ended", case] for by_rank in found] == [ENDS[case]] * 2
