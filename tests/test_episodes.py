"""Statistics over episodes and prompts, whose rows lie in several micro-batches and on several ranks, by hand.

Ranks are threads here: the plan's gathers without processes. tests/test_plan_ranks.py and
tests/test_statistics_world.py do it with processes, the latter through Megatron's schedule.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest
import torch
from test_corrections import ratios, reinforce
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.spec.levels import UNITS, Unit
from support.steps import NAN, ONE, arrange, near, pictured, refused, solve, weights_of

NUMBER = 2
ROW_BY_ROW = pg.Split(sequences=1)


class Thread(Ranks):
    """A data-parallel rank played by a thread."""

    barrier = threading.Barrier(NUMBER)
    here: list[Any] = [None] * NUMBER
    gathers = 0

    def gather(self, rows: Tensor, group: Any, size: int) -> Tensor:
        Thread.here[self.world_rank] = rows
        Thread.gathers += self.world_rank == 0
        Thread.barrier.wait(60)
        out = torch.stack(Thread.here)
        Thread.barrier.wait(60)
        return out

    def total(self, numbers: Tensor, group: Any) -> Tensor:
        return self.gather(numbers, group, NUMBER).sum(0)


def on_two_ranks(work: Callable[[int, Ranks], Any]) -> list[Any]:
    def rank(r: int) -> Any:
        return work(r, Thread(world="w", data="d", world_rank=r, world_size=2, data_rank=r, data_size=2))

    Thread.gathers = 0
    with ThreadPoolExecutor(NUMBER) as pool:
        return list(pool.map(rank, range(NUMBER)))


def planned(parts: list[list[pg.TokenBatch]], spec: pg.LossSpec, **more: Any) -> list[pg.Plan]:
    return on_two_ranks(lambda r, ranks: pg.plan(parts[r], spec, split=ROW_BY_ROW, ranks=ranks, **more))


# Episode 0 has the rows of ratios (2,) and (8, 1/2), of product 8 and geometric mean 2; episode 1 the ratios 4 and 1/4,
# of product 1. Each row begins with a context token of ratio 1.
LEFT = ratios(1, 2, 1, 4, 0.25, 1, 8, 0.5)
ROWS = ("cA", "cAA", "cAA")
EPISODES = [0, 1, 0]


def batch(**more: Any) -> pg.TokenBatch:
    return pictured(*ROWS, **({"episode_ids": EPISODES} | LEFT | more))


def cut(whole: pg.TokenBatch) -> list[list[pg.TokenBatch]]:
    """Episode 0 lies on both ranks."""
    return [[whole.select([0, 1])], [whole.select([2])]]


def of_members(plan: pg.Plan) -> list[float]:
    table = plan.components["rl"]
    return table.weight_T[table.member_T].tolist()


RULES = [
    (pg.TruncatedIS(level="episode", high=100.0), [8, 1, 1, 8, 8]),
    (pg.TruncatedIS(level="episode", low=2.0, high=5.0), [5, 2, 2, 5, 5]),
    (pg.TruncatedIS(level="episode_geometric", high=100.0), [2, 1, 1, 2, 2]),
    # Each episode counts once, wherever its rows are: (8 + 1) / 2.
    (pg.TruncatedIS(level="episode", high=100.0, normalize=True), [16 / 9, 2 / 9, 2 / 9, 16 / 9, 16 / 9]),
    (pg.RatioMask(unit="episode", low=0.9, high=1.1), [0, 1, 1, 0, 0]),
    (pg.RatioMask(unit="episode", mean="product", low=7.0, high=9.0), [1, 0, 0, 1, 1]),
    # The veto of one row takes the other too.
    (pg.Veto(unit="episode", low=0.1, high=7.0), [0, 1, 1, 0, 0]),
    (pg.Veto(unit="episode", low=0.3), [1, 0, 0, 1, 1]),
    # k1 = -log r: of episode 0 the mean -log 2, the largest log 2; of episode 1 the mean 0, the largest log 4.
    (pg.Reject(unit="episode", estimator="k1", low=-0.5, high=0.5), [0, 1, 1, 0, 0]),
    (pg.Reject(unit="episode", estimator="k1", statistic="max", high=1.0), [1, 0, 0, 1, 1]),
    (pg.Reject(unit="episode", estimator="k1", statistic="sum", low=-2.0, high=0.5), [0, 1, 1, 0, 0]),
    # k2 = (log r)^2 / 2: log2^2 / 2 times 1, 9, 1, of mean 11/3; and 4, 4.
    (pg.Reject(unit="episode", estimator="k2", high=3.7 / 2 * math.log(2) ** 2), [1, 0, 0, 1, 1]),
]


@pytest.mark.parametrize(("rule", "expected"), RULES, ids=lambda x: getattr(x, "formula", str)() if x else None)
def test_what_each_rule_says_of_an_episode_of_two_rows(rule: Any, expected: list[float]) -> None:
    spec, whole = reinforce(rule), batch()
    kept = [x for x in expected if x]
    near(weights_of(whole, spec), kept, 1e-14)
    many = planned(cut(whole), spec)
    assert [x for plan in many for x in of_members(plan)] == weights_of(whole, spec)  # bit for bit
    alone = pg.plan([whole], spec, split=ROW_BY_ROW)
    assert [plan.counts for plan in many] == [alone.counts] * 2
    assert alone.counts["rl"]["members"] == len(kept)


def test_a_prompt_is_a_unit_like_an_episode() -> None:
    """All rows are of one prompt: the product is 8, of five tokens."""
    whole = batch(prompt_ids=["p"] * 3)
    near(weights_of(whole, reinforce(pg.TruncatedIS(level="prompt", high=100.0))), [8] * 5, 1e-14)
    near(weights_of(whole, reinforce(pg.TruncatedIS(level="prompt_geometric", high=100.0))), [8**0.2] * 5, 1e-14)
    assert weights_of(whole, reinforce(pg.Veto(unit="prompt", low=0.3))) == []
    # Episode ids count inside their prompt: these are three episodes.
    apart = batch(prompt_ids=["p", "p", "q"])
    near(weights_of(apart, reinforce(pg.TruncatedIS(level="episode", high=100.0))), [2, 1, 1, 4, 4], 1e-14)


def test_denominators_leave_out_what_an_episode_s_veto_took_on_another_rank() -> None:
    """The veto lies in the row of rank 1; without its episode the one row of rank 0 that is left has two tokens."""
    path, rule = "mean(episode) > mean(token)", pg.Veto(unit="episode", low=0.1, high=7.0)
    parts = cut(batch())
    kept, left = (planned(parts, reinforce(rule, normalizer=path, count_rejected=kept)) for kept in (True, False))
    assert [of_members(plan) for plan in kept] == [[0.25, 0.25], []]  # of two episodes, with 3 and 2 tokens
    assert [of_members(plan) for plan in left] == [[0.5, 0.5], []]
    assert "3 tokens out: episode veto" in left[1].report()


def test_a_mean_weight_counts_an_episode_once_among_those_that_train_a_token() -> None:
    """A band takes 4, 1/4, 8 and 1/2: of episode 0 the token of ratio 2 is left, of episode 1 none."""
    rules = (pg.TruncatedIS(level="episode", high=100.0, normalize=True), pg.IcePop(low=1.5, high=3.0, weight=False))
    near([plan.components["rl"].means[0] for plan in planned(cut(batch()), reinforce(*rules))], [8.0] * 2)
    # A prompt of which one episode is rejected counts once too, through the other: of product 8.
    rules = (pg.TruncatedIS(level="prompt", high=100.0, normalize=True), pg.Veto(unit="episode", low=0.1, high=7.0))
    whole = batch(prompt_ids=["p"] * 3)
    near([plan.components["rl"].means[0] for plan in planned(cut(whole), reinforce(*rules))], [8.0] * 2)


def test_the_oldest_token_of_an_episode_decides_for_all_of_it() -> None:
    rule = reinforce(pg.Staleness(max_lag=2, level="episode"), old="policy")
    whole = batch(versions=[5, 5, 5, 5, 5, 5, 2, 5])
    assert [of_members(plan) for plan in planned(cut(whole), rule, version=5)] == [[1.0, 1.0], []]


def test_a_row_that_is_not_there_has_no_say() -> None:
    """The third row ended in a fault, whatever stands on it: episode 0 is the first row alone."""
    for lost in ({}, {name: [*values[:6], NAN, NAN] for name, values in LEFT.items()}):
        whole = batch(**lost, terminations=["success", "success", "fault"])
        near(weights_of(whole, reinforce(pg.TruncatedIS(level="episode", high=100.0))), [2, 1, 1], 1e-14)
        assert weights_of(whole, reinforce(pg.Veto(unit="episode", low=0.3, high=3.0))) == [1.0]
    # One without a token of any component does not either: the second row, of ratio 8, has no observation.
    pair = pictured("cAo", "cA", episode_ids=[0, 0], **ratios(1, 1, 1, 1, 8))
    answers = pg.LossSpec(
        components=[pg.CrossEntropy(normalizer="sum(token)")], empty_sequences="exclude",
        corrections=[pg.Veto(unit="episode", high=7.0, on=("ce",))],
    )  # fmt: skip
    assert weights_of(pair, answers, "ce") == [1.0]
    assert weights_of(pair, answers.add(pg.Entropy()), "ce") == []  # now it is there


def test_a_number_that_is_none_is_refused_wherever_its_row_lies() -> None:
    """The token of ratio 8 is masked, and rank 1, where it lies, trains nothing of the episode."""
    broken = {"old_logprobs": [*LEFT["old_logprobs"][:6], NAN, -1.0]}
    whole = batch(**broken, masks={"keep": [True] * 6 + [False] * 2})
    spec = reinforce(pg.Veto(unit="episode"), masks=[pg.UserMask(name="keep")])

    def on_rank(r: int, ranks: Ranks) -> str:
        error = refused(pg.DataError, lambda: pg.plan(cut(whole)[r], spec, split=ONE, ranks=ranks), "rank 1", "old")
        return str(error)

    first, second = on_two_ranks(on_rank)
    assert first == second and "a non-finite value that a statistic of component 'rl' reads" in first


def test_ids_that_a_rule_reads_must_be_there() -> None:
    spec = reinforce(pg.Veto(unit="episode"))
    bare = batch(episode_ids=None)
    refused(pg.DataError, lambda: pg.plan([bare], spec, split=ONE), "episode_ids are absent", "read by Veto")
    refused(pg.DataError, lambda: pg.voters(bare, spec), "episode_ids are absent", "read by Veto")
    axis = pg.LossSpec(components=[pg.PolicyGradient(ratio=pg.Ratio(level="prompt"))])
    refused(pg.DataError, lambda: pg.plan([batch()], axis, split=ONE), "prompt_ids are absent", "read by rl")


def test_an_episode_votes_by_what_all_of_its_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, whole = reinforce(pg.Veto(unit="episode", low=0.1, high=7.0)), batch()
    assert pg.voters(whole, spec).tolist() == [False, True, False]

    def on_rank(r: int, ranks: Ranks) -> list[bool]:
        return pg.voters(cut(whole)[r][0], spec, group=ranks).tolist()

    monkeypatch.setattr(Ranks, "named", staticmethod(lambda group, caller: group))
    assert on_two_ranks(on_rank) == [[False, True], [False]]


def test_statistics_of_all_rules_take_one_gather() -> None:
    """The plan's row, the numbers of the rows, and the row once more with what is then known."""
    rules = [pg.Veto(unit="episode"), pg.TruncatedIS(level="episode"), pg.RatioMask(unit="prompt", low=0.1, high=9.0)]
    whole = batch(prompt_ids=["p"] * 3)
    planned(cut(whole), reinforce(*rules))
    assert Thread.gathers == 3
    planned(cut(whole), reinforce(rules[0]))
    assert Thread.gathers == 3
    planned([cut(whole)[0], []], reinforce(*rules))  # a rank without rows
    assert Thread.gathers == 3
    planned(cut(whole), reinforce(rules[0].replace(unit="sequence")))
    assert Thread.gathers == 1


