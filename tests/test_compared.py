"""Given baselines, OPO, pass@k, GDPO, sequence statistics and turn-level GAE against arithmetic by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from support.steps import refused
from support.worlds import world_fixture

A = pg.advantages
LENGTHS = (1, 3, 2, 4, 2)
"""Policy tokens of five rows: three of prompt a, two of prompt b."""
PROMPTS = ("a", "a", "a", "b", "b")


def batch(rows: tuple[int, ...] = (0, 1, 2, 3, 4), **more: Any) -> pg.TokenBatch:
    """Each row is a token of prompt and then its policy tokens."""
    lengths = [1 + LENGTHS[row] for row in rows]
    return pg.TokenBatch.from_packed(
        tokens=[0] * sum(lengths), lengths=lengths,
        action_mask=[bit for length in lengths for bit in [False] + [True] * (length - 1)],
        prompt_ids=[PROMPTS[row] for row in rows], sample_ids=[f"row {row}" for row in rows],
        **{"episode_ids": [str(row) for row in rows], **more},
    )  # fmt: skip


def per_row(found: pg.TokenBatch) -> list[float]:
    """The advantage of each row, which must be the same on all of its action tokens, and 0 at its last position."""
    out = []
    for row in range(len(found)):
        start, end = int(found.cu_S1[row]), int(found.cu_S1[row + 1])
        values = found.streams["advantages"][start:end].tolist()
        assert len(set(values[:-1])) == 1 and values[-1] == 0
        out.append(values[0])
    return out


def near(got: list[float], expected: list[float]) -> None:
    assert got == pytest.approx(expected, rel=1e-13, abs=1e-15)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_given_baseline_is_subtracted() -> None:
    near(
        per_row(A.given_baseline(batch(), float64(1, 0, 0.5, 1, 1), float64(0.25, 0.25, 0.25, 1, 1))),
        [0.75, -0.25, 0.25, 0, 0],
    )
    two = A.given_baseline([batch((0, 1)), batch((2,))], [1.0, 0.0, 0.5], [0.25, 0.25, 0.25])
    near(per_row(two[0]) + per_row(two[1]), [0.75, -0.25, 0.25])
    refused(pg.DataError, lambda: A.given_baseline(batch(), [1.0] * 5, [1.0] * 4), "baselines has the wrong shape")
    bad = [0.0, math.nan, 0.0, 0.0, 0.0]
    refused(pg.DataError, lambda: A.given_baseline(batch(), [1.0] * 5, bad), "a baseline is not finite", "row 1")
    broken = batch(terminations=["success", "fault", "success", "success", "success"])
    near(per_row(A.given_baseline(broken, [1.0] * 5, bad)), [1, 0, 1, 1, 1])


def test_opo_weighs_the_mean_by_length() -> None:
    """Prompt a: (1 * 1 + 3 * 0 + 2 * 0.5) / 6 = 1/3; prompt b: equal rewards teach nothing."""
    found, report = A.opo(batch(), float64(1, 0, 0.5, 1, 1))
    near(per_row(found), [2 / 3, -1 / 3, 1 / 6, 0, 0])
    assert [str(one) for one in report.silent] == ["prompt 'b': all rewards equal (1) (2 of 2 episodes vote)"]
    # Rows 0 and 1 are one episode of 4 tokens: (4 * 1 + 2 * 0.5) / 6 = 5/6.
    found, _ = A.opo(batch(episode_ids=["x", "x", "y", "z", "w"]), float64(1, 1, 0.5, 2, 1))
    near(per_row(found), [1 / 6, 1 / 6, -1 / 3, 2 - 5 / 3, 1 - 5 / 3])  # b: (4 * 2 + 2 * 1) / 6 = 5/3


def test_a_row_without_a_policy_token_does_not_vote() -> None:
    """Rewards 100 (nothing to train), 1 and 0: as if the first were not there."""
    three = pg.TokenBatch.from_packed(
        tokens=[0] * 6, lengths=[2, 2, 2], action_mask=[False, False, False, True, False, True], prompt_ids=["a"] * 3,
        episode_ids=[0, 1, 2],
    )  # fmt: skip
    for make in (lambda: A.opo(three, float64(100, 1, 0)), lambda: A.pass_at_k(three, float64(1, 1, 0), 1),
                 lambda: A.gdpo(three, {"r": float64(100, 1, 0)}, scale="none")):  # fmt: skip
        found, report = make()
        values = per_row(found)
        assert report.voters == 2 and values[0] == 0 and values[1] == -values[2] != 0


def by_subsets(rewards: list[int], k: int) -> list[float]:
    """All subsets of k answers, their standardised worth, and the mean over those that hold the answer."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    worth = [max(rewards[i] for i in subset) for subset in subsets]
    mean = sum(worth) / len(worth)
    std = math.sqrt(sum((value - mean) ** 2 for value in worth) / len(worth))
    scores = [(value - mean) / std for value in worth]
    holding = [[s for s, subset in zip(scores, subsets, strict=True) if i in subset] for i in range(len(rewards))]
    return [sum(some) / len(some) for some in holding]


