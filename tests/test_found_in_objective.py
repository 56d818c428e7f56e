"""What trying the package from outside brought up about the objective: the input that came out wrong, what is right.

Rows are "cA...": position t holds the log-prob of token t + 1, so the last entry of ``logp`` and of gradients is the
row's end, which predicts nothing. Log-ratios are bounded to +-20.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.finishing import results
from megatron_pgloss.metrics import merge_all
from megatron_pgloss.verify.oracle import oracle_loss
from support.steps import NAN, Answer, near, pictured, solve

E20 = math.exp(20)


def both(
    part: Any, logp: list[float], *, dtype: torch.dtype = torch.float64, rtol: float = 1e-13, **given: Any
) -> Answer:
    """The package's answer on one row of actions, once it equals the oracle's; streams of one number a token."""
    picture, spec = "c" + "A" * len(logp), pg.LossSpec(components=[part])
    names = {"old": "old_logprobs", "rollout": "rollout_logprobs", "ref": "ref_logprobs"}
    streams = {name: [0.0, *values] for name, values in given.items()}
    batch = pictured(picture, dtype=dtype, **{names.get(name, name): values for name, values in streams.items()})
    found = solve(batch, spec, torch.tensor([*logp, NAN], dtype=dtype), keep_tokens=True)
    row = {"tokens": list(range(len(picture))), "action": [0, *[1] * len(logp)], "advantages": [1.0] * len(picture)}
    leaf = torch.tensor([0.0, *logp], dtype=torch.float64, requires_grad=True)
    judge = oracle_loss([leaf], None, [row | streams], spec.to_dict())["loss"]
    judge.backward()
    assert leaf.grad is not None
    near(found.loss, judge, rtol)
    near(found.grad_T[:-1], leaf.grad[1:], rtol)
    return found


def rl(**more: Any) -> pg.PolicyGradient:
    return pg.PolicyGradient(normalizer="sum(token)", **more)


def weighted(estimator: str, **more: Any) -> pg.KL:
    return pg.KL(estimator=estimator, gradient="weighted", normalizer="sum(token)", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("gap", [20.1, 30.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weighted_kl_beyond_the_bound_does_not_pull(gap: float, dtype: torch.dtype) -> None:
    """r = 1 at lp = old; the value is that at the bound, e^20 - 20 - 1."""
    found = both(weighted("k3"), [-80.0], old=[-80.0], ref=[-80.0 + gap], dtype=dtype, rtol=3e-7)
    near(found.loss, E20 - 21, 3e-7)
    assert found.grad_T[0] == 0.0 and found.metrics["kl/bounded"] == 1.0


@pytest.mark.parametrize("gap", [19.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weighted_kl_within_the_bound_has_the_gradient_r_d(gap: float, dtype: torch.dtype) -> None:
    """r (log pi - log ref) with r = 1: -gap to the last bit, in float32 too; at the bound itself it is still free."""
    found = both(weighted("k3"), [-80.0], old=[-80.0], ref=[-80.0 + gap], dtype=dtype, rtol=3e-7)
    assert found.grad_T[0] == -gap and found.metrics["kl/bounded"] == 0.0


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -1.5, -0.5), ("k2", 1.125, -0.375), ("k3", math.exp(1.5) - 2.5, -1.5), ("abs", 1.5, 0.5)],
)
def test_a_weighted_kl_is_r_times_the_value_differentiated(estimator: str, value: float, slope: float) -> None:
    """d = -1.5, r = 2: r (value), and r (value + derivative): d + 1, d^2/2 + d, d, |d| + sign d."""
    found = both(weighted(estimator), [-5.0], old=[-5.0 - math.log(2)], ref=[-3.5])
    near([found.loss, float(found.grad_T[0])], [2 * value, 2 * slope], 1e-13)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_weight_beyond_the_bound_holds_the_whole_term(estimator: str) -> None:
    """log r = 25: e^20 times the value at d = 2, and no gradient by either factor."""
    value = {"k1": 2.0, "k2": 2.0, "k3": math.exp(-2) + 1, "abs": 2.0}[estimator]
    found = both(weighted(estimator), [-1.0], old=[-26.0], ref=[-3.0])
    near(found.loss, E20 * value, 1e-13)
    assert found.grad_T[0] == 0.0 and found.metrics["kl/bounded"] == 1.0


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [("k1", -25.0, 0.5), ("k2", 312.5, -12.5), ("abs", 25.0, -0.5)]
)
def test_what_has_no_exp_has_no_bound(estimator: Any, value: float, slope: float) -> None:
    """d = -25 at one of two tokens, the other at 0: value / 2; k2 is 25^2 / 2 / 2 = 156.25."""
    found = both(pg.KL(estimator=estimator), [-25.5, -1.0], ref=[-0.5, -1.0])
    near(found.loss, value / 2)
    assert found.grad_T[0] == slope and "kl/bounded" not in found.metrics


def test_k3_with_the_gradient_of_k2_holds_its_value_alone() -> None:
    found = both(pg.KL(estimator="k3", gradient="k2"), [-25.5], ref=[-0.5], rtol=1e-12)
    near(found.loss, E20 - 21)
    assert found.grad_T[0] == -25.0 and found.metrics["kl/bounded"] == 0.0


def test_dro_s_square_has_no_bound() -> None:
    """-A d + beta/2 d^2 at d = -25, A = 1, beta = 0.1: 25 + 31.25, slope -1 - 2.5."""
    found = both(rl(surrogate=pg.DRO(beta=0.1)), [-26.0], old=[-1.0])
    near(found.loss, 56.25)
    near(found.grad_T[0], -3.5)
    assert found.metrics["rl/bounded"] == 0.0


def test_the_teacher_s_advantage_has_no_bound() -> None:
    """-(log ref - log pi) r = -25 at r = 1."""
    found = both(rl(surrogate=pg.Distill()), [-26.0], old=[-26.0], ref=[-1.0])
    near([found.loss, float(found.grad_T[0])], [-25.0, -25.0])


SUM = [-61.0, -1.0, -1.0, -1.0], [-1.0, -16.0, -16.0, -16.0]
"""log pi and log old of d = (-60, 15, 15, 15): -15 in all."""


def test_a_sum_over_the_sequence_is_bounded_as_a_whole() -> None:
    """TOPR, A = -1: weight e^-15 = 3.06e-7 on each token's log pi, as the correction has it on the same row."""
    logp, old = SUM
    weight, given = math.exp(-15), {"advantages": [-1.0] * 4, "old": old}
    found = both(rl(surrogate=pg.TOPR(), ratio="sequence_sum"), logp, **given)
    near(found.grad_T[:4], [weight] * 4, 1e-13)
    rule = pg.TruncatedIS(of="policy", level="sequence", high=1.0)
    spec = pg.LossSpec(components=[rl(surrogate=pg.Reinforce(), ratio="none")], corrections=[rule])
    batch = pictured("cAAAA", advantages=-1.0, old_logprobs=-1.0, rollout_logprobs=[0.0, *old])
    near(solve(batch, spec, [*logp, NAN]).grad_T, found.grad_T, 1e-13)


