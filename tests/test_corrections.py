"""Corrections from frozen log-probs: weights, rejections, scopes and denominators, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.planning import voters
from support.steps import ONE, near, pictured, refused, solve, weights_of

SUM = "sum(token)"
LOG2 = math.log(2)


def ratios(*values: float) -> dict[str, Any]:
    """``old`` with exactly the given ratios to the rollout stream, the greater of both 0; token order, one a token."""
    logs = [math.log(r) for r in values]
    return {"old_logprobs": [min(x, 0.0) for x in logs], "rollout_logprobs": [min(-x, 0.0) for x in logs]}


def reinforce(*corrections: Any, normalizer: str = SUM, **more: Any) -> pg.LossSpec:
    part = {name: more.pop(name) for name in ("count_rejected", "units", "count") if name in more}
    rl = pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", normalizer=normalizer, **part)
    return pg.LossSpec(components=[rl], corrections=corrections, **more)


# One context token, then the turn AA, an answer, the turn AA; and a row of one action.
ROWS = ("cAAoAA", "cA")
LEFT = ratios(1, 2, 4, 1, 0.5, 8, 1, 0.25)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # token: 2, 4, .5, 8 | .25
        ("token", [2, 4, 0.5, 8, 0.25]),
        # products: sequence 2*4*.5*8 = 32; turns 8 and 4
        ("sequence", [32, 32, 32, 32, 0.25]),
        ("turn", [8, 8, 4, 4, 0.25]),
        # geometric means: 32^(1/4), then sqrt 8 and sqrt 4
        ("geometric", [32**0.25] * 4 + [0.25]),
        ("turn_geometric", [8**0.5] * 2 + [2, 2] + [0.25]),
    ],
)
def test_importance_weights_of_every_level(level: Any, expected: list[float]) -> None:
    batch = pictured(*ROWS, **LEFT)
    near(weights_of(batch, reinforce(pg.TruncatedIS(level=level, high=100.0))), expected, 1e-13)
    cut = [min(max(x, 1.0), 3.0) for x in expected]
    near(weights_of(batch, reinforce(pg.TruncatedIS(level=level, low=1.0, high=3.0))), cut, 1e-13)


def test_a_product_is_bounded_once_and_not_token_by_token() -> None:
    batch = pictured("cAA", old_logprobs=[0.0, -1.0, -49.0], rollout_logprobs=-26.0)
    # log-ratios 25 and -23: their sum is 2, which no bound of 20 touches.
    near(weights_of(batch, reinforce(pg.TruncatedIS(level="sequence", high=1e3))), [math.e**2] * 2, 1e-13)


def test_a_weight_is_bounded_before_exp() -> None:
    batch = pictured("cA", old_logprobs=-1.0, rollout_logprobs=-26.0)
    for rule in (pg.TruncatedIS(high=1e12), pg.TruncatedIS(level="turn", high=1e12), pg.IcePop(high=1e12)):
        near(weights_of(batch, reinforce(rule)), [math.exp(20)])
        near(weights_of(batch, reinforce(rule, log_ratio_bound=3.0)), [math.exp(3)])


def test_weights_of_mean_one_within_a_sequence() -> None:
    """Ratios 2, 4, 1/2, 8 have mean 29/8 and are cut at 3 to mean 17/8; a single one becomes 1. The mean is over what
    was sampled, also where a mask leaves one token of it."""
    batch = pictured(*ROWS, **LEFT)
    rule = pg.TruncatedIS(high=100.0, normalize="sequence")
    near(weights_of(batch, reinforce(rule)), [2 / 3.625, 4 / 3.625, 0.5 / 3.625, 8 / 3.625, 1], 1e-13)
    cut = pg.TruncatedIS(high=3.0, normalize="sequence")
    near(weights_of(batch, reinforce(cut)), [2 / 2.125, 3 / 2.125, 0.5 / 2.125, 3 / 2.125, 1], 1e-13)
    both = reinforce(rule, pg.IcePop(low=0.5, high=2.0, weight=False))
    near(weights_of(batch, both), [2 / 3.625, 0.5 / 3.625], 1e-13)
    refused(pg.SpecError, lambda: pg.TruncatedIS(level="turn", normalize="sequence"), "level='token'", "level='turn'")
    assert "over its mean in the sequence" in str(pg.presets.ppo(corrections=[rule]))
    assert not pg.presets.ppo(corrections=[pg.TruncatedIS(of="policy", normalize="sequence")]).needs_statistics_pass
    assert not pg.presets.ppo(corrections=[pg.TruncatedIS(of="policy", normalize="sequence")]).by_token


def test_weights_of_mean_one_over_tokens_and_over_units() -> None:
    batch = pictured(*ROWS, **LEFT)
    token = pg.TruncatedIS(high=100.0, normalize=True)
    mean = (2 + 4 + 0.5 + 8 + 0.25) / 5
    near(weights_of(batch, reinforce(token)), [x / mean for x in (2, 4, 0.5, 8, 0.25)], 1e-13)
    unit = pg.TruncatedIS(level="turn", high=100.0, normalize=True)
    mean = (8 + 4 + 0.25) / 3  # three turns, each once
    near(weights_of(batch, reinforce(unit)), [x / mean for x in (8, 8, 4, 4, 0.25)], 1e-13)
    # Over what is trained: a band rejects 4, 8 and .25, and only the turns of 2 and of .5 are left.
    both = reinforce(token, pg.IcePop(low=0.5, high=2.0, weight=False))
    near(weights_of(batch, both), [2 / 1.25, 0.5 / 1.25], 1e-13)
    plan = pg.plan([batch], both, split=ONE)
    assert plan.components["rl"].means == {0: 1.25}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        # Inclusive on both sides, in log space.
        (pg.IcePop(low=0.5, high=4.0, weight=False), "yyyn n"),
        (pg.IcePop(low=0.25, high=8.0, weight=False), "yyyy y"),
        # Geometric mean of the first row 32^(1/4) = 2.38, product 32; turns 8, 4.
        (pg.RatioMask(low=0.3, high=2.4), "yyyy n"),
        (pg.RatioMask(low=0.2, high=2.3), "nnnn y"),
        (pg.RatioMask(mean="product", low=0.2, high=31.0), "nnnn y"),
        (pg.RatioMask(mean="product", unit="turn", low=0.2, high=4.1), "nnyy y"),
        # d = -log2 * (1, 2, -1, 3) | 2 log2. k1 mean -5/4 log2, sum -5 log2, max log2.
        (pg.Reject(estimator="k1", high=1.9 * LOG2), "yyyy n"),
        (pg.Reject(estimator="k1", low=-1.2 * LOG2, high=9.0), "nnnn y"),
        (pg.Reject(estimator="k1", statistic="sum", low=-5.1 * LOG2, high=9.0), "yyyy y"),
        (pg.Reject(estimator="k1", statistic="max", high=0.9 * LOG2), "nnnn n"),
        (pg.Reject(estimator="k1", statistic="max", unit="turn", high=0.9 * LOG2), "yynn n"),
        # k2 = log2^2/2 * (1, 4, 1, 9) | 4: mean 15/4, sum 15, max 9.
        (pg.Reject(estimator="k2", high=3.76 * LOG2**2 / 2), "yyyy n"),
        (pg.Reject(estimator="k2", high=3.74 * LOG2**2 / 2), "nnnn n"),
        (pg.Reject(estimator="k2", statistic="sum", high=14.9 * LOG2**2 / 2), "nnnn y"),
        (pg.Reject(estimator="k2", statistic="max", high=8.9 * LOG2**2 / 2), "nnnn y"),
        (pg.Reject(estimator="k2", statistic="max", unit="turn", high=8.9 * LOG2**2 / 2), "yynn y"),
        # k3 = r - 1 - log r of .25: 2 log2 - .75 = .636; of 8: 7 - 3 log2 = 4.92.
        (pg.Reject(estimator="k3", unit="token", high=0.637), "ynyn y"),
        (pg.Reject(estimator="k3", unit="token", high=0.635), "ynyn n"),
        (pg.Reject(estimator="k3", statistic="max", high=4.93), "yyyy y"),
        (pg.Reject(estimator="k3", statistic="max", high=4.92), "nnnn y"),
        # One token kills its unit.
        (pg.Veto(low=0.4), "yyyy n"),
        (pg.Veto(low=0.6), "nnnn n"),
        (pg.Veto(low=0.6, unit="turn"), "yynn n"),
        (pg.Veto(low=0.1, high=7.0), "nnnn y"),
    ],
)
def test_what_each_rule_rejects(rule: Any, kept: str) -> None:
    plan = pg.plan([pictured(*ROWS, **LEFT)], reinforce(rule), split=ONE)
    member_T = plan.components["rl"].member_T[plan.table["action"]]
    expected = [c == "y" for c in kept.replace(" ", "")]
    assert member_T.tolist() == expected
    assert plan.counts["rl"][rule.reason] == expected.count(False)
    assert f"{expected.count(False)} tokens out: {rule.reason}" in plan.report() or all(expected)
    assert rule.formula() in plan.report() and rule.formula() in str(plan.spec)


def test_icepop_weighs_inside_its_band_and_several_rules_multiply() -> None:
    batch = pictured(*ROWS, **LEFT)
    near(weights_of(batch, reinforce(pg.IcePop(low=0.5, high=4.0))), [2, 4, 0.5])
    both = reinforce(pg.IcePop(low=0.5, high=4.0), pg.TruncatedIS(level="turn", high=5.0))
    near(weights_of(batch, both), [2 * 5, 4 * 5, 0.5 * 4])


def test_statistics_run_over_the_tokens_as_sampled_whatever_the_masks() -> None:
    """The mask takes the first token, whose ratio of 2 still counts in the product of the turn."""
    batch = pictured("cAA", masks={"keep": [True, False, True]}, **ratios(1, 2, 3))
    spec = reinforce(pg.TruncatedIS(level="sequence", high=10.0), masks=[pg.UserMask(name="keep")])
    near(weights_of(batch, spec), [6])
    nowhere = pictured("cAA", masks={"keep": [True, False, True]}, old_logprobs=[0.0, math.nan, 0.0],
                       rollout_logprobs=[0.0, 0.0, -math.log(3)])  # fmt: skip
    # What is not finite has no vote to give, and its unit no statistic: refused, trained or not.
    refused(pg.DataError, lambda: weights_of(nowhere, spec), "a statistic of component 'rl' reads", "stream 'old'")
    mean = spec.replace(corrections=[pg.TruncatedIS(level="geometric", high=10.0)])
    near(weights_of(batch, mean), [6**0.5], 1e-13)
    refused(pg.DataError, lambda: weights_of(nowhere, mean), "a statistic of component 'rl' reads", "stream 'old'")


NORM = "mean(sequence) > mean(token)"


@pytest.mark.parametrize(
    ("count_rejected", "units", "expected"),
    [
        # Rows of 4 and 1 actions; the veto on turns takes two tokens of the first row, all of the second.
        (True, "counted", [1 / 8, 1 / 8]),
        (False, "counted", [1 / 2, 1 / 2]),  # the second row has no counted token and is no unit
        (False, "all", [1 / 4, 1 / 4]),
        (True, "all", [1 / 8, 1 / 8]),
    ],
)
def test_rejected_tokens_and_units_in_the_denominators(count_rejected: bool, units: Any, expected: list[float]) -> None:
    spec = reinforce(pg.Veto(low=0.6, unit="turn"), normalizer=NORM, count_rejected=count_rejected, units=units)
    plan = pg.plan([pictured(*ROWS, **LEFT)], spec, split=ONE)
    near(plan.components["rl"].weight_T[plan.components["rl"].member_T], expected)
    assert plan.counts["rl"]["sequence"] == (1 if (count_rejected, units) == (False, "counted") else 2)
    assert plan.counts["rl"]["token"] == (5 if count_rejected else 2)


def test_all_rejected_contributes_nothing() -> None:
    for count_rejected in (True, False):
        spec = reinforce(pg.Veto(low=0.9), normalizer=NORM, count_rejected=count_rejected)
        answer = solve(pictured("cA", **ratios(1, 0.5)), spec, [-1.0, -1.0])
        assert answer.loss == 0 and not answer.grad_T.any() and not answer.plan.has_signal
        assert "nothing left" in answer.plan.report()


def test_scopes_by_default() -> None:
    """Weights act on every policy gradient; rejection on every component over actions, never on ce; the report says so
    for each."""
    spec = pg.LossSpec(
        components=[
            pg.PolicyGradient(normalizer=SUM),
            pg.Entropy(normalizer=SUM),
            pg.CrossEntropy(normalizer=SUM),
            pg.PolicyGradient(name="second", normalizer=SUM),
        ],
        corrections=[pg.TruncatedIS(high=3.0), pg.Veto(low=0.4), pg.IcePop(high=100.0, low=0.1, weight=False)],
    )
    plan = pg.plan([pictured(*ROWS, **LEFT)], spec, split=ONE)
    weight = {name: plan.components[name].weight_T[plan.components[name].member_T].tolist() for name in spec.names}
    near(weight["rl"], [2, 3, 0.5, 3])
    assert weight["second"] == weight["rl"] and weight["entropy"] == [1] * 4 and weight["ce"] == [1]
    assert [plan.counts[name]["sequence veto"] for name in spec.names] == [1, 1, 0, 1]
    text = plan.report()
    assert text.count("corrected: times min(old/mu, 3)") == 2 and text.count("reject the sequence where any") == 3
    assert text.count("reject the token where") == 3  # a band that does not weigh is a rejection
    weighing = spec.replace(corrections=[pg.IcePop(high=5.0)])
    counts = pg.plan([pictured(*ROWS, **LEFT)], weighing, split=ONE).counts
    assert [counts[name]["icepop band"] for name in spec.names] == [2, 0, 0, 2]
    only = spec.replace(corrections=[pg.Veto(low=0.4, on=("second",))])
    plan = pg.plan([pictured(*ROWS, **LEFT)], only, split=ONE)
    assert [plan.counts[name]["members"] for name in spec.names] == [5, 5, 1, 4]


def test_the_count_set_named_by_a_mask_is_the_mask_itself() -> None:
    """Six marked tokens, an answer and a context token among them, divide the two that are trained."""
    marked = [True, True, True, True, True, True, False, True]
    batch = pictured(*ROWS, masks={"all": marked, "few": [False, True] + [False] * 3 + [True] + [False] * 2}, **LEFT)
    spec = reinforce(count="all", normalizer="mean(token)", masks=[pg.UserMask(name="few")])
    # The first token of a row is nobody's target: of the seven marked, "c" of the first row does not count.
    near(weights_of(batch, spec), [1 / 6, 1 / 6])


def test_a_fault_leaves_every_component_and_every_count_set() -> None:
    batch = pictured(*ROWS, terminations=["fault", "success"], masks={"all": [True] * 8}, **LEFT)
    spec = pg.LossSpec(
        components=[
            pg.PolicyGradient(normalizer=NORM, units="all"),
            pg.CrossEntropy(normalizer=NORM, count="observations", units="all"),
            pg.Entropy(normalizer="mean(token)", count="all"),
        ]
    )
    plan = pg.plan([batch], spec, split=ONE)
    assert [plan.counts[name]["members"] for name in spec.names] == [1, 0, 1]
    assert [plan.counts[name]["fault"] for name in spec.names] == [4, 1, 4]
    assert plan.counts["rl"]["sequence"] == plan.counts["ce"]["sequence"] == 1
    near(plan.components["entropy"].weight_T[plan.components["entropy"].member_T], [1.0])


def stale(versions: Any, level: Any = "token", version: int | None = 7) -> pg.Plan:
    batch = pictured(*ROWS, versions=torch.tensor(versions), **LEFT)
    return pg.plan([batch], reinforce(pg.Staleness(max_lag=2, level=level)), split=ONE, version=version)


@pytest.mark.parametrize(
    ("versions", "level", "kept"),
    [
        ([5, 4], "token", "yyyy n"),
        ([0, 5, 4, 0, 7, 5, 0, 4], "token", "ynyy n"),
        ([0, 5, 4, 0, 7, 5, 0, 4], "turn", "nnyy n"),
        ([0, 5, 4, 0, 7, 5, 0, 6], "sequence", "nnnn y"),
    ],
)
def test_tokens_that_are_too_old_are_rejected_by_version(versions: list[int], level: Any, kept: str) -> None:
    plan = stale(versions, level)
    assert plan.components["rl"].member_T[plan.table["action"]].tolist() == [c == "y" for c in kept.replace(" ", "")]
    assert plan.counts["rl"]["stale"] == kept.count("n")


def test_versions_that_cannot_be_are_refused() -> None:
    refused(pg.DataError, lambda: stale([5, 4], version=None), "current version", "Staleness", "begin(..., version=V)")
    refused(pg.DataError, lambda: stale([5, 8]), "later version", "row 1, token 1", "versions")
    spec = reinforce(pg.Staleness(max_lag=1))
    refused(pg.DataError, lambda: pg.plan([pictured("cA")], spec, split=ONE, version=3), "versions are absent")
    refused(pg.DataError, lambda: pictured("cA", versions=torch.tensor([0.5])), "versions must be whole numbers")


def test_numbers_that_cannot_be_are_refused() -> None:
    refused(pg.SpecError, lambda: pg.TruncatedIS(low=3.0), "low lies above high")
    refused(pg.SpecError, lambda: pg.RatioMask(low=2.0, high=1.0), "low lies above high")
    refused(pg.SpecError, lambda: pg.RatioMask(high=1.0), "RatioMask.low")
    refused(pg.SpecError, lambda: pg.Reject(estimator="k2", low=0.0, high=1.0), "k2 is never negative")
    refused(pg.SpecError, lambda: pg.Staleness(max_lag=-1), "Staleness.max_lag")
    data: Any = reinforce().to_dict()
    refused(pg.SpecError, lambda: pg.plan([pictured("cA")], data, split=ONE), "got dict", "LossSpec.from_dict")
    refused(pg.SpecError, lambda: reinforce(pg.Veto(), old="policy"), "Veto(of='old')", "of='policy'")
    refused(pg.SpecError, lambda: reinforce(pg.Veto(on=("kl",))), "kl")
    refused(pg.DataError, lambda: pg.plan([pictured("cA", old_logprobs=-1.0)], reinforce(pg.Veto()), split=ONE),
            "rollout is absent", "Veto")  # fmt: skip
    broken = pictured("cA", old_logprobs=[0.0, math.inf], rollout_logprobs=-1.0)
    refused(pg.DataError, lambda: pg.plan([broken], reinforce(pg.Veto()), split=ONE), "non-finite", "'old'")


def test_every_rule_survives_toml_and_pickle() -> None:
    import pickle

    spec = reinforce(
        pg.TruncatedIS(level="turn", low=0.1, normalize=True), pg.IcePop(on=None), pg.RatioMask(low=0.9, high=1.1),
        pg.Reject(estimator="k1", low=-1.0, high=2.0), pg.Veto(high=9.0), pg.Staleness(max_lag=3),
    )  # fmt: skip
    assert pg.LossSpec.from_toml(spec.to_toml()) == spec == pickle.loads(pickle.dumps(spec))


def test_wholly_rejected_rows_do_not_vote() -> None:
    batch = pictured(*ROWS, versions=torch.tensor([5, 4]), **LEFT)
    assert voters(batch, reinforce(pg.Veto(low=0.4))).tolist() == [True, False]
    assert voters(batch, reinforce(pg.Staleness(max_lag=1)), version=6).tolist() == [True, False]


def test_versions_of_spans_reach_their_tokens() -> None:
    def trace(*versions: Any) -> pg.Trace:
        spans = [pg.Span(role="user", author="harness", tokens=[1])]
        for version in versions:
            spans += [pg.Span(role="assistant", author="policy", tokens=[2, 3], version=version)]
            spans += [pg.Span(role="tool", author="environment", tokens=[4])]
        return pg.Trace(spans=spans, advantage=1.0)

    batch = pg.TokenBatch.from_traces([trace(5, [6, 7]), trace(4)])
    assert batch.streams["versions"][batch.action_T].tolist() == [5, 5, 6, 7, 4, 4]
    assert pg.TokenBatch.from_traces([trace(None)]).streams.get("versions") is None
    refused(pg.DataError, lambda: pg.TokenBatch.from_traces([trace(5, None)]), "version of policy spans", "some")
    refused(pg.DataError, lambda: pg.TokenBatch.from_traces([trace([5])]), "number of versions", "expected 2")
    old = {"spec": reinforce(pg.Veto())}
    refused(pg.DataError, lambda: voters(pictured("cA"), old["spec"]), "old is absent", "score first")
