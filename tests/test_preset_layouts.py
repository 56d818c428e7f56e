"""Every preset on real Megatron-Core layouts: tensor with pipeline, context with data parallelism, packed rows.

One world of four processes visits them all; loss, every parameter's gradient and every metric are held against the
float64 oracle, as in tests/test_layouts.py.
"""

from __future__ import annotations

from typing import Any

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


def tour(rank: int, world: int) -> dict[str, list[Any]]:
    """All presets on each layout."""
    from megatron_pgloss.verify.judge import Judge
    from megatron_pgloss.verify.visit import visit

    layouts.quiet()
    judge = Judge({name: spec for name, spec in presets().items() if name not in NO_MODEL})
    return {name: visit(Job(world=world, layers=2, **fields), judge) for name, fields in LAYOUTS.items()}


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
@pytest.mark.parametrize("name", [name for name in pg.presets.PRESETS if name not in NO_MODEL])
def test_a_preset_has_the_oracles_gradient_on_every_layout(name: str, layout: str, found: Any) -> None:
    seen = found[layout][name]
    assert not seen.error, seen.error
    assert seen.loss_error < TOLERANCE and seen.gradient_error < TOLERANCE, (seen.loss_error, seen.parameter)
    assert seen.metric_error < TOLERANCE, seen.metric
