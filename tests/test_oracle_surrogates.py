"""The oracle's surrogates, ratios, KL forms and value loss against numbers worked out by hand."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch

from megatron_pgloss.errors import DataError
from megatron_pgloss.verify.oracle import oracle_kl, oracle_loss
from support.oracle_cases import NAN, leaf, near, row, run

LN2 = log(2)
LOGP = -1.5
SIGMOID = 1 / (1 + exp(-1))
PHI = 4 * exp(-3)  # 2^2 e^(3 (1 - 2))
PHI_LOW = 0.125 * exp(1.0)  # (1/2)^3 e^(2 (1 - 1/2))


def pg(kind: str, ratio: Any = "token", **more: Any) -> dict[str, Any]:
    return {"kind": "policy_gradient", "surrogate": {"kind": kind} | more, "ratio": ratio}


@pytest.mark.parametrize(
    ("part", "advantage", "d", "loss", "slope"),
    [
        (pg("unclipped"), 3, LN2, -6, -6),
        (pg("clip", low=0.2, high=0.2, delta=3.0), -1, log(4), 3, 0),
        (pg("clip", low=0.2, high=0.2, delta=3.0), -1, LN2, 2, 2),
        (pg("clip", low=0.2, high=0.2, delta=3.0), 1, LN2, -1.2, 0),
        (pg("cispo", high=0.5), 2, LN2, -1.5 * 2 * LOGP, -3),
        (pg("cispo", high=0.5), -2, -LN2, 0.5 * 2 * LOGP, 1),
        (pg("cispo", low=0.2, high=0.5), -2, -LN2, 0.8 * 2 * LOGP, 1.6),
        (pg("cispo", high=5.0, bound="absolute"), 1, log(6), -5 * LOGP, -5),
        (pg("cispo", low=0.9, high=5.0, bound="absolute"), 1, -LN2, -0.9 * LOGP, -0.9),
        (pg("topr"), 2, LN2, -2 * LOGP, -2),
        (pg("topr"), -2, LN2, 2 * LOGP, 2),
        (pg("topr"), -2, -LN2, LOGP, 1),
        (pg("sapo"), 1, LN2, -4 * SIGMOID, -4 * SIGMOID * (1 - SIGMOID) * 2),
        (pg("sapo", tau_negative=2.0), -1, 0.0, 2 * 0.5, 1.0),
        (pg("sapo"), 1, log(25), -4 / (1 + exp(-24)), -4 * exp(-24) / (1 + exp(-24)) ** 2 * 25),  # nearly flat
        (pg("vespo"), 1, LN2, -PHI * LOGP, -PHI),
        (pg("vespo"), -1, -LN2, PHI_LOW * LOGP, PHI_LOW),
        (pg("dro"), 2, LN2, -2 * LN2 + 0.05 * LN2**2, -2 + 0.1 * LN2),
        (pg("real"), 7, LN2, log(1.25), -2 * 0.25 / 1.25),
        (pg("real"), -7, LN2, log(5), 2 * 4 / 5),
        (pg("real"), 0, LN2, 0, 0),
        (pg("distill"), NAN, LN2, -1 * 2, -2),
        (pg("nll"), NAN, NAN, -LOGP, -1),
        (pg("unclipped", "none"), 3, NAN, -3, -3),
    ],
)
def test_a_surrogate_has_this_value_and_slope(part: Any, advantage: float, d: float, loss: float, slope: float) -> None:
    """One token of log-prob -1.5, log(pi/old) = d, log(ref/pi) = 1."""
    rows = [row(".A", advantages=float(advantage), old=[NAN, LOGP - d], ref=[NAN, LOGP + 1])]
    result = run(rows, part, logp=leaf(NAN, LOGP))
    near(result["loss"], float(loss))
    near(result["grads"][0], [0, float(slope)])


THREE = [row(".AAoA", old=[0, -2 - LN2, -2.0, NAN, -2 + LN2], advantages=1.0)]
LOGP3 = (0.0, -2.0, -2.0, NAN, -2.0)
# d = log 2, 0, -log 2: their mean is 0, their sum 0, the turns' (2 + 1 tokens) means log 2 / 2 and -log 2.
ROOT = 2**0.5


@pytest.mark.parametrize(
    ("ratio", "ratios", "slopes"),
    [
        ("token", [2, 1, 0.5], [2, 1, 0.5]),
        ("sequence", [1, 1, 1], [1, 1, 1]),
        ("sequence_token", [1, 1, 1], [1, 1, 1]),
        ("turn", [ROOT, ROOT, 0.5], [ROOT, ROOT, 0.5]),
        ("turn_token", [ROOT, ROOT, 0.5], [ROOT, ROOT, 0.5]),
        ("turn_sum", [2, 2, 0.5], [2, 2, 0.5]),
        ("prefix", [2, 2, 1], [2, 2, 1]),
        # d plus the least d before: log 2; 0 + log 2; -log 2 + min(log 2, 0).
        ("prefix_min", [2, 2, 0.5], [2, 2, 0.5]),
        ({"kind": "ratio", "level": "turn", "statistic": "sum"}, [2, 2, 0.5], [4, 4, 0.5]),
    ],
)
def test_a_ratio_is_this_statistic(ratio: Any, ratios: list[float], slopes: list[float]) -> None:
    """Loss -mean r; a gradient through the sum of a turn of two reaches each of its tokens from both."""
    result = run(THREE, pg("unclipped", ratio), logp=leaf(*LOGP3))
    near(result["token_losses"]["rl"][0][[1, 2, 4]], [-float(r) for r in ratios])
    near(result["grads"][0][[1, 2, 4]], [-float(s) / 3 for s in slopes])


def test_statistics_run_over_what_was_sampled_unless_members_are_asked_for() -> None:
    """The mask takes the first token: the mean of d over the sequence is still 0, over the members -log 2 / 2."""
    rows = [THREE[0] | {"masks": {"keep": [True, False, True, True, True]}}]
    keep = {"kind": "user_mask", "name": "keep"}
    for over, value in (("sampled", -1.0), ("members", -(2**-0.5))):
        part = pg("unclipped", {"kind": "ratio", "over": over})
        near(run(rows, part, masks=[keep], logp=leaf(*LOGP3))["loss"], value)


def test_geometric_mean_of_clipped_token_ratios() -> None:
    """d = log 2, 0, -log 2 under m = min(d, 0.4): exp((0.4 - log 2)/3), with slope through the two that are free."""
    result = run(THREE, pg("gmpo"), logp=leaf(*LOGP3))
    value = exp((0.4 - LN2) / 3)
    near(result["loss"], -value)
    near(result["grads"][0], [0, 0, -value / 3, 0, -value / 3])


def test_influence_of_the_tokens_that_follow() -> None:
    """half_life 1, so a token k positions on counts 2^-k, and positions are 1, 2, 4: f = exp of log 2 (1 - 1/8),
    -log 2 / 4, -log 2. reach 0.5: 1.5, and 1 twice; to both sides 2^-(1/4) and 1/2. Terms: -1.28, -1, -0.5."""
    part = pg("fipo", half_life=1.0, reach=0.5, low=0.2, high=0.28)
    near(run(THREE, part, logp=leaf(*LOGP3))["loss"], -(1.5 * 1.28 + 1 + 0.5) / 3)
    part["surrogate"]["both"] = True
    near(run(THREE, part, logp=leaf(*LOGP3))["loss"], -(1.5 * 1.28 + 2**-0.25 + 0.5 * 0.5) / 3)
    # Ratios above delta leave the sum: then f = exp(-log 2 / 8), 2^(-1/4), 1/2.
    part["surrogate"]["delta"] = 1.5
    near(run(THREE, part, logp=leaf(*LOGP3))["loss"], -(2**-0.125 * 1.28 + 2**-0.25 + 0.5 * 0.5) / 3)
    # A < 0 and r = 2 > safe_ratio: f is held in [0.8, 1]; the cap is off. Terms: 2, 1, 0.8.
    part["surrogate"] |= {"delta": None, "safe_ratio": 1.5}
    rows = [THREE[0] | {"advantages": -1.0}]
    near(run(rows, part, logp=leaf(*LOGP3))["loss"], (1.0 * 2 + 2**-0.25 * 1 + 0.5 * 0.8) / 3)


def test_bounds_may_be_a_stream() -> None:
    rows = [row(".AA", old=[0, -1 - LN2, -1 - LN2], streams={"room": [NAN, 0.5, 3.0]})]
    result = run(rows, pg("clip", low=0.2, high="room"), logp=leaf(0, -1, -1))
    near(result["loss"], -(1.5 + 2) / 2)
    near(result["grads"][0], [0, 0, -1])


K = {"k1": LN2, "k2": LN2**2 / 2, "k3": 0.5 + LN2 - 1, "abs": LN2}
SLOPE = {"k1": 1.0, "k2": LN2, "k3": 0.5, "abs": 1.0}


@pytest.mark.parametrize("estimator", K)
@pytest.mark.parametrize("gradient", ["plain", "k2", "weighted"])
@pytest.mark.parametrize("base", ["old", "rollout"])
def test_kl_has_a_value_and_a_gradient_of_its_own(estimator: str, gradient: str, base: str) -> None:
    """d = log 2; pi/old = 3, pi/mu = 5. weighted: (r k)' = r (k + k')."""
    rows = [row(".A", old=[0, -1 - log(3)], rollout=[0, -1 - log(5)], ref=[0, -1 - LN2])]
    part = {"kind": "kl", "estimator": estimator, "gradient": gradient, "base": base}
    result = run(rows, part, logp=leaf(0, -1))
    r = {"old": 3, "rollout": 5}[base] if gradient == "weighted" else 1
    near(result["loss"], r * K[estimator])
    slope = {"plain": SLOPE[estimator], "k2": LN2, "weighted": r * (K[estimator] + SLOPE[estimator])}[gradient]
    near(result["grads"][0], [0, slope])


def test_exact_kl_of_two_rows_of_logits() -> None:
    """pi = (1/4, 3/4), ref = (1/2, 1/2): log 2 - H = 1/4 log(1/2) + 3/4 log(3/2); a column of -inf adds nothing."""
    pi = torch.tensor([[0.0, log(3), -torch.inf]] * 2, dtype=torch.float64)
    ref = torch.tensor([[1.0, 1.0, -torch.inf]] * 2, dtype=torch.float64)
    kl = oracle_kl(pi, ref)
    near(kl, [0, 0.25 * log(0.5) + 0.75 * log(1.5)])
    part = {"kind": "kl", "estimator": "exact"}
    near(oracle_loss(leaf(0, -1), None, [row(".A")], {"components": [part]}, kls=[kl])["loss"], float(kl[1]))
    with pytest.raises(DataError, match="exact KL is needed"):
        run([row(".A")], part, logp=leaf(0, -1))


@pytest.mark.parametrize(
    ("clip", "value", "loss", "slope"),
    [
        (None, 1.5, 0.125, 0.5),  # (1.5 - 1)^2 / 2
        (0.2, 1.5, 0.125, 0.5),  # V_old = 0: clipped to 0.2, (0.2 - 1)^2 = 0.64 > 0.25: the larger, with no slope
        (0.2, 0.1, 0.405, -0.9),
    ],
)
def test_value_loss(clip: float | None, value: float, loss: float, slope: float) -> None:
    if clip and value == 1.5:
        loss, slope = 0.32, 0.0
    rows = [row(".A", returns=[NAN, 1.0], values=[NAN, 0.0])]
    spec = {"components": [{"kind": "value", "clip": clip} | ({} if clip else {"clip": 1e9})]}
    values = leaf(NAN, value)
    found = oracle_loss(leaf(0, -1), None, rows, spec, values=values)
    found["loss"].backward()
    near(found["loss"], loss)
    near(values[0].grad, [0, slope])
