"""One small step on which every preset is worked out by hand.

| | row 0 | | row 1 | | | |
|---|---|---|---|---|---|---|
| token | 0 | 1 | 2 | 3 | 4 | masked |
| A | 2 | 2 | -1 | -1 | -1 | NaN |
| log pi | -1 | -0.5 | -2 | -1.5 | -0.25 | NaN |
| pi/old | 2 | 1.1 | 0.5 | 1.05 | 4 | NaN |
| pi/mu | 1.25 | 0.8 | 0.4 | 1 | 2 | NaN |
| log pi - log ref | -0.5 | 0.5 | -1 | 0 | 1 | NaN |
| entropy | 0.3 | 0.9 | 0.6 | 0.2 | 1.2 | NaN |

Under a clip of 0.2 on both sides token 0 is clipped high and token 2 low; tokens 1 and 3 lie inside the bounds, and
token 4 lies far outside, on the side that is not clipped. Each row ends with an observation, of log-prob -0.4 and -0.6.

A test gives the loss as a function of the five log-probs alone, in which everything that the objective detaches is a
number. So its finite differences are those of the loss with the detached inputs held fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log
from typing import Any

import torch

import megatron_pgloss as pg
from support.steps import NAN, pictured, solve

A = [2.0, 2.0, -1.0, -1.0, -1.0]
X = [-1.0, -0.5, -2.0, -1.5, -0.25]
R = [2.0, 1.1, 0.5, 1.05, 4.0]
S = [1.25, 0.8, 0.4, 1.0, 2.0]
D = [-0.5, 0.5, -1.0, 0.0, 1.0]
"""log pi - log ref."""
H = [0.3, 0.9, 0.6, 0.2, 1.2]
EACH = range(5)
PLACES = (0, 1, 4, 5, 6)
"""Positions of the five tokens; 2 and 8 predict the answers, 7 the masked token."""
ROWS = ("cAAo", "cAAAAo")
UNMASKED = ("cAAo", "cAAAco")
"""Where a statistic runs over a unit: it would read the masked token, and what is not finite there is refused."""
KEEP = pg.UserMask(name="keep", on=None)
SEQUENCE = [1 / 4] * 2 + [1 / 6] * 3
"""Weights under the mean over sequences of token means."""


def per_token(values: Sequence[float], fill: float = NAN) -> list[float]:
    """Token order, with ``fill`` wherever none of the five is."""
    placed = [fill] * 10
    for value, place in zip(values, PLACES, strict=True):
        placed[place + 1] = value
    return placed


def batch(rows: Sequence[str] = ROWS, **more: Any) -> pg.TokenBatch:
    """The step as a user hands it over."""
    given: dict[str, Any] = {
        "advantages": per_token(A),
        "old_logprobs": per_token([x - log(r) for x, r in zip(X, R, strict=True)]),
        "rollout_logprobs": per_token([x - log(s) for x, s in zip(X, S, strict=True)]),
        "ref_logprobs": per_token([x - d for x, d in zip(X, D, strict=True)]),
        "masks": {"keep": [place != 8 for place in range(10)]},
        "sample_ids": ["first", "second"],
    }
    return pictured(*rows, **(given | more))


def aligned(values: Sequence[float], answers: tuple[float, float] = (NAN, NAN)) -> list[float]:
    """Values at the five tokens and the two observations, as a target-aligned stream."""
    placed = [NAN] * 10
    for value, place in zip(values, PLACES, strict=True):
        placed[place] = value
    placed[2], placed[8] = answers
    return placed


def old_ratio(x: Sequence[float]) -> list[float]:
    """pi/old at the log-probs ``x``."""
    return [R[j] * exp(x[j] - X[j]) for j in EACH]


def mu_ratio(x: Sequence[float]) -> list[float]:
    """pi/mu."""
    return [S[j] * exp(x[j] - X[j]) for j in EACH]


def added(weights: Sequence[float], terms: Sequence[float]) -> float:
    return sum(w * term for w, term in zip(weights, terms, strict=True))


def check(
    spec: pg.LossSpec,
    value: float,
    slopes: Sequence[float],
    loss: Callable[[list[float]], float],
    answers: tuple[float, float] = (0.0, 0.0),
    **more: Any,
) -> None:
    """Assert that the package, and likewise ``loss`` by finite differences, has this value and these slopes.

    Args:
        slopes: d loss / d log pi of the five tokens, in closed form.
        loss: the loss as a function of the five log-probs, with everything else held fixed.
        answers: slopes at the two observations.
        more: further streams of the batch.
    """
    parts = [*spec.gates, *(item for part in spec.components for item in part.parts)]
    rows = UNMASKED if any(part.statistic_unit for part in parts) else ROWS
    answer = solve(batch(rows, **more), spec, aligned(X, (-0.4, -0.6)), aligned(H, (0.5, 0.7)))
    assert abs(answer.loss - value) < 1e-12
    expected = torch.tensor(aligned(slopes, answers), dtype=torch.float64).nan_to_num(0.0)
    torch.testing.assert_close(answer.grad_T, expected, rtol=1e-12, atol=1e-14)
    assert all(float(answer.grad_T[place]) == 0.0 for place in (3, 7, 9))
    clipped = [place for place, slope in zip(PLACES, slopes, strict=True) if slope == 0]
    assert all(float(answer.grad_T[place]) == 0.0 for place in clipped)  # exactly
    assert abs(loss(X) - value) < 1e-12
    step = 1e-6
    for j in EACH:
        up, down = [list(X) for _ in range(2)]
        up[j] += step
        down[j] -= step
        assert abs((loss(up) - loss(down)) / (2 * step) - slopes[j]) < 1e-8, j
