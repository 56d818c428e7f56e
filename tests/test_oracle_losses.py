"""The oracle's objectives, masks and corrections against values and gradients by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.verify.oracle import oracle_loss
from support.oracle_cases import CE, CLIP, NAN, REINFORCE, leaf, near, row, run


def test_reinforce_value_and_gradient():
    # A = 2, -1 on log-probs -0.5, -3: (2 * 0.5 - 3) / 2; gradient -A / 2.
    rows = [row(".AA.", advantages=[NAN, 2.0, -1.0, NAN])]
    result = run(rows, REINFORCE, logp=leaf(NAN, -0.5, -3.0, NAN))
    near(result["loss"], -1.0)
    near(result["grads"][0], [0, -1, 0.5, 0])


def test_clip_on_each_side_of_each_sign():
    # Ratios 1.5, 0.5, 1.5, 0.75 with A = +1, +1, -1, -1: gains 1.28, 0.5, -1.5, -0.8.
    old = [-math.log(r) - 1 for r in (1.5, 0.5, 1.5, 0.75)]
    rows = [row(".AAAA", advantages=[0, 1, 1, -1, -1], old=[NAN, *old])]
    result = run(rows, CLIP)
    near(result["loss"], 0.52 / 4)
    near(result["grads"][0], [0, 0, -0.5 / 4, 1.5 / 4, 0])  # A r where the bound is slack, else 0
    stats = result["ratio_stats"]["rl"]
    assert (stats["low"], stats["high"], stats["dual"], stats["tokens"]) == (1, 1, 0, 4)
    near([stats["mean"], stats["min"], stats["max"]], [4.25 / 4, 0.5, 1.5])
    assert result["clip_fraction"]["rl"] == 0.5


def test_dual_clip_holds_negative_advantages_alone():
    # Ratios 4, 2, 4, A = -1, -1, +1, c = 3: gains -3 (flat), -2, 1.28 (flat).
    old = [-math.log(r) - 1 for r in (4, 2, 4)]
    rows = [row(".AAA", advantages=[0, -1, -1, 1], old=[0, *old])]
    dual = CLIP | {"surrogate": CLIP["surrogate"] | {"dual": 3.0}}
    result = run(rows, dual)
    near(result["loss"], (3 + 2 - 1.28) / 3)
    near(result["grads"][0], [0, 0, 2 / 3, 0])
    assert result["ratio_stats"]["rl"]["dual"] == 1


def test_on_policy_ratio_is_one_and_its_gradient_is_reinforce():
    # Value -A, gradient -A, over three tokens of A = -2.7, 3, -3: (2.7 - 3 + 3) / 3.
    rows = [row(".AAA.", advantages=[NAN, -2.7, 3.0, -3.0, NAN])]
    for spec in ({"old": "policy"}, {"old": "given"}):
        part = CLIP | ({} if spec["old"] == "policy" else {"ratio": "none"})
        result = run(rows, part, **spec)
        near(result["loss"], 0.9)
        near(result["grads"][0], [0, 0.9, -1, 1, 0])
        assert result["clip_fraction"]["rl"] == 0


def test_loss_of_nine_tenths_with_gradient_minus_one_on_two_tokens():
    # Two tokens of A = 2: gradient -1 on each; log-probs -0.2 and -0.7: (0.4 + 1.4) / 2.
    rows = [row(".AA.", advantages=2.0)]
    result = run(rows, REINFORCE, logp=leaf(0.0, -0.2, -0.7, 0.0))
    near(result["loss"], 0.9)
    near(result["grads"][0], [0, -1, -1, 0])


def test_rollout_as_old_takes_the_ratio_to_the_sampler():
    rows = [row(".A", rollout=[NAN, -1 - math.log(1.1)], old=[NAN, -7.0])]
    result = run(rows, CLIP, old="rollout")
    near(result["loss"], -1.1)
    near(result["grads"][0], [0, -1.1])


KL_CASES = [  # estimator, value and derivative at d = log(pi / ref)
    ("k1", lambda d: d, lambda d: 1.0),
    ("k2", lambda d: d * d / 2, lambda d: d),
    ("k3", lambda d: math.exp(-d) + d - 1, lambda d: 1 - math.exp(-d)),
]


@pytest.mark.parametrize(("estimator", "value", "slope"), KL_CASES, ids=["k1", "k2", "k3"])
@pytest.mark.parametrize("to", ["ref", "old", "rollout"])
def test_kl_estimators_are_differentiated_as_they_stand(estimator, value, slope, to):
    d = (0.5, -1.25)
    rows = [row(".AAo", **{to: [NAN, -1 - d[0], -1 - d[1], NAN]})]
    part = {"kind": "kl", "estimator": estimator, "to": to, "coef": 0.04}
    result = run(rows, part)
    near(result["components"]["kl"], (value(d[0]) + value(d[1])) / 2)
    near(result["loss"], 0.04 * (value(d[0]) + value(d[1])) / 2)
    near(result["grads"][0], [0, 0.02 * slope(d[0]), 0.02 * slope(d[1]), 0])


def test_log_ratios_are_constant_beyond_their_bound():
    # d = 100 and -100: k3 at +-20 with gradient 0; a ratio of exp(100) at A < 0 likewise.
    rows = [row(".AA", advantages=-1.0, ref=[0, -101, 99], old=[0, -101, 99])]
    result = run(rows, {"kind": "kl", "estimator": "k3"}, log_ratio_bound=20.0)
    near(result["loss"], (math.exp(-20) + 20 - 1 + math.exp(20) - 20 - 1) / 2)
    near(result["grads"][0], [0, 0, 0])
    result = run(rows, CLIP, log_ratio_bound=20.0)
    near(result["loss"], (math.exp(20) + 0.8) / 2)
    near(result["grads"][0], [0, 0, 0])


def test_entropy_is_a_bonus_and_coefficients_can_be_overridden():
    rows = [row(".AAo")]
    entropies = leaf(NAN, 1.5, 0.5, 9.0)
    part = {"kind": "entropy", "coef": 1e-3}
    result = run(rows, part, entropies=entropies)
    near(result["components"]["entropy"], -1.0)
    near(result["loss"], -1e-3)
    near(entropies[0].grad, [0, -5e-4, -5e-4, 0])
    near(run(rows, part, entropies=entropies, coef={"entropy": 2.0})["loss"], -2.0)
    with pytest.raises(SpecError, match="no component"):
        run(rows, part, entropies=entropies, coef={"entropi": 2.0})


def test_components_have_denominators_of_their_own():
    rows = [row(".AAoooo")]
    result = run(rows, REINFORCE, CE | {"coef": 0.1})
    near(result["grads"][0], [0, -0.5, -0.5, -0.025, -0.025, -0.025, -0.025])
    near(result["loss"], 1 + 0.1)


def test_truncated_importance_weights_are_constants_in_the_numerator():
    # old - rollout = log 1.5 and log 4, held at 2; loss (1.5 + 2) / 2 on log-probs -1, A = 1.
    rows = [row(".AAo", old=[0, -1, -1, 0], rollout=[0, -1 - math.log(1.5), -1 - math.log(4), 0])]
    tis = {"kind": "truncated_is", "of": "old", "level": "token", "high": 2.0}
    for correction in (tis, tis | {"of": "policy"}, tis | {"on": ["rl"]}):
        result = run(rows, REINFORCE, corrections=[correction])
        near(result["loss"], 1.75)
        near(result["grads"][0], [0, -0.75, -1, 0])
    # Not on other components, unless they are named.
    k1 = {"kind": "kl", "estimator": "k1", "to": "old"}
    near(run(rows, k1, corrections=[tis])["grads"][0], [0, 0.5, 0.5, 0])
    near(run(rows, k1, corrections=[tis | {"on": ["kl"]}])["grads"][0], [0, 0.75, 1, 0])


def test_drop_truncated_takes_action_tokens_of_all_components():
    rows = [row(".AAo", termination="truncated"), row(".AAo", termination="success")]
    result = run(rows, REINFORCE, CE, masks=[{"kind": "drop_truncated"}])
    near(result["weights"]["rl"][0], [0, 0, 0, 0])
    near(result["weights"]["rl"][1], [0, 0.5, 0.5, 0])
    near(result["weights"]["ce"][0], [0, 0, 0, 0.5])
    assert result["counts"]["rl"]["masks"] == {"drop_truncated": 2}
    assert result["counts"]["rl"]["sequence"] == 1


def test_drop_zero_advantage_acts_on_the_policy_gradient_alone():
    rows = [row(".AAA", advantages=[0, 0, 1, 0], ref=[0, -1, -1, -1])]
    kl = {"kind": "kl", "estimator": "k1"}
    result = run(rows, REINFORCE, kl, masks=[{"kind": "drop_zero_advantage"}])
    near(result["weights"]["rl"][0], [0, 0, 1, 0])
    near(result["weights"]["kl"][0], [0, 1 / 3, 1 / 3, 1 / 3])


def test_a_component_with_nothing_left_is_zero_with_zero_gradients():
    rows = [row(".AA", advantages=0.0)]
    result = run(rows, REINFORCE, masks=[{"kind": "drop_zero_advantage"}])
    assert result["loss"] == 0
    near(result["grads"][0], [0, 0, 0])
    empty = oracle_loss([], None, [], {"components": [REINFORCE]})
    assert empty["loss"] == 0


def test_term_sees_the_streams_and_unit_statistics():
    # log-ratios 1 and 2 in the first turn, 4 in the second; means 1.5 and 4; squares 1, 4, 16.
    old = [NAN, -2.0, -3.0, NAN, -5.0]
    rows = [row(".AAoA", old=old, masks={"keep": [True, True, False, True, True]})]
    keep = {"kind": "user_mask", "name": "keep"}
    term = {"kind": "term", "name": "t", "on": "action", "normalizer": "sum(token)"}
    result = run(rows, term | {"fn": lambda x: x.log_ratio.square()}, masks=[keep])
    near(result["loss"], 17.0)
    near(result["grads"][0], [0, 2, 0, 0, 8])
    # Statistics see the token that the mask took: sampled is sampled.
    result = run(rows, term | {"fn": lambda x: x.unit_mean(x.log_ratio, "turn")}, masks=[keep])
    near(result["loss"], 5.5)
    near(result["grads"][0], [0, 0.5, 0.5, 0, 1])
    result = run(rows, term | {"fn": lambda x: x.unit_sum(x.log_ratio, "sequence")}, masks=[keep])
    near(result["loss"], 14.0)
    result = run(rows, term | {"fn": lambda x: x.prefix_sum(x.log_ratio)})
    near(result["loss"], 1 + 3 + 7)
    near(result["grads"][0], [0, 3, 2, 0, 1])
    near(
        run(rows, term | {"fn": "test_oracle_losses:ratio_times_advantage"})["loss"],
        sum_exp(1, 2, 4),
    )
    with pytest.raises(DataError, match="one number per token"):
        run(rows, term | {"fn": lambda x: x.logp.sum()})


def ratio_times_advantage(x: Any) -> Tensor:
    """A term found by its name."""
    return x.ratio * x.advantage


def sum_exp(*values: float) -> float:
    return sum(math.exp(v) for v in values)
