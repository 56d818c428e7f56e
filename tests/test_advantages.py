"""Advantages from rewards: episodes vote once each, those that leave do not, groups that teach nothing are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_pgloss as pg
from megatron_pgloss.advantages.groups import standardize
from support.steps import NAN, near, pictured, refused, solve

A = pg.advantages


def ids(*names: str) -> dict[str, list[Any]]:
    """``"a1"`` is episode 1 of prompt a."""
    return {"prompt_ids": [name[0] for name in names], "episode_ids": [int(name[1:]) for name in names]}


def rewards(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_row(batch: pg.TokenBatch, name: str = "advantages") -> list[float]:
    """The stream at the first action of every row."""
    firsts = [int((batch.action_T & (batch.seq_T == row)).nonzero()[0]) for row in range(len(batch))]
    return batch.streams[name][firsts].tolist()


def test_an_episode_that_leaves_the_loss_does_not_vote() -> None:
    """Rewards [1, 1, 0, 0], the second masked: mean 1/3, so [2/3, -, -1/3, -1/3]; 0 stands at the masked one."""
    batch = pictured("cA", "cAA", "cA", "cAA", **ids("a0", "a1", "a2", "a3"), terminations=["success", "truncated"] * 2)
    spec = pg.presets.dapo(overlong="drop")
    assert pg.voters(batch, spec).tolist() == [True, False, True, False]
    out, report = A.group_relative(
        batch, rewards(1, 1, 0, 0), scale="none", voters=torch.tensor([True, False, True, True])
    )
    near(of_row(out), [2 / 3, 0.0, -1 / 3, -1 / 3])
    assert (report.groups, report.episodes, report.voters, report.silent) == (1, 4, 3, ())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (pg.presets.ppo(), [True, True, True, False]),
        (pg.presets.ppo(masks=[pg.DropTruncated()]), [True, False, True, False]),
        (pg.presets.ppo(masks=[pg.DropTruncated(), pg.UserMask(name="keep")]), [True, False, False, False]),
        (pg.presets.ppo(masks=[pg.DropTruncated(on=())]), [True, True, True, False]),
        (pg.presets.ppo(masks=[pg.DropZeroAdvantage()]), [True, True, True, False]),
    ],
)
def test_voters_are_the_rows_that_the_spec_leaves(spec: pg.LossSpec, expected: list[bool]) -> None:
    """The third row has no action left under ``keep``; the advantages are all 0 here, and that is not asked."""
    batch = pictured(
        "cA", "cA", "cA", "cA", advantages=0.0,
        terminations=["success", "truncated", "failure", "fault"], masks={"keep": [True] * 5 + [False] + [True] * 2},
    )  # fmt: skip
    assert pg.voters(batch, spec).tolist() == expected


def test_an_episode_that_is_rejected_whole_does_not_vote() -> None:
    """old/mu is e^2 at both tokens of the second row and at one of two of the third: geometric means e^2 and e."""
    mu = [-1.0, -1.0, -1.0, -3.0, -3.0, -1.0, -3.0, -1.0, -1.0, -1.0]
    batch = pictured("cA", "cAA", "cAA", "cA", old_logprobs=-1.0, rollout_logprobs=mu, **ids("a0", "a1", "a2", "a3"))
    batch = replace(batch, streams={name: batch.streams[name] for name in ("old", "rollout")})
    stays = pg.voters(batch, pg.presets.ppo(corrections=[pg.RatioMask(low=0.5, high=4.0)]))
    assert stays.tolist() == [True, False, True, True]
    assert pg.voters(batch, pg.presets.ppo(corrections=[pg.Veto(high=4.0)])).tolist() == [True, False, False, True]
    assert pg.voters(batch, pg.presets.ppo(corrections=[pg.TruncatedIS()])).all()
    out, report = A.group_relative(batch, rewards(1, 1, 0, 0), scale="none", voters=stays)
    near(of_row(out), [2 / 3, 0.0, -1 / 3, -1 / 3])
    assert report.voters == 3


def test_a_fault_never_votes_whatever_its_reward() -> None:
    batch = pictured("cA", "cA", "cA", **ids("a0", "a1", "a2"), terminations=["success", "fault", "failure"])
    out, report = A.group_relative(batch, rewards(1, NAN, 0), scale="none")
    near(of_row(out), [0.5, 0.0, -0.5])
    assert (report.episodes, report.voters) == (3, 2)


def test_the_rows_of_an_episode_vote_once() -> None:
    """Episode a0 has three rows. Once each: mean (1 + 0) / 2; by rows it would be 3/4."""
    batch = pictured("cA", "cAA", "cA", "cA", **ids("a0", "a0", "a0", "a1"))
    near(of_row(A.group_relative(batch, rewards(1, 1, 1, 0), scale="none")[0]), [0.5, 0.5, 0.5, -0.5])
    refused(pg.DataError, lambda: A.group_relative(batch, rewards(1, 1, 0, 0)), "different rewards", "1 and 0", "row 2")
    # Only whole episodes leave: one of three rows masked, it still votes.
    some = A.group_relative(batch, rewards(1, 1, 1, 0), scale="none", voters=torch.tensor([False, True, True, True]))
    near(of_row(some[0]), [0.5, 0.5, 0.5, -0.5])


def test_episode_0_of_two_prompts_are_two_episodes() -> None:
    batch = pictured("cA", "cA", "cA", "cA", **ids("a0", "a1", "b0", "b1"))
    near(of_row(A.group_relative(batch, rewards(1, 0, 0, 4), scale="none")[0]), [0.5, -0.5, -2.0, 2.0])


HALF = 2**-0.5
SPREAD = (11 / 3) ** 0.5  # of 0, 2, 0, 4 with n - 1: mean 1.5, squares 2.25 + 0.25 + 2.25 + 6.25


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [-HALF, HALF, -HALF, HALF]),
        ({"scale": "none"}, [-1.0, 1.0, -2.0, 2.0]),
        ({"scale": "batch"}, [-1 / SPREAD, 1 / SPREAD, -2 / SPREAD, 2 / SPREAD]),
        ({"scale": "mean"}, [-1.0, 1.0, -1.0, 1.0]),
        ({"baseline": "leave_one_out", "scale": "none"}, [-2.0, 2.0, -4.0, 4.0]),
        ({"baseline": "none", "scale": "none"}, [0.0, 2.0, 0.0, 4.0]),
    ],
)
def test_baselines_and_scales_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    """Groups [0, 2] and [0, 4]: means 1 and 2, deviations sqrt 2 and 2 sqrt 2, over all four 1.9149."""
    values, report = A.of_rewards(rewards(0, 2, 0, 4), ["a", "a", "b", "b"], **options)
    near(values, expected)
    batch = pictured("cA", "cAAo", "cA", "cA", **ids("a0", "a1", "b0", "b1"))
    out, other = A.group_relative(batch, rewards(0, 2, 0, 4), **options)
    near(of_row(out), expected)
    assert report == other and not report.silent


def test_rloo_compares_with_the_others_alone() -> None:
    """Rewards 1, 2, 6: others' means 4, 3.5, 1.5."""
    batch = pictured("cA", "cA", "cA", **ids("a0", "a1", "a2"))
    near(of_row(A.rloo(batch, rewards(1, 2, 6))[0]), [-3.0, -1.5, 4.5])