def test_sums_do_not_depend_on_who_holds_which_row() -> None:
    """1e16 + 1 - 1e16 is 0 or 1 by the order in which it is added up; exactly rounded it is 1."""
    whole = pictured(
        *["cA"] * 3, old_logprobs=[0, -0.5, 0, -1.5, 0, -1e16], rollout_logprobs=[0, -1e16, 0, -2.5, 0, -0.5],
        episode_ids=[0, 0, 0],
    )  # fmt: skip
    spec = reinforce(pg.TruncatedIS(level="episode", high=100.0))
    for order in ([0, 1, 2], [0, 2, 1], [1, 2, 0]):
        near(weights_of(whole.select(order), spec), [math.e] * 3, 1e-15)


# ---- ratios of the policy ------------------------------------------------------------------------------------------

# d = 0.1 and 0.3 in the first row, -0.1 in the second: one episode, of mean 0.1. A = 1 and -3.
POLICY = [-0.9, -0.7, NAN, -1.1, NAN]
TWO = {"episode_ids": [7, 7], "old_logprobs": -1.0, "advantages": [1.0, -3.0]}
R = math.exp(0.1)


def episodic(surrogate: Any, axis: Any = None, **more: Any) -> pg.LossSpec:
    part = pg.PolicyGradient(surrogate=surrogate, ratio=axis or pg.Ratio(level="episode"), normalizer="sum(token)")
    return pg.LossSpec(components=[part], **more)


