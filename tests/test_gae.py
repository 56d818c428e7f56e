"""GAE over an episode's actions: by hand, against a plain loop, and wherever its rows lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_advantages import ids, rewards

import megatron_pgloss as pg
from support.steps import NAN, near, pictured, refused, solve

A = pg.advantages


def loop(deltas: list[float], decay: float) -> list[float]:
    """The definition, backwards."""
    out, later = [], 0.0
    for delta in reversed(deltas):
        later = delta + decay * later
        out.append(later)
    return out[::-1]


def at_actions(batch: pg.TokenBatch, name: str) -> torch.Tensor:
    return batch.streams[name][batch.action_T]


def test_by_hand_with_an_observation_bridged() -> None:
    """Values 1, 2 at the actions, reward 4, gamma = lambda = 1/2.

    delta_2 = 4 - 2 = 2; delta_1 = 0 + 2/2 - 1 = 0; A_1 = 0 + 2/4 = 0.5. The value 100 at the observation and 50 after
    the end are not read: the episode was finished.
    """
    batch = pictured("cAoA", terminations=["failure"])
    values = torch.tensor([1.0, 100.0, 2.0, 50.0], dtype=torch.float64)
    out, report = A.gae(batch, rewards(4), values=values, gamma=0.5, lam=0.5)
    near(out.streams["advantages"], [0.5, 0.0, 2.0, 0.0])
    near(out.streams["returns"], [1.5, 0.0, 4.0, 0.0])
    near(out.streams["values"], [1.0, 0.0, 2.0, 0.0])
    assert (report.episodes, report.bootstrapped, report.left, report.empty) == (1, 0, 0, 0)


@pytest.mark.parametrize(
    ("state", "options", "expected"),
    [
        ("success", {}, 4 - 2.0),
        ("failure", {}, 4 - 2.0),
        ("invalid", {}, 4 - 2.0),
        ("truncated", {}, 4 + 0.5 * 50 - 2.0),
        ("truncated", {"last_values": [10.0]}, 4 + 0.5 * 10 - 2.0),
        ("truncated", {"bootstrap": "none"}, 4 - 2.0),
        ("fault", {}, 0.0),
    ],
)
def test_how_an_episode_ended_says_how_it_goes_on(state: str, options: dict[str, Any], expected: float) -> None:
    batch = pictured("cA", terminations=[state])
    values = torch.tensor([2.0, 50.0], dtype=torch.float64)
    out, report = A.gae(batch, rewards(4), values=values, gamma=0.5, lam=0.5, **options)
    near(out.streams["advantages"], [expected, 0.0])
    assert report.bootstrapped == (state == "truncated" and "bootstrap" not in options)
    assert report.left == (state == "fault")


def test_a_fault_may_hold_anything() -> None:
    """Its other row says success; the episode leaves all the same."""
    batch = pictured("cA", "cA", "cA", **ids("a0", "a0", "a1"), terminations=["fault", "success", "success"])
    values = torch.tensor([NAN, NAN, 2.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    out, report = A.gae(batch, rewards(NAN, 4, 4), values=values)
    near(out.streams["advantages"], [0.0, 0.0, 0.0, 0.0, 3.0, 0.0])
    near(out.streams["returns"], [0.0, 0.0, 0.0, 0.0, 4.0, 0.0])
    assert (report.episodes, report.left) == (2, 1)


def several(seed: int = 0) -> tuple[pg.TokenBatch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Episode a0 in three rows, one of them without an action, a truncated one in two, one of a single action."""
    pictures = ("cAAoA", "ccoc", "oAAAAAAoo", "cA", "cAAAA", "cAoAc")
    batch = pictured(
        *pictures, **ids("a0", "a0", "a0", "a1", "b0", "b0"), sample_ids=list("uvwxyz"),
        terminations=["success"] * 3 + ["failure", "truncated", "truncated"],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    value_T, more_T = (torch.randn(batch.tokens_T.numel(), generator=generator, dtype=torch.float64) for _ in range(2))
    return batch, value_T, more_T, rewards(1, 1, 1, 0, 0.5, 0.5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 0.5), (0.99, 0.95)])
def test_matches_the_definition_on_episodes_of_several_rows(gamma: float, lam: float) -> None:
    batch, value_T, more_T, reward_S = several()
    out, _ = A.gae(batch, reward_S, values=value_T, token_rewards=more_T, gamma=gamma, lam=lam)
    for rows, end in (((0, 1, 2), 0.0), ((3,), 0.0), ((4, 5), float(value_T[-1]))):
        at = [int(t) for row in rows for t in (batch.action_T & (batch.seq_T == row)).nonzero()]
        earned = [float(more_T[t]) for t in at]
        earned[-1] += float(reward_S[rows[0]])
        after = [float(value_T[t]) for t in at[1:]] + [end]
        deltas = [r + gamma * v - float(value_T[t]) for r, v, t in zip(earned, after, at, strict=True)]
        near(out.streams["advantages"][at], loop(deltas, gamma * lam), 1e-12)
        near(out.streams["returns"][at], out.streams["advantages"][at] + value_T[at])
    assert not out.streams["advantages"][~batch.action_T].any()


