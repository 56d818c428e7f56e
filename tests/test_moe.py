"""Mixture of experts: the policy gradient under expert parallelism, against the oracle.

With the auxiliary coefficients at 0 every parameter, the router's included, is compared. That Megatron's own losses
keep their weight beside ours is tests/test_own_losses.py. Empty micro-batches dilute those losses, and are refused
unless allowed by name.
"""

from __future__ import annotations

from typing import Any

import pytest

import megatron_pgloss as pg
from support import jobs, layouts
from support.faulty import outcome
from support.jobs import Job
from support.layouts import SP
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
EXPERTS = dict(experts=4, topk=2)
AUX = EXPERTS | dict(moe_aux_coeff=0.1, moe_z_coeff=0.01)
JOBS = {
    "ep2": Job(ep=2, model=EXPERTS),
    "ep2, per-token": Job(ep=2, model=EXPERTS, per_token=True),
    "ep4, one rank empty": Job(ep=4, model=EXPERTS, empty_rank=True),
    "ep2 pp2": Job(ep=2, pp=2, model=EXPERTS),
    "ep2 tp2 sp, per-token": Job(ep=2, tp=2, model=EXPERTS | SP, per_token=True),
    "ep2 cp2 distributed optimizer": Job(ep=2, cp=2, model=EXPERTS | layouts.DISTOPT),
    "ep2 average_in_collective": Job(ep=2, model=EXPERTS | dict(average_in_collective=True)),
}


def refused(rows: list[Any]) -> dict[str, Any]:
    """Micro-batches without rows, where an auxiliary loss averages over micro-batches."""
    from megatron_pgloss import megatron as pgm

    found = {}
    for name, model in (("aux", AUX), ("no aux", EXPERTS)):
        job = Job(ep=2, model=model, empty_rank=True)
        chunks, where = jobs.build(job)
        batches = jobs.batches_of(job, where, pg.presets.dapo(), rows)
        for allowed in (False, True):
            step = pgm.PolicyLossStep(pg.presets.dapo(), chunks, split=job.split, allow_empty_microbatches=allowed)
            found[name, allowed] = outcome(lambda step=step, batches=batches: step.begin(batches))[:2]
        found[name, "plan"] = step.plan.report() if name == "aux" else ""
        layouts.leave(chunks)
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    chunks, model_fn = jobs.oracle_model(**EXPERTS)
    rows = jobs.rows_of_step(0, model_fn)
    loss, reference, _ = jobs.oracle_answer(chunks, model_fn, rows, layouts.rich())
    layouts.leave(chunks)
    found: dict[str, Any] = {}
    for name, job in JOBS.items():
        chunks, where = jobs.build(job)
        metrics, grads, _ = jobs.one_step(job, chunks, where, layouts.rich(), rows)
        found[name] = (abs(metrics["loss"] / loss - 1), *jobs.worst(grads, reference))
        layouts.leave(chunks)
    found["router"] = max(float(grad.abs().max()) for name, grad in reference.items() if "router" in name)
    return found | {"refused": refused(rows)}


everyone = world_fixture(tour, 4)


@pytest.fixture(scope="module")
def found(everyone: Any, table: list[str]) -> list[dict[str, Any]]:
    results = everyone
    for name in JOBS:
        loss, gradient, parameter = results[0][name]
        table.append(f"experts, {name}: loss {loss:.0e}, gradient {gradient:.0e}, {parameter}")
    return results


@pytest.mark.parametrize("name", JOBS)
def test_the_policy_gradient_of_experts_and_router_equals_the_oracle(name: str, found: Any) -> None:
    for by_rank in found:
        loss, gradient, parameter = by_rank[name]
        assert loss < 1e-10
        assert gradient < 1e-10, parameter
    assert found[0]["router"] > 1e-4


def test_an_empty_microbatch_is_refused_where_it_would_dilute_and_allowed_by_name(found: Any) -> None:
    seen = [by_rank["refused"] for by_rank in found]
    kind, text = seen[0]["aux", False]
    assert [one["aux", False] for one in seen] == [(kind, text)] * 4
    assert kind == "LayoutError"
    assert "micro-batch would be empty" in text
    assert "allow_empty_microbatches=True" in text
    for case in (("aux", True), ("no aux", False), ("no aux", True)):
        assert [one[case] for one in seen] == [("fine", "")] * 4