@pytest.mark.parametrize("split", [ONE, ROW_BY_ROW], ids=["together", "apart"])
def test_a_ratio_of_an_episode_is_differentiated_through_all_of_its_rows(split: pg.Split) -> None:
    two = pictured("cAA", "cA", **TWO)
    # L = -r (1 + 1 - 3) = r, and each d is a third of the mean.
    mine = solve(two, episodic(pg.Unclipped()), POLICY, split=split)
    near([mine.loss], [R], 1e-15)
    near(mine.grad_T, [R / 3, R / 3, 0, R / 3, 0], 1e-15)
    # Above 1.05 a positive advantage moves nothing: L = -2 * 1.05 + 3 r.
    mine = solve(two, episodic(pg.Clip(low=0.05, high=0.05)), POLICY, split=split)
    near([mine.loss], [3 * R - 2.1], 1e-14)
    near(mine.grad_T, [R, R, 0, R, 0], 1e-14)
    assert mine.metrics["rl/clip_high"] == 2 / 3
    # The sum in place of the mean: log r = 0.3.
    mine = solve(two, episodic(pg.Unclipped(), pg.Ratio(level="episode", statistic="sum")), POLICY, split=split)
    near(mine.grad_T, [math.exp(0.3)] * 2 + [0, math.exp(0.3), 0], 1e-14)
    # Held fixed, it is a factor, and each token has its own gradient, -r A.
    mine = solve(two, episodic(pg.Unclipped(), pg.Ratio(level="episode", gradient="token")), POLICY, split=split)
    near(mine.grad_T, [-R, -R, 0, 3 * R, 0], 1e-15)


