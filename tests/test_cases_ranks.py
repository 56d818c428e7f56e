"""Inputs that broke other people's losses over several ranks: who is counted, and what a token weighs in the end.

One world of four plain processes, no model: each token's loss is theta times its slope, and the gradient of theta is
reduced over the ranks the way a wrapper would. Cases as in docs/cases.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from support.steps import near, pictured
from support.worlds import world_fixture

pytestmark = pytest.mark.multiproc

STEPS: dict[str, list[list[list[float]]]] = {
    # Rank by rank, row by row: the slope of each token.
    "PRIME-01, NRL-11": [[[2.0]], [[1.0, 1.0, 1.0]], [], []],
    "NRL-10": [[[1.0]], [[1.0]], [[1.0]], [[1.0]]],
    "SLIME-02": [[[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]], [], []],
    "MLM-03": [[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]], [[7.0, 8.0]]],
    "MLM-03, uneven": [[[1.0, 2.0, 3.0, 4.0, 5.0]], [[6.0]], [], [[7.0], [8.0]]],
}
RIGHT = {"PRIME-01, NRL-11": 1.25, "NRL-10": 1.0, "SLIME-02": 1.0, "MLM-03": 4.5, "MLM-03, uneven": 4.5}


def gradient(rows: list[list[float]], average: bool, split: pg.Split) -> tuple[float, dict[str, float]]:
    """Theta's gradient after the reduction, and the counts that the plan agreed on."""
    spec = pg.presets.reinforce(old="given", normalizer="mean(token)")
    batches = [pictured(*["c" + "A" * len(row) for row in rows])] if rows else []
    plan = pg.plan(batches, spec, split=split, group=dist.group.WORLD)
    slopes = torch.tensor([x for row in rows for x in (*row, 0.0)], dtype=torch.float64)
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    for micro in plan.microbatches():
        own = slopes[micro.index_N.clamp(min=0)] if rows else torch.zeros(micro.index_N.shape, dtype=torch.float64)
        loss = pg.weighted_sum((theta * own).reshape(micro.shape), micro, "rl")
        (loss * (plan.gradient_scale if average else 1.0)).backward()
    total = torch.zeros(()).double() if theta.grad is None else theta.grad.clone()
    dist.all_reduce(total)
    return float(total) / (dist.get_world_size() if average else 1), dict(plan.counts["rl"])


def world(rank: int, size: int) -> dict[Any, Any]:
    return {
        (name, average, split): gradient(ranks[rank], average, split)
        for name, ranks in STEPS.items()
        for average in (False, True)
        for split in (pg.Split(sequences=1), pg.Split(sequences=2), pg.Split(max_tokens=8))
    }


found = world_fixture(world, 4)


def test_token_weights_are_those_of_the_whole_step(found: list[dict[Any, Any]]) -> None:
    """By wrappers that add gradients up and by those that average them, however the ranks cut their rows."""
    for by_rank in found:
        for (name, average, split), (grad, _) in by_rank.items():
            assert grad == pytest.approx(RIGHT[name], rel=1e-14), (name, average, split)


def test_each_token_is_counted_once(found: list[dict[Any, Any]]) -> None:
    """VERL-29 over data-parallel ranks; a replica of several ranks speaks once, which tests/test_layouts.py holds."""
    for by_rank in found:
        for (name, _, _), (_, counts) in by_rank.items():
            near(float(counts["token"]), float(sum(len(row) for rows in STEPS[name] for row in rows)))
