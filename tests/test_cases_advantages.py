"""Inputs that broke other people's losses: returns, baselines, deviations, whitening. Cases as in docs/cases.md."""

from __future__ import annotations

import torch

import megatron_pgloss as pg
from support.steps import NAN, near, pictured

A = pg.advantages
HALF = 2**-0.5


def rewards(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_tool_reply_does_not_cut_off_the_outcome() -> None:
    """VERL-17: actions at 1, 2 and 5, 6, a reply between; reward 1 at the end, gamma 1: every action returns 1."""
    batch = pictured("cAAooAA", terminations=["success"])
    out, _ = A.gae(batch, rewards(1), values=torch.zeros(7, dtype=torch.float64), gamma=1.0, lam=1.0)
    assert out.streams["returns"].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_the_kl_of_a_tool_token_is_nobodys_reward() -> None:
    """SLIME-09: KL [0.1, 5, 0.1] of which the middle is the tool's; beta 1, gamma 1, reward 1: returns 0.8, -, 0.9."""
    batch = pictured("cAoA", old_logprobs=[NAN, -1.0, -1.0, -1.0], ref_logprobs=[NAN, -1.1, -6.0, -1.1],
                     terminations=["success"])  # fmt: skip
    penalty = A.kl_penalty(batch, 1.0)
    near(penalty, [-0.1, 0.0, -0.1, 0.0], 1e-13)
    out, _ = A.gae(
        batch, rewards(1), values=torch.zeros(4, dtype=torch.float64), gamma=1.0, lam=1.0, token_rewards=penalty
    )
    near(out.streams["returns"], [0.8, 0.0, 0.9, 0.0], 1e-13)


def test_whitening_leaves_padding_at_zero() -> None:
    """VERL-27: values [1, 3] and a masked 0: [-0.7071, 0.7071, 0], the last not -1.4142."""
    batch = pictured("cAAc", advantages=[0.0, 1.0, 3.0, 0.0])
    near(A.whiten(batch)[0].streams["advantages"], [-HALF, HALF, 0.0, 0.0])


def test_two_halves_of_a_batch_are_centred_on_one_mean() -> None:
    """SLIME-03: [1, 1] and [3, 3] have the mean 2; a part without any token changes nothing."""
    halves = [pictured("cAA", advantages=1.0), pictured("cAA", advantages=3.0), pictured("ccc", advantages=7.0)]
    out, moments = A.whiten(halves, scale=False)
    assert [part.streams["advantages"].tolist()[:2] for part in out[:2]] == [[-1.0, -1.0], [1.0, 1.0]]
    assert moments.mean == 2.0 and out[2].streams["advantages"].tolist() == [0.0] * 3


def test_equal_rewards_teach_nothing() -> None:
    """NRL-16: no advantage is made of a rounding residue over a deviation of 0."""
    values, report = A.of_rewards(rewards(1, 1, 1, 1), ["p"] * 4, baseline="leave_one_out", scale="group")
    assert values.tolist() == [0.0] * 4 and len(report.silent) == 1


def test_a_baseline_is_subtracted_before_the_division() -> None:
    """PRIME-05: rewards [0, 1]: +-0.7071, not r - mean/std."""
    near(A.of_rewards(rewards(0, 1), ["p", "p"])[0], [-HALF, HALF])


def test_group_and_batch_deviation_are_what_they_say() -> None:
    """PRIME-06: groups [0, 2] and [0, 4]: 1.4142 and 2.8284, over all four 1.9149."""
    given, groups = rewards(0, 2, 0, 4), ["a", "a", "b", "b"]
    near(A.of_rewards(given, groups, scale="group")[0], [-HALF, HALF, -HALF, HALF])
    batch = A.of_rewards(given, groups, scale="batch")[0]
    near(batch, [-0.5222329678670935, 0.5222329678670935, -1.044465935734187, 1.044465935734187], 1e-12)