@pytest.mark.parametrize(
    ("ratio", "logs"),
    [
        ("prefix", [-20.0, -20.0, -20.0, -15.0]),  # -60, -45, -30, -15: the first three at the bound
        ("sequence_sum", [-15.0] * 4),
        ("prefix_min", [-20.0] * 4),  # -60, and 15 + (-60) from then on
    ],
)
def test_so_are_the_other_statistics(ratio: str, logs: list[float]) -> None:
    """``-A r`` with A = 1 and the token's own gradient: exp(log) where it is within the bound, 0 where it is held."""
    logp, old = SUM
    found = both(rl(surrogate=pg.Unclipped(), ratio=ratio), logp, old=old)
    near(found.loss, -sum(math.exp(x) for x in logs), 1e-13)
    near(found.grad_T[:4], [0.0 if x == -20 else -math.exp(x) for x in logs], 1e-13)
    assert found.metrics["rl/bounded"] == logs.count(-20.0) / 4


@pytest.mark.parametrize("surrogate", [pg.Unclipped(), pg.GMPO(low=100.0)])
def test_a_mean_over_the_sequence_is_bounded_as_a_whole(surrogate: Any) -> None:
    """GSPO and GMPO, d = (-60, 0, 0, 0), A = 1: e^-15, and an equal share of the gradient on all four tokens."""
    ratio = "token" if surrogate.token_ratio_only else "sequence"
    found = both(rl(surrogate=surrogate, ratio=ratio), [-61.0, -1.0, -1.0, -1.0], old=[-1.0] * 4)
    near(found.loss, -4 * math.exp(-15), 1e-13)
    near(found.grad_T[:4], [-math.exp(-15)] * 4, 1e-13)


def test_fipo_s_future_is_bounded_as_a_whole() -> None:
    """d = (0.1, 50, -60), gamma = 1/2: the future of the first token is 0.1 + 25 - 15 = 10.1, and not 0.1 + 10 - 5 as
    of bounded summands. f = e^10.1, and r = e^0.1 is inside the clip."""
    found = both(rl(surrogate=pg.FIPO(half_life=1.0, reach=1e5)), [-0.9, -1.0, -61.0], old=[-1.0, -51.0, -1.0])
    near(found.outs[0].tokens["rl"].loss[0, 0], -math.exp(10.1 + 0.1), 1e-12)


