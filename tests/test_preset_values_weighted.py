"""Presets with a constant weight, a trust region, a quadratic, a label or a teacher: value and gradient worked out by
hand on the step of tests/support/preset_cases.py.
"""

from __future__ import annotations

from math import exp, log

import megatron_pgloss as pg
from support.preset_cases import (
    EACH,
    KEEP,
    SEQUENCE,
    A,
    D,
    R,
    S,
    X,
    added,
    aligned,
    batch,
    check,
    mu_ratio,
    old_ratio,
    per_token,
)
from support.steps import NAN, near, solve

P = pg.presets
M = {"masks": [KEEP]}
TOKEN = [1 / 5] * 5


def weighed(w: list[float], x: list[float]) -> list[float]:
    """-w A log pi."""
    return [-w[j] * A[j] * x[j] for j in EACH]


def test_reinforce() -> None:
    """-A log pi: 2, 1, -2, -1.5, -0.25: -0.75 / 5."""
    check(P.reinforce(**M), -0.15, [-0.4, -0.4, 0.2, 0.2, 0.2], lambda x: added(TOKEN, weighed([1] * 5, x)))


def test_gpg() -> None:
    """Token 1 has no advantage here: it leaves numerator and count: (2 - 2 - 1.5 - 0.25) / 4."""
    advantages = per_token([2.0, 0.0, -1.0, -1.0, -1.0])
    check(
        P.gpg(**M), -1.75 / 4, [-0.5, 0, 0.25, 0.25, 0.25],
        lambda x: (-2 * x[0] + x[2] + x[3] + x[4]) / 4, advantages=advantages,
    )  # fmt: skip


def test_cispo() -> None:
    """pi/old cut at 1.5: weights 1.5, 1.1, 0.5, 1.05, 1.5 on -A log pi: 3, 1.1, -1, -1.575, -0.375: 1.15 / 5. No token
    is without a slope."""
    w = [1.5, 1.1, 0.5, 1.05, 1.5]
    slopes = [-w[j] * A[j] / 5 for j in EACH]
    check(P.cispo(high=0.5, **M), 0.23, slopes, lambda x: added(TOKEN, weighed(w, x)))
    check(P.cispo(high=1.5, bound="absolute", **M), 0.23, slopes, lambda x: added(TOKEN, weighed(w, x)))
    raised = [1.5, 1.1, 0.9, 1.05, 1.5]
    check(
        P.cispo(low=0.1, high=0.5, **M), (1.15 - 0.8) / 5, [-raised[j] * A[j] / 5 for j in EACH],
        lambda x: added(TOKEN, weighed(raised, x)),
    )  # fmt: skip


def test_aipo() -> None:
    """pi/mu cut at 1.5: 1.25, 0.8, 0.4, 1, 1.5: 2.5, 0.8, -0.8, -1.5, -0.375: 0.625 / 5."""
    w = [1.25, 0.8, 0.4, 1.0, 1.5]
    check(P.aipo(cap=1.5, **M), 0.125, [-w[j] * A[j] / 5 for j in EACH], lambda x: added(TOKEN, weighed(w, x)))


def test_topr() -> None:
    """Positive rows weigh 1, negative ones min(0.4 * 1 * 2, 1) = 0.8: sums 3 and -3.75 * 0.8 = -3, over two rows: 0."""
    w = [1.0, 1.0, 0.8, 0.8, 0.8]
    half = [1 / 2] * 5
    check(P.topr(**M), 0.0, [-w[j] * A[j] / 2 for j in EACH], lambda x: added(half, weighed(w, x)))


def test_vespo() -> None:
    """pi/mu of the rows: 1 and 0.8. phi(1) = 1; phi(0.8) = 0.8^3 e^(2 * 0.2) = 0.763814 where A < 0."""
    w = [1.0] * 2 + [0.512 * exp(0.4)] * 3
    check(
        P.vespo(**M), (3 - 3.75 * 0.512 * exp(0.4)) / 5, [-w[j] * A[j] / 5 for j in EACH],
        lambda x: added(TOKEN, weighed(w, x)),
    )  # fmt: skip


def test_sapo() -> None:
    """-(4/tau) sigmoid(tau (r - 1)) A with tau 1 and 1.05: the gates at r = 2, 1.1 | 0.5, 1.05, 4 are 2.92423, 2.09992
    | 1.41594, 1.95475, 3.65298; slopes -4 s (1 - s) r A, s the sigmoid."""
    tau = [1.0, 1.0, 1.05, 1.05, 1.05]

    def sigmoid(j: int, r: float) -> float:
        return 1 / (1 + exp(-tau[j] * (r - 1)))

    def loss(x: list[float]) -> float:
        r = old_ratio(x)
        return added(SEQUENCE, [-4 / tau[j] * sigmoid(j, r[j]) * A[j] for j in EACH])

    gates = [sigmoid(j, R[j]) for j in EACH]
    slopes = [-SEQUENCE[j] * 4 * gates[j] * (1 - gates[j]) * R[j] * A[j] for j in EACH]
    hand = (-2 * (2.92423 + 2.09992) / 2 + (1.41594 + 1.95475 + 3.65298) / 3) / 2
    assert abs(loss(X) - hand) < 1e-4
    check(P.sapo(**M), loss(X), slopes, loss)


