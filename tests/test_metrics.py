"""Metrics are typed sums: each by hand, each with its documented divisor, exact under any split."""

from __future__ import annotations

from itertools import pairwise
from math import exp, isnan, log
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_pgloss as pg
from megatron_pgloss.metrics import METRICS, Metric, kind_of, merge_all, unpack
from megatron_pgloss.objective.measure import Among, names
from support.steps import NAN, near, pictured, solve

KINDS = {row.suffix: row.kind for row in METRICS}


def test_every_metric_by_hand() -> None:
    """Four actions with ratios to old of 0.5, 2, 1.1 and e^25 and advantages -1, 1, 1, -1; an answer of -0.7."""
    logp = [-2 + log(0.5), -2 + log(2.0), -2 + log(1.1), -0.7, 23.0, NAN]
    batch = pictured(
        "cAAAoA",
        advantages=[9.0, -1.0, 1.0, 1.0, 9.0, -1.0],
        old_logprobs=-2.0,
        rollout_logprobs=[9.0, -2.0, -2.0 - log(4.0), -2.0, NAN, -2.0],
        ref_logprobs=[9.0, -2.0, -2.0, -2.0, NAN, 22.0],
    )
    spec = pg.presets.dapo(corrections=[pg.TruncatedIS(high=2.0)], dual=3.0, entropy=0.1).add(pg.CrossEntropy())
    found = solve(batch, spec, logp, [0.1, 0.2, 0.3, NAN, 0.4, NAN]).metrics

    def k3(d: float) -> float:
        return exp(-d) + d - 1

    d = [log(0.5), log(2.0), log(1.1)]
    expected = {
        "rl/loss": (0.8 * 1 - 1.28 * 2 - 1.1 * 1 + 3.0 * 1)
        / 4,  # clipped low, high (weight 4, truncated to 2), free, dual
        "rl/fault": 0.0,
        "rl/ratio": (0.5 + 2 + 1.1 + exp(25)) / 4,
        "rl/ratio_sq": (0.25 + 4 + 1.21 + exp(50)) / 4,
        "rl/ratio_min": 0.5,
        "rl/ratio_max": exp(25),
        "rl/clip_low": 0.25,
        "rl/clip_high": 0.25,
        "rl/clip_dual": 0.25,
        "rl/bounded": 0.0,  # the token beyond the bound is the dual clip's
        "rl/k1_old": (sum(d) + 25) / 4,
        # Tokens are old's and mu's: exp(d) - 1 - d; beyond the bound at the bound.
        "rl/k3_old_pi": (sum(k3(-x) for x in d) + k3(-20)) / 4,
        "rl/k3_rollout_old": k3(-log(4.0)) / 4,
        "rl/k3_rollout_pi": (k3(-d[0]) + k3(-log(8.0)) + k3(-d[2]) + k3(-20)) / 4,
        "rl/k3_pi_ref": (sum(map(k3, d)) + k3(1.0)) / 4,
        "rl/entropy": 0.25,
        "rl/is_weight": (1 + 2 + 1 + 1) / 4,
        "rl/is_weight_sq": (1 + 4 + 1 + 1) / 4,
        "rl/is_weight_min": 1.0,
        "rl/is_weight_max": 2.0,
        "rl/is_raw": (1 + 4 + 1 + 1) / 4,
        "rl/is_chi2": 15 / 4,
        "rl/is_chi2_sequence": 15.0,
        "rl/is_truncated": 0.25,
        "entropy/loss": -0.25,
        "entropy/entropy": 0.25,
        "entropy/fault": 0.0,
        "ce/loss": 0.7,
        "ce/nll": 0.7,
        "ce/fault": 0.0,
    }
    for name, value in expected.items():
        near(found[name], value, 1e-12)
    rest = set(found) - set(expected)
    assert rest == {"rl/fault_at", "entropy/fault_at", "ce/fault_at"} and all(isnan(found[name]) for name in rest)


SPECS = {name: preset.build(**preset.example) for name, preset in pg.presets.PRESETS.items()}
SPECS |= {
    "everything": pg.presets.grpo(corrections=[pg.TruncatedIS(on=("rl", "kl"))], entropy=0.1, dual=2.0)
    .add(pg.Term("own", lambda x: x.logp))
    .add(pg.KL(name="kl_old", to="old")),
    "late": pg.presets.ppo(
        old="policy",
        corrections=[pg.TruncatedIS(of="policy"), pg.IcePop(of="policy")],
        gates=[pg.TVGate(low=0.2, high=0.2), pg.RatioGate(), pg.Gate(lambda x: x.logp.exp())],
    ),
    "ratio none": pg.LossSpec(components=[pg.PolicyGradient(ratio="none")]),
}
GIVEN: dict[str, dict[str, Any]] = {
    "all streams": {"rollout_logprobs": -1.0, "ref_logprobs": -1.0},
    "what is read": {},
}


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("given_streams", GIVEN)
@pytest.mark.parametrize("name", SPECS)
def test_names_are_what_is_measured_and_documented(name: str, given_streams: str, entropy: bool) -> None:
    """What other ranks are told to expect is what arrives, in order, and each is in the table with its kind."""
    spec = SPECS[name]
    streams = dict(GIVEN[given_streams])
    for stream in set(spec.readers) - {"advantages"}:
        streams[stream if stream in ("values", "returns") else f"{stream}_logprobs"] = -1.0
    batch = pictured("cAo", sample_ids=["a"], prompt_ids=["p"], **streams)
    computed = entropy or spec.needs_entropy
    critic = [0.3] * 3 if name == "critic" else None
    answer = solve(batch, spec, [-0.5, -0.5, NAN], [0.1] * 3 if computed else None, value=critic)
    there = frozenset(batch.streams)
    expected = [name for part in spec.components for name in names(part, spec, there, computed)]
    (out,) = answer.outs
    assert list(out.metrics) == expected
    for label, metric in out.metrics.items():
        assert metric.kind == kind_of(label) == KINDS[label.split("/")[1]]
        assert (metric.count is not None) == (metric.kind == "mean")
        assert not metric.value.requires_grad and metric.value.dtype == torch.float64


