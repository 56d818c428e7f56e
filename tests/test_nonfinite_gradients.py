"""No step whose gradients or loss are not finite ends as if nothing were wrong, on any rank.

One world of two processes, tiny models. What is not finite never meets a log-prob here: `faults` inside a component
are tests/test_step.py.
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
EXPERTS = TINY | dict(experts=4, topk=2)
WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": layouts.OVERLAP,
    "distributed optimizer": layouts.DISTOPT,
    "distributed optimizer, overlap": layouts.DISTOPT | layouts.OVERLAP,
}
JOBS: dict[str, tuple[Job, dict[str, Any]]] = {
    **{f"dp2, {name}": (Job(model=TINY | more), {}) for name, more in WRAPPERS.items()},
    **{f"ep2, {name}": (Job(ep=2, model=EXPERTS | more), {}) for name, more in WRAPPERS.items()},
    "keep": (Job(model=TINY), {"head": "keep"}),
    "pp2": (Job(pp=2, model=TINY), {}),
    "cp2": (Job(cp=2, model=TINY), {}),
}
SINGLE = Job(model=TINY | dict(dtype=torch.float32))
HUGE = {"weights": 1e38, "advantages": 1e5}
OVERFLOWS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "weights 1e38 x advantages 1e5": (HUGE, {}),
    "coef 1e39 x advantages 1e3": ({"advantages": 1e3}, {"rl": 1e39}),
    "coef 1e308 x advantages 1e9": ({"advantages": 1e9}, {"rl": 1e308}),
    "advantages 1e308": ({"advantages": 1e308}, {}),
}
"""Streams that every token gets, and coefficients of the step: finite log-probs, and a product that is not."""
SPEC = pg.LossSpec(components=[pg.PolicyGradient()])


class Spoiled:
    """A forward step that makes the last layer's output NaN at padding, or at context positions, of every micro-batch
    on the second data-parallel rank, or on whichever rank of a replica has such a position.
    """

    def __init__(self, step: pgm.PolicyLossStep, where: str, rank: int) -> None:
        self.step, self.where, self.here = step, where, step.layout.dp_size == 1 or rank == 1
        self.hit = 0

    def __call__(self, data_iterator: Any, model: Any, *_: Any) -> Any:
        micro = next(data_iterator)
        real_N = micro.index_N >= 0
        at_N = ~real_N
        if self.where == "context":
            action_T = micro.table["action"]
            at_N = real_N & ~action_T[micro.index_N.clamp(min=0)]
        at_BL = at_N.reshape(micro.shape)
        bare = model.module

        def spoil(_: Any, __: Any, output: Any) -> Any:
            self.hit += int(at_BL.sum())
            hidden, *rest = output  # [s, b, H]
            return torch.where(at_BL.t()[..., None], float("nan"), hidden), *rest

        hooks = [bare.decoder.layers[-1].register_forward_hook(spoil)] if self.here and bare.post_process else []
        try:
            output = self.step.run_model(micro, model)
        finally:
            for hook in hooks:
                hook.remove()
        return output, self.step.loss_func(micro)


def ended(step: pgm.PolicyLossStep, chunks: list[Any], losses: Any, rule: str) -> dict[str, Any]:
    step.on_nonfinite = rule  # type: ignore[assignment]
    metrics: dict[str, float] = {}
    kind, text, _ = outcome(lambda: metrics.update(step.finish(losses)))
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        "error": (kind, text),
        "should_step": step.should_step,
        "skipped": metrics.get("skipped"),
        "faults": metrics.get("gradient_fault"),
        "in loss": metrics.get("rl/fault"),
        "zero": not any(bool(buffer.grad_data.any()) for buffer in buffers),
    }


def spoiled(job: Job, options: dict[str, Any], rows: list[Any], rank: int, cases: list[tuple[str, str]]) -> Any:
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split, **options)
    batches, found = jobs.batches_of(job, where, SPEC, rows), {}
    for at, rule in cases:
        step.begin(batches)
        forward_step = Spoiled(step, at, rank)
        losses = jobs.run_schedule(step, chunks, forward_step_func=forward_step)
        found[at, rule] = ended(step, chunks, losses, rule) | {"hit": forward_step.hit}
    step.begin(batches)
    found["clean"] = ended(step, chunks, jobs.run_schedule(step, chunks), "raise")
    layouts.leave(chunks)
    return found


def unwrapped(rows: list[Any]) -> dict[str, Any]:
    """A model without Megatron's wrapper, whose gradients are ``param.grad``."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    job = Job(tp=2, model=TINY)
    chunks, where = jobs.build(job, wrap=False)
    (model,) = chunks
    model.config.finalize_model_grads_func = lambda *args, **more: None
    step = pgm.PolicyLossStep(SPEC, model, split=job.split)
    found = {}
    for name, value in {"clean": 1.0, "raise": float("nan"), "skip": float("inf")}.items():
        step.on_nonfinite = "skip" if name == "skip" else "raise"
        step.begin(jobs.batches_of(job, where, SPEC, rows))
        model.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=step.forward_step, data_iterator=step.data_iterator(), model=model,
            num_microbatches=step.num_microbatches, seq_length=step.seq_length, forward_only=False,
            micro_batch_size=step.micro_batch_size,
        )  # fmt: skip
        model.decoder.final_layernorm.weight.grad[0] *= value
        found[name] = outcome(lambda losses=losses: step.finish(losses))[0], step.should_step
    grads = [parameter.grad for parameter in model.parameters()]
    found["zero"] = not any(bool(grad.any()) for grad in grads if grad is not None)
    layouts.leave(chunks)
    return found