@pytest.mark.parametrize(
    ("values", "options", "reason"),
    [
        ((0.1, 0.1, 0.1), {}, "all rewards equal (0.1)"),
        ((0.1, 0.1, 0.1), {"baseline": "leave_one_out", "scale": "none"}, "all rewards equal (0.1)"),
        ((1.0, 1.0, 1.0), {"scale": "batch"}, "all rewards equal (1)"),
        ((0.0, 0.0, 0.0), {"scale": "mean"}, "all rewards equal (0)"),
        ((1.0, 0.0, 1.0), {"min_voters": 4}, "too few voters, fewer than 4"),
        ((1.0, 0.0, 1.0), {"voters": [True, False, False]}, "too few voters, fewer than 2"),
        ((1.0, 0.0, 1.0), {"voters": [False, False, False]}, "too few voters, fewer than 2"),
    ],
)
def test_a_silent_group_gives_exactly_0_and_is_named(values: Any, options: dict[str, Any], reason: str) -> None:
    """0.1 three times: the mean rounds away from 0.1, and rounding over a deviation of rounding would be +-1."""
    options = {name: torch.tensor(v) if name == "voters" else v for name, v in options.items()}
    out, report = A.of_rewards(rewards(*values), ["p"] * 3, **options)
    assert out.tolist() == [0.0, 0.0, 0.0]
    (silent,) = report.silent
    assert (silent.prompt, silent.reason) == ("p", reason)
    assert "1 groups are silent" in str(report) and reason in str(report) and "'p'" in str(report)