@pytest.mark.parametrize(
    ("part", "given", "share"),
    [
        # Three tokens of d = 10: a sum of 30 on each.
        (rl(surrogate=pg.Unclipped(), ratio="sequence_sum"), {}, 1.0),
        (rl(surrogate=pg.Unclipped()), {}, 0.0),
        (rl(surrogate=pg.CISPO(high=0.2), ratio="sequence_sum"), {}, 0.0),
        (rl(surrogate=pg.TOPR(), ratio="sequence_sum"), {}, 0.0),
        (rl(surrogate=pg.VESPO(), ratio="sequence_sum"), {}, 0.0),
        (rl(surrogate=pg.DRO(), ratio="sequence_sum"), {}, 0.0),
        (rl(surrogate=pg.SAPO(), ratio="sequence_sum"), {}, 1.0),
        (rl(surrogate=pg.REAL(), ratio="sequence_sum"), {}, 1.0),
        # What the clip has cut, and what an advantage of 0 never had, the bound does not take.
        (rl(surrogate=pg.Clip(), ratio="sequence_sum"), {}, 0.0),
        (rl(surrogate=pg.Clip(), ratio="sequence_sum"), {"advantages": [-1.0] * 3}, 1.0),
        (rl(surrogate=pg.Clip(dual=3.0), ratio="sequence_sum"), {"advantages": [-1.0] * 3}, 0.0),
        (rl(surrogate=pg.Unclipped(), ratio="sequence_sum"), {"advantages": [1.0, 0.0, -1.0]}, 2 / 3),
        (rl(surrogate=pg.Surrogate(lambda x: x.ratio), ratio="sequence_sum"), {}, 1.0),
        (rl(surrogate=pg.Surrogate(lambda x: x.log_ratio), ratio="sequence_sum"), {}, 0.0),
    ],
)  # fmt: skip
def test_bounded_counts_the_tokens_whose_gradient_the_bound_took(part: Any, given: Any, share: float) -> None:
    streams = {f"{name}_logprobs" if name == "old" else name: [9.0, *values] for name, values in given.items()}
    batch = pictured("cAAA", old_logprobs=-11.0, **streams)
    found = solve(batch, pg.LossSpec(components=[part]), [-1.0, -1.0, -1.0, NAN])
    near(found.metrics["rl/bounded"], share)
    assert int((found.grad_T[:3] == 0).sum()) >= round(3 * share)


@pytest.mark.parametrize("d", [20.0, -20.0])
def test_a_log_ratio_exactly_at_the_bound_is_free(d: float) -> None:
    """As a ratio exactly on a clip's bound is. One definition: the gradient of exp(d) there, and none beyond."""
    sign = 1.0 if d < 0 else -1.0
    part = rl(surrogate=pg.Clip(low=0.2, high=0.2))
    at = both(part, [-30.0 + d], old=[-30.0], advantages=[sign])
    near(at.grad_T[0], -sign * math.exp(d), 1e-13)
    past = both(part, [-30.0 + d + math.copysign(1e-13, d)], old=[-30.0], advantages=[sign])
    assert (at.metrics["rl/bounded"], past.metrics["rl/bounded"]) == (0.0, 1.0) and past.grad_T[0] == 0.0


