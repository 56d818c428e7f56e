"""The statistics pass: exact selection over a step, gates decided from it, denominators without what is rejected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_pgloss as pg
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.planning.select import Job, draws
from support.steps import ONE, arrange, near, pictured, refused, solve

JOB = Job(Ranks())
FLOATS = st.floats(-1e4, 1e4, allow_subnormal=True) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324])


def stream(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.data())
def test_an_order_statistic_is_the_value_that_sorting_gives(values: list[float], data: Any) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    mask_T = torch.tensor(mask)
    inside = sorted(value for value, there in zip(values, mask, strict=True) if there)
    if inside:
        k = data.draw(st.integers(1, len(inside)))
        assert JOB.smallest(stream(*values), mask_T, k) == inside[k - 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_a_sum_does_not_depend_on_the_order_by_a_bit(values: list[float], random: Any) -> None:
    whole_T, mask_T = stream(*values), torch.ones(len(values), dtype=torch.bool)
    total = JOB.sum(whole_T, mask_T)
    random.shuffle(values)
    assert JOB.sum(stream(*values), mask_T) == total
    assert abs(total - math.fsum(values)) <= len(values) * 2.0**-52 + abs(total) * 2.0**-52


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 10) | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=30), st.floats(0.01, 9))
def test_a_cut_leaves_the_most_tokens_whose_mean_is_small_enough(values: list[float], mean: float) -> None:
    cut = JOB.cut(stream(*values), torch.ones(len(values), dtype=torch.bool), mean)
    kept = [value for value in values if value < cut]
    assert math.fsum(kept) <= mean * len(kept) * (1 + 1e-12) + 1e-12
    if math.isinf(cut):
        return
    assert cut in values
    one_more = [value for value in values if value <= cut]  # equal values go together
    assert math.fsum(one_more) > mean * len(one_more) * (1 - 1e-12) - 1e-12


class Counting(Job):
    """Notes what would travel."""

    def _total(self, numbers: torch.Tensor) -> torch.Tensor:
        assert numbers.dtype == torch.int64
        self.sent.append(numbers.numel())
        return super()._total(numbers)

    def __init__(self) -> None:
        super().__init__(Ranks())
        self.sent: list[int] = []


@pytest.mark.parametrize("tokens", [10, 5000])
def test_what_travels_is_a_few_integers_whatever_the_number_of_tokens(tokens: int) -> None:
    values_T, mask_T = torch.rand(tokens, dtype=torch.float64), torch.ones(tokens, dtype=torch.bool)
    job = Counting()
    job.smallest(values_T, mask_T, 3)
    assert job.sent == [256] * 8
    job.sent.clear()
    job.cut(values_T, mask_T, 0.2)
    assert job.sent == [1280] * 8
    job.sent.clear()
    job.lowest_draws(torch.arange(tokens), mask_T, 4)
    assert job.sent == [1] + [256] * 8
    job.sent.clear()
    job.mean(values_T, mask_T)
    assert job.sent == [512]


def test_draws_are_made_of_sample_id_position_and_seed_alone() -> None:
    batch = pictured("cAAA", "cAA", sample_ids=["x", "y"])
    there, seeded = draws(batch, 0), draws(batch, 1)
    assert bool((there >= 0).all()) and there.unique().numel() == 7 and not torch.equal(there, seeded)
    assert torch.equal(draws(batch.select([1, 0]), 0), torch.cat([there[4:], there[:4]]))
    many = draws(pictured("c" * 4000, sample_ids=[7]), 3).double() / 2.0**63
    assert abs(float(many.mean()) - 0.5) < 0.02 and abs(float(many.var()) - 1 / 12) < 0.005


def gated(
    gate: Any, logp: list[float], *, entropy: list[float] | None = None, split: pg.Split = ONE, **given: Any
) -> Any:
    """Plan and statistics pass over pictured rows: the plan and what is kept at the actions."""
    part = {name: given.pop(name) for name in ("normalizer", "count_rejected", "units") if name in given}
    rl = pg.PolicyGradient(surrogate=pg.Clip(), **{"normalizer": "mean(token)", **part})
    spec = pg.LossSpec(components=[rl], gates=[gate], old=given.pop("old", "given"))
    rows = given.pop("rows", ("cAAAA", "cA"))
    batch = pictured(*rows, **{"old_logprobs": -1.0, "rollout_logprobs": -1.0, "sample_ids": ["a", "b"]} | given)
    plan = pg.plan([batch], spec, split=split)
    assert plan.needs_statistics_pass

    def scored(micro: pg.MicroBatch) -> pg.TokenLogprobs:
        there = None if entropy is None else arrange(micro, stream(*entropy))
        return pg.TokenLogprobs(logprob=arrange(micro, stream(*logp)), entropy=there)

    done = pg.statistics_pass(plan, [scored(micro) for micro in plan.microbatches()])
    assert not done.needs_statistics_pass and pg.statistics_pass(done, []) is done
    keep_T = done.components["rl"].gates[0][done.components["rl"].member_T]
    return done, keep_T.tolist()


SPLITS = (ONE, pg.Split(sequences=1), pg.Split(max_tokens=8))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("share", "kept"), [(0.2, "nnnyn"), (0.4, "nynyn"), (0.5, "nynyy"), (0.9, "yyyyy")])
def test_the_tokens_of_highest_entropy_are_kept(share: float, kept: str, split: pg.Split) -> None:
    """Of 5 tokens the ceil(5 share) highest: 1, 2, 3, 5; the lowest two are equal and stay or go together."""
    plan, keep = gated(pg.EntropyGate(share=share), [-1.0] * 7, entropy=[0.1, 3, 0.1, 9, 0, 2, 0], split=split)
    assert keep == [c == "y" for c in kept]
    assert f"entropy {plan.components['rl'].thresholds[0]['entropy']:.6g}" in plan.report()


@pytest.mark.parametrize("split", SPLITS)
def test_second_moments_are_cut_from_the_top(split: pg.Split) -> None:
    """Gaps .1 .2 -.3 .4 | .5 with A = 1: outward .01 .04 .16 .25. Mean of the lowest three .07, of all .115."""
    logp = [-0.9, -0.8, -1.3, -0.6, 0, -0.5, 0]
    assert gated(pg.SecondMomentGate(threshold=0.08), logp, split=split)[1] == [True, True, True, True, False]
    assert gated(pg.SecondMomentGate(threshold=0.06), logp, split=split)[1] == [True, True, True, False, False]
    assert gated(pg.SecondMomentGate(threshold=0.2), logp, split=split)[1] == [True] * 5
    # With A < 0 the one that shrank is outward: alone, .09.
    assert gated(pg.SecondMomentGate(threshold=0.08), logp, advantages=-1.0)[1] == [True, True, False, True, True]


@pytest.mark.parametrize("split", SPLITS)
def test_covariance_selects_a_band_by_draw_and_the_top_by_value(split: pg.Split) -> None:
    """A = (1, -1, 1, -1, 0), log pi - mean = (1, -1, 0, 2, -2): covariances 1, 1, 0, -2, 0."""
    logp, advantages = [-2.0, -4.0, -3.0, -1.0, 0, -5.0, 0], [0.0, 1, -1, 1, -1, 0, 0]
    given: dict[str, Any] = {"advantages": advantages, "split": split}
    top = pg.CovarianceGate(select="top", share=0.2)
    assert gated(top, logp, **given)[1] == [False, False, True, True, True]  # equal ones go together
    assert gated(top.replace(effect="keep"), logp, **given)[1] == [True, True, False, False, False]
    one = pg.CovarianceGate(select="band", low=0.5, high=5.0, share=0.2)
    kept = gated(one, logp, **given)[1]
    assert sorted(kept[:2]) == [False, True] and all(kept[2:])
    chosen = {tuple(gated(one.replace(seed=seed), logp, **given)[1]) for seed in range(6)}
    assert len(chosen) == 2  # which of the two depends on the seed, not on the split
    assert chosen == {tuple(gated(one.replace(seed=seed), logp, advantages=advantages)[1]) for seed in range(6)}
    assert gated(one.replace(share=1.0), logp, **given)[1] == [False, False, True, True, True]


def test_draws_need_sample_ids() -> None:
    gate = pg.CovarianceGate(select="band")
    refused(pg.DataError, lambda: gated(gate, [-1.0] * 7, sample_ids=None), "sample_ids are absent", "CovarianceGate")


NORM = "mean(sequence) > mean(token)"


@pytest.mark.parametrize(
    ("count_rejected", "units", "expected"),
    [(True, "counted", [1 / 8] * 4 + [1 / 2]), (False, "counted", [0, 0, 1 / 2, 1 / 2, 0]),
     (False, "all", [0, 0, 1 / 4, 1 / 4, 0])],
)  # fmt: skip
def test_denominators_without_what_a_gate_drops(count_rejected: bool, units: Any, expected: list[float]) -> None:
    """The band keeps ratios from .5 to 2: the third and fourth of the first row, none of the second."""
    logp = [-1 + math.log(r) for r in (3, 0.4, 1.5, 0.6, 1, 4, 1)]
    more: dict[str, Any] = {"normalizer": NORM, "units": units}
    gate = pg.RatioGate(low=0.5, high=2.0, base="old")
    if count_rejected:
        rl = pg.PolicyGradient(**more)
        spec = pg.LossSpec(components=[rl], gates=[gate])
        assert not spec.needs_statistics_pass
        plan = pg.plan([pictured("cAAAA", "cA", old_logprobs=-1.0)], spec, split=ONE)
    else:
        plan, keep = gated(gate, logp, count_rejected=False, **more)
        assert keep == [False, False, True, True, False]
        assert plan.counts["rl"]["token"] == 2 and plan.counts["rl"]["members"] == 5
        assert "leaves its denominators" in plan.report()
    near(plan.components["rl"].weight_T[plan.components["rl"].member_T], expected)
    total = torch.zeros((), dtype=torch.float64)
    leaf = stream(*logp).requires_grad_()
    for micro in plan.microbatches():
        total = total + pg.policy_loss(pg.TokenLogprobs(logprob=arrange(micro, leaf), entropy=None), micro).loss
    total.backward()
    # The clip at 1.2 holds the third; the fourth, at .6 with A = 1, moves.
    weight = expected[3]
    near(leaf.grad, [0, 0, 0, -0.6 * weight, 0, 0, 0], 1e-13)
    near(total, -weight * (1.2 + 0.6), 1e-13)


def test_late_rejections_leave_the_denominators_too() -> None:
    rl = pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", normalizer=NORM, count_rejected=False)
    spec = pg.LossSpec(components=[rl], old="policy", corrections=[pg.Veto(of="policy", low=0.6)])
    plan = pg.plan([pictured("cAA", "cA", "cA", rollout_logprobs=-1.0)], spec, split=ONE)
    logp = stream(-1 + math.log(2), -1 + math.log(0.5), 0, -1, 0, -1, 0)
    (micro,) = plan.microbatches()
    done = pg.statistics_pass(plan, [pg.TokenLogprobs(logprob=arrange(micro, logp), entropy=None)])
    near(done.components["rl"].weight_T[done.components["rl"].member_T], [0, 0, 1 / 2, 1 / 2])
    (micro,) = done.microbatches()
    leaf = logp.clone().requires_grad_()
    pg.policy_loss(pg.TokenLogprobs(logprob=arrange(micro, leaf), entropy=None), micro).loss.backward()
    near(leaf.grad, [0, 0, 0, -1 / 2, 0, -1 / 2, 0])


@pytest.mark.parametrize(("level", "mean"), [("token", (2 + 0.5 + 4) / 3), ("sequence", (1 + 4) / 2)])
def test_weights_of_the_current_policy_of_mean_one(level: Any, mean: float) -> None:
    """Ratios 2, 1/2 | 4: over tokens 6.5/3; over sequences their products 1 and 4."""
    rl = pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", normalizer="sum(token)")
    rule = pg.TruncatedIS(of="policy", level=level, high=9.0, normalize=True)
    spec = pg.LossSpec(components=[rl], old="policy", corrections=[rule])
    plan = pg.plan([pictured("cAA", "cA", rollout_logprobs=-1.0)], spec, split=pg.Split(sequences=1))
    logp = stream(-1 + math.log(2), -1 + math.log(0.5), 0, -1 + math.log(4), 0)
    scored = [pg.TokenLogprobs(logprob=arrange(micro, logp), entropy=None) for micro in plan.microbatches()]
    done = pg.statistics_pass(plan, scored)
    near(done.components["rl"].means[0], mean, 1e-13)
    leaf, total = logp.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
    for micro in done.microbatches():
        total = total + pg.policy_loss(pg.TokenLogprobs(logprob=arrange(micro, leaf), entropy=None), micro).loss
    total.backward()
    raw = (2, 0.5, 4) if level == "token" else (1, 1, 4)
    near(leaf.grad, [-raw[0] / mean, -raw[1] / mean, 0, -raw[2] / mean, 0], 1e-13)


GROUPED = {
    "rows": ("cAA", "cA", "cAAA", "cA", "cA", "cA"),
    "prompt_ids": ["p", "p", "q", "p", "q", "p"],
    "advantages": [1.0, 2.0, -1.0, -0.5, -3.0, 0.0],
}
"""Two prompts, interleaved: p has labels + + - and one row without; q has - -."""


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("old", ["given", "policy"])
def test_a_group_is_classified_as_one_wherever_its_rows_lie(old: Any, split: pg.Split) -> None:
    """s / tau = log 2, log 4 (+), log 3 (-) in p: log(1 + 1/2 + 1/4) and log(1 + 3); log 5, log 7 in q: log(1 + 12).
    On-policy every s is 0: log 3, log 2 and log 3."""
    spec = pg.presets.real(old=old)
    logit = [math.log(2), math.log(4), math.log(5), math.log(3), math.log(7), math.log(9)]
    if old == "policy":
        logit = [0.0] * 6
    rows = GROUPED["rows"]
    step = [x / 2 for x, row in zip(logit, rows, strict=True) for _ in row]  # tau = 1/2
    logp = [-1 + x + shift for x, shift in zip(step, [0.1, -0.1, 0, 0, 0, 0.2, -0.1, -0.1, *[0] * 7], strict=True)]
    answer = solve(
        pictured(*rows, **{key: GROUPED[key] for key in ("prompt_ids", "advantages")}, old_logprobs=-1.0),
        spec, logp, split=split,
    )  # fmt: skip
    odds = [math.exp(x) for x in logit]
    up, down, other = 1 + 1 / odds[0] + 1 / odds[1], 1 + odds[3], 1 + odds[2] + odds[4]
    near(answer.loss, (math.log(up) + math.log(down) + math.log(other)) / 2, 1e-13)
    a, b, d = (-1 / odds[0] / up / 2, -1 / odds[1] / up, odds[3] / down)
    c, e = odds[2] / other / 3, odds[4] / other
    near(answer.grad_T, [a, a, 0, b, 0, c, c, c, 0, d, 0, e, 0, 0, 0], 1e-13)


def test_a_group_needs_its_pass_and_its_prompts_and_a_broken_row_does_not_vote() -> None:
    rows = GROUPED["rows"]
    given: dict[str, Any] = {"advantages": GROUPED["advantages"], "old_logprobs": -1.0}
    refused(pg.DataError, lambda: solve(pictured(*rows, **given), pg.presets.real(), [-1.0] * 15), "prompt_ids")
    batch = pictured(*rows, **given, prompt_ids=GROUPED["prompt_ids"])
    plan = pg.plan([batch], pg.presets.real(), split=ONE)
    (micro,) = plan.microbatches()
    bare = pg.TokenLogprobs(logprob=arrange(micro, stream(*[-1.0] * 15)))
    refused(pg.DataError, lambda: pg.policy_loss(bare, micro), "the loss of a group", "statistics pass")
    logp = [-1.0] * 15
    logp[3] = math.nan  # the second row of p, its only token
    answer = solve(batch, pg.presets.real(), logp)
    assert answer.metrics["rl/fault"] == 1
    # Of p, log 2 and log 2 are left; of q, log 3.
    near(answer.loss, (2 * math.log(2) + math.log(3)) / 2, 1e-13)
    near(answer.grad_T[:5], [-1 / 4, -1 / 4, 0, 0, 0], 1e-13)


def test_a_pass_that_does_not_fit_its_plan_is_refused() -> None:
    spec = pg.LossSpec(components=[pg.PolicyGradient()], gates=[pg.EntropyGate()])
    plan = pg.plan([pictured("cA", old_logprobs=-1.0)], spec, split=ONE)
    assert "a statistics pass is to come" in plan.report()
    one = torch.zeros(1, 2, dtype=torch.float64)
    refused(pg.DataError, lambda: pg.statistics_pass(plan, []), "another number of micro-batches")
    bare = pg.TokenLogprobs(logprob=one, entropy=None)
    refused(pg.DataError, lambda: pg.statistics_pass(plan, [bare]), "reads the entropy")
    wrong = pg.TokenLogprobs(logprob=one[:, :1], entropy=one)
    refused(pg.DataError, lambda: pg.statistics_pass(plan, [wrong]), "wrong shape", "micro-batch 0")
    (micro,) = plan.microbatches()
    both = pg.TokenLogprobs(logprob=one, entropy=one)
    refused(pg.DataError, lambda: pg.policy_loss(both, micro), "statistics", "rl")
    # Without the pass the denominators, or the mean of the weights, would silently be others.
    kept = pg.LossSpec(components=[pg.PolicyGradient(count_rejected=False)], gates=[pg.RatioGate(base="old")])
    mean = pg.LossSpec(
        components=[pg.PolicyGradient()], corrections=[pg.TruncatedIS(of="policy", normalize=True)]
    )  # fmt: skip
    for late in (kept, mean):
        plan = pg.plan([pictured("cA", old_logprobs=-1.0, rollout_logprobs=-1.0)], late, split=ONE)
        (micro,) = plan.microbatches()
        refused(pg.DataError, lambda micro=micro: pg.policy_loss(bare, micro), "statistics pass")  # type: ignore[misc]
    plain = pg.plan([pictured("cA", old_logprobs=-1.0)], pg.presets.ppo(), split=ONE)
    assert not plain.needs_statistics_pass and pg.statistics_pass(plain, []) is plain