def test_division_by_a_deviation_of_0_is_skipped_not_softened() -> None:
    """Advantages +-1e-7 with deviation 0 stay as they are; an epsilon of 1e-6 would make them +-0.1."""
    assert [standardize(1e-7, 0.0), standardize(-1e-7, 0.0), standardize(3.0, 2.0)] == [1e-7, -1e-7, 1.5]


def test_rewards_of_tokens_are_added_over_the_episode() -> None:
    """a0: 1 - 0.5 - 0.25 over its two rows; a1: 0. NaN stands where no action is."""
    batch = pictured("cA", "cAo", "cA", **ids("a0", "a0", "a1"))
    tokens_T = torch.tensor([-0.5, NAN, -0.25, NAN, NAN, 0.0, NAN], dtype=torch.float64)
    out, _ = A.group_relative(batch, rewards(1, 1, 0), scale="none", token_rewards=tokens_T)
    near(of_row(out), [0.125, 0.125, -0.125])


def test_kl_in_the_reward() -> None:
    """log old - log ref = log 2 at the first action, -log 2 at the second."""
    log2 = torch.tensor(2.0, dtype=torch.float64).log().item()
    batch = pictured("cAAo", old_logprobs=[NAN, -1.0, -1.0, NAN], ref_logprobs=[9.0, -1.0 - log2, -1.0 + log2, 9.0])
    near(A.kl_penalty(batch, 0.5), [-0.5 * log2, 0.5 * log2, 0.0, 0.0])
    near(A.kl_penalty(batch, 0.5, estimator="k2"), [-0.25 * log2**2, -0.25 * log2**2, 0.0, 0.0])
    near(A.kl_penalty(batch, 0.5, estimator="k3"), [-0.5 * (0.5 + log2 - 1), -0.5 * (2 - log2 - 1), 0.0, 0.0], 1e-13)
    bad = pictured("cA", old_logprobs=[0.0, -1.0], ref_logprobs=[0.0, NAN])
    refused(pg.DataError, lambda: A.kl_penalty(bad, 0.1), "'ref'", "not finite", "row 0, token 1")
    broken = pictured("cA", old_logprobs=[0.0, -1.0], ref_logprobs=[0.0, NAN], terminations=["fault"])
    assert A.kl_penalty(broken, 0.1).tolist() == [0.0, 0.0]
    refused(pg.DataError, lambda: A.kl_penalty(pictured("cA"), 0.1), "'old'", "old_logprobs")


