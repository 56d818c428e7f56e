"""Presets with a clipped ratio: value and gradient worked out by hand on the step of tests/support/preset_cases.py."""

from __future__ import annotations

from math import exp, log

import pytest

import megatron_pgloss as pg
from support.preset_cases import EACH, KEEP, SEQUENCE, A, D, R, S, X, added, check, old_ratio

P = pg.presets
M = {"masks": [KEEP]}
TOKEN = [1 / 5] * 5


def clipped(x: list[float], low: float = 0.2, high: float = 0.2) -> list[float]:
    """-min(r A, clip(r, 1 - low, 1 + high) A)."""
    return [-min(r * a, min(max(r, 1 - low), 1 + high) * a) for r, a in zip(old_ratio(x), A, strict=True)]


def k3(x: list[float]) -> list[float]:
    """exp(-d) + d - 1."""
    moved = [D[j] + x[j] - X[j] for j in EACH]
    return [exp(-d) + d - 1 for d in moved]


def test_ppo() -> None:
    """Terms -1.2 * 2 = -2.4 (high), -1.1 * 2 = -2.2, 0.8 (low), 1.05, 4: their mean is 1.25 / 5 = 0.25. Slopes 0, -2.2,
    0, 1.05, 4 over 5."""
    check(P.ppo(**M), 0.25, [0, -0.44, 0, 0.21, 0.8], lambda x: added(TOKEN, clipped(x)))


def test_ppo_with_a_dual_clip_and_with_a_cap() -> None:
    """At most 3 where A < 0: the last term is 3, with slope 0: 0.25 / 5. INTELLECT-2's delta is the same number."""
    for spec in (P.ppo(dual=3.0, **M), P.ppo(delta=3.0, **M)):
        check(spec, 0.05, [0, -0.44, 0, 0.21, 0], lambda x: added(TOKEN, [*clipped(x)[:4], 3.0]))


def test_lite_ppo() -> None:
    """The loss is `ppo`; the rest of the recipe is in the advantages."""
    check(P.lite_ppo(**M), 0.25, [0, -0.44, 0, 0.21, 0.8], lambda x: added(TOKEN, clipped(x)))


def test_grpo() -> None:
    """Sequence means of the terms: -2.3 and 5.85/3 = 1.95, so -0.175. k3 of d = -0.5, 0.5, -1, 0, 1:
    0.148721, 0.106531, 0.718282, 0, 0.367879, by sequence 0.127626 and 0.362054, so 0.244840; times 0.04. Slopes of k3:
    1 - exp(-d)."""
    kl = [0.04 * w * (1 - exp(-d)) for w, d in zip(SEQUENCE, D, strict=True)]
    check(
        P.grpo(**M),
        -0.175 + 0.04 * added(SEQUENCE, [exp(-d) + d - 1 for d in D]),
        [kl[0], -2.2 / 4 + kl[1], kl[2], 1.05 / 6 + kl[3], 4 / 6 + kl[4]],
        lambda x: added(SEQUENCE, clipped(x)) + 0.04 * added(SEQUENCE, k3(x)),
    )


def test_grpo_without_a_reference() -> None:
    check(P.grpo(kl=0, **M), -0.175, [0, -2.2 / 4, 0, 1.05 / 6, 4 / 6], lambda x: added(SEQUENCE, clipped(x)))


def test_dr_grpo() -> None:
    """Two sequences, a budget of 8 tokens each: 1.25 / 16."""
    w = [1 / 16] * 5
    check(P.dr_grpo(8, **M), 1.25 / 16, [0, -2.2 / 16, 0, 1.05 / 16, 0.25], lambda x: added(w, clipped(x)))


def test_dapo() -> None:
    """Clip-higher: the first term is -1.28 * 2 = -2.56: 1.09 / 5."""
    check(P.dapo(**M), 0.218, [0, -0.44, 0, 0.21, 0.8], lambda x: added(TOKEN, clipped(x, 0.2, 0.28)))


@pytest.mark.parametrize(("variant", "coef"), [("paper", 0.05), ("prime_rl", 0.1)])
def test_echo(variant: str, coef: float) -> None:
    """`ppo`'s 0.25, and the answers' 0.4 and 0.6, one in each row: 0.5 by token and by sequence alike."""
    check(
        P.echo(variant, **M), 0.25 + coef * 0.5, [0, -0.44, 0, 0.21, 0.8],
        lambda x: added(TOKEN, clipped(x)) + coef * 0.5, answers=(-coef / 2, -coef / 2),
    )  # fmt: skip


def test_gspo() -> None:
    """Ratios of the sequences: sqrt(2.2) = 1.48324 and 2.1^(1/3) = 1.28058. Clipped to 1.0004 where A = 2: -2.0008; on
    the open side 1.28058 for A = -1. Through the mean each of the three tokens gets a third from all three."""
    s = 2.1 ** (1 / 3)

    def loss(x: list[float]) -> float:
        moved = s * exp(sum(x[j] - X[j] for j in (2, 3, 4)) / 3)
        return (-2 * 1.0004 + moved) / 2

    check(P.gspo(**M), (-2.0008 + s) / 2, [0, 0, s / 6, s / 6, s / 6], loss)


