"""Values and gradients of every kind of component, worked out by hand on a few tokens.

Rows are "cA...": position t holds the log-prob of token t + 1, so the last entry of ``logp`` and of gradients is the
row's end, which predicts nothing.
"""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from support.steps import NAN, near, pictured, solve


def ratios(*values: float) -> list[float]:
    """Log-probs whose ratio to an old log-prob of -2 is as given."""
    return [-2.0 + log(value) for value in values] + [NAN]


def clip_spec(**surrogate: Any) -> pg.LossSpec:
    return pg.LossSpec(components=[pg.PolicyGradient(surrogate=pg.Clip(**surrogate), normalizer="sum(token)")])


def test_reinforce_is_minus_advantage_times_logprob() -> None:
    """A = 2 at log-probs -0.2 and -0.7, token mean: (2 * 0.2 + 2 * 0.7)/2 = 0.9, gradient -2/2 each. The first token of
    the row and the masked one hold NaN."""
    batch = pictured("cAAAA", advantages=2.0, masks={"m": [True, False, True, True, False]})
    spec = pg.presets.reinforce(masks=[pg.UserMask(name="m")])
    answer = solve(batch, spec, [NAN, -0.2, -0.7, NAN, NAN])
    near(answer.loss, 0.9)
    assert answer.grad_T.tolist() == [0.0, -1.0, -1.0, 0.0, 0.0]


def test_normalisers_add_terms_up_as_they_say() -> None:
    """Terms [[2], [1, 1, 1, 1]]: sequence mean (2 + 1)/2, token mean 6/5, budget 4 (2/4 + 4/4)/2."""
    terms = torch.tensor([[2.0, NAN, NAN, NAN, NAN], [1.0, 1.0, 1.0, 1.0, NAN]], dtype=torch.float64)
    for normalizer, value in (
        ("mean(sequence) > mean(token)", 1.5),
        ("mean(token)", 1.2),
        ("mean(sequence) > sum(token)/4", 0.75),
        ("mean(sequence) > sum(token)", 3.0),
    ):
        batch = pictured("cA", "cAAAA")
        (micro,) = pg.plan(
            [batch], pg.presets.reinforce(normalizer=normalizer), split=pg.Split(sequences=2)
        ).microbatches()
        near(pg.weighted_sum(terms, micro, "rl"), value)
        # The same through the objective: -A log pi with A = 1.
        near(solve(batch, micro.spec, [-2.0, NAN, -1.0, -1.0, -1.0, -1.0, NAN]).loss, value)


@pytest.mark.parametrize(
    ("advantage", "ratio", "term", "slope", "gate"),
    [
        # -min(r A, clip(r, 0.8, 1.28) A); inside, the slope by the log-prob is -A r.
        (1.5, 1.0, -1.5, -1.5, 0),
        (1.5, 1.2, -1.8, -1.8, 0),
        (1.5, 0.5, -0.75, -0.75, 0),  # below the lower bound a good token is pulled up
        (1.5, 1.4, -1.92, 0.0, 2),  # 1.28 * 1.5
        (-1.5, 1.0, 1.5, 1.5, 0),
        (-1.5, 0.9, 1.35, 1.35, 0),
        (-1.5, 0.5, 1.2, 0.0, 1),  # 0.8 * 1.5
        (-1.5, 2.0, 3.0, 3.0, 0),  # above the upper bound a bad token is pushed down
        (-1.5, 5.0, 4.5, 0.0, 3),  # but for the dual bound: 3 * 1.5
        (1.5, 5.0, -1.92, 0.0, 2),  # which is none for good tokens
        (0.0, 5.0, 0.0, 0.0, 0),
    ],
)
def test_clip_on_both_sides_of_both_signs(advantage: float, ratio: float, term: float, slope: float, gate: int) -> None:
    batch = pictured("cA", advantages=advantage, old_logprobs=-2.0)
    answer = solve(batch, clip_spec(low=0.2, high=0.28, dual=3.0), ratios(ratio), keep_tokens=True)
    near(answer.loss, term)
    near(answer.grad_T, [slope, 0.0])
    report = answer.outs[0].tokens["rl"]
    assert report.gate.tolist() == [[gate, -1]] and report.weight.tolist() == [[1.0, 0.0]]
    near(report.loss, [[term, 0.0]])
    assert report.ratio is not None
    near(report.ratio[0, 0], ratio)


def test_dual_is_off_unless_asked_for() -> None:
    answer = solve(pictured("cA", advantages=-1.0, old_logprobs=-2.0), clip_spec(), ratios(5.0))
    near(answer.loss, 5.0)
    near(answer.grad_T, [5.0, 0.0])


def test_the_smallest_bounds_still_bind_on_their_own_side() -> None:
    batch = pictured("cAA", advantages=[1.0, 1.0, -1.0], old_logprobs=-2.0)
    answer = solve(batch, clip_spec(low=0.0, high=0.0), ratios(1 + 1e-9, 1 - 1e-9))
    assert answer.loss == 0.0 and answer.grad_T.tolist() == [0.0, 0.0, 0.0]


