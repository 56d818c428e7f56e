"""What a skip promises, which rows may be tried again, and what the ranks of a step must have in common.

One world of two processes, tiny models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from support import jobs, layouts
from support.faulty import outcome
from support.jobs import Job
from support.worlds import world_fixture

TINY = dict(hidden=16, ffn=16)
BIASED = TINY | dict(
    experts=4, topk=2,
    extra=dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", moe_router_dtype="fp64"),
)  # fmt: skip
ON_POLICY = pg.presets.reinforce()


class Counter(torch.nn.Module):
    """A module of the user's own: a buffer that it replaces, one that comes late, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("late", None)
        self.steps = 0

    def forward(self, module: Any, args: Any, output: Any) -> None:
        self.seen = self.seen + 1
        self.late = torch.ones(1)
        self.steps += 1

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def state_of(chunks: list[Any]) -> dict[str, Any]:
    """Everything that the model holds, parameters and buffers, persistent or not, as bits."""
    found: dict[str, Any] = {}
    for i, chunk in enumerate(chunks):
        for name, value in (*chunk.named_parameters(), *chunk.named_buffers()):
            found[f"{i}.{name}"] = value.detach().clone()
        for name, module in chunk.named_modules():
            if isinstance(module, Counter):
                found[f"{i}.{name}.steps"] = torch.tensor(module.steps)
    return found


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    )


def poisoned(step: pgm.PolicyLossStep) -> Callable[..., Any]:
    def forward_step(data_iterator: Any, model: Any, *_: Any) -> Any:
        micro = next(data_iterator)
        loss_func = step.loss_func(micro)
        return step.run_model(micro, model), lambda logits, **more: loss_func(logits * float("nan"), **more)

    return forward_step


def skipped(rows: list[Any]) -> dict[str, Any]:
    """A mixture of experts with a selection bias, and a module of the user's own, through a skip and a step."""
    job = Job(ep=2, model=BIASED)
    chunks, where = jobs.build(job)
    counter = Counter()
    chunks[0].module.counter = counter
    chunks[0].module.decoder.layers[0].register_forward_hook(counter.forward)
    step = pgm.PolicyLossStep(ON_POLICY, chunks, split=job.split, on_nonfinite="skip", allow_routed_padding=True)
    batches = jobs.batches_of(job, where, ON_POLICY, rows)
    jobs.run_schedule(_begun(step, batches), chunks)  # counts are not those of a fresh model
    step.close()
    counter.late = None
    before = state_of(chunks)
    step.begin(batches)
    losses = jobs.run_schedule(step, chunks, forward_step_func=poisoned(step))
    found = {"in between": moved(before, state_of(chunks))}
    metrics = step.finish(losses)
    found |= {"skipped": metrics["skipped"], "after": moved(before, state_of(chunks))}
    step.begin(batches)  # the same rows, on-policy: no update was made
    metrics = step.finish(jobs.run_schedule(step, chunks))
    found |= {"again": metrics["skipped"], "made": moved(before, state_of(chunks))}
    found["second"] = outcome(lambda: step.begin(batches))[:2]
    layouts.leave(chunks)
    return found


def _begun(step: pgm.PolicyLossStep, batches: Any) -> pgm.PolicyLossStep:
    step.begin(batches)
    return step


def tried_again(rows: list[Any], rank: int) -> dict[str, Any]:
    """On-policy rows after a step that `finish` raised for, after one that was left, after one that was reported."""
    job = Job(model=TINY)
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(ON_POLICY, chunks, split=job.split)
    batches = jobs.batches_of(job, where, ON_POLICY, rows)
    losses = jobs.run_schedule(_begun(step, batches), chunks, forward_step_func=poisoned(step))
    found = {"raised": outcome(lambda: step.finish(losses))[0], "after": outcome(lambda: step.begin(batches))[:2]}
    jobs.run_schedule(step, chunks)
    step.close()
    found["left"] = outcome(lambda: step.begin(batches))[:2]
    jobs.run_schedule(step, chunks)
    found["forgotten"] = outcome(lambda: step.begin(batches))[:2]  # neither finish nor close: it may have stepped
    reported = pgm.PolicyLossStep(ON_POLICY, chunks, split=job.split, on_nonfinite="report")
    fresh = jobs.batches_of(job, where, ON_POLICY, rows)
    reported.begin(fresh)
    reported.finish(jobs.run_schedule(reported, chunks, forward_step_func=poisoned(reported)))
    found["reported"] = outcome(lambda: reported.begin(fresh))[0]
    layouts.leave(chunks)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "on_nonfinite": {"on_nonfinite": "skip"},
    "head": {"head": "recompute"},
    "head_memory": {"head_memory": 7},
    "sampler_head": {"sampler_head": "fp32"},
    "allow_empty_microbatches": {"allow_empty_microbatches": True},
    "forward": {"forward": lambda model, micro, inputs: model(**inputs)},
}