def test_a_lambda_of_its_own_for_the_returns() -> None:
    batch, value_T, more_T, reward_S = several()
    given = {"values": value_T, "token_rewards": more_T, "gamma": 0.9}
    both, _ = A.gae(batch, reward_S, lam=0.5, value_lam=1.0, **given)
    assert both.streams["advantages"].equal(A.gae(batch, reward_S, lam=0.5, **given)[0].streams["advantages"])
    assert both.streams["returns"].equal(A.gae(batch, reward_S, lam=1.0, **given)[0].streams["returns"])


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [3, 2, 0, 5, 1, 4]])
def test_rows_may_lie_anywhere_if_their_places_are_given(order: list[int]) -> None:
    """The same bits, in one batch or in two, whatever the order of rows."""
    batch, value_T, more_T, reward_S = several()
    wanted, _ = A.gae(batch, reward_S, values=value_T, token_rewards=more_T)
    index = torch.tensor(order)
    moved = torch.cat([(batch.seq_T == row).nonzero().flatten() for row in order])
    for cut in (6, 2):
        parts = [batch.select(order[:cut]), batch.select(order[cut:])]
        found, _ = A.gae(
            parts, reward_S[index], values=value_T[moved], token_rewards=more_T[moved], order=index
        )  # fmt: skip
        for name in ("advantages", "returns"):
            assert torch.cat([part.streams[name] for part in found]).equal(wanted.streams[name][moved])
    naive, _ = A.gae(batch.select(order), reward_S[index], values=value_T[moved], token_rewards=more_T[moved])
    assert not naive.streams["advantages"].equal(wanted.streams["advantages"][moved])


def test_returns_and_values_feed_the_value_loss() -> None:
    """R = 1, old value 0.5, V = 0.9, clipped to 0.7: max(0.1^2, 0.3^2) / 2."""
    batch = pictured("cA", terminations=["success"])
    out, _ = A.gae(batch, rewards(1), values=torch.tensor([0.5, NAN], dtype=torch.float64))
    near(solve(out, pg.presets.critic(clip=0.2), [-1.0, NAN], value=[0.9, NAN]).loss, 0.045, 1e-12)


def test_ten_thousand_actions_in_a_row() -> None:
    """gamma = lambda = 1, no values: the advantage of every action is what is still to come, exactly."""
    batch = pictured("c" + "A" * 10_000, terminations=["success"])
    zero_T = torch.zeros(10_001)
    out, _ = A.gae(batch, [1.0], values=zero_T, token_rewards=torch.ones(10_001), lam=1.0)
    assert out.streams["advantages"].dtype == torch.float32
    assert out.streams["advantages"][:-1].tolist() == [10_000 - t + 1.0 for t in range(10_000)]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda b, v: A.gae(b, [1.0, 1.0]), ("gae needs values",)),
        (lambda b, v: A.gae(pictured("cA", "cA"), [1.0, 1.0], values=v), ("terminations", "bootstrap='none'")),
        (lambda b, v: A.gae(b, [1.0, 1.0], values=v[:3]), ("values", "[4]", "[3]")),
        (lambda b, v: A.gae(b, [1.0, 1.0], values=v.bfloat16()), ("values", "bfloat16")),
        (lambda b, v: A.gae(b, [1.0, 1.0], values=v, gamma=1.1), ("gamma", "1.1")),
        (lambda b, v: A.gae(b, [1.0, NAN], values=v), ("reward is not finite", "row 1")),
        (lambda b, v: A.gae(b, [1.0, 1.0], values=v, bootstrap="mean"), ("bootstrap='mean'",)),
        (lambda b, v: A.gae(b, [1.0, 1.0], values=v * NAN), ("values is not finite", "row 0, token 1")),
        (lambda b, v: A.gae(b, [1.0, 1.0], values=v.masked_fill(v == 4, NAN)), ("value of its last state", "row 1")),
        (lambda b, v: A.gae(b, [1.0, 0.5], values=v, order=[0, 1]), ("different rewards", "row 0 and row 1")),
        (lambda b, v: A.gae(b, [1.0, 1.0], values=v, order=[0, 0]), ("the same order",)),
    ],
)
def test_what_cannot_be_is_refused(build: Any, words: tuple[str, ...]) -> None:
    batch = pictured("cA", "cA", **ids("a0", "a0"), terminations=["success", "truncated"])
    refused(pg.DataError, lambda: build(batch, torch.tensor([1.0, 2.0, 3.0, 4.0])), *words)


def test_values_that_came_with_the_batch_know_no_last_state() -> None:
    """The shift to targets leaves nothing at a row's end: V(last) must be given."""
    batch = pictured("cA", terminations=["truncated"])
    batch = A.gae(batch, [1.0], values=torch.tensor([2.0, 3.0]), bootstrap="none")[0]
    refused(pg.DataError, lambda: A.gae(batch, [1.0]), "value of its last state", "last_values=")
    near(A.gae(batch, [1.0], last_values=[3.0])[0].streams["advantages"], [1 + 3.0 - 2.0, 0.0], 1e-7)