def test_lengths_of_episodes_and_penalties_on_them() -> None:
    """Limit 10, buffer 4: nothing up to 6, half at 8, all from 10 on (DAPO eq. 13)."""
    batch = pictured("cAA", "cAoA", "cA", **ids("a0", "a0", "a1"))
    assert A.episode_lengths(batch).tolist() == [4, 4, 1]
    near(A.soft_overlong([0, 6, 7, 8, 10, 99], limit=10, buffer=4), [0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    near(A.soft_overlong([8], limit=10, buffer=4, penalty=0.2), [-0.1])
    near(A.linear_length(torch.tensor([3, 5, 9]), 0.5, free=4), [0.0, -0.5, -2.5])
    refused(pg.DataError, lambda: A.soft_overlong([1], limit=10, buffer=0), "buffer must lie in (0, 10]")
    refused(pg.DataError, lambda: A.linear_length([1.5], 0.1), "whole numbers")


def test_one_number_a_turn_lies_on_every_token_of_the_turn() -> None:
    batch = pictured("cAAoAc", "cA")
    out = A.per_turn(batch, [[0.5, -1.0], [2.0]])
    assert out.streams["advantages"].tolist() == [0.5, 0.5, 0.5, -1.0, -1.0, 0.0, 2.0, 0.0]
    refused(pg.DataError, lambda: A.per_turn(batch, [[0.5], [2.0]]), "turns", "expected 2", "row 0")
    refused(pg.DataError, lambda: A.per_turn(batch, [[0.5, NAN], [2.0]]), "not finite", "row 0")
    given = pictured("cAAA", turn_ids=[-1, 7, 7, 3])
    assert A.per_turn(given, torch.tensor([[1.0, 2.0]])).streams["advantages"].tolist() == [1.0, 1.0, 2.0, 0.0]


@given(st.permutations(range(7)), st.integers(0, 7))
def test_order_and_batches_do_not_matter_by_a_bit(order: list[int], cut: int) -> None:
    pictures = ["cA", "cAAo", "cAA", "cAAAA", "cA", "cAoA", "cAA"]
    names = ids("a0", "a0", "a1", "a2", "b0", "b1", "b2")
    values = rewards(0.1, 0.1, 0.7, -0.3, 0.2, 0.3, 1e9)
    whole = pictured(*pictures, **names, sample_ids=list(range(7)))
    given_ = [whole.select(part) for part in (order[:cut], order[cut:])]
    for scale in ("group", "batch"):
        one, first = A.group_relative(whole, values, scale=scale)
        many, second = A.group_relative(given_, values[torch.tensor(order)], scale=scale)
        assert first.voters == second.voters and {s.prompt for s in first.silent} == {s.prompt for s in second.silent}
        one, many = A.whiten(one)[0], A.whiten(many)[0]
        wanted = dict(zip(one.sample_ids, of_row(one), strict=True))
        found = [pair for part in many for pair in zip(part.sample_ids, of_row(part), strict=True)]
        assert dict(found) == wanted


def test_float32_rewards_give_a_float32_stream_and_the_loss_reads_it() -> None:
    batch = pictured("cA", "cAA", dtype=torch.float32, **ids("a0", "a1"), old_logprobs=-1.0)
    out, _ = A.group_relative(batch, torch.tensor([1.0, 0.0]), scale="none")
    assert out.streams["advantages"].dtype == torch.float32
    assert A.group_relative(batch, [1, 0], scale="none")[0].streams["advantages"].equal(out.streams["advantages"])
    near(solve(out, pg.presets.ppo(), torch.full((5,), -1.0)).loss, -(0.5 - 0.5 - 0.5) / 3, 1e-6)
    assert "advantages" in batch.streams and batch.streams["advantages"].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_traces_need_no_advantage_before_the_rewards_are_known() -> None:
    def trace(episode: int, advantage: float | None = None) -> pg.Trace:
        spans = [
            pg.Span(role="user", author="harness", tokens=[1]),
            pg.Span(role="assistant", author="policy", tokens=[2]),
        ]
        return pg.Trace(prompt_id=0, episode_id=episode, spans=spans, advantage=advantage)

    batch = pg.TokenBatch.from_traces([trace(0), trace(1)])
    assert "advantages" not in batch.streams
    refused(pg.DataError, lambda: pg.TokenBatch.from_traces([trace(0, 1.0), trace(1)]), "advantage", "trace 1")
    assert of_row(A.group_relative(batch, [1.0, 0.0], scale="none")[0]) == [0.5, -0.5]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda b: A.group_relative(pictured("cA"), [1.0]), ("prompt_ids",)),
        (lambda b: A.group_relative(b, [1.0]), ("rewards", "[2]", "[1]")),
        (lambda b: A.group_relative(b, [1.0, NAN]), ("not finite", "row 1")),
        (lambda b: A.group_relative(b, [1.0, -1.0], scale="mean"), ("rewards >= 0", "-1")),
        (lambda b: A.group_relative(b, [1.0, 0.0], scale="std"), ("scale='std'", "group, batch, mean, none")),
        (lambda b: A.group_relative(b, [1.0, 0.0], min_voters=1), ("min_voters=1",)),
        (lambda b: A.group_relative(b, torch.ones(2).bfloat16()), ("bfloat16",)),
        (lambda b: A.group_relative(b, [1.0, 0.0], voters=[1, 0]), ("voters", "bool [2]")),
        (lambda b: A.group_relative(b, [1.0, 0.0], token_rewards=torch.ones(3)), ("token_rewards", "[4]", "[3]")),
        (lambda b: A.group_relative("b", [1.0, 0.0]), ("TokenBatch", "str")),
        (lambda b: A.of_rewards([1.0, 0.0], [0, 0], terminations=["done", "fault"]), ("termination", "success")),
        (lambda b: A.reinforce_plus_plus(b, [1.0, 0.0], baseline="group", gamma=0.9), ("gamma=1",)),
        (lambda b: A.whiten(A.per_turn(b, [[1.0], [2.0]]), mask=torch.ones(4)), ("mask", "bool [4]")),
    ],
)
def test_what_cannot_be_is_refused(build: Any, words: tuple[str, ...]) -> None:
    batch = pictured("cA", "cA", **ids("a0", "a1"))
    refused(pg.DataError, lambda: build(batch), *words)


def test_every_state_has_its_effect() -> None:
    assert set(A.EFFECTS) == set(pg.Termination)
    leaves = {state for state, effect in A.EFFECTS.items() if effect.bootstrap == "leaves"}
    assert leaves == {state for state, effect in A.EFFECTS.items() if not effect.votes} == {pg.Termination.FAULT}
    assert [state for state, e in A.EFFECTS.items() if e.bootstrap == "value"] == [pg.Termination.TRUNCATED]