@pytest.mark.parametrize(
    ("rewards", "k"),
    [([1, 0, 0, 0, 0], 2), ([1, 1, 0, 0, 0], 2), ([0, 1, 0, 0, 0], 4), ([1, 0, 0, 1, 0], 3), ([1, 1, 0, 1, 0], 1)],
)
def test_pass_at_k_is_the_mean_over_all_subsets(rewards: list[int], k: int) -> None:
    rows = pg.TokenBatch.from_packed(
        tokens=[0] * 10, lengths=[2] * 5, action_mask=[False, True] * 5, prompt_ids=["p"] * 5
    )
    found, report = A.pass_at_k(rows, float64(*rewards), k)
    near(per_row(found), by_subsets(rewards, k))
    assert report.voters == 5 and not report.silent


def test_pass_at_k_by_hand_and_where_it_teaches_nothing() -> None:
    """One of three right, k = 2: R = 1 - 1/3 = 2/3, s = sqrt(2)/3; right 1/sqrt(2), wrong (1/3 - 1/2) / s."""
    found, report = A.pass_at_k(batch(), float64(1, 0, 0, 1, 0), 2)
    near(per_row(found)[:3], [1 / math.sqrt(2), -1 / math.sqrt(8), -1 / math.sqrt(8)])
    assert [(one.prompt, one.reason) for one in report.silent] == [
        ("b", "every 2 of its answers are worth the same (1)")
    ]
    _, report = A.pass_at_k(batch(), float64(1, 0, 0, 1, 0), 3)
    assert [(one.prompt, one.reason) for one in report.silent] == [
        ("a", "every 3 of its answers are worth the same (1)"), ("b", "too few voters, fewer than 3"),
    ]  # fmt: skip
    refused(pg.DataError, lambda: A.pass_at_k(batch(), [1, 0, 0.5, 0, 1], 2), "0 and 1", "0.5", "row 2")
    refused(pg.DataError, lambda: A.pass_at_k(batch(), [1, 0, 0, 0, 1], 0), ">= 1")


def test_gdpo_standardises_each_reward_by_itself() -> None:
    """Prompt a: right (1, 0, 0), deviation 1/sqrt(3), mean 1/3: (2, -1, -1)/sqrt(3); short (0, 1, 1), weight 0.5: minus
    half of it. Prompt b: right alone differs, (1, 0): deviation 1/sqrt(2), so +- 1/sqrt(2)."""
    rewards = {"right": float64(1, 0, 0, 1, 0), "short": float64(0, 1, 1, 1, 1)}
    sums = [1 / math.sqrt(3), -0.5 / math.sqrt(3), -0.5 / math.sqrt(3), 1 / math.sqrt(2), -1 / math.sqrt(2)]
    found, report = A.gdpo(batch(), rewards, weights={"short": 0.5}, scale="none")
    near(per_row(found), sums)
    assert not report.silent
    std = math.sqrt((1 / 3 + 2 * 0.25 / 3 + 2 * 0.5) / 4)  # five numbers of mean 0
    near(per_row(A.gdpo(batch(), rewards, weights={"short": 0.5})[0]), [value / std for value in sums])
    same = {"right": float64(1, 1, 1, 1, 0), "short": float64(0, 0, 0, 1, 1)}
    _, report = A.gdpo(batch(), same)
    assert [(one.prompt, one.reason) for one in report.silent] == [("a", "all rewards equal")]
    refused(pg.DataError, lambda: A.gdpo(batch(), rewards, weights={"shrot": 1.0}), "'shrot'", "right, short")
    refused(pg.DataError, lambda: A.gdpo(batch(), {}), "by their names")