def differing(rows: list[Any], rank: int) -> dict[str, Any]:
    """One option, or one argument, is another on the second rank."""
    job = Job(model=TINY)
    chunks, where = jobs.build(job)
    spec = pg.presets.dapo()
    batches, found = jobs.batches_of(job, where, spec, rows), {}
    for name, given in OPTIONS.items():
        step = pgm.PolicyLossStep(spec, chunks, split=job.split, **(given if rank else {}))
        found[name] = outcome(lambda step=step: step.begin(batches))[:2]
        alike = pgm.PolicyLossStep(spec, chunks, split=job.split, **given)
        found[name, "alike"] = outcome(lambda step=alike: step.begin(batches))[:2]
    step = pgm.PolicyLossStep(spec, chunks, split=job.split)
    found["into"] = outcome(lambda: step.score(batches, into="old" if rank else "ref"))[:2]
    found["bogus"] = outcome(lambda: step.score(batches, into="bogus" if rank else "ref"))[:2]  # type: ignore[arg-type]
    step.begin(batches)
    losses = jobs.run_schedule(step, chunks)
    for name, wrong in {
        "a scalar": [{**one, "rl/loss": one["rl/loss"][0]} for one in losses],
        "a float": [{**one, "rl/loss": 1.0} for one in losses],
        "a dictionary": dict(losses[0]),
        "None": None,
    }.items():
        found["reports", name] = outcome(lambda wrong=wrong: step.finish(wrong if rank else losses))[:2]
    found["reports", "right"] = outcome(lambda: step.finish(losses))[:2]
    layouts.leave(chunks)
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    rows = jobs.rows_of_step(0, max_length=13)
    return {"skip": skipped(rows), "again": tried_again(rows, rank), "differing": differing(rows, rank)}


found = world_fixture(tour, 2)


@pytest.mark.multiproc
def test_a_skip_leaves_the_whole_model_bit_identical(found: Any) -> None:
    for seen in (by_rank["skip"] for by_rank in found):
        names = {name.rsplit(".", 1)[-1] for name in seen["in between"]}
        assert {"expert_bias", "seen", "late", "steps"} <= names  # the case can tell
        assert seen["skipped"] == 1.0
        assert seen["after"] == []
        assert seen["again"] == 0.0
        assert any("expert_bias" in name for name in seen["made"])


@pytest.mark.multiproc
def test_rows_may_be_tried_again_unless_an_update_was_made(found: Any) -> None:
    for by_rank in found:
        seen = by_rank["again"]
        assert (seen["raised"], seen["after"], seen["left"]) == ("NonFiniteError", ("fine", ""), ("fine", ""))
        assert seen["reported"] == "DataError"
        for kind, text in (seen["forgotten"], by_rank["skip"]["second"]):
            assert kind == "DataError"
            assert "a second update on the same rollouts with old='policy'" in text and "step.close()" in text


@pytest.mark.multiproc
@pytest.mark.parametrize("name", [*OPTIONS, "into"])
def test_options_are_agreed_before_any_work(name: str, found: Any) -> None:
    ((kind, text),) = {by_rank["differing"][name] for by_rank in found}
    assert kind == "LayoutError"
    assert "ranks differ in split, coefficients or options" in text and "rank 0 and rank 1" in text
    field = {"into": "into = 'ref' on rank 0 and 'old' on rank 1", "forward": "forward = False on rank 0 and True"}
    assert f"step.{field.get(name, name)}" in text
    if name != "into":
        assert {by_rank["differing"][name, "alike"] for by_rank in found} == {("fine", "")}


@pytest.mark.multiproc
def test_a_stream_that_cannot_be_scored_is_refused_everywhere_before_the_model_runs(found: Any) -> None:
    ((kind, text),) = {by_rank["differing"]["bogus"] for by_rank in found}
    assert kind == "DataError"
    assert "score(into='bogus')" in text and "at rank 1" in text and "old | ref | rollout | values" in text


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["a scalar", "a float", "a dictionary", "None"])
def test_reports_of_another_shape_are_refused_everywhere_and_the_step_stays_open(name: str, found: Any) -> None:
    ((kind, text),) = {by_rank["differing"]["reports", name] for by_rank in found}
    assert kind == "DataError"
    assert "rank 1" in text and "forward_backward_func returned" in text
    assert {by_rank["differing"]["reports", "right"] for by_rank in found} == {("fine", "")}
