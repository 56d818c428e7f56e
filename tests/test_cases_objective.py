"""Inputs that broke other people's losses: ratios, KL, masks, temperature, value, and what is ignored in silence.

The name of each case is that of docs/cases.md.
"""

from __future__ import annotations

from math import exp, log

import pytest
import torch

import megatron_pgloss as pg
from support.steps import NAN, ONE, near, pictured, refused, solve

T, F = True, False


@pytest.mark.parametrize("split", [pg.Split(sequences=1), ONE])
def test_a_value_loss_does_not_grow_with_the_micro_batches(split: pg.Split) -> None:
    """VERL-05: losses 1, 2, 3, 4 in two micro-batches: 2.5, not 1.5 + 3.5."""
    spec = pg.LossSpec(components=[pg.spec.Value(clip=None)])
    worth = [2**0.5, 2.0, NAN, 6**0.5, 8**0.5, NAN]
    answer = solve(pictured("cAA", "cAA", returns=0.0), spec, [-1.0] * 6, value=worth, split=split)
    near(answer.loss, 2.5)


def test_a_distillation_loss_does_not_grow_with_the_micro_batches() -> None:
    """VERL-05: -(log ref - log pi) of 1, 2, 3, 4 at ratio 1."""
    spec = pg.presets.opd()
    for split in (pg.Split(sequences=1), ONE):
        batch = pictured("cAA", "cAA", ref_logprobs=[0.0, -2.0, -3.0, 0.0, -4.0, -5.0], rollout_logprobs=-1.0)
        near(solve(batch, spec, [-1.0, -1.0, NAN, -1.0, -1.0, NAN], split=split).metrics["distill/loss"], 2.5)


def test_weighted_k3_keeps_its_value_and_gains_the_score_term() -> None:
    """NRL-03 a: lp = old = -1, ref = -2: value 0.3678794 either way, derivative 1.0 with the weight."""
    part = pg.KL(gradient="weighted")
    answer = solve(pictured("cA", ref_logprobs=-2.0, old_logprobs=-1.0), pg.LossSpec(components=[part]), [-1.0, NAN])
    near([answer.loss, float(answer.grad_T[0])], [0.36787944117144233, 1.0])


@pytest.mark.parametrize(("gradient", "expected"), [("weighted", 0.5), ("plain", 0.3807970779778823)])
def test_expected_gradient_of_k3_over_two_words(gradient: str, expected: float) -> None:
    """NRL-03 b: logits [0, 0], reference [2, 0], both words with their probability 1/2: KL 0.4337808; its gradient is
    [-0.5, 0.5], and without the weight [-0.3808, 0.3808]."""
    tokens = torch.tensor([[0, 0], [0, 1]])
    ref = torch.tensor([2.0, 0.0], dtype=torch.float64).log_softmax(0)
    batch = pg.TokenBatch.from_padded(
        tokens=tokens, lengths=[2, 2], action_mask=torch.tensor([[F, T]] * 2), advantages=torch.ones(2).double(),
        old_logprobs=torch.full((2, 2), log(0.5), dtype=torch.float64), ref_logprobs=ref[tokens],
    )  # fmt: skip
    spec = pg.LossSpec(components=[pg.KL(gradient=gradient)])
    (micro,) = pg.plan([batch], spec, split=ONE).microbatches()
    z = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    out = pg.policy_loss(pg.token_logprobs(z.expand(2, 2, 2), micro.targets), micro)
    near(out.loss, 0.4337808304830271)
    out.loss.backward()
    near(z.grad, [-expected, expected])


@pytest.mark.parametrize(("lp", "stored", "ratio"), [(-5.37, -5.375, 1.00501), (-17.3, -17.25, 0.95123)])
def test_log_probs_in_bf16_are_refused_for_what_they_do_to_a_ratio(lp: float, stored: float, ratio: float) -> None:
    """SLIME-14: the same policy, once in bf16, is another one by 0.5 and 5 percent."""
    half = torch.tensor([0.0, lp], dtype=torch.bfloat16)
    assert float(half[1]) == stored and abs(exp(lp - stored) - ratio) < 1e-5

    def build(**more: object) -> pg.TokenBatch:
        return pg.TokenBatch.from_packed(
            tokens=torch.tensor([1, 2]), lengths=[2], action_mask=torch.tensor([F, T]), advantages=torch.ones(1),
            old_logprobs=half, **more,
        )  # fmt: skip

    refused(pg.DataError, build, "old_logprobs", "bfloat16")
    answer = solve(build(allow_low_precision=["old_logprobs"]), pg.presets.ppo(), torch.tensor([lp, NAN]))
    assert abs(answer.metrics["rl/ratio"] - ratio) < 1e-4  # by name one gets what one asked for