def test_reinforce_plus_plus_by_sequence_and_by_token() -> None:
    """Rewards 1, 0, 2, 0, 1 on 1, 3, 2, 4, 2 tokens. Sequences: mean 0.8, deviation sqrt(0.7). Tokens: 12 of them, mean
    7/12, squares about it 1 + 8 + 2 - 49/12. polgrad 0.2.1's reinforce_pp_advantages gives the first (40 random cases,
    5e-16)."""
    rewards = float64(1, 0, 2, 0, 1)
    found, moments = A.reinforce_plus_plus(batch(), rewards, statistics="sequences")
    near(per_row(found), [(r - 0.8) / math.sqrt(0.7) for r in rewards.tolist()])
    assert (moments.count, moments.mean) == (5, 0.8)
    found, moments = A.reinforce_plus_plus(batch(), rewards)
    std = math.sqrt((1 + 8 + 2 - 49 / 12) / 11)
    near(per_row(found), [(r - 7 / 12) / std for r in rewards.tolist()])
    # Group baseline: a: mean 1, b: 0.5; the rest 0, -1, 1, -0.5, 0.5: mean 0, squares 2.5, over 4.
    found, _ = A.reinforce_plus_plus(batch(), rewards, baseline="group", statistics="sequences")
    near(per_row(found), [value / math.sqrt(0.625) for value in (0, -1, 1, -0.5, 0.5)])


TURNS = pg.TokenBatch.from_packed(
    # prompt, two tokens, an answer, one token, an answer, two tokens; then a row of one turn.
    tokens=[0] * 11, lengths=[8, 3], action_mask=[False, True, True, False, True, False, True, True, False, True, True],
    prompt_ids=[0, 1], episode_ids=[0, 1], terminations=["success", "truncated"],
)  # fmt: skip
VALUES = float64(0.5, 9, 9, 0.2, 9, -0.3, 9, 9, 0.4, 9, 0.7)
"""V at position t, which predicts token t + 1; 9 where nobody may look, but for the last, V after the row."""


def test_turns_are_actions_by_hand() -> None:
    """Values at the turns' first tokens 0.5, 0.2, -0.3; rewards of turns 0.1 + 0.2, 0, 0 + 1; gamma 0.9, lam 0.8.
    delta_3 = 1 + 0.3 = 1.3; delta_2 = 0.9 * -0.3 - 0.2 = -0.47; delta_1 = 0.3 + 0.9 * 0.2 - 0.5 = -0.02."""
    more = torch.zeros(11, dtype=torch.float64)
    more[0], more[1] = 0.1, 0.2
    found, report = A.turn_gae(TURNS, float64(1, 0), values=VALUES, token_rewards=more, gamma=0.9, lam=0.8)
    three = 1.3
    two = -0.47 + 0.72 * three
    one = -0.02 + 0.72 * two
    truncated = 0.9 * 0.7 - 0.4  # goes on with V(last)
    near(found.streams["advantages"].tolist(), [one, one, 0, two, 0, three, three, 0, truncated, truncated, 0])
    back = [one + 0.5, one + 0.5, 0, two + 0.2, 0, three - 0.3, three - 0.3, 0, truncated + 0.4, truncated + 0.4, 0]
    near(found.streams["returns"].tolist(), back)
    near(found.streams["values"].tolist(), [0.5, 9, 0, 0.2, 0, -0.3, 9, 0, 0.4, 9, 0])
    assert (report.episodes, report.bootstrapped) == (2, 1)
    assert bool((found.action_T == TURNS.action_T).all())


def test_turns_of_one_token_are_gae() -> None:
    single = pg.TokenBatch.from_packed(
        tokens=[0] * 5,
        lengths=[5],
        action_mask=[False, True, False, True, False],
        prompt_ids=[0],
        terminations=["failure"],
    )
    values = float64(0.3, 0, -0.2, 0, 0)
    for name in ("advantages", "returns"):
        one = A.gae(single, float64(2), values=values, gamma=0.9, lam=0.5)[0].streams[name]
        assert torch.equal(A.turn_gae(single, float64(2), values=values, gamma=0.9, lam=0.5)[0].streams[name], one)


