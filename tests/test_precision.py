"""bf16 and fp16 through Float16Module: the logits stay in half precision, and a layout adds no error of its own.

The judge is the float64 model with the same (rounded) weights. What a layout may differ by is measured against the same
half-precision model on one process: rounding inside the model, not the loss, is what is seen there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from support import jobs, layouts
from support.cover import pairs, visited
from support.jobs import Job
from support.layouts import SP
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
JOBS = {
    "dp4": Job(layers=4),
    "tp2 pp2": Job(tp=2, pp=2, layers=4),
    "pp2 vpp2, per-token": Job(pp=2, vpp=2, per_token=True),
    "cp2 packed": Job(cp=2, split=pg.Split(max_tokens=80), layers=4),
    "tp2 cp2 sp, per-token": Job(tp=2, cp=2, model=SP, per_token=True, layers=4),
}


CASES = visited(
    "half precision",
    [(kind, name) for kind in HALF for name in JOBS],
    lambda case: pairs({case[0], *layouts.axes(JOBS[case[1]])}),
)


def spec() -> pg.LossSpec:
    """A clip too wide to hold anywhere: rounding that moves one token over an edge would hide all else."""
    return pg.presets.grpo(low=0.9, high=9.0, kl=0.1, entropy=0.05)


def distance(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Relative error of the whole gradient in the Euclidean norm."""
    gap = sum(float((grads[name] - value).square().sum()) for name, value in reference.items())
    return (gap / sum(float(value.square().sum()) for value in reference.values())) ** 0.5


def one_step(job: Job, chunks: list[Any], batches: list[pg.TokenBatch]) -> dict[str, Any]:
    """Score, then a step on the scored log-probs and one on the given ones; dtypes as the loss sees them."""
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss.verify.layouts.reshard import full_gradients

    step = pgm.PolicyLossStep(spec(), chunks, split=job.split)
    seen: set[torch.dtype] = set()

    def forward_step(data_iterator: Any, model: Any, *_: Any) -> Any:
        output, loss_func = step.forward_step(data_iterator, model)

        def loss(logits: torch.Tensor, **more: Any) -> Any:
            seen.add(logits.dtype)
            returned = loss_func(logits, **more)
            seen.add(("loss", returned[0].dtype))
            return returned

        return output, loss

    step.begin(step.score(batches, into="old"))
    metrics = step.finish(jobs.run_schedule(step, chunks))
    found: dict[str, Any] = {"ratio": (metrics["rl/ratio_min"], metrics["rl/ratio_max"])}
    step.begin(batches)
    metrics = step.finish(jobs.run_schedule(step, chunks, forward_step_func=forward_step))
    found |= {"dtypes": seen, "loss": metrics["loss"], "fault": metrics["rl/fault"]}
    found["grads"] = {name: grad / job.loss_scale for name, grad in full_gradients(chunks).items()}
    found["last"] = step.layout.last_stage
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    from megatron_pgloss.verify.layouts.reshard import full_parameters, load_full

    layouts.quiet()
    found: dict[str, Any] = {}
    for kind, dtype in HALF.items():
        model = dict(dtype=dtype)
        one = Job(model=model, layers=4, loss_scale=256.0 if kind == "fp16" else 1.0, split=pg.Split(sequences=11))
        chunks, where = jobs.build(one)
        rounded = full_parameters(chunks)
        layouts.leave(chunks)

        chunks, model_fn = jobs.oracle_model(layers=4)
        load_full(chunks, rounded)
        rows = [row | {"weights": {}} for row in jobs.rows_of_step(0, model_fn)]
        rows = [
            row | {k: torch.tensor(row[k]).tolist() for k in ("old", "ref", "advantages")} for row in rows
        ]  # float32
        loss, reference, _ = jobs.oracle_answer(chunks, model_fn, rows, spec())
        layouts.leave(chunks)

        # One process: the first rank has everything, the others nothing.
        chunks, where = jobs.build(one)
        alone = one_step(one, chunks, [jobs.batch_of(rows, dtype=torch.float32)] if rank == 0 else [])
        layouts.leave(chunks)
        error = {"loss": abs(alone["loss"] / loss - 1), "all": distance(alone["grads"], reference)}
        found[kind, "one process"] = error | {"worst": jobs.worst(alone["grads"], reference)}
        for name, job in ((name, JOBS[name]) for of, name in CASES if of == kind):
            job = replace(job, model=job.model | model, loss_scale=one.loss_scale)
            chunks, where = jobs.build(job)
            mine = jobs.share(rows, where.dp_rank, where.dp)
            seen = one_step(job, chunks, [jobs.batch_of(mine, dtype=torch.float32)])
            layouts.leave(chunks)
            grads = seen.pop("grads")
            seen |= {"loss": abs(seen["loss"] / loss - 1), "all": distance(grads, reference)}
            found[kind, name] = seen | {"worst": jobs.worst(grads, reference)}
    return found


everyone = world_fixture(tour, 4)


@pytest.fixture(scope="module")
def found(everyone: Any, table: list[str]) -> list[dict[str, Any]]:
    results = everyone
    for (kind, name), seen in results[0].items():
        table.append(
            f"{kind} on {name}: loss {seen['loss']:.1e}, gradient {seen['all']:.1e} in norm, "
            f"worst parameter {seen['worst'][0]:.1e} ({seen['worst'][1]})"
        )
    return results


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_logits_reach_the_loss_in_half_precision_and_the_loss_is_float32(kind: str, name: str, found: Any) -> None:
    for seen in (by_rank[kind, name] for by_rank in found):
        assert seen["dtypes"] == ({HALF[kind], ("loss", torch.float32)} if seen["last"] else set())
        assert seen["fault"] == 0


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_layout_is_at_most_twice_as_far_off_as_one_process(kind: str, name: str, found: Any) -> None:
    alone, seen = found[0][kind, "one process"], found[0][kind, name]
    assert alone["all"] < 0.05
    assert seen["all"] < 2 * alone["all"]
    assert seen["worst"][0] < 2 * alone["worst"][0]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_first_update_on_recorded_scores_has_ratio_exactly_one(kind: str, name: str, found: Any) -> None:
    assert [by_rank[kind, name]["ratio"] for by_rank in found] == [(1.0, 1.0)] * 4
