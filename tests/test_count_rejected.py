"""`count_rejected` as a keyword of presets: verl's denominators without a preset written anew."""

from __future__ import annotations

import math

import pytest
import torch

import megatron_pgloss as pg
from support.steps import ONE, near

# One row of four actions; old/mu is 1, 1, 10, 1, so that a band from 0.5 to 2 rejects the third.
OLD = [0.0, 0.0, 0.0, math.log(10), 0.0]


def batch() -> pg.TokenBatch:
    return pg.TokenBatch.from_packed(
        tokens=torch.zeros(5, dtype=torch.int64), lengths=[5],
        action_mask=torch.tensor([False, True, True, True, True]), advantages=torch.ones(1),
        old_logprobs=torch.tensor(OLD) - 3, rollout_logprobs=torch.full((5,), -3.0), ref_logprobs=torch.zeros(5) - 3,
    )  # fmt: skip


@pytest.mark.parametrize(("given", "weight"), [({}, 1 / 4), ({"count_rejected": True}, 1 / 4),
                                               ({"count_rejected": False}, 1 / 3)])  # fmt: skip
def test_the_weight_of_what_is_left(given: dict[str, bool], weight: float) -> None:
    """Three tokens are left of four: each weighs 1/4 while the rejected one is counted, else 1/3; the KL alike."""
    band = pg.IcePop(low=0.5, high=2.0, weight=False)
    spec = pg.presets.grpo(kl=0.1, corrections=[band], **given)
    plan = pg.plan([batch()], spec, split=ONE)
    for name in ("rl", "kl"):
        near(plan.components[name].weight_T, [weight, weight, 0, weight, 0], 1e-7)
        assert plan.counts[name]["token"] == round(1 / weight)


@pytest.mark.parametrize("name", pg.presets.PRESETS)
def test_every_preset_takes_it_and_cross_entropy_never_changes(name: str) -> None:
    preset = pg.presets.PRESETS[name]
    for part in preset.build(**preset.example).components:
        assert part.count_rejected
    for part in preset.build(**preset.example, count_rejected=False).components:
        assert part.count_rejected == (part.over == "observation")


def test_a_component_s_own_choice_is_left_alone() -> None:
    own = pg.KL(name="drift", coef=0.1, count_rejected=False)
    spec = pg.presets.ppo(more=(own,))
    assert [part.count_rejected for part in spec.components] == [True, False]


def test_gates_need_the_statistics_pass_then() -> None:
    assert not pg.presets.dppo_tv().needs_statistics_pass
    assert pg.presets.dppo_tv(count_rejected=False).needs_statistics_pass