def test_bad_token_rewards_of_a_turn_are_refused_by_name() -> None:
    bad = torch.full((11,), math.nan, dtype=torch.float64)
    refused(
        pg.DataError, lambda: A.turn_gae(TURNS, [1.0, 0.0], values=VALUES, token_rewards=bad), "token_rewards", "row 0"
    )


def on_ranks(rank: int, size: int) -> dict[str, Any]:
    """The same five rows, dealt to two ranks in the middle of a group; then a fault on one rank alone."""
    group, rows = torch.distributed.group.WORLD, ((3, 0), (4, 1, 2))[rank]
    mine = batch(rows)
    rewards, right = float64(1, 0, 0.5, 2, 1)[list(rows)], float64(1, 0, 0, 1, 0)[list(rows)]

    def said(call: Any) -> str:
        try:
            call()
        except pg.PGLossError as error:
            return str(error)
        return "nothing"

    pairs = {"r": rewards, "s": right}
    return {
        "rows": rows,
        "opo": per_row(A.opo(mine, rewards, group=group)[0]),
        "pass": per_row(A.pass_at_k(mine, right, 2, group=group)[0]),
        "gdpo": per_row(A.gdpo(mine, pairs, group=group)[0]),
        "rpp": per_row(A.reinforce_plus_plus(mine, rewards, statistics="sequences", group=group)[0]),
        "said": said(lambda: A.pass_at_k(mine, right if rank else right * 0.5, 2, group=group)),
        "turn": said(lambda: A.turn_gae(mine, rewards, values=torch.zeros(mine.tokens_T.numel()),
                                        token_rewards=None if rank else torch.ones(1), bootstrap="none", group=group)),
        "mismatch": str(pg.mismatch([with_logprobs(mine, rows)], group=group)),
        "none": str(pg.mismatch([with_logprobs(batch(), (0, 1, 2, 3, 4))] if rank else [], group=group)),
    }  # fmt: skip


ranks = world_fixture(on_ranks, 2)


@pytest.mark.multiproc
def test_groups_across_ranks_are_the_whole_step_s(ranks: list[dict[str, Any]]) -> None:
    rewards, right = float64(1, 0, 0.5, 2, 1), float64(1, 0, 0, 1, 0)
    alone = {
        "opo": A.opo(batch(), rewards)[0], "pass": A.pass_at_k(batch(), right, 2)[0],
        "gdpo": A.gdpo(batch(), {"r": rewards, "s": right})[0],
        "rpp": A.reinforce_plus_plus(batch(), rewards, statistics="sequences")[0],
    }  # fmt: skip
    for name, whole in alone.items():
        expected = per_row(whole)
        for rank in ranks:
            assert rank[name] == [expected[row] for row in rank["rows"]], name
    assert ranks[0]["said"] == ranks[1]["said"] and "0 and 1" in ranks[0]["said"]
    assert ranks[0]["turn"] == ranks[1]["turn"] and "rank 0" in ranks[0]["turn"]
    whole = str(pg.mismatch([with_logprobs(batch(), (0, 1, 2, 3, 4))]))
    assert {ranks[0]["mismatch"], ranks[1]["mismatch"], ranks[0]["none"], ranks[1]["none"]} == {whole}


MU = ((-1.0,), (-0.5, -2.0, -0.25), (-1.5, -0.125), (-0.5, -0.5, -1.0, -0.75), (-3.0, -0.25))
GAP = ((0.25,), (-0.5, 0.0, 0.125), (0.0, 0.5), (0.25, 0.0, -0.25, 0.5), (-1.0, 0.25))
"""log old - log mu."""


def with_logprobs(given: pg.TokenBatch, rows: tuple[int, ...]) -> pg.TokenBatch:
    """The two streams, target-aligned: a row's last position says nothing."""
    mu = [value for row in rows for value in (*MU[row], math.nan)]
    old = [value for row in rows for value in (*(m + g for m, g in zip(MU[row], GAP[row], strict=True)), math.nan)]
    return given.with_stream("rollout", float64(*mu)).with_stream("old", float64(*old))


