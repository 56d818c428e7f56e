"""A model of another signature, run by the user's own function or forward step: the same numbers as `run_model`.

One world of four processes: tensor, pipeline and context parallelism with packed rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.verify.layouts.models import build_gpt
from megatron_pgloss.verify.layouts.reshard import full_gradients
from support import jobs, layouts
from support.faulty import outcome
from support.jobs import Job
from support.worlds import world_fixture

TINY = dict(hidden=16, ffn=16)
THD = pg.Split(max_tokens=40)
JOBS = {
    "cp2 tp2 packed": Job(cp=2, tp=2, split=THD, model=TINY),
    "pp2 vpp2 packed": Job(pp=2, vpp=2, split=THD, model=TINY),
    "pp2 padded": Job(pp=2, model=TINY),
}
SPEC = pg.LossSpec(
    components=[pg.PolicyGradient(), pg.KL(coef=0.1)],
    gates=[pg.EntropyGate(share=0.5)],
)


def renamed(chunks: list[Any]) -> None:
    """Give the model's ``forward`` another signature, and something more that it asks for."""
    from megatron.core.models.gpt import GPTModel

    class Renamed(GPTModel):
        def forward(self, tokens: Any, places: Any, *, packing: Any = None, image: Any, **more: Any) -> Any:  # type: ignore[override]
            assert image == "seen"
            return super().forward(tokens, places, None, packed_seq_params=packing, **more)

    # From 0.18 on a fused head attaches by a keyword; before, it needs none.
    own = inspect.signature(lambda self, tokens, places, *, packing=None, image: None)
    head = [one for name, one in inspect.signature(GPTModel.forward).parameters.items() if "processor" in name]
    Renamed.forward.__signature__ = own.replace(parameters=[*own.parameters.values(), *head])  # type: ignore[attr-defined]
    for chunk in chunks:
        chunk.module.__class__ = Renamed


def right(model: Any, micro: Any, inputs: Any) -> Any:
    more = {name: inputs[name] for name in inputs if name == "output_processor"}
    return model(micro.input_ids, micro.position_ids, packing=micro.packed_seq_params, image="seen", **more)


def careless(model: Any, micro: Any, inputs: Any) -> Any:
    return model(micro.input_ids, micro.position_ids, image="seen")


def own_step(step: pgm.PolicyLossStep) -> Callable[..., Any]:
    """A forward step of the user's own around `inputs`."""

    def forward_step(data_iterator: Any, model: Any, *_: Any) -> Any:
        micro = next(data_iterator)
        return model(**step.inputs(micro, model)), step.loss_func(micro)

    return forward_step


def whole_step(step: pgm.PolicyLossStep, chunks: list[Any], batches: list[Any], **more: Any) -> dict[str, Any]:
    scored = step.score(batches, into="ref")
    step.begin(scored)
    trained = step.finish(jobs.run_schedule(step, chunks, **more))
    grads = full_gradients(chunks)
    step.begin(scored)
    with torch.no_grad():
        looked = step.finish(jobs.run_schedule(step, chunks, forward_only=True, **more))
    return {
        "ref": [one.streams["ref"] for one in scored],
        "loss": trained["loss"],
        "looked": looked["loss"],
        "grads": grads,
    }


def visit(job: Job, rows: list[Any]) -> dict[str, Any]:
    chunks, where = jobs.build(job)
    batches = jobs.batches_of(job, where, SPEC, rows)
    own = whole_step(pgm.PolicyLossStep(SPEC, chunks, split=job.split), chunks, batches)
    by_hand = pgm.PolicyLossStep(SPEC, chunks, split=job.split)
    seen = {"by hand": whole_step(by_hand, chunks, batches, forward_step_func=own_step(by_hand))}
    found: dict[str, Any] = {}
    renamed(chunks)
    seen["other signature"] = whole_step(
        pgm.PolicyLossStep(SPEC, chunks, split=job.split, forward=right), chunks, batches
    )
    if job.vpp is None:
        headed = pgm.PolicyLossStep(SPEC, chunks, split=job.split, forward=right, head="keep")
        seen["other signature, fused head"] = whole_step(headed, chunks, batches)
    for name, other in seen.items():
        found[name] = {
            "ref": max(float((a - b).abs().max()) for a, b in zip(own["ref"], other["ref"], strict=True)),
            "loss": abs(own["loss"] - other["loss"]),
            "looked": abs(own["looked"] - other["looked"]),
            "gradient": jobs.worst(other["grads"], own["grads"])[0],
        }
    found["largest"] = max(float(grad.abs().max()) for grad in own["grads"].values())
    found["without a function"] = outcome(lambda: pgm.PolicyLossStep(SPEC, chunks, split=job.split))[:2]
    batches = jobs.batches_of(job, where, SPEC, rows)  # not updated on yet
    bad = pgm.PolicyLossStep(pg.presets.reinforce(), chunks, split=job.split, forward=careless)
    found["careless score"] = outcome(lambda: bad.score(batches, into="ref"))[:2]
    bad.begin(batches)
    losses = jobs.run_schedule(bad, chunks)
    found["careless"] = outcome(lambda: bad.finish(losses))[:2]
    bad.close()
    found["again"] = outcome(lambda: bad.begin(batches))[:2]
    layouts.leave(chunks)
    return found