def test_ratio_none_is_one_with_the_gradient_of_the_logprob() -> None:
    """Term -A, slope -A, whatever the log-prob and without an old stream; a clip never binds."""
    part = pg.PolicyGradient(surrogate=pg.Clip(low=0.0, high=0.0), ratio="none", normalizer="sum(token)")
    answer = solve(pictured("cAA", advantages=[9.0, 2.0, -3.0]), pg.LossSpec(components=[part]), [-5.0, -0.1, NAN])
    assert answer.loss == 1.0 and answer.grad_T.tolist() == [-2.0, 3.0, 0.0]


@pytest.mark.parametrize("spec", [pg.presets.ppo(), pg.presets.ppo(old="policy"), pg.presets.ppo(old="rollout")])
def test_equal_policies_have_ratio_one_and_the_plain_policy_gradient(spec: pg.LossSpec) -> None:
    """Bitwise, for any log-prob: gradient -A/n of token mean."""
    logp = torch.linspace(-9.7, -0.3, 5, dtype=torch.float64)
    token_order = torch.cat([torch.zeros(1, dtype=torch.float64), logp[:4]])
    advantages = [9.0, 1.0, -2.0, 3.0, -4.0]
    batch = pictured("cAAAA", advantages=advantages, old_logprobs=token_order, rollout_logprobs=token_order)
    answer = solve(batch, spec, logp)
    assert answer.grad_T.tolist() == [-0.25, 0.5, -0.75, 1.0, 0.0] and answer.loss == 0.5
    for name, value in (("ratio", 1.0), ("ratio_min", 1.0), ("ratio_max", 1.0), ("k1_old", 0.0), ("k3_old_pi", 0.0)):
        assert answer.metrics[f"rl/{name}"] == value
    assert [answer.metrics[f"rl/clip_{side}"] for side in ("low", "high", "dual")] == [0.0] * 3


@pytest.mark.parametrize("to", ["ref", "old", "rollout"])
@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: exp(-d) + d - 1, lambda d: 1 - exp(-d)),
    ],
)
def test_kl_estimators_and_their_plain_gradients(estimator: str, value: Any, slope: Any, to: str) -> None:
    """d = log pi - log base. With d = 1: 1, 0.5, 0.3678794 and slopes 1, 1, 0.6321206."""
    spec = pg.LossSpec(components=[pg.KL(estimator=estimator, to=to, coef=0.5)])
    answer = solve(pictured("cAA", **{f"{to}_logprobs": -2.0}), spec, [-1.0, -2.5, NAN])
    near(answer.loss, 0.5 * (value(1.0) + value(-0.5)) / 2)
    near(answer.grad_T, [0.25 * slope(1.0), 0.25 * slope(-0.5), 0.0])
    if estimator == "k3":
        near([value(1.0), slope(1.0)], [0.3678794, 0.6321206], 1e-6)


def test_kl_to_old_on_policy_has_value_zero() -> None:
    spec = pg.LossSpec(old="policy", components=[pg.KL(estimator="k1", to="old")])
    answer = solve(pictured("cA"), spec, [-3.0, NAN])
    assert answer.loss == 0.0 and answer.grad_T.tolist() == [1.0, 0.0]


def test_k3_keeps_its_digits_near_equality() -> None:
    """k3(1e-9) = 5e-19; exp(-d) + d - 1 as written gives 0 or 1e-16."""
    answer = solve(pictured("cA", ref_logprobs=0.0), pg.LossSpec(components=[pg.KL()]), [1e-9, NAN])
    near(answer.loss, 5e-19, 1e-6)
    assert abs(float(answer.grad_T[0]) - 1e-9) < 1e-16


def test_a_positive_coefficient_raises_entropy() -> None:
    """The term is -H: value -0.1 * (0.5 + 0.7)/2, gradient -0.05 by each entropy, none by the log-prob."""
    spec = pg.LossSpec(components=[pg.Entropy(coef=0.1)])
    answer = solve(pictured("cAA"), spec, [NAN, 3.0, NAN], [0.5, 0.7, NAN], fill=7.0)
    # A NaN log-prob of a member is a fault, whoever reads it: that token is left out, and said so.
    near(answer.loss, -0.1 * 0.7 / 2)
    assert answer.metrics["entropy/fault"] == 1
    whole = solve(pictured("cAA"), spec, [-1.0, 3.0, NAN], [0.5, 0.7, NAN])
    near(whole.loss, -0.1 * 1.2 / 2)
    near(whole.entropy_grad_T, [-0.05, -0.05, 0.0])
    assert whole.grad_T.tolist() == [0.0] * 3


def test_cross_entropy_runs_over_answers_alone() -> None:
    spec = pg.LossSpec(components=[pg.CrossEntropy(coef=2.0)])
    answer = solve(pictured("cAoAo"), spec, [NAN, -0.5, NAN, -1.5, NAN])
    near(answer.loss, 2.0)
    assert answer.grad_T.tolist() == [0.0, -1.0, 0.0, -1.0, 0.0]