def test_mismatch_by_hand() -> None:
    """Perplexity of a row: exp(-mean log p); the rest over twelve tokens or five rows. polgrad 0.2.1's logprob_mismatch
    gives the same k1 and k3."""
    found = pg.mismatch([with_logprobs(batch(), (0, 1, 2, 3, 4))])
    means = [sum(row) / len(row) for row in MU]
    gaps = [sum(row) / len(row) for row in GAP]
    flat = [d for row in GAP for d in row]
    assert (found.tokens, found.sequences, found.unscored) == (12, 5, 0)
    near([found.rollout_ppl], [sum(math.exp(-m) for m in means) / 5])
    near([found.old_ppl], [sum(math.exp(-m - d) for m, d in zip(means, gaps, strict=True)) / 5])
    near([found.log_ppl_gap], [sum(-d for d in gaps) / 5])
    near([found.log_ppl_gap_abs, found.log_ppl_gap_max], [sum(map(abs, gaps)) / 5, 0.375])
    near([found.k1, found.k3], [-sum(flat) / 12, sum(math.exp(d) - 1 - d for d in flat) / 12])
    near([found.chi2_token], [sum(math.exp(2 * d) for d in flat) / 12 - 1])
    near([found.chi2_sequence], [sum(math.exp(2 * sum(row)) for row in GAP) / 5 - 1])
    refused(pg.DataError, lambda: pg.mismatch([batch()]), "rollout", "rollout_logprobs=")


def unscored(logprobs: list[float | None], old: list[float]) -> pg.TokenBatch:
    prompt = pg.Span(role="user", author="harness", tokens=[0])
    answer = pg.Span(
        role="assistant", author="policy", tokens=[1, 2, 3], logprobs=logprobs, streams={"old_logprobs": old}
    )
    return pg.TokenBatch.from_traces([pg.Trace(spans=[prompt, answer], sample_id="s", advantage=1.0)])


def test_unscored_tokens_are_refused_or_have_ratio_1() -> None:
    """old - mu = 0.5, unscored, -0.25. Weights e^0.5, 1, e^-0.25; the sequence's product e^0.25."""
    given = unscored([-1.5, None, -1.0], [-1.0, -2.0, -1.25])
    token = pg.presets.ppo(corrections=[pg.TruncatedIS(high=10.0)])
    one = pg.Split(sequences=1)
    refused(pg.DataError, lambda: pg.plan([given], token, split=one), "non-finite", "sample 's', token 2")
    batch = given.with_unscored("ratio_1")
    assert pg.mismatch(given).unscored == 1 and pg.mismatch(batch).unscored == 0

    def weights(spec: pg.LossSpec) -> list[float]:
        return [
            3 * w for w in pg.plan([batch], spec, split=pg.Split(sequences=1)).components["rl"].weight_T.tolist()[:3]
        ]

    assert weights(token) == pytest.approx([math.exp(0.5), 1.0, math.exp(-0.25)], rel=1e-6)
    whole = pg.presets.ppo(corrections=[pg.TruncatedIS(high=10.0, level="sequence")])
    assert weights(whole) == pytest.approx([math.exp(0.25)] * 3, rel=1e-6)
    assert weights(pg.presets.ppo(corrections=[pg.IcePop(low=0.99, high=1.01)])) == pytest.approx([0, 1, 0], rel=1e-6)
    assert torch.equal(given.with_unscored("ratio_1").streams["rollout"][1], given.streams["old"][1])
    refused(pg.DataError, lambda: given.with_unscored("ignore"), "'ratio_1'")  # type: ignore[arg-type]
    no_old = pg.TokenBatch.from_packed(
        tokens=[0, 1], lengths=[2], action_mask=[False, True], rollout_logprobs=[0.0, math.nan]
    )
    refused(pg.DataError, lambda: no_old.with_unscored("ratio_1"), "'old'", "score the batch into old")
    nobody = unscored([-1.5, None, -1.0], [-1.0, math.nan, -1.25])
    refused(
        pg.DataError, lambda: nobody.with_unscored("ratio_1"), "scored by nobody", "sample 's', token 2, stream 'old'"
    )