def one_expert(rows: list[Any], rank: int) -> dict[str, Any]:
    """A gradient that only the second rank holds: an expert's, with expert parallelism over both."""
    job = Job(ep=2, model=EXPERTS)
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split)
    step.begin(jobs.batches_of(job, where, SPEC, rows))
    losses = jobs.run_schedule(step, chunks)
    if rank == 1:
        chunks[0].expert_parallel_buffers[0].grad_data[3] = float("inf")
    found = ended(step, chunks, losses, "raise")
    layouts.leave(chunks)
    return found


def overflown(rows: list[Any]) -> dict[str, Any]:
    chunks, where = jobs.build(SINGLE)
    step, found = pgm.PolicyLossStep(SPEC, chunks, split=SINGLE.split), {}
    for name, (streams, coef) in OVERFLOWS.items():
        weights = {"rl": streams.get("weights")}
        here = [
            row
            | ({"weights": {"rl": [weights["rl"]] * len(row["tokens"])}} if weights["rl"] else {})
            | ({"advantages": [streams["advantages"]] * len(row["tokens"])} if "advantages" in streams else {})
            for row in rows
        ]
        mine = jobs.share(here, where.dp_rank, where.dp)
        batches = [jobs.batch_of(mine, weights=("rl",) if weights["rl"] else ())]
        begun = outcome(lambda batches=batches, coef=coef: step.begin(batches, coef=coef))[:2]
        if begun != ("fine", ""):
            found[name] = {"begin": begun}
            continue
        found[name] = {"begin": begun} | ended(step, chunks, jobs.run_schedule(step, chunks), "raise")
    layouts.leave(chunks)
    return found


def silent(rows: list[Any]) -> dict[str, Any]:
    """All advantages 0: no gradient, but where the model has losses of its own."""
    found = {}
    flat = [row | {"advantages": [0.0] * len(row["tokens"])} for row in rows]
    for name, model in {"dense": TINY, "moe": EXPERTS | dict(moe_aux_coeff=0.1)}.items():
        job = Job(model=model)
        chunks, where = jobs.build(job)
        step = pgm.PolicyLossStep(SPEC, chunks, split=job.split)
        step.begin(jobs.batches_of(job, where, SPEC, flat))
        found[name] = ended(step, chunks, jobs.run_schedule(step, chunks), "raise")
        layouts.leave(chunks)
    return found