def once_unread(rows: list[Any], rank: int) -> tuple[str, str]:
    """One micro-batch of one stage alone, without a loss, on one rank."""
    job = JOBS["pp2 vpp2 packed"]
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(pg.presets.reinforce(), chunks, split=job.split)

    def forward_step(data_iterator: Any, model: Any, *_: Any) -> Any:
        micro = next(data_iterator)
        if model is chunks[1] and micro.number == 1 and rank == 0:
            return model(micro.input_ids, micro.position_ids, None), step.loss_func(micro)
        return model(**step.inputs(micro, model)), step.loss_func(micro)

    step.begin(jobs.batches_of(job, where, pg.presets.reinforce(), rows))
    losses = jobs.run_schedule(step, chunks, forward_step_func=forward_step)
    found = outcome(lambda: step.finish(losses))[:2]
    layouts.leave(chunks)
    return found


def read_by_a_reference_alone(rows: list[Any]) -> tuple[str, str]:
    """The step runs the reference by itself, on the same micro-batch: that does not stand for the policy."""
    job = JOBS["cp2 tp2 packed"]
    chunks, where = jobs.build(job)
    reference = build_gpt(vocab_size=jobs.VOCAB, seq_length=64, wrap=False, **TINY)
    spec = pg.LossSpec(components=[pg.PolicyGradient(), pg.KL(estimator="exact", to="ref", coef=0.1)])
    step = pgm.PolicyLossStep(spec, chunks, split=job.split, reference=reference)

    def forward_step(data_iterator: Any, model: Any, *_: Any) -> Any:
        micro = next(data_iterator)
        return model(micro.input_ids, micro.position_ids, None), step.loss_func(micro)

    step.begin(jobs.batches_of(job, where, spec, rows))
    losses = jobs.run_schedule(step, chunks, forward_step_func=forward_step)
    found = outcome(lambda: step.finish(losses))[:2]
    reference.clear()
    layouts.leave(chunks)
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    rows = jobs.rows_of_step(0, max_length=13)
    return {name: visit(job, rows) for name, job in JOBS.items()} | {
        "once": once_unread(rows, rank), "reference": read_by_a_reference_alone(rows),
    }  # fmt: skip


found = world_fixture(tour, 4)
WAYS = ("by hand", "other signature", "other signature, fused head")


@pytest.mark.multiproc
@pytest.mark.parametrize("name", JOBS)
def test_a_users_own_call_gives_the_same_numbers_in_every_pass(name: str, found: Any) -> None:
    for by_rank in found:
        assert by_rank[name]["largest"] > 1e-4
        for way in WAYS:
            if way in by_rank[name]:
                assert max(by_rank[name][way].values()) < 1e-12, (way, by_rank[name][way])
        assert len([way for way in WAYS if way in by_rank[name]]) == (2 if "vpp" in name else 3)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", JOBS)
def test_a_forward_that_cannot_take_the_inputs_is_refused_when_the_step_is_made(name: str, found: Any) -> None:
    for by_rank in found:
        kind, text = by_rank[name]["without a function"]
        assert kind == "UnsupportedError"
        assert "does not take what the step hands over is refused" in text and "forward=FN" in text
        assert ("packed_seq_params" in text) == ("packed" in name)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", JOBS)
def test_packed_rows_whose_boundaries_nobody_read_are_refused_everywhere(name: str, found: Any) -> None:
    for case in ("careless score", "careless"):
        seen = {by_rank[name][case] for by_rank in found}
        if "packed" in name:
            ((kind, text),) = seen
            assert kind == "DataError"
            assert "a packed micro-batch was run without its boundaries" in text
            assert "rank 0, micro-batch 0" in text
        else:
            assert seen == {("fine", "")}
    again = {by_rank[name]["again"] for by_rank in found}
    assert (again == {("fine", "")}) == ("packed" in name)  # no update was made, or one was


@pytest.mark.multiproc
def test_one_stage_without_a_loss_is_enough(found: Any) -> None:
    ((kind, text),) = {by_rank["once"] for by_rank in found}
    assert kind == "DataError"
    assert "at rank 0, micro-batch 1, chunk 1" in text


@pytest.mark.multiproc
def test_what_the_reference_reads_the_policy_has_not_read(found: Any) -> None:
    ((kind, text),) = {by_rank["reference"] for by_rank in found}
    assert kind == "DataError"
    assert "a packed micro-batch was run without its boundaries" in text