def test_gspo_token() -> None:
    """The same value; each token carries the gradient of its own log-prob, the mean held fixed."""
    s = 2.1 ** (1 / 3)
    check(
        P.gspo_token(**M), (-2.0008 + s) / 2, [0, 0, s / 6, s / 6, s / 6],
        lambda x: -1.0004 + sum(s * exp(x[j] - X[j]) for j in (2, 3, 4)) / 6,
    )  # fmt: skip


def test_luspo() -> None:
    """GSPO's terms weighed by length: (2 * -2.0008 + 3 * 1.28058) / 2."""
    s = 2.1 ** (1 / 3)

    def loss(x: list[float]) -> float:
        return -2.0008 + 1.5 * s * exp(sum(x[j] - X[j] for j in (2, 3, 4)) / 3)

    check(P.luspo(**M), -2.0008 + 1.5 * s, [0, 0, s / 2, s / 2, s / 2], loss)


def test_gmpo() -> None:
    """m = min(log 2, 0.4), log 1.1: mean 0.247655, term -2 e^0.247655; m = -0.4, log 1.05, log 4: mean 0.345028. The
    clipped ones have no slope, the others share the mean's."""
    up, down = exp((0.4 + log(1.1)) / 2), exp((-0.4 + log(1.05) + log(4)) / 3)

    def loss(x: list[float]) -> float:
        y = [x[j] - X[j] for j in EACH]
        return (-2 * up * exp(y[1] / 2) + down * exp((y[3] + y[4]) / 3)) / 2

    check(P.gmpo(**M), (-2 * up + down) / 2, [0, -up / 2, 0, down / 6, down / 6], loss)


def test_fipo() -> None:
    """half_life 1: futures log 2 + log(1.1)/2 = 0.7408, log 1.1; -log 2 + log(1.05)/2 + log(4)/4, log 1.05 + log(4)/2,
    log 4. exp, held in [1, 1.2]: 1.2, 1.1, 1, 1.2, 1.2; the last back to 1, for its ratio of 4 is above 3. Terms of
    dapo: -2.56, -2.2, 0.8, 1.05, 4."""
    f = [1.2, 1.1, 1.0, 1.2, 1.0]
    terms = [-2.56, -2.2, 0.8, 1.05, 4.0]
    check(
        P.fipo(half_life=1.0, safe_ratio=3.0, **M), added(TOKEN, [a * b for a, b in zip(f, terms, strict=True)]),
        [0, -2.2 * 1.1 / 5, 0, 1.05 * 1.2 / 5, 4 / 5],
        lambda x: added(TOKEN, [a * b for a, b in zip(f, clipped(x, 0.2, 0.28), strict=True)]),
    )  # fmt: skip


def test_opsm() -> None:
    """mean log mu - log pi of row 1: -log(0.8)/3 = 0.0744. Above 0.07 the row is dropped, and stays in the mean."""
    check(P.opsm(0.07, **M), -2.3 / 2, [0, -2.2 / 4, 0, 0, 0], lambda x: added(SEQUENCE[:2], clipped(x)[:2]))
    check(P.opsm(0.08, **M), -0.175, [0, -2.2 / 4, 0, 1.05 / 6, 4 / 6], lambda x: added(SEQUENCE, clipped(x)))


def test_icepop() -> None:
    """old/mu = 0.625, 0.72727, 0.8, 0.95238, 0.5: in [0.6, 5] all but the last. Terms -1.5, -1.6, 0.64, 1: by sequence
    -1.55 and 1.64/3."""
    q = [s / r for s, r in zip(S, R, strict=True)][:4]
    check(
        P.icepop(floor=0.6, **M), (-1.55 + 1.64 / 3) / 2, [0, -1.6 / 4, 0, 1 / 6, 0],
        lambda x: added(SEQUENCE[:4], [a * b for a, b in zip(q, clipped(x)[:4], strict=True)]),
    )  # fmt: skip


def test_high_entropy() -> None:
    """Of five entropies the two highest, 1.2 and 0.9: dapo's -2.2 and 4, over five."""
    check(
        P.high_entropy(share=0.4, **M), 1.8 / 5, [0, -0.44, 0, 0, 0.8],
        lambda x: (clipped(x)[1] + clipped(x)[4]) / 5,
    )  # fmt: skip


def test_clip_cov() -> None:
    """A - 0.2 = 1.8, 1.8, -1.2, ... times log pi + 1.05 = 0.05, 0.55, -0.95, -0.45, 0.8: 0.09, 0.99, 1.14, 0.54, -0.96.
    In [0.9, 5] lie tokens 1 and 2, and two are to go: -2.4, 1.05 and 4 are left."""
    check(
        P.clip_cov(share=0.4, floor=0.9, **M), 2.65 / 5, [0, 0, 0, 0.21, 0.8],
        lambda x: (-2.4 + clipped(x)[3] + clipped(x)[4]) / 5,
    )  # fmt: skip


def test_kl_cov() -> None:
    """The largest of those covariances is token 2's: |log pi - log old| = log 2 on it. The ratio is unclipped: -4,
    -2.2, 0.5, 1.05, 4: -0.65 / 5."""
    check(
        P.kl_cov(share=0.2, penalty=0.25, **M), (-0.65 + 0.25 * log(2)) / 5,
        [-4 / 5, -2.2 / 5, (0.5 - 0.25) / 5, 1.05 / 5, 4 / 5],
        lambda x: (sum(-r * a for r, a in zip(old_ratio(x), A, strict=True)) + 0.25 * (log(2) - x[2] + X[2])) / 5,
    )  # fmt: skip
