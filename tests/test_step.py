"""What Megatron's schedule gets from `loss_func`, and how a step ends: faults, miscounts, second updates, evaluation.

One world of four processes on three layouts; every outcome is looked at on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from support import jobs, layouts
from support.dispatched import Dispatched
from support.faulty import outcome
from support.jobs import Job
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
JOBS = {
    "dp4": Job(),
    "tp2 pp2, per-token": Job(tp=2, pp=2, per_token=True),
    "pp2 vpp2": Job(pp=2, vpp=2),
    "cp2 tp2 packed": Job(cp=2, tp=2, split=pg.Split(max_tokens=80)),
}
ROW = 5
NAME = "r5" + "\N{CJK UNIFIED IDEOGRAPH-8A13}" * 100
SHOWN = "'r5" + NAME[-1] * 29 + "..." + NAME[-1] * 15 + "' (102 characters)"
"""Of a name longer than 64 characters, quotes included: the first 32, the last 16, and how many it has."""
TOKEN = jobs.rows_of_step(0)[ROW]["action"].index(True) + 1
"""Row and token of the step whose log-prob is made NaN: an action, not the first of its row; its name is long."""


def spec() -> pg.LossSpec:
    return pg.LossSpec(
        components=[
            pg.PolicyGradient(normalizer="mean(sequence) > mean(token)"),
            pg.KL(coef=0.1),
            pg.Entropy(coef=0.05),
        ]
    )


def contract(step: Any, chunk: Any, batches: list[pg.TokenBatch], per_token: bool) -> list[str]:
    """Every promise about what ``loss_func`` returns, on one micro-batch; the names of those broken."""
    step.begin(batches)
    micro = next(step.data_iterator())
    loss_func = step.loss_func(micro)
    logits = step.run_model(micro, chunk).detach().requires_grad_()
    *twice, third = (loss_func(logits.clone()) for _ in range(3))
    loss, report = third[0], third[-1]
    frozen = {name: value.clone() for name, value in report.items()}
    first = loss.item()
    checks = {
        "form": len(third) == (3 if per_token else 2),
        "scalar": loss.dim() == 0 and loss.requires_grad,
        "not a view": loss._base is None and loss.untyped_storage().nbytes() == loss.element_size(),
        "detached report": not any(value.requires_grad for value in report.values()),
        "pairs": all(value.numel() == 2 and value.dtype == torch.float64 for value in report.values()),
        "own storage": loss.data_ptr() not in {value.data_ptr() for value in report.values()},
        "again the same": all(
            torch.equal(again[0], loss) and all(torch.equal(again[-1][k], v) for k, v in report.items())
            for again in twice
        ),
        "non_loss_data": all(
            torch.equal(value, report[name]) for name, value in loss_func(logits.clone(), non_loss_data=True).items()
        ),
    }
    if per_token:
        checks["count"] = (
            third[1].dtype == torch.int32 and third[1].dim() == 0 and int(third[1]) == micro.input_ids.numel()
        )
    with Dispatched() as seen:  # its streams are arranged by now
        loss_func(logits.clone())
    # Host tensors alone are looked into: temperatures that live on a CPU; in per-token mode a rounded factor, and the
    # arrangement where its tokens are counted.
    host = (micro.temperature is not None) + per_token * (2 - step._padding_counts)
    checks[f"no host sync: {seen.waits}"] = seen.waits == ["_local_scalar_dense"] * host
    # What the schedule does to it, in place, before and after backward.
    loss *= 3
    loss /= 7
    (gradient,) = torch.autograd.grad(loss, logits)
    loss.data = torch.empty((1,), dtype=loss.dtype)
    (reference,) = torch.autograd.grad(loss_func(logits.clone())[0], logits)
    gap = (gradient - reference * 3 / 7).abs().max() / reference.abs().max()
    checks["gradient follows"] = bool(gap < 1e-14) and first != 0
    checks["report untouched"] = all(torch.equal(report[name], value) for name, value in frozen.items())
    return [name for name, fine in checks.items() if not fine]


def poisoned(step: Any) -> Callable[..., Any]:
    """A forward step of the user's own that makes the logits of one target NaN, on whichever rank holds it."""

    def forward_step(data_iterator: Any, model: Any, *_: Any) -> Any:
        micro = next(data_iterator)
        batch, loss_func = step.plan.batch, step.loss_func(micro)
        hit = torch.zeros(micro.shape, dtype=torch.bool)
        if batch is not None and NAME in batch.sample_ids:
            at = int(batch.cu_S1[batch.sample_ids.index(NAME)]) + TOKEN - 1
            hit = (micro.index_N == at).reshape(micro.shape)

        def loss(logits: torch.Tensor, **more: Any) -> Any:
            return loss_func(torch.where(hit[..., None], float("nan"), logits), **more)

        return step.run_model(micro, model), loss

    return forward_step