@pytest.mark.parametrize("surrogate", [pg.Clip(low=0.5, high=1.0), pg.Clip(low=0.0, high=0.0), pg.Clip(dual=2.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_oracle_too_leaves_a_ratio_on_a_clip_s_bound_free(surrogate: Any, advantage: float) -> None:
    """r = 2, 1/2 and 1 to the last bit; the term is -A r wherever r is on a bound or inside."""
    both(rl(surrogate=surrogate), [math.log(2), -math.log(2), 0.0], old=[0.0] * 3, advantages=[advantage] * 3)


def test_k3_of_old_and_the_policy_is_that_of_tokens_drawn_from_old() -> None:
    """exp(d) - 1 - d at d = -20 in one of four tokens: (e^-20 + 19) / 4 = 4.75, not 1.2e8. mu = old + log 2 in one:
    KL(mu || old) = (1/2 - 1 + log 2) / 4."""
    batch = pictured("cAAAA", old_logprobs=-1.0, rollout_logprobs=[0, -1.0, -1.0, -1.0, -1.0 + math.log(2)])
    found = solve(batch, pg.presets.ppo(), [-21.0, -1.0, -1.0, -1.0, NAN]).metrics
    near(found["rl/k3_old_pi"], (math.exp(-20) + 19) / 4)
    near(found["rl/k3_rollout_old"], (math.log(2) - 0.5) / 4)
    near(found["rl/k3_rollout_pi"], (math.exp(-20) + 19 + math.log(2) - 0.5) / 4, 1e-13)


def weighed(rule: Any, *ratios: float) -> dict[str, float]:
    """Metrics of one row whose tokens have these ratios to the sampler, old and policy alike, and the step's own."""
    logp, picture = [-5.0 + math.log(r) for r in ratios], "c" + "A" * len(ratios)
    batch = pictured(picture, old_logprobs=[0.0, *logp], rollout_logprobs=-5.0)
    spec = pg.LossSpec(components=[pg.PolicyGradient()], corrections=[rule])
    answer = solve(batch, spec, [*logp, NAN])
    return results(merge_all(out.metrics for out in answer.outs), answer.plan)


@pytest.mark.parametrize("of", ["old", "policy"])
def test_weights_are_reported_as_applied_and_as_they_were(of: Any) -> None:
    """Ratios 1 and 3, truncated to 2, over their mean 1.5: 2/3 and 4/3, of deviation 1/3. Raw 1 and 3; r^2 - 1 is 0 and
    8 by token, 8 by the sequence of product 3."""
    found = weighed(pg.TruncatedIS(of=of, high=2.0, normalize=True), 1.0, 3.0)
    values = {"": 1.0, "_min": 2 / 3, "_max": 4 / 3, "_std": 1 / 3}
    near([found[f"rl/is_weight{name}"] for name in values], list(values.values()), 1e-13)
    near([found["rl/is_raw"], found["rl/is_chi2"], found["rl/is_chi2_sequence"]], [2.0, 4.0, 8.0], 1e-13)
    assert found["rl/is_truncated"] == 0.5 and "rl/rejected" not in found


@pytest.mark.parametrize("of", ["old", "policy"])
def test_a_rejected_token_has_no_weight_and_is_counted_wherever_it_is_rejected(of: Any) -> None:
    """Ratios 1, 2 and 10 in the band [1/2, 5]: weights 1 and 2 are applied, one of three tokens is rejected."""
    found = weighed(pg.IcePop(of=of), 1.0, 2.0, 10.0)
    near([found["rl/is_weight"], found["rl/rejected"], found["rl/is_raw"]], [1.5, 1 / 3, 13 / 3], 1e-13)
    near([found["rl/is_chi2"], found["rl/is_chi2_sequence"]], [(0 + 3 + 99) / 3, 399.0], 1e-13)
    near([found["rl/is_weight_min"], found["rl/is_weight_max"]], [1.0, 2.0], 1e-13)


def test_sequences_count_once_each_in_their_chi_square() -> None:
    """Rows of ratios (2, 2), of which the mask leaves one, and (1, 1, 1): 3 and 0, whatever the split."""
    rows = ("cAA", "cAAA")
    mu = [0.0, *[-2.0 - math.log(2)] * 2, 0.0, -2.0, -2.0, -2.0]
    given = {"old_logprobs": -2.0, "rollout_logprobs": mu, "masks": {"late": [True, False, *[True] * 5]}}
    spec = pg.LossSpec(
        components=[pg.PolicyGradient()], corrections=[pg.TruncatedIS()], masks=[pg.UserMask(name="late")]
    )
    for split in (pg.Split(sequences=1), pg.Split(sequences=2), pg.Split(max_tokens=16)):
        found = solve(pictured(*rows, **given), spec, [-2.0, -2.0, NAN, -2.0, -2.0, -2.0, NAN], split=split).metrics
        near([found["rl/is_chi2_sequence"], found["rl/is_chi2"]], [1.5, 3 / 4], 1e-13)


def test_a_value_inside_its_clip_is_not_clipped() -> None:
    """0.1734... away from the old value under a clip of 0.5: V to the last bit, so that neither error is larger."""
    value, old, target = -0.09376858138313218, 0.07965425164295466, -0.04208025189252505
    batch = pictured("cA", values=old, returns=target)
    spec = pg.LossSpec(components=[pg.Value(clip=0.5)])
    found = solve(batch, spec, [-1.0, NAN], value=[value, NAN])
    near(found.value_grad_T[0], value - target)
    assert found.metrics["value/value_clipped"] == 0.0


@pytest.mark.parametrize("d", [-10.0, -17.5, -1e-4, 2.0])
def test_sapo_s_slope_keeps_its_digits_in_float32(d: float) -> None:
    """-4 s (1 - s) r with s = sigmoid(r - 1), r = e^d, for A = tau = 1."""
    found = both(rl(surrogate=pg.SAPO()), [-20.0 + d], old=[-20.0], dtype=torch.float32, rtol=2e-6)
    r = math.exp(-20.0 + d + 20.0)
    s = 1 / (1 + math.exp(1 - r))
    near(found.grad_T[0], -4 * s * (1 - s) * r, 2e-6)


@pytest.mark.parametrize("d", [-(2.0**-13), 2.0**-13])
def test_so_does_k3_s(d: float) -> None:
    """1 - exp(-d) of a policy that is almost its reference."""
    found = both(pg.KL(), [-1.0 + d], ref=[-1.0], dtype=torch.float32, rtol=2e-4)
    near(found.grad_T[0], -math.expm1(-d), 1e-6)
