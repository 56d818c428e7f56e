"""Every preset on real Megatron-Core layouts: tensor with pipeline, context with data parallelism, packed rows.

One world of four processes visits them all; loss, every parameter's gradient and every metric are held against the
float64 oracle, as in tests/test_layouts.py.
"""

from __future__ import annotations

from typing import Any

import heads
import layouts
import pytest
from jobs import Job
from objectives import NO_MODEL, presets

import megatron_pgloss as pg
from worlds import run_world

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


def tour(rank: int, world: int) -> dict[str, list[Any]]:
    """All presets on each layout."""
    from megatron_pgloss.verify.run.judge import Judge
    from megatron_pgloss.verify.run.visit import visit

    layouts.quiet()
    judge = Judge({name: spec for name, spec in presets().items() if name not in NO_MODEL} | {"taught": TAUGHT} | KEPT)
    found = {name: visit(Job(world=world, layers=2, **fields), judge) for name, fields in LAYOUTS.items()}
    truth = heads.Truth()
    for name, fields in LAYOUTS.items():  # a critic is a model of its own
        found[name].append(heads.visit(Job(world=world, layers=2, **fields), "critic", truth))
    return found


@pytest.fixture(scope="module")
def found(table: list[str]) -> dict[str, dict[str, Any]]:
    by_layout = run_world(tour, 4, timeout=500)[0]
    worst = max((one for many in by_layout.values() for one in many), key=lambda one: one.gradient_error)
    table.append(
        f"every preset on {len(by_layout)} layouts: worst gradient {worst.gradient_error:.1e} ({worst.spec}, "
        f"{worst.parameter})"
    )
    return {name: {one.spec: one for one in many} for name, many in by_layout.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["taught", *KEPT, *pg.presets.PRESETS])
def test_a_preset_has_the_oracles_gradient_on_every_layout(name: str, layout: str, found: Any) -> None:
    seen = found[layout][name]
    assert not seen.error, seen.error
    assert seen.loss_error < TOLERANCE and seen.gradient_error < TOLERANCE, (seen.loss_error, seen.parameter)
    assert seen.metric_error < TOLERANCE, seen.metric