def nonfinite(job: Job, chunks: list[Any], batches: list[Any], rule: str) -> dict[str, Any]:
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss.verify.layouts.reshard import full_gradients

    step = pgm.PolicyLossStep(spec(), chunks, split=job.split, on_nonfinite=rule)  # type: ignore[arg-type]
    step.begin(batches)
    losses = jobs.run_schedule(step, chunks, forward_step_func=poisoned(step))
    metrics: dict[str, float] = {}
    error = outcome(lambda: metrics.update(step.finish(losses)))
    grads = full_gradients(chunks)
    return {
        "error": error[:2],
        "metrics": {k: metrics.get(k) for k in ("rl/fault", "kl/fault", "entropy/fault", "skipped", "rl/loss", "loss")},
        "should_step": step.should_step,
        "finite": all(bool(grad.isfinite().all()) for grad in grads.values()),
        "zero": all(not bool(grad.any()) for grad in grads.values()),
    }


def miscounted(step: Any, chunks: list[Any], batches: list[Any], rank: int) -> dict[str, Any]:
    """`finish` with another number of reports than planned, on one rank; then with the right one."""
    step.begin(batches)
    losses = jobs.run_schedule(step, chunks)
    return {
        "dropped": outcome(lambda: step.finish(losses[:-1] if rank == 3 else losses))[:2],
        "twice": outcome(lambda: step.finish([*losses, *losses[-1:]]))[:2],
        "foreign": outcome(lambda: step.finish([{"lm loss": torch.zeros(2)} for _ in losses]))[:2],
        "right": outcome(lambda: step.finish(losses))[:2],
        "closed": outcome(lambda: step.finish(losses))[:2],
        "no plan": outcome(lambda: step.num_microbatches)[:2],
    }


def policies(job: Job, chunks: list[Any], batches: list[Any]) -> dict[str, Any]:
    """On-policy: an evaluation, the update, and a second one on the same rows by whatever way they come."""
    from megatron_pgloss import megatron as pgm

    step = pgm.PolicyLossStep(pg.presets.reinforce(), chunks, split=job.split)
    step.begin(batches)
    with torch.no_grad():
        looked = step.finish(jobs.run_schedule(step, chunks, forward_only=True))
    step.begin(batches)
    updated = step.finish(jobs.run_schedule(step, chunks))
    again = [outcome(lambda: step.begin(batches))[:2]]
    again += [outcome(lambda mini=mini: step.begin(mini))[:2] for mini in pg.minibatches(batches, 2, by="episode")]
    return {"evaluation": looked["loss"], "update": updated["loss"], "again": again}


def without_signal(job: Job, chunks: list[Any], batches: list[Any]) -> dict[str, Any]:
    """All advantages 0, and masked: loss 0, gradient exactly 0, said so; and a coefficient of this step alone."""
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss.verify.layouts.reshard import full_gradients

    flat = [batch.with_stream("advantages", torch.zeros_like(batch.streams["advantages"])) for batch in batches]
    masked = pg.presets.dapo(masks=(pg.DropZeroAdvantage(),))
    step = pgm.PolicyLossStep(masked, chunks, split=job.split)
    plan = step.begin(flat)
    metrics = step.finish(jobs.run_schedule(step, chunks))
    grads = full_gradients(chunks)
    found = {"signal": plan.has_signal, "should_step": step.should_step, "loss": metrics["loss"]}
    found["zero"] = all(not bool(grad.any()) for grad in grads.values())
    step = pgm.PolicyLossStep(spec(), chunks, split=job.split)
    losses = {}
    for kl in (0.1, 0.7):
        step.begin(batches, coef={"kl": kl})
        losses[kl] = step.finish(jobs.run_schedule(step, chunks))
    rest = {kl: seen["loss"] - kl * seen["kl/loss"] for kl, seen in losses.items()}
    return found | {"coef": abs(rest[0.1] - rest[0.7]), "kl": losses[0.1]["kl/loss"]}


def truth(layers: int) -> tuple[list[Any], float]:
    """The step's rows, and what the oracle's policy loss is without the term of the token that becomes NaN."""
    chunks, model_fn = jobs.oracle_model(layers=layers)
    rows = [row | {"weights": {}, "termination": "success"} for row in jobs.rows_of_step(0, model_fn)]
    _, _, answer = jobs.oracle_answer(chunks, model_fn, rows, spec())
    layouts.leave(chunks)
    assert rows[ROW]["action"][TOKEN]
    rows[ROW]["name"] = NAME
    lost = answer["weights"]["rl"][ROW][TOKEN] * answer["token_losses"]["rl"][ROW][TOKEN]
    return rows, float(answer["components"]["rl"] - lost)