def test_echo_by_both_of_its_normalisations() -> None:
    """Row 0 has answers of log-prob -1, -2, -3; the user keeps the last two (O' in O). Row 1 has one of -4, dropped.
    Paper: 0.05 * mean over both sequences of the mean over O: 0.05 * 1/2 * (2 + 3)/3. prime-rl: 0.1 * (2 + 3)/2."""
    keep = {"keep": [True, True, False, True, True, True, True, True, False]}
    batch = pictured("cAoooA", "cAo", old_logprobs=-1.0, masks=keep)
    logp = [-1.0, -1.0, -2.0, -3.0, -1.0, NAN, -1.0, -4.0, NAN]
    rules = [pg.UserMask(name="keep", on=("ce",))]
    for variant, value, slope in (("paper", 0.05 * 5 / 6, -0.05 / 6), ("prime_rl", 0.25, -0.05)):
        spec = pg.presets.echo(variant, masks=rules)
        with_ce, without = solve(batch, spec, logp), solve(batch, spec, logp, coef={"ce": 0.0})
        near(with_ce.loss - without.loss, value, 1e-13)
        near((with_ce.grad_T - without.grad_T)[1:4], [0.0, slope, slope])
        # Answers cannot change the scale of rl, by a bit: neither its denominators nor its weights.
        alone = solve(batch, pg.presets.ppo(), logp)
        assert alone.plan.counts["rl"] | {"mask keep": 0} == with_ce.plan.counts["rl"] and without.loss == alone.loss
        assert torch.equal(alone.plan.components["rl"].weight_T, with_ce.plan.components["rl"].weight_T)


def test_truncated_importance_weights_are_constants() -> None:
    """old/mu = 1.25 and, truncated to 2, 4: loss 1.25 * l + 2 * l over 2 tokens; no gradient through the weight; kl is
    none of its business."""
    mu = [0.0, -2.0 - log(1.25), -2.0 - log(4.0)]
    batch = pictured("cAA", advantages=[9.0, 1.0, -1.0], old_logprobs=-2.0, rollout_logprobs=mu, ref_logprobs=-2.5)
    spec = pg.presets.ppo(kl=1.0, kl_estimator="k1", corrections=[pg.TruncatedIS(high=2.0)])
    answer = solve(batch, spec, ratios(1.1, 1.1))
    near(answer.metrics["rl/loss"], (-1.25 * 1.1 + 2.0 * 1.1) / 2)
    near(answer.grad_T, [(-1.25 * 1.1 + 1) / 2, (2.0 * 1.1 + 1) / 2, 0.0])
    near(answer.metrics["kl/loss"], 0.5 + log(1.1))
    near([answer.metrics["rl/is_weight"], answer.metrics["rl/is_truncated"]], [(1.25 + 2) / 2, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e4, -1e4])
def test_an_extreme_log_ratio_is_finite_and_does_not_pull(difference: float, dtype: torch.dtype) -> None:
    """In every consumer: exp would be infinite in float32. The gradient beyond the bound of 20 is exactly 0, but
    for k2, which has no exp: (d^2/2)/2 of two tokens has the slope d/2."""
    for advantage in (1.0, -1.0):
        names = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
        given: dict[str, Tensor] = dict.fromkeys(names, torch.tensor([0.0, -2.0, -2.0], dtype=dtype))
        spec = pg.presets.grpo(kl=0.1, corrections=[pg.TruncatedIS()]).add(pg.KL(name="k2", estimator="k2", coef=0.5))
        logp = torch.tensor([-2.0 + difference, -2.0, NAN], dtype=dtype)
        answer = solve(pictured("cAA", dtype=dtype, advantages=advantage, **given), spec, logp, keep_tokens=True)
        assert torch.isfinite(torch.tensor(answer.loss)) and answer.grad_T.tolist()[0] == 0.5 * difference / 2
        # A clip decides on its own side, the bound on the other, and only what it decided it counts.
        gate = {(True, True): 2, (False, False): 1}.get((difference > 0, advantage > 0), 4)
        assert answer.outs[0].tokens["rl"].gate[0, 0] == gate
        assert answer.grad_T[1] == -advantage / 2 and answer.metrics["rl/bounded"] == (0.5 if gate == 4 else 0.0)
        assert answer.metrics["kl/bounded"] == 0.5 and "k2/bounded" not in answer.metrics


def test_a_zero_or_negative_loss_is_reported() -> None:
    for advantages, loss in (([9.0, 1.0, -1.0], 0.0), ([9.0, 0.25, 0.25], -0.25)):
        answer = solve(pictured("cAA", advantages=advantages, old_logprobs=-2.0), pg.presets.ppo(), ratios(1.0, 1.0))
        near([answer.loss, answer.metrics["rl/loss"]], [loss, loss])