def test_tokens_of_an_episode_that_no_component_trains_still_carry_its_ratio() -> None:
    """The second row is masked: L = -2 r, of which it has a third of the slope; over the members alone it has none."""
    two = pictured("cAA", "cA", masks={"keep": [True] * 3 + [False] * 2}, **TWO)
    spec = episodic(pg.Unclipped(), masks=[pg.UserMask(name="keep")])
    mine = solve(two, spec, POLICY, split=ROW_BY_ROW)
    near(mine.grad_T, [-2 / 3 * R, -2 / 3 * R, 0, -2 / 3 * R, 0], 1e-15)
    mine = solve(two, episodic(pg.Unclipped(), pg.Ratio(level="episode", over="members"), masks=spec.masks), POLICY)
    r = math.exp(0.2)
    near(mine.grad_T, [-r, -r, 0, 0, 0], 1e-15)


def test_gates_and_weights_act_on_what_flows_through_an_episode() -> None:
    """A gate of A < 0 where the mean of log mu - log pi over the episode exceeds: here 0.1 - 0.1 = 0 over mu = -0.9."""
    two = pictured("cAA", "cA", rollout_logprobs=-0.9, **TWO)
    for threshold, slope in ((0.01, R / 3), (0.0, R / 3)):
        spec = episodic(pg.Unclipped(), gates=[pg.SequenceGate(threshold=threshold, unit="episode")])
        near(solve(two, spec, POLICY, split=ROW_BY_ROW).grad_T, [slope, slope, 0, slope, 0], 1e-15)
    # Over mu = -0.8 the gap is 0.1: the second row goes, and with it its part of the slope: L = -2 r.
    two = pictured("cAA", "cA", rollout_logprobs=-0.8, **TWO)
    spec = episodic(pg.Unclipped(), gates=[pg.SequenceGate(threshold=0.09, unit="episode")])
    near(solve(two, spec, POLICY, split=ROW_BY_ROW).grad_T, [-2 / 3 * R, -2 / 3 * R, 0, -2 / 3 * R, 0], 1e-14)
    # A weight of pi/mu over the episode, of product exp(3 * -0.1), multiplies all of it.
    weighed = episodic(pg.Unclipped(), corrections=[pg.TruncatedIS(of="policy", level="episode")])
    near(
        solve(two, weighed, POLICY, split=ROW_BY_ROW).grad_T,
        [R / 3 * math.exp(-0.3)] * 2 + [0, R / 3 * math.exp(-0.3), 0],
        1e-14,
    )