def test_dro() -> None:
    """-A d + 0.05 d^2 with d = log(pi/old): -1.386294 + 0.024023, -0.190620 + 0.000454, -0.693147 + 0.024023,
    0.048790 + 0.000119, 1.386294 + 0.096091."""
    d = [log(r) for r in R]

    def loss(x: list[float]) -> float:
        moved = [d[j] + x[j] - X[j] for j in EACH]
        return added(TOKEN, [-A[j] * moved[j] + 0.05 * moved[j] ** 2 for j in EACH])

    value = (-2 * log(2.2) + log(2.1) + 0.05 * sum(x * x for x in d)) / 5
    check(P.dro(**M), value, [(-A[j] + 0.1 * d[j]) / 5 for j in EACH], loss)


def test_kimi() -> None:
    """The same of the rows' sums, log 2.2 and log 2.1; every token of a row has the slope of the sum."""
    first, second = log(2.2), log(2.1)

    def loss(x: list[float]) -> float:
        y = [x[j] - X[j] for j in EACH]
        one, two = first + y[0] + y[1], second + y[2] + y[3] + y[4]
        return (-2 * one + 0.05 * one**2 + two + 0.05 * two**2) / 2

    value = (-2 * first + 0.05 * first**2 + second + 0.05 * second**2) / 2
    check(P.kimi(**M), value, [-1 + 0.05 * first] * 2 + [0.5 + 0.05 * second] * 3, loss)


def test_real() -> None:
    """softplus(-sign(A) s / 0.5), s the rows' mean log-ratios: log(1 + 1/2.2) = 0.374693 for log(2.2)/2, and log(1 +
    2.1^(2/3)) = 0.970575 for log(2.1)/3: the mean over rows; or the sum, of one prompt."""
    up, down = 1 / 2.2, 2.1 ** (2 / 3)

    def loss(x: list[float]) -> float:
        y = [x[j] - X[j] for j in EACH]
        one = log(1 + up * exp(-(y[0] + y[1])))
        return (one + log(1 + down * exp(2 * (y[2] + y[3] + y[4]) / 3))) / 2

    slope_up, slope_down = up / (1 + up), down / (1 + down)
    value, slopes = (log(1 + up) + log(1 + down)) / 2, [-slope_up / 2] * 2 + [slope_down / 3] * 3
    check(P.real(form="binary", **M), value, slopes, loss)
    check(P.real(**M), 2 * value, [2 * slope for slope in slopes], lambda x: 2 * loss(x), prompt_ids=["one", "one"])


# pi - mu: 0.07358, -0.15163, -0.20300, 0, 0.38940.


def test_dppo_tv() -> None:
    """-A pi/mu: -2.5, -1.6, 0.4, 1, 2. A > 0 and 0.07358 > 0.05 drops token 0, A < 0 and -0.203 < -0.2 token 2; the
    others run inwards: 1.4 / 5."""
    check(
        P.dppo_tv(high=0.05, **M), 1.4 / 5, [0, -0.32, 0, 0.2, 0.4],
        lambda x: added(TOKEN, [0, -2 * mu_ratio(x)[1], 0, mu_ratio(x)[3], mu_ratio(x)[4]]),
    )  # fmt: skip


def test_dppo_kl() -> None:
    """Outwards run token 0, with a binary KL of 0.01206, and token 2, with 0.1329 > 0.05: (-2.5 - 1.6 + 1 + 2) / 5."""
    check(
        P.dppo_kl(**M), -1.1 / 5, [-0.5, -0.32, 0, 0.2, 0.4],
        lambda x: added(TOKEN, [-A[j] * mu_ratio(x)[j] if j != 2 else 0 for j in EACH]),
    )  # fmt: skip


def drift(x: list[float]) -> float:
    """Mean of (log pi - log mu)^2."""
    return sum(log(s) ** 2 for s in mu_ratio(x)) / 5


