"""A plan: counts, the report, signal, coefficients; and that nothing outside a component can move a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from support.steps import NAN, ONE, near, pictured, refused, solve, weights_of

KEEP = {"keep": [True] * 4 + [False] + [True] * 6 + [True, False, True]}


def step() -> pg.TokenBatch:
    """Rows: 3 actions and 1 answer; 2 and 1, truncated; 1 and 2, broken. The mask takes an answer of the first row and
    one of the last. Advantages 1, 0 and -1."""
    return pictured(
        "cAAAo", "cAAo", "coAoc", advantages=[1.0, 0.0, -1.0], old_logprobs=-1.0, ref_logprobs=-1.0,
        terminations=["success", "truncated", "fault"], masks=KEEP, prompt_ids=["p", "p", "q"],
    )  # fmt: skip


SPEC = pg.LossSpec(
    components=[
        pg.PolicyGradient(normalizer="mean(prompt) > mean(token)"),
        pg.KL(coef=0.04, normalizer="mean(sequence) > mean(token)"),
        pg.CrossEntropy(count="observations", units="all", coef=0.5, normalizer="mean(sequence) > mean(token)"),
    ],
    masks=[pg.DropTruncated(on=("kl",)), pg.DropZeroAdvantage(), pg.UserMask(name="keep")],
)


def test_counts_per_component_level_and_reason() -> None:
    """rl: 6 actions, 1 in the broken row, 2 of advantage 0; left 3, all in prompt p. kl: of its 6 the fault takes 1 and
    truncation 2. ce: 4 answers, 2 in the broken row, 1 in the mask; it counts the two rows that did not break."""
    counts = pg.plan([step()], SPEC, split=ONE).counts
    common = {"mask keep": 0, "truncated": 0, "zero advantage": 0}
    levels = {"sequence": 1, "turn": 1, "token": 3, "prompt": 1}
    left = {"base": 6, "members": 3, "live": 3, "fault": 1}
    assert counts["rl"] == common | left | levels | {"zero advantage": 2}
    assert counts["kl"] == common | left | levels | {"truncated": 2}
    observed = {"sequence": 2, "turn": 2, "token": 2, "prompt": 1}
    assert counts["ce"] == common | {"base": 4, "members": 1, "live": 1, "fault": 2} | observed | {"mask keep": 1}


def test_report_is_for_people() -> None:
    text = pg.plan([step()], SPEC, split=pg.Split(sequences=2), coef={"kl": 0.0}).report()
    assert text.splitlines() == [
        "step of 3 sequences, 14 tokens, on 1 data-parallel rank x 2 micro-batches",
        "  old log-probs: given with the batch",
        "rl: coefficient 1, mean(prompt) > mean(token)",
        "  counted (members, units counted): 1 prompts, 1 sequences, 1 turns, 3 tokens",
        "  trains 3 of 6 tokens, 3 can move the policy",
        "  1 tokens out: fault",
        "  2 tokens out: zero advantage",
        "kl: coefficient 0, mean(sequence) > mean(token)",
        "  counted (members, units counted): 1 prompts, 1 sequences, 1 turns, 3 tokens",
        "  trains 3 of 6 tokens, 3 can move the policy",
        "  1 tokens out: fault",
        "  2 tokens out: truncated",
        "ce: coefficient 0.5, mean(sequence) > mean(token)",
        "  counted (observations, units all): 1 prompts, 2 sequences, 2 turns, 2 tokens",
        "  trains 1 of 4 tokens, 1 can move the policy",
        "  2 tokens out: fault",
        "  1 tokens out: mask keep",
    ]
    excluded = pg.plan([pictured("cA", "cc")], pg.presets.reinforce(empty_sequences="exclude"), split=ONE)
    assert "1 sequences left out: no member of any component" in excluded.report()
    assert excluded.job["excluded"] == 1 and excluded.counts["rl"]["sequence"] == 1
    idle = pg.plan([pictured("cA", advantages=0.0)], pg.presets.reinforce(), split=ONE)
    assert "1 of 1 tokens, 0 can move the policy" in idle.report() and "has_signal is False" in idle.report()


def test_levels_that_nobody_gave_are_not_counted() -> None:
    batch = pictured("cA", "cAA", episode_ids=[0, 1])
    plan = pg.plan([batch], pg.presets.reinforce(normalizer="mean(episode) > mean(token)"), split=ONE)
    assert plan.counts["rl"]["episode"] == 2 and "prompt" not in plan.counts["rl"]


def test_two_masks_of_one_name_share_a_line() -> None:
    rules = [pg.UserMask(name="m", on=("rl",)), pg.UserMask(name="m", on=("rl",))]
    plan = pg.plan([pictured("cAA", masks={"m": [True, True, False]})], pg.presets.reinforce(masks=rules), split=ONE)
    assert plan.counts["rl"]["mask m"] == 1 and plan.report().count("1 tokens out: mask m") == 1


def test_named_masks_act_on_the_components_they_name() -> None:
    """On ce they take answers: of the truncated row, or where the advantage is 0."""
    batch = pictured("cAo", "cAoo", advantages=[0.0, 1.0], terminations=["success", "truncated"])
    parts = [*pg.presets.reinforce().components, pg.CrossEntropy()]
    for mask, left in (
        (pg.DropTruncated(on=("ce",)), 1),
        (pg.DropZeroAdvantage(on=("ce",)), 2),
        (pg.DropTruncated(), 3),
    ):
        counts = pg.plan([batch], pg.LossSpec(old="policy", components=parts, masks=[mask]), split=ONE).counts
        assert counts["ce"]["members"] == left and counts["rl"]["members"] == (1 if mask.on is None else 2)


def test_coefficients_of_a_step() -> None:
    batch, logp = step(), [-1.5] * 14
    base = solve(batch, SPEC, logp)
    more = solve(batch, SPEC, logp, coef={"kl": 1.04})
    near(more.loss - base.loss, base.metrics["kl/loss"], 1e-12)
    assert more.plan.coef == {"rl": 1.0, "kl": 1.04, "ce": 0.5} and SPEC.component("kl").coef == 0.04
    for coef, kind, words in (
        ({"kll": 1.0}, pg.SpecError, ("no component 'kll'", "did you mean 'kl'?")),
        ({"kl": NAN}, pg.DataError, ("coef['kl'] is not a finite number", "nan")),
        ({"kl": "big"}, pg.DataError, ("coef['kl'] is not a finite number", "'big'")),
    ):
        refused(kind, lambda coef=coef: pg.plan([batch], SPEC, split=ONE, coef=coef), *words)


def test_has_signal_asks_whether_the_policy_can_move() -> None:
    def signal(spec: pg.LossSpec, *, coef: Any = None, **given: Any) -> bool:
        return pg.plan([pictured("cAo", **({"ref_logprobs": -1.0} | given))], spec, split=ONE, coef=coef).has_signal

    alone, with_kl = pg.presets.reinforce(), pg.presets.reinforce(kl=0.1)
    assert signal(alone) and not signal(alone, advantages=0.0) and not signal(alone, coef={"rl": 0.0})
    assert not signal(alone, weights={"rl": 0.0})
    assert signal(with_kl, advantages=0.0) and not signal(with_kl, advantages=0.0, coef={"kl": 0.0})
    assert signal(alone.add(pg.CrossEntropy()), advantages=0.0)
    assert not signal(alone.replace(masks=[pg.DropTruncated()]), terminations=["truncated"])


def test_one_process_needs_no_scale_and_no_group() -> None:
    for group in (None, "local"):
        assert pg.plan([pictured("cA")], pg.presets.reinforce(), split=ONE, group=group).gradient_scale == 1.0
    refused(pg.LayoutError, lambda: pg.plan([], None, split=ONE, group="world"), "group='world'", "'local'")


def test_a_component_with_nothing_left_is_exactly_zero() -> None:
    spec = pg.presets.reinforce(masks=[pg.DropTruncated()]).add(
        pg.CrossEntropy(normalizer="mean(sequence) > mean(token)")
    )
    answer = solve(pictured("cAA", terminations=["truncated"]), spec, [NAN, -1.0, 1e4])
    assert answer.loss == 0.0 and torch.equal(answer.grad_T, torch.zeros(3, dtype=torch.float64))
    assert answer.plan.report().count("nothing left: this component contributes exactly 0") == 2
    # Beside a live component it adds nothing at all, by a bit.
    alone = solve(pictured("cAA"), pg.presets.reinforce(), [-1.0, -2.0, -3.0])
    beside = solve(pictured("cAA"), pg.presets.reinforce().add(pg.CrossEntropy()), [-1.0, -2.0, -3.0])
    assert beside.loss == alone.loss and torch.equal(beside.grad_T, alone.grad_T)


def test_empty_sequences_are_excluded_on_request() -> None:
    spec = pg.presets.reinforce(normalizer="mean(sequence) > mean(token)", empty_sequences="exclude")
    near(weights_of(pictured("cAA", "ccc", "cA", "c"), spec), [1 / 4] * 2 + [1 / 2])


def test_a_second_update_needs_old_logprobs_unless_it_is_the_same_step() -> None:
    batch = pictured("cA", "cA", "cA", sample_ids=["x", "y", "z"])
    spec = pg.presets.reinforce()
    first, other = (pg.plan([batch.select([0, 1])], spec, split=pg.Split(sequences=1)) for _ in range(2))
    for plan, rounds in ((first, 2), (other, 0)):  # several micro-batches, and passes, of one step are one update
        for micro in (*plan.microbatches(),) * rounds:
            pg.policy_loss(pg.TokenLogprobs(logprob=torch.zeros(micro.shape, requires_grad=True), entropy=None), micro)
    words = ("second update", "old='policy'", "sample 'x'")
    refused(pg.DataError, lambda: pg.plan([batch], spec, split=ONE), *words)
    micro = next(other.microbatches())
    lp = pg.TokenLogprobs(logprob=torch.zeros(micro.shape, requires_grad=True), entropy=None)
    refused(pg.DataError, lambda: pg.policy_loss(lp, micro), *words)
    pg.plan([batch.select([2])], spec, split=ONE)
    pg.plan([batch.with_stream("old", torch.zeros(6))], pg.presets.ppo(), split=ONE)
    assert first.updated and not other.updated


def test_evaluation_is_no_update() -> None:
    batch, spec = pictured("cA"), pg.presets.reinforce()
    for _ in range(2):
        micro = next(pg.plan([batch], spec, split=ONE).microbatches())
        pg.policy_loss(pg.TokenLogprobs(logprob=torch.zeros(micro.shape), entropy=None), micro)


def test_a_scoring_plan_needs_no_spec_and_no_streams() -> None:
    batch = pictured("cAA", "ccc", temperature=torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0, 0.0]))
    plan = pg.plan([batch], None, split=pg.Split(sequences=1))
    assert plan.coef == {} and plan.counts == {} and not plan.has_signal and plan.num_microbatches == 2
    micro, context = plan.microbatches()
    assert micro.targets.tolist() == [[2, 3, 0]] and micro.temperature is not None and context.temperature is not None
    assert micro.temperature.tolist() == [[0.5, 0.5, 1.0]]
    assert context.temperature.tolist() == [[1.0, 1.0, 1.0]]  # what nobody sampled is scored as it stands
    lp = pg.TokenLogprobs(logprob=torch.zeros(1, 3), entropy=None)
    refused(pg.DataError, lambda: pg.policy_loss(lp, micro), "planned without a spec")
    refused(
        pg.DataError, lambda: pg.weighted_sum(torch.zeros(1, 3), micro, "rl"), "no component 'rl'", "a plan with a spec"
    )
    assert pg.plan([], None, split=ONE).num_microbatches == 1


@pytest.mark.parametrize("garbage", [NAN, float("inf"), -1e4])
def test_nothing_outside_a_component_moves_a_weight(garbage: float) -> None:
    """Advantages, log-probs and weights of tokens that are masked, of observations and of context."""
    spec = pg.presets.grpo(
        corrections=[pg.TruncatedIS()], masks=[pg.UserMask(name="keep"), pg.DropZeroAdvantage()]
    ).replace(empty_sequences="exclude")
    keep, real = [True] * 4 + [False, True], [False, True, True, False, False, True]

    def plan(outside: float) -> pg.Plan:
        stream = [0.5 + 0.1 * k if inside else outside for k, inside in enumerate(real)]
        names = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
        logps = {key: [-x for x in stream] for key in names}
        batch = pictured("cAAoAA", advantages=stream, **logps, masks={"keep": keep}, weights={"rl": stream})
        return pg.plan([batch], spec, split=ONE)

    one, two = plan(0.25), plan(garbage)
    assert one.counts == two.counts
    for name in ("rl", "kl"):
        assert torch.equal(one.components[name].weight_T, two.components[name].weight_T)
        assert torch.equal(one.components[name].member_T, two.components[name].member_T)