def test_the_ratio_of_an_episode_on_two_ranks_is_that_of_one_process() -> None:
    two, spec = pictured("cAA", "cA", **TWO), episodic(pg.Clip(low=0.05, high=0.05))
    whole = solve(two, spec, POLICY)
    parts, logp = [[two.select([0])], [two.select([1])]], [POLICY[:3], POLICY[3:]]

    def on_rank(r: int, ranks: Ranks) -> tuple[float, list[float]]:
        leaf_T = torch.tensor(logp[r], dtype=torch.float64, requires_grad=True)
        plan = pg.plan(parts[r], spec, split=ONE, ranks=ranks)
        (micro,) = plan.microbatches()
        plan = pg.statistics_pass(plan, [pg.TokenLogprobs(logprob=arrange(micro, leaf_T.detach()))])
        (micro,) = plan.microbatches()
        loss = pg.policy_loss(pg.TokenLogprobs(logprob=arrange(micro, leaf_T)), micro).loss
        loss.backward()
        assert leaf_T.grad is not None
        return float(loss.detach()), leaf_T.grad.tolist()

    found = on_two_ranks(on_rank)
    near([sum(loss for loss, _ in found)], [whole.loss], 1e-15)
    assert [x for _, grad in found for x in grad] == whole.grad_T.tolist()  # bit for bit


def test_without_the_pass_the_loss_is_refused() -> None:
    two = pictured("cAA", "cA", rollout_logprobs=-0.9, **TWO)
    for spec in (
        episodic(pg.Unclipped()),
        episodic(pg.Unclipped(), "token", gates=[pg.SequenceGate(threshold=0.1, unit="episode")]),
        episodic(pg.Unclipped(), "token", corrections=[pg.Veto(of="policy", unit="episode")]),
    ):
        plan = pg.plan([two], spec, split=ONE)
        (micro,) = plan.microbatches()
        lp = pg.TokenLogprobs(logprob=arrange(micro, torch.tensor(POLICY, dtype=torch.float64)))
        assert plan.needs_statistics_pass and spec.needs_statistics_pass
        refused(pg.DataError, lambda lp=lp, micro=micro: pg.policy_loss(lp, micro), "pg.statistics_pass", "'rl'")


def test_a_function_of_one_s_own_is_told_where_episodes_are_known() -> None:
    spec = episodic(pg.Surrogate(lambda x: x.unit_mean(x.log_ratio, "episode")), "token")
    refused(pg.SpecError, lambda: solve(pictured("cAA", "cA", **TWO), spec, POLICY), "'episode'", "Ratio")


def test_an_episode_s_rows_have_no_order() -> None:
    for statistic in ("prefix", "prefix_min"):
        build = lambda s=statistic: pg.Ratio(level="episode", statistic=s, gradient="token")  # noqa: E731
        refused(pg.SpecError, build, "no order", "'sequence'")


def test_units_are_the_levels_and_come_back_from_toml() -> None:
    assert get_args(Unit) == UNITS[:-1]
    spec = episodic(
        pg.Unclipped(), corrections=[rule for rule, _ in RULES], gates=[pg.SequenceGate(threshold=0.1, unit="prompt")]
    )
    assert pg.LossSpec.from_toml(spec.to_toml()) == spec
    text = str(spec)
    assert "r = exp(mean_episode (log pi - log old))" in text and "prod_episode old/mu" in text
    with pytest.raises(pg.SpecError, match="did you mean 'episode'"):
        pg.LossSpec.from_toml(spec.to_toml().replace('unit = "episode"', 'unit = "episodes"'))