def test_prime_dppo() -> None:
    """As `dppo_tv` with 0.2 on both sides, so token 2 alone goes: -1.1 / 5; and 1e-3 (log pi - log mu)^2 on all five:
    0.049793, 0.049793, 0.839589, 0, 0.480453."""
    slopes = [0.002 * log(s) / 5 for s in S]
    slopes = [a + b for a, b in zip(slopes, [-0.5, -0.32, 0, 0.2, 0.4], strict=True)]
    value = -0.22 + 1e-3 * drift(X)
    assert abs(drift(X) - 1.419628 / 5) < 1e-6
    check(
        P.prime_dppo(**M), value, slopes,
        lambda x: added(TOKEN, [-A[j] * mu_ratio(x)[j] if j != 2 else 0 for j in EACH]) + 1e-3 * drift(x),
    )  # fmt: skip


def test_prime_ipo() -> None:
    """|pi - mu| > 0.1 drops tokens 1, 2 and 4 whatever their advantage: (-2.5 + 1) / 5."""
    check(
        P.prime_ipo(kl_tau=0.0, **M), -0.3, [-0.5, 0, 0, 0.2, 0],
        lambda x: added(TOKEN, [-2 * mu_ratio(x)[0], 0, 0, mu_ratio(x)[3], 0]),
    )  # fmt: skip


def test_m2po() -> None:
    """Outwards run tokens 0, 1 (A > 0, pi > old) and 2 (A < 0, pi < old), of (log 2)^2 = 0.480453, (log 1.1)^2 =
    0.009084 and 0.480453. Until their mean is at most 0.04 both large ones go: (-2.2 + 1.05 + 4) / 5."""
    check(
        P.m2po(**M), 2.85 / 5, [0, -0.44, 0, 0.21, 0.8],
        lambda x: added(TOKEN, [0, -2 * old_ratio(x)[1], 0, old_ratio(x)[3], old_ratio(x)[4]]),
    )  # fmt: skip


def test_distill() -> None:
    """-(log ref - log pi) pi/mu = d pi/mu: -0.625, 0.4, -0.4 (dropped: pi - mu = -0.203 < -0.2), 0, 2: 1.775 / 5."""
    check(
        P.distill(kl_tau=0.0, **M), 1.775 / 5, [-0.125, 0.08, 0, 0, 0.4],
        lambda x: added(TOKEN, [D[j] * mu_ratio(x)[j] if j != 2 else 0 for j in EACH]),
    )  # fmt: skip
    value = 1.775 / 5 + 1e-3 * drift(X)
    slopes = [0.002 * log(s) / 5 + m for s, m in zip(S, [-0.125, 0.08, 0, 0, 0.4], strict=True)]
    check(
        P.distill(**M), value, slopes,
        lambda x: added(TOKEN, [D[j] * mu_ratio(x)[j] if j != 2 else 0 for j in EACH]) + 1e-3 * drift(x),
    )  # fmt: skip


def test_opd() -> None:
    """log pi - log ref at ratio 1: (-0.5 + 0.5 - 1 + 0 + 1) / 5 = 0, each with its own slope."""
    check(
        P.opd(**M), 0.0, [d / 5 for d in D], lambda x: added(TOKEN, [D[j] * exp(x[j] - X[j]) for j in EACH])
    )  # fmt: skip


def test_nll() -> None:
    """-log pi: 5.25 / 5; of the tokens with A > 0 alone: 1.5 / 2."""
    check(P.nll(**M), 1.05, [-0.2] * 5, lambda x: -sum(x) / 5)
    check(P.nll(positive=True, **M), 0.75, [-0.5, -0.5, 0, 0, 0], lambda x: -(x[0] + x[1]) / 2)


def test_critic() -> None:
    """V = 0.5, 1.1, 0.5, 1.5, 0.1, R = 1: (V - R)^2 = 0.25, 0.01, 0.25, 0.25, 0.81. V held within 0.2 of V_old = 0, 1,
    1, 1.5, 0: 0.2, 1.1, 0.8, 1.5, 0.1, so 0.64, 0.01, 0.04, 0.25, 0.81. The larger of the two, halved, over 5; no slope
    where the held one is larger."""
    value = [0.5, 1.1, 0.5, 1.5, 0.1]
    given = {"returns": per_token([1.0] * 5), "values": per_token([0.0, 1.0, 1.0, 1.5, 0.0])}
    says = [NAN] * 10
    for number, place in zip(value, (0, 1, 4, 5, 6), strict=True):
        says[place] = number
    answer = solve(batch(**given), P.critic(**M), aligned(X), value=says)
    near(answer.loss, (0.64 + 0.01 + 0.25 + 0.25 + 0.81) / 2 / 5)
    near(answer.value_grad_T, [0, 0.02, 0, 0, -0.1, 0.1, -0.18, 0, 0, 0], 1e-12)


def test_every_preset_has_a_test() -> None:
    """One for each name of the table, in this file or in test_preset_values.py."""
    import test_preset_values

    for name in P.PRESETS:
        assert f"test_{name}" in globals() or hasattr(test_preset_values, f"test_{name}"), name