def test_the_table_says_what_a_mean_is_divided_by() -> None:
    assert len({row.suffix for row in METRICS}) == len(METRICS)
    for row in METRICS:
        assert (row.kind == "mean") == bool(row.divided_by) and row.meaning and row.first_step


@given(values=st.lists(st.tuples(st.integers(-1000, 1000), st.booleans()), max_size=30), data=st.data())
def test_parts_merge_into_the_whole_exactly(values: list[tuple[int, bool]], data: st.DataObject) -> None:
    """Any cut into parts, empty ones too; whole numbers, so that sums are exact whatever their order."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    edges = [0, *cuts, len(values)]

    def measured(part: list[tuple[int, bool]]) -> dict[str, Metric]:
        value_T = torch.tensor([value for value, _ in part], dtype=torch.float64)
        member_T = torch.tensor([flag for _, flag in part], dtype=torch.bool)
        return {
            "a/ratio": Among(member_T).mean(value_T),
            "a/loss": Metric.sum(torch.where(member_T, value_T, 0).sum()),
            "a/ratio_min": Among(member_T).least(value_T),
            "a/ratio_max": Among(member_T).most(value_T),
        }

    whole = measured(values)
    merged = merge_all(measured(values[a:b]) for a, b in pairwise(edges))
    picked = [value for value, flag in values if flag]
    assert whole["a/ratio_min"].value == min(picked, default=float("inf"))
    assert whole["a/ratio_max"].value == max(picked, default=-float("inf"))
    for name, metric in whole.items():
        assert torch.equal(merged[name].pack(), metric.pack())
        assert torch.equal(unpack(name, metric.pack()).pack(), metric.pack())
    result = whole["a/ratio"].result()
    assert result == sum(picked) / len(picked) if picked else isnan(result)


def test_a_mean_is_never_averaged_again() -> None:
    """1 token of 4 and 3 tokens of 0: the mean is 1, where a mean of means is 2."""
    one = Among(torch.tensor([True])).mean(torch.tensor([4.0]))
    three = Among(torch.ones(3, dtype=torch.bool)).mean(torch.zeros(3))
    assert one.merge(three).result() == 1.0 and three.merge(one).result() == 1.0


def test_nothing_to_measure_is_not_a_number_and_values_outside_do_not_count() -> None:
    none = torch.zeros(2, dtype=torch.bool)
    garbage = torch.tensor([NAN, float("inf")])
    for metric in (
        Among(none).mean(garbage),
        Among(none).least(garbage),
        Among(none).most(garbage),
    ):
        assert isnan(metric.result())
    one = torch.tensor([False, True])
    assert Among(one).mean(torch.tensor([NAN, 2.0])).result() == 2.0
    assert Among(one).most(torch.tensor([NAN, -2.0])).result() == -2.0
    assert Among(torch.zeros(0, dtype=torch.bool)).least(torch.zeros(0)).value == float("inf")
    assert kind_of("own/anything") == "sum"


def test_metrics_do_not_depend_on_the_split() -> None:
    rows = ("cAAA", "cAo", "coA", "cAAAAo", "cA")
    total = sum(map(len, rows))
    streams = {name: [-1.0 - 0.1 * ((5 * k) % 7) for k in range(total)] for name in ("old_logprobs", "ref_logprobs")}
    batch = pictured(*rows, advantages=[1.0, -1.0, 0.5, -0.5, 2.0], **streams)
    spec = pg.presets.grpo(entropy=0.1).add(pg.CrossEntropy())
    logp = [-1.0 - 0.1 * ((3 * k) % 8) for k in range(total)]
    whole = solve(batch, spec, logp, [0.5] * total).metrics
    for split in (pg.Split(sequences=1), pg.Split(sequences=2), pg.Split(microbatches=3), pg.Split(max_tokens=8)):
        parts = solve(batch, spec, logp, [0.5] * total, split=split).metrics
        assert list(parts) == list(whole)
        for name, value in whole.items():
            assert isnan(value) == isnan(parts[name])
            if not isnan(value):
                near(parts[name], value, 1e-13)


def test_report_does_not_alias_the_loss() -> None:
    """Scaling the loss in place, as schedules do, must not reach what is reported."""
    batch = pictured("cA", old_logprobs=-1.0)
    answer = solve(batch, pg.presets.ppo(), [-1.0, NAN])
    (out,) = answer.outs
    before = out.metrics["rl/loss"].result()
    with torch.no_grad():
        out.loss.mul_(7.0)
    assert out.metrics["rl/loss"].result() == before == -1.0
