"""Every preset on real Megatron-Core layouts: tensor with pipeline, context with data parallelism, packed rows.

One world of four processes visits them all; loss, every parameter's gradient and every metric are held against the
float64 oracle, as in tests/test_layouts.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import megatron_pgloss as pg
from support import heads, jobs, layouts
from support.cover import visited
from support.jobs import Job
from support.layouts import axes
from support.objectives import NO_MODEL, presets
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-10
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": dict(tp=2, pp=2),
    "cp2 dp2": dict(cp=2, per_token=True),
    "cp2 dp2, packed": dict(cp=2, split=pg.Split(max_tokens=80), shuffle=1),
    "tp2 dp2, packed": dict(tp=2, split=pg.Split(max_tokens=160), per_token=True),
}


TAUGHT = pg.LossSpec(
    components=[
        pg.PolicyGradient(),
        pg.TopKDistill(coef=0.3, normalizer="mean(prompt) > mean(token)"),
        pg.TopKDistill(name="watched", direction="reverse", tail="renormalize", on="observation", coef=0.2),
    ]
)
"""A teacher's top-k beside a policy gradient."""


def _on_sets(**rule: Any) -> pg.LossSpec:
    return pg.LossSpec(
        components=[
            pg.PolicyGradient(surrogate=pg.Clip(low=0.4, high=0.6)),
            pg.KL(estimator="k3", coef=0.1),
            pg.Entropy(coef=0.05),
            pg.CrossEntropy(coef=0.2),
        ],
        kept=pg.KeptSet(outside="add", **rule),
    )


KEPT = {
    "kept sets": _on_sets(source="recomputed"),
    "kept sets, min-p first": _on_sets(source="recomputed", top_p_of="top_k_min_p"),
    "recorded sets": _on_sets(source="recorded"),
}
"""Log-prob, entropy and KL on the sets that the sampler drew from; observations keep the whole vocabulary."""


SPECS = {name: spec for name, spec in presets().items() if name not in NO_MODEL} | {"taught": TAUGHT} | KEPT
CRITIC = "critic"
"""A model of its own."""


def traits(spec: pg.LossSpec) -> set[str]:
    """What a spec consists of, in words. Its surrogates work token by token: one layout says as much as another."""
    data = spec.to_dict()
    found = {f"old {data['old']}"} | {
        f"{part['kind']}" for key in ("gates", "corrections", "masks") for part in data[key]
    }
    for part in data["components"]:
        found |= {part["kind"], *(f"{key} {part[key]}" for key in ("ratio", "estimator") if part.get(key))}
    return found | ({"kept"} if data.get("kept") else set())


def shows(case: tuple[str, str]) -> set[Any]:
    """Every preset, every layout, and every trait of a spec with every axis of a layout."""
    name, layout = case
    at = Job(world=4, **LAYOUTS[layout])
    own = {f"spec {name}"} if name == CRITIC else traits(SPECS[name])
    triples = [("cp", "packed", trait) for trait in own if "ratio" in trait] if {"cp", "packed"} <= axes(at) else []
    return {f"spec {name}", layout, *product(sorted(axes(at)), sorted(own)), *triples}


CASES = visited("presets x layouts", [(name, layout) for name in [*SPECS, CRITIC] for layout in LAYOUTS], shows)


def tour(rank: int, world: int) -> dict[str, list[Any]]:
    """The chosen presets on each layout."""
    from megatron_pgloss.verify.run.visit import visit

    layouts.quiet()
    judge, truth, found = jobs.judge_of(SPECS), heads.Truth(), {}
    for name, fields in LAYOUTS.items():
        job, chosen = Job(world=world, **fields), [spec for spec, layout in CASES if layout == name]
        found[name] = visit(job, judge, [spec for spec in chosen if spec != CRITIC])
        if CRITIC in chosen:
            found[name].append(heads.visit(job, CRITIC, truth))
    return found


everyone = world_fixture(tour, 4, timeout=900, early=True)


@pytest.fixture(scope="module")
def found(everyone: Any, table: list[str]) -> dict[str, dict[str, Any]]:
    by_layout = everyone[0]
    worst = max((one for many in by_layout.values() for one in many), key=lambda one: one.gradient_error)
    table.append(
        f"presets on {len(by_layout)} layouts: worst gradient {worst.gradient_error:.1e} ({worst.spec}, "
        f"{worst.parameter})"
    )
    return {name: {one.spec: one for one in many} for name, many in by_layout.items()}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_preset_has_the_oracles_gradient_on_a_layout(name: str, layout: str, found: Any) -> None:
    seen = found[layout][name]
    assert not seen.error, seen.error
    assert seen.loss_error < TOLERANCE and seen.gradient_error < TOLERANCE, (seen.loss_error, seen.parameter)
    assert seen.metric_error < TOLERANCE, seen.metric


def test_every_preset_and_spec_is_there() -> None:
    assert {name for name, _ in CASES} == {"taught", *KEPT, *pg.presets.PRESETS}