def half(rows: list[Any]) -> dict[str, Any]:
    """fp16 with a loss scale that overflows: Megatron's scaler has to see it, and to skip the step itself."""
    job = Job(model=TINY | dict(dtype=torch.float16), loss_scale=2.0**40)
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split)
    step.begin(jobs.batches_of(job, where, SPEC, rows))
    found = ended(step, chunks, jobs.run_schedule(step, chunks), "raise")
    layouts.leave(chunks)
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    rows = jobs.rows_of_step(0, max_length=13)
    found: dict[str, Any] = {}
    for name, (job, options) in JOBS.items():
        places = [(at, "raise") for at in (("padding", "context") if name in TWICE else ("padding",))]
        found[name] = spoiled(job, options, rows, rank, [*places, *([("padding", "skip")] if name in TWICE else [])])
    return found | {
        "expert": one_expert(rows, rank), "overflow": overflown(rows), "silent": silent(rows), "half": half(rows),
        "unwrapped": unwrapped(rows),
    }  # fmt: skip


TWICE = ("dp2, plain", "keep", "pp2", "cp2")
"""Where context positions are spoiled too, and a step is skipped."""
found = world_fixture(tour, 2)


def alike(found: Any, look: Callable[[Any], Any]) -> Any:
    """What both ranks saw."""
    one, other = (look(by_rank) for by_rank in found)
    assert one == other
    return one


@pytest.mark.multiproc
@pytest.mark.parametrize("name", JOBS)
def test_a_nan_activation_outside_of_the_loss_stops_the_step_on_every_rank(name: str, found: Any) -> None:
    for at in ("padding", "context") if name in TWICE else ("padding",):
        assert any(by_rank[name][at, "raise"]["hit"] for by_rank in found)
        kind, text = alike(found, lambda seen, at=at: seen[name][at, "raise"]["error"])
        assert kind == "NonFiniteError"
        assert "the gradients are not finite, although the loss is" in text and "at rank " in text
    clean = alike(found, lambda seen: seen[name]["clean"])
    assert (clean["error"], clean["should_step"], clean["faults"]) == (("fine", ""), True, 0.0)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", TWICE)
def test_a_nan_activation_outside_of_the_loss_can_be_skipped(name: str, found: Any) -> None:
    seen = [by_rank[name]["padding", "skip"] for by_rank in found]
    for one in seen:
        assert (one["error"], one["skipped"], one["should_step"], one["zero"]) == (("fine", ""), 1.0, False, True)
        assert one["faults"] >= 1
        assert one["in loss"] == 0


@pytest.mark.multiproc
def test_a_gradient_that_one_rank_alone_holds_stops_all(found: Any) -> None:
    kind, text = alike(found, lambda seen: seen["expert"]["error"])
    assert kind == "NonFiniteError"
    assert "got a largest size of inf; at rank 1" in text


@pytest.mark.multiproc
@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_product_that_overflows_stops_the_step(name: str, found: Any) -> None:
    seen = alike(found, lambda seen: seen["overflow"][name])
    if seen["begin"] != ("fine", ""):  # refused before any forward pass: as good
        assert seen["begin"][0] == "DataError"
        return
    assert seen["error"][0] == "NonFiniteError"
    what = "the loss is not finite" if "1e308 x" in name else "the gradients are not finite"
    assert what in seen["error"][1] and "overflow" in seen["error"][1]


@pytest.mark.multiproc
def test_a_step_without_signal_is_made_where_the_model_has_gradients_of_its_own(found: Any) -> None:
    for by_rank in found:
        dense, moe = by_rank["silent"]["dense"], by_rank["silent"]["moe"]
        assert dense["error"] == moe["error"] == ("fine", "")
        assert (dense["should_step"], dense["zero"]) == (False, True)
        assert (moe["should_step"], moe["zero"]) == (True, False)


@pytest.mark.multiproc
def test_fp16_gradients_that_overflow_are_left_to_the_loss_scaler(found: Any) -> None:
    seen = alike(found, lambda seen: seen["half"])
    assert (seen["error"], seen["should_step"]) == (("fine", ""), True)
    assert seen["faults"] == 2


@pytest.mark.multiproc
def test_gradients_of_a_model_without_a_wrapper_are_looked_at_and_zeroed(found: Any) -> None:
    seen = alike(found, lambda seen: seen["unwrapped"])
    assert seen["clean"] == ("fine", True)
    assert seen["raise"][0] == "NonFiniteError"
    assert seen["skip"] == ("fine", False)
    assert seen["zero"]