def tour(rank: int, world: int) -> dict[str, Any]:
    from megatron_pgloss import megatron as pgm

    layouts.quiet()
    truths = {layers: truth(layers) for layers in {job.depth for job in JOBS.values()}}
    found: dict[str, Any] = {}
    for name, job in JOBS.items():
        rows, left = truths[job.depth]
        chunks, where = jobs.build(job)
        batches = jobs.batches_of(job, where, spec(), rows)
        step = pgm.PolicyLossStep(spec(), chunks, split=job.split)
        here: dict[str, Any] = {"broken": [], "left": left}
        if job.pp == 1:
            here["broken"] = contract(step, chunks[0], batches, job.per_token)
        here["miscounted"] = miscounted(step, chunks, batches, rank)
        here |= {rule: nonfinite(job, chunks, batches, rule) for rule in ("raise", "skip", "report")}
        here["flat"] = without_signal(job, chunks, batches)
        here["policy"] = policies(job, chunks, jobs.batches_of(job, where, spec(), rows))  # not updated on yet
        found[name] = here
        layouts.leave(chunks)
    # The contract in per-token mode, on a layout whose every rank is a last stage.
    job = replace(JOBS["dp4"], per_token=True)
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(spec(), chunks, split=job.split)
    found["broken"] = contract(step, chunks[0], jobs.batches_of(job, where, spec(), truths[job.depth][0]), True)
    layouts.leave(chunks)
    return found


found = world_fixture(tour, 4)


def same(found: Any, name: str, *path: str) -> Any:
    """What all ranks saw alike."""
    seen = []
    for by_rank in found:
        value = by_rank[name]
        for step in path:
            value = value[step]
        seen.append(value)
    assert [repr(value) for value in seen] == [repr(seen[0])] * len(seen)
    return seen[0]


def test_loss_func_keeps_the_schedules_contract(found: Any) -> None:
    assert [by_rank[name]["broken"] for by_rank in found for name in JOBS] == [[]] * (4 * len(JOBS))
    assert [by_rank["broken"] for by_rank in found] == [[]] * 4


@pytest.mark.parametrize("name", JOBS)
def test_a_wrong_number_of_reports_is_an_error_everywhere(name: str, found: Any) -> None:
    seen = same(found, name, "miscounted")
    for case in ("dropped", "twice", "foreign"):
        kind, text = seen[case]
        assert kind == "LayoutError", case
        assert "another number of micro-batch reports" in text
        assert "rank " in text
    assert "rank 3" in seen["dropped"][1]
    assert seen["right"] == ("fine", "")
    assert seen["closed"][0] == seen["no plan"][0] == "DataError"


@pytest.mark.parametrize("name", JOBS)
def test_a_nan_inside_a_component_raises_on_every_rank(name: str, found: Any) -> None:
    kind, text = same(found, name, "raise", "error")
    assert kind == "NonFiniteError"
    assert f"sample {SHOWN}, token {TOKEN}, stream 'logits'" in text
    assert "at rank " in text
    assert "component rl" in text
    assert same(found, name, "raise", "finite")


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("rule", ["skip", "report"])
def test_a_nan_inside_a_component_is_skipped_or_reported_alike(name: str, rule: str, found: Any) -> None:
    assert same(found, name, rule, "error") == ("fine", "")
    metrics = same(found, name, rule, "metrics")
    assert [metrics[f"{part}/fault"] for part in ("rl", "kl", "entropy")] == [1.0] * 3
    assert metrics["skipped"] == (rule == "skip")
    assert same(found, name, rule, "should_step") == (rule == "report")
    assert same(found, name, rule, "finite")
    assert same(found, name, rule, "zero") == (rule == "skip")
    # What is left is the loss without that token's terms.
    assert metrics["rl/loss"] == pytest.approx(same(found, name, "left"), rel=1e-12)


@pytest.mark.parametrize("name", JOBS)
def test_an_evaluation_is_no_update_and_a_second_update_is_refused(name: str, found: Any) -> None:
    seen = same(found, name, "policy")
    assert seen["evaluation"] == seen["update"]
    assert len(seen["again"]) == 3
    for kind, text in seen["again"]:
        assert kind == "DataError"
        assert "second update on the same rollouts with old='policy'" in text
        assert "sample 'r" in text


@pytest.mark.parametrize("name", JOBS)
def test_a_step_without_signal_has_zero_gradients_and_says_so(name: str, found: Any) -> None:
    seen = same(found, name, "flat")
    assert (seen["signal"], seen["should_step"], seen["zero"], seen["loss"]) == (False, False, True, 0.0)


@pytest.mark.parametrize("name", JOBS)
def test_a_coefficient_of_this_step_alone(name: str, found: Any) -> None:
    seen = same(found, name, "flat")
    assert seen["coef"] < 1e-12
    assert seen["kl"] > 1e-3