def test_the_value_head_knows_no_temperature() -> None:
    """SLIME-04: values [2, 3] at T = 0.5 are [2, 3]: (4 + 9) / 2 halves, and not (16 + 36) / 2."""
    spec = pg.LossSpec(components=[pg.spec.Value(clip=None)])
    answer = solve(pictured("cAA", returns=0.0, temperature=0.5), spec, [-1.0] * 3, value=[2.0, 3.0, NAN])
    near(answer.loss, (4 + 9) / 2 / 2)


def test_padding_has_no_entropy() -> None:
    """TRL-09: entropies [0.1, 0.2, 0.9, 0, 0, 0] of which three are tokens; the upper half is 0.2 and 0.9."""
    spec = pg.presets.reinforce(gates=[pg.spec.EntropyGate(share=0.5)])
    entropy = [0.1, 0.2, 0.9, 0.0, 0.0, 0.0, NAN]
    batch = pictured("cAAA", "ccc")
    spec = spec.replace(empty_sequences="exclude")
    answer = solve(batch, spec, [-1.0, -1.0, -1.0, NAN, NAN, NAN, NAN], entropy)
    assert answer.grad_T.tolist() == [0.0, -1 / 3, -1 / 3, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_minus_a_probability_near_one_keeps_its_digits(dtype: torch.dtype) -> None:
    """TRL-07: fp32 log(1 - e^x) is -18.42068 at x = -1e-8 and -6.908255 at -1e-3, not -inf: with base e^-1e-3 and
    pi = e^-1e-8 the binary KL is 1e-3 (18.42068 - 6.908255) - (1e-3 - 1e-8) = 0.010507."""
    for threshold, kept in ((0.0104, 0.0), (0.0106, -1.0)):
        batch = pictured("cA", dtype=dtype, rollout_logprobs=-1e-3)
        spec = pg.presets.reinforce(gates=[pg.spec.KLGate(threshold=threshold)])
        answer = solve(batch, spec, torch.tensor([-1e-8, NAN], dtype=dtype))
        assert answer.grad_T.tolist() == [kept, 0.0]


def test_a_ratio_of_one_is_one_whatever_the_temperature_was() -> None:
    """VERL-12: logits [0, 1] sampled at T = 0.5: without it the ratio would be 0.83."""
    tokens, logits = torch.tensor([[0, 1]]), torch.tensor([[[0.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)
    old = torch.tensor([[0.0, -log(1 + exp(-2.0))]], dtype=torch.float64)
    for temperature, ratio in ((0.5, 1.0), (None, 0.8299965)):
        batch = pg.TokenBatch.from_padded(
            tokens=tokens, lengths=[2], action_mask=torch.tensor([[F, T]]), advantages=torch.ones(1).double(),
            old_logprobs=old, temperature=temperature,
        )  # fmt: skip
        (micro,) = pg.plan([batch], pg.presets.ppo(), split=ONE).microbatches()
        lp = pg.token_logprobs(logits, micro.targets, temperature=micro.temperature)
        near(pg.policy_loss(lp, micro).metrics["rl/ratio"].result(), ratio, 1e-6)


def test_a_loss_below_zero_is_a_number_like_any_other() -> None:
    """MLM-28: A = [1, -1] at ratio 1 gives 0.0, A = [0.25, 0.25] gives -0.25; both are reported."""
    for advantages, loss in (([0.0, 1.0, -1.0], 0.0), ([0.0, 0.25, 0.25], -0.25)):
        answer = solve(pictured("cAA", advantages=advantages, old_logprobs=-1.0), pg.presets.ppo(), [-1.0, -1.0, NAN])
        assert answer.metrics["rl/loss"] == loss and answer.loss == loss
