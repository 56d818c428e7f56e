"""Where ``old`` comes from: given, policy, record, rollout, interpolate; and corrections of the current policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from support.steps import NAN, ONE, arrange, near, pictured, refused, solve

CLIP = pg.PolicyGradient(surrogate=pg.Clip(low=0.2, high=0.2), normalizer="sum(token)")


def spec(old: str, **more: Any) -> pg.LossSpec:
    return pg.LossSpec(components=[CLIP], old=old, **more)


def rows(**given: Any) -> pg.TokenBatch:
    return pictured("cAA", "cA", sample_ids=["a", "b"], **given)


FIRST = [-1.0, -2.0, NAN, -3.0, NAN]
THEN = [-1.0 + math.log(1.1), -2.0 + math.log(1.5), NAN, -3.0 + math.log(0.9), NAN]


def test_record_is_the_policy_first_and_what_it_had_then_afterwards() -> None:
    """First ratio 1: loss -3, gradient -1 each. Then 1.1 and 0.9 inside, 1.5 clipped to 1.2 with gradient 0."""
    batch = rows()
    first = solve(batch, spec("record"), FIRST)
    assert first.loss == -3 and first.metrics["rl/ratio_min"] == first.metrics["rl/ratio_max"] == 1
    near(first.grad_T, [-1, -1, 0, -1, 0])
    second = solve(batch, spec("record"), THEN)
    near(second.loss, -(1.1 + 1.2 + 0.9))
    near(second.grad_T, [-1.1, 0, 0, -0.9, 0])
    # The record is of the first update; a third does not move it.
    near(solve(batch, spec("record"), THEN).loss, -(1.1 + 1.2 + 0.9))


def test_record_goes_row_by_row_through_every_view() -> None:
    """Row b is updated on alone; a later step over both meets a for the first time and b for the second."""
    batch = rows()
    solve(batch.select([1]), spec("record"), [-3.0, NAN])
    both = solve(batch.select([1, 0]), spec("record"), [THEN[3], NAN, *THEN[:3]])
    near(both.loss, -(0.9 + 1 + 1))
    near(both.grad_T, [-0.9, 0, -1, -1, 0])
    # What b had first stays its old; a's is from the step over both.
    near(solve(batch, spec("record"), FIRST).loss, -(1 / 1.1 + 1 / 1.5 + 1))


def test_record_of_several_microbatches_and_of_packed_ones() -> None:
    for split in (pg.Split(sequences=1), pg.Split(max_tokens=8)):
        batch = rows()
        assert solve(batch, spec("record"), FIRST, split=split).loss == -3
        near(solve(batch, spec("record"), THEN).loss, -(1.1 + 1.2 + 0.9))


def test_an_evaluation_records_nothing() -> None:
    batch = rows()
    plan = pg.plan([batch], spec("record"), split=ONE)
    for micro in plan.microbatches():
        pg.policy_loss(pg.TokenLogprobs(logprob=arrange(micro, torch.tensor(THEN)), entropy=None), micro)
    assert solve(batch, spec("record"), FIRST).loss == -3
    near(solve(batch, spec("record"), THEN).loss, -3.2)


def test_what_was_recorded_must_be_finite_where_it_is_read() -> None:
    batch = rows()
    plan = pg.plan([batch], spec("record"), split=ONE)
    (micro,) = plan.microbatches()
    logp = torch.tensor([NAN, -2.0, 0.0, -3.0, 0.0], dtype=torch.float64, requires_grad=True)
    pg.policy_loss(pg.TokenLogprobs(logprob=arrange(micro, logp), entropy=None), micro)
    refused(pg.DataError, lambda: solve(batch, spec("record"), THEN), "non-finite", "sample 'a', token 1", "'old'")


def test_a_row_seen_in_part_is_refused() -> None:
    batch = rows()
    plan = pg.plan([batch], spec("record"), split=ONE)
    (micro,) = plan.microbatches()
    half = micro.take(torch.arange(2), (1, 2), torch.zeros(2, dtype=torch.int64), 1, None)
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    pg.policy_loss(pg.TokenLogprobs(logprob=logp, entropy=None), half)
    refused(pg.DataError, lambda: pg.plan([batch], spec("record"), split=ONE), "sample 'a'", "step.finish")


@pytest.mark.parametrize(("lag", "alpha"), [(0, 0.0), (1, 0.0), (2, 1 / 2), (4, 3 / 4)])
def test_interpolate_lies_between_the_sampler_and_the_policy_by_version(lag: int, alpha: float) -> None:
    """old = mu + alpha (sg(pi) - mu): log r = (1 - alpha) (log pi - log mu), gradient that of log pi times r."""
    batch = pictured("cA", rollout_logprobs=-1.0, versions=torch.tensor([9 - lag]))
    gap = 0.1
    loss, grad_T, plan = solve_versioned(batch, spec("interpolate"), [-1.0 + gap, NAN], 9)
    ratio = math.exp((1 - alpha) * gap)
    near(loss, -ratio, 1e-13)
    near(grad_T, [-ratio, 0], 1e-13)
    assert float(plan.table["interpolation"][0]) == alpha


def solve_versioned(
    batch: pg.TokenBatch, spec: pg.LossSpec, logp: list[float], version: int
) -> tuple[torch.Tensor, torch.Tensor, pg.Plan]:
    """Loss, gradient and plan of one micro-batch."""
    plan = pg.plan([batch], spec, split=ONE, version=version)
    logp_T = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    (micro,) = plan.microbatches()
    out = pg.policy_loss(pg.TokenLogprobs(logprob=arrange(micro, logp_T), entropy=None), micro)
    (grad_T,) = torch.autograd.grad(out.loss, logp_T)
    return out.loss, grad_T, plan


def test_a_correction_of_an_interpolated_old_acts_inside_the_loss() -> None:
    """alpha = 1/2, log pi - log mu = 0.2: old/mu = exp(0.1) weighs the ratio pi/old = exp(0.1)."""
    batch = pictured("cA", rollout_logprobs=-1.0, versions=torch.tensor([7]))
    late = spec("interpolate", corrections=[pg.TruncatedIS(high=10.0)])
    loss, grad_T, _ = solve_versioned(batch, late, [-0.8, NAN], 9)
    near(loss, -math.exp(0.1) * math.exp(0.1), 1e-13)
    near(grad_T, [-math.exp(0.2), 0], 1e-13)


def test_who_reads_what_is_said_where_it_is_absent() -> None:
    plain = pictured("cA")
    words = {
        "given": ("old is absent", "rl", "score"),
        "rollout": ("rollout is absent", "rl"),
        "interpolate": ("rollout is absent", "rl"),
    }
    for old, said in words.items():
        refused(pg.DataError, lambda old=old: pg.plan([plain], spec(old), split=ONE), *said)  # type: ignore[misc]
    sampled = pictured("cA", rollout_logprobs=-1.0)
    refused(
        pg.DataError, lambda: pg.plan([sampled], spec("interpolate"), split=ONE, version=3), "versions", "interpolate"
    )
    for old in ("policy", "record", "rollout"):
        refused(pg.SpecError, lambda old=old: spec(old, corrections=[pg.Veto()]), "of='old'")  # type: ignore[misc]


@pytest.mark.parametrize("old", ["policy", "record", "rollout", "given", "interpolate"])
def test_the_report_says_where_old_comes_from(old: str) -> None:
    batch = pictured("cA", old_logprobs=-1.0, rollout_logprobs=-1.0, versions=torch.tensor([3]))
    plan = pg.plan([batch], spec(old), split=ONE, version=3)
    line = next(line for line in plan.report().splitlines() if "old log-probs" in line)
    words = {"policy": "ratio exactly 1", "record": "first update", "rollout": "two policies", "given": "given with",
             "interpolate": "by version"}  # fmt: skip
    assert words[old] in line


def test_weights_of_the_current_policy_are_constants_of_the_term() -> None:
    """sg(pi)/mu = (2, .5): times -A log pi each; no gradient flows through the weight."""
    batch = pictured("cAA", rollout_logprobs=[0.0, -1.0, -1.0])
    rl = pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", normalizer="sum(token)")
    late = pg.LossSpec(components=[rl], old="policy", corrections=[pg.TruncatedIS(of="policy", high=10.0)])
    logp = [-1 + math.log(2), -1 - math.log(2), NAN]
    answer = solve(batch, late, logp)
    near(answer.grad_T, [-2, -0.5, 0], 1e-13)
    near(answer.loss, -2 * logp[0] - 0.5 * logp[1], 1e-13)
    veto = late.replace(corrections=[pg.Veto(of="policy", low=0.6)])
    answer = solve(pictured("cAA", "cA", rollout_logprobs=-1.0), veto, [*logp, -1.0, NAN])
    near(answer.grad_T, [0, 0, 0, -1, 0])  # the first row is vetoed by its second token
