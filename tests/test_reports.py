"""What broke other people's losses, in numbers small enough for paper; each is the right value of a public report."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from support.steps import NAN, ONE, near, pictured, solve

SEQUENCE = "mean(sequence) > mean(token)"
T, F = True, False


@pytest.mark.parametrize(
    ("case", "normalizer", "losses", "keep", "value"),
    [
        ("K micro-batches", "mean(token)", [[1, 2], [3, 4]], None, 2.5),
        ("mean of sums", "mean(sequence) > sum(token)", [[1, 1, 1, 1], [2, 2]], None, 4.0),
        ("mean of means", SEQUENCE, [[1, 1, 1, 1], [2, 2]], None, 1.5),
        ("token mean", "mean(token)", [[1, 1, 1, 1], [2, 2]], None, 8 / 6),
        ("NaN outside", "mean(token)", [[1, NAN]], [[T, F]], 1.0),
        ("all masked", "mean(token)", [[3, 4]], [[F, F]], 0.0),
        ("no epsilon", "mean(token)", [[1, 3]], None, 2.0),
        ("tool tokens", "mean(token)", [[1, 1, 9, 9, 1]], [[T, T, F, F, T]], 1.0),
        ("token t has gradient t", "mean(token)", [[1, 2, 3, 4, 5, 6, 7, 8]], None, 4.5),
        ("an empty micro-batch", "mean(token)", [[1, 3], [5, 7]], [[T, T], [F, F]], 2.0),
        ("phantom tokens", "mean(token)", [[2, 2, 2], [9], [9]], [[T] * 3, [F], [F]], 2.0),
        ("uneven micro-batches", "mean(token)", [[2], [1, 1, 1]], None, 1.25),
        ("and an empty one", "mean(token)", [[2], [1, 1, 1], [9]], [[T], [T] * 3, [F]], 1.25),
        ("tokens, not sequences", "mean(token)", [[1], [1, 1, 1]], None, 1.0),
        ("sequence mean", SEQUENCE, [[2], [1, 1, 1]], None, 1.5),
        ("length-weighted", "mean(token)", [[2], [1, 1, 1]], None, 1.25),
        ("an ignored row", "mean(token)", [[1], [1], [1], [9]], [[T], [T], [T], [F]], 1.0),
        ("an ignored token", "mean(token)", [[log(2), log(2), 9]], [[T, T, F]], log(2)),
    ],
)
@pytest.mark.parametrize("split", [pg.Split(sequences=1), pg.Split(sequences=9), pg.Split(max_tokens=9)])
def test_averages(
    case: str, normalizer: str, losses: list[list[float]], keep: list[list[bool]] | None, value: float, split: pg.Split
) -> None:
    """Given losses under a normaliser, whatever the micro-batches."""
    rows = ["c" + "A" * len(row) for row in losses]
    flat = [x for row in losses for x in (*row, NAN)]
    flags = [x for row in keep or [[T] * len(row) for row in losses] for x in (F, *row)]
    spec = pg.presets.reinforce(normalizer=normalizer, masks=[pg.UserMask(name="keep")])
    plan = pg.plan([pictured(*rows, masks={"keep": flags})], spec, split=split)
    loss_T = torch.tensor(flat, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for micro in plan.microbatches():
        own = loss_T[micro.index_N.clamp(min=0)].reshape(micro.shape)
        total = total + pg.weighted_sum(own, micro, "rl")
    near(total, value)


def ratio_none(*, advantages: Any = 1.0, **more: Any) -> tuple[pg.LossSpec, dict[str, Any]]:
    part = pg.PolicyGradient(surrogate=pg.Clip(), ratio="none")
    return pg.LossSpec(components=[part]), {"advantages": advantages} | more


def test_no_argument_is_ignored() -> None:
    """Weights [1, 2, 9], mask [1, 1, 0], ratio 1: -(1 + 2)/2."""
    spec, given = ratio_none(weights={"rl": [0.0, 1.0, 2.0, 9.0]}, masks={"m": [T, T, T, F]})
    answer = solve(pictured("cAAA", **given), spec.replace(masks=[pg.UserMask(name="m")]), [-1.0, -1.0, -1.0, NAN])
    near(answer.loss, -1.5)
    near(answer.grad_T, [-0.5, -1.0, 0.0, 0.0])


def test_importance_weights_carry_no_gradient() -> None:
    """log pi = -1, mu = -1.2: weight e^0.2; dL/dlp = -1.2214028, and not 0 as through a differentiated weight."""
    batch = pictured("cA", old_logprobs=-1.0, rollout_logprobs=-1.2)
    answer = solve(batch, pg.presets.ppo(corrections=[pg.TruncatedIS()]), [-1.0, NAN])
    near(answer.grad_T, [-1.2214027581601699, 0.0])


def test_kl_is_added_to_what_is_minimised() -> None:
    """pg 0.2, kl 0.5, beta 0.1: 0.25."""
    batch = pictured("cA", advantages=-0.2, old_logprobs=-1.0, ref_logprobs=-1.5)
    near(solve(batch, pg.presets.ppo(kl=0.1, kl_estimator="k1"), [-1.0, NAN]).loss, 0.25)


def test_log_ratios_are_bounded_and_nan_stays_visible() -> None:
    """fp32, log-ratio 100, A = -1: e^20 = 4.8517e8, gradient 0. NaN is counted, not made a 0 in silence."""
    batch = pictured("cAA", dtype=torch.float32, advantages=-1.0, old_logprobs=-100.5)
    answer = solve(batch, pg.presets.ppo(normalizer="sum(token)"), torch.tensor([-0.5, NAN, NAN]))
    assert abs(answer.loss / 4.8516520e8 - 1) < 1e-6 and answer.grad_T.tolist() == [0.0, 0.0, 0.0]
    assert answer.metrics["rl/fault"] == 1.0


def test_excluded_tokens_are_selected_before_exp() -> None:
    """fp32 log-ratios [0.1, 200] of which the second is masked, A = 1, no clip: -1.1051709, gradient 0 there."""
    batch = pictured("cAA", dtype=torch.float32, old_logprobs=[0.0, -1.0, -201.0], masks={"m": [T, T, F]})
    answer = solve(batch, pg.presets.ppo(high=9.0, masks=[pg.UserMask(name="m")]), torch.tensor([-0.9, -1.0, NAN]))
    assert abs(answer.loss + 1.1051709) < 1e-6 and answer.grad_T[1] == 0.0


def test_plain_k3_has_the_gradient_of_its_value() -> None:
    """lp = old = -1, ref = -2: k3 = 0.3678794, plain derivative 0.6321206."""
    answer = solve(pictured("cA", ref_logprobs=-2.0), pg.LossSpec(components=[pg.KL()]), [-1.0, NAN])
    near([answer.loss, float(answer.grad_T[0])], [0.36787944117144233, 0.6321205588285577])


def test_equal_policies_in_full_precision_have_ratio_one() -> None:
    values = torch.tensor([-5.37, -17.3, NAN])
    batch = pictured("cAA", dtype=torch.float32, old_logprobs=torch.tensor([0.0, -5.37, -17.3]))
    assert solve(batch, pg.presets.ppo(), values).metrics["rl/ratio_max"] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_temperature_on_both_sides(dtype: torch.dtype) -> None:
    """Logits [0, 1], T = 0.5, sampled token 1: lp -0.1269280, H 0.3653339, ratio 1."""
    batch = pg.TokenBatch.from_padded(
        tokens=torch.tensor([[0, 1]]),
        lengths=[2],
        action_mask=torch.tensor([[F, T]]),
        advantages=torch.ones(1, dtype=dtype),
        old_logprobs=torch.tensor([[0.0, -0.12692801104297263]], dtype=dtype),
        temperature=0.5,
    )
    (micro,) = pg.plan([batch], pg.presets.ppo(), split=ONE).microbatches()
    logits = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]], dtype=dtype)
    lp = pg.token_logprobs(logits, micro.targets, temperature=micro.temperature, entropy=True)
    assert lp.entropy is not None
    rtol = 1e-6 if dtype == torch.float32 else 1e-14
    near(lp.logprob[0, 0], -0.12692801104297263, rtol)
    near(lp.entropy[0, 0], 0.3653339, 1e-6)
    near(pg.policy_loss(lp, micro).metrics["rl/ratio"].value, 1.0, rtol)


@pytest.mark.parametrize(
    ("case", "picture", "trained"),
    [
        ("the first answer token is trained", "cccAA", [F, F, T, T, F]),
        ("a mask on the first token holds nothing", "occ", [F, F, F]),
        ("samples of 3 and 2 tokens", "cAA cA", [T, T, F, T, F]),
    ],
)
def test_alignment(case: str, picture: str, trained: list[bool]) -> None:
    batch = pictured(*picture.split())
    flags: Tensor = batch.action_T | batch.target_T
    assert flags.tolist() == trained
