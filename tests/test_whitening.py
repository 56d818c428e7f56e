"""Whitening over the tokens of the step, and REINFORCE++ on it."""

from __future__ import annotations

import torch
from test_advantages import HALF, A, ids, rewards

from support.steps import NAN, near, pictured


def test_whitening_is_over_the_members_and_leaves_0_elsewhere() -> None:
    """Values 1 and 3: mean 2, deviation sqrt 2. The row that does not vote, and the fault, get 0 and do not count."""
    batch = pictured(
        "cAoA", "cA", "cA", advantages=[9.0, 1.0, 9.0, 3.0, 0.0, 7.0, 0.0, NAN],
        terminations=["success", "success", "fault"],
    )  # fmt: skip
    stays = torch.tensor([True, False, True])
    out, moments = A.whiten(batch, voters=stays)
    near(out.streams["advantages"], [-HALF, 0.0, HALF, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert (moments.count, moments.mean) == (2, 2.0)
    near(moments.std, 2**0.5)
    near(A.whiten(batch, voters=stays, scale=False)[0].streams["advantages"][:3], [-1.0, 0.0, 1.0])
    flat = pictured("cA", "cAA", advantages=0.1)
    out, moments = A.whiten(flat)
    assert out.streams["advantages"].tolist() == [0.0] * 5 and moments.std == 0
    half, _ = A.whiten(batch, mask=torch.tensor([True, True, False, True, True, True, True, True]), voters=stays)
    assert half.streams["advantages"].tolist() == [0.0] * 8


def test_reinforce_plus_plus_whitens_returns_to_go() -> None:
    """Token rewards -1 and -2, reward 4 at the end: returns 1 and 2; the other episode: 0. Mean 1, deviation 1."""
    batch = pictured("cAoA", "cA", **ids("a0", "a1"))
    tokens_T = torch.tensor([-1.0, NAN, -2.0, NAN, 0.0, NAN], dtype=torch.float64)
    out, _ = A.reinforce_plus_plus(batch, rewards(4, 0), token_rewards=tokens_T)
    near(out.streams["advantages"], [0.0, 0.0, 1.0, 0.0, -1.0, 0.0])
    # gamma 1/2: the first action's return is -1 + (4 - 2) / 2 = 0.
    half, moments = A.reinforce_plus_plus(batch, rewards(4, 0), token_rewards=tokens_T, gamma=0.5)
    near(moments.mean, 2 / 3)
    near(half.streams["advantages"][[0, 2, 4]], rewards(-2 / 3, 4 / 3, -2 / 3) / (4 / 3) ** 0.5)
    # Group baseline: 1 - (-1): episodes +-2 on tokens 2, 2, -2; mean 2/3, deviation sqrt(16/3).
    group, _ = A.reinforce_plus_plus(batch, rewards(4, 0), baseline="group")
    near(group.streams["advantages"][[0, 2, 4]], rewards(4 / 3, 4 / 3, -8 / 3) / (16 / 3) ** 0.5)
