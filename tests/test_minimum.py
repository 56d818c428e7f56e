"""The least that a policy-gradient loss must do: two blocks of numbers, and what must be refused.

T target-aligned positions: entry t is about the token after position t.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from support.steps import NAN, ONE, near, pictured, refused, solve

SEQUENCE = "mean(sequence) > mean(token)"


def test_the_loss_of_two_tokens_among_four() -> None:
    """Log-probs [nan, -0.2, -0.7, nan], advantage 2, mask [0, 1, 1, 0]: -2 (-0.2 - 0.7) / 2 = 0.9, and each of the two
    has slope -2 / 2 = -1."""
    answer = solve(pictured("ccAA", advantages=2.0), pg.presets.reinforce(), [NAN, -0.2, -0.7, NAN])
    near(answer.loss, 0.9)
    assert answer.grad_T.tolist() == [0.0, -1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("normalizer", "loss"),
    [
        (SEQUENCE, 1.5),  # (2/1 + 4/4) / 2
        ("mean(token)", 1.2),  # (2 + 4) / 5
        ("mean(sequence) > sum(token)/4", 0.75),  # (2/4 + 4/4) / 2
    ],
)
@pytest.mark.parametrize("split", [pg.Split(sequences=1), pg.Split(sequences=2), pg.Split(max_tokens=8)])
def test_the_three_averages_of_one_and_four_tokens(normalizer: str, loss: float, split: pg.Split) -> None:
    """Terms [[2], [1, 1, 1, 1]]."""
    spec = pg.presets.reinforce(normalizer=normalizer)
    near(solve(pictured("cA", "cAAAA"), spec, [-2.0, NAN, -1.0, -1.0, -1.0, -1.0, NAN], split=split).loss, loss)


@pytest.mark.parametrize("shape", [(1, 2), (1, 4), (3, 1), (3,)])
def test_log_probs_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    (micro,) = pg.plan([pictured("cAA")], pg.presets.reinforce(), split=ONE).microbatches()
    wrong = pg.TokenLogprobs(logprob=torch.zeros(shape), entropy=None)
    refused(pg.DataError, lambda: pg.policy_loss(wrong, micro), "logprob has the wrong shape", "[1, 3]")


def test_streams_of_another_shape_are_refused() -> None:
    def build(**changes: Any) -> pg.TokenBatch:
        given: dict[str, Any] = {
            "tokens": torch.arange(6).reshape(2, 3),
            "lengths": [3, 3],
            "action_mask": torch.tensor([[False, True, True]] * 2),
            "advantages": torch.ones(2),
        }
        return pg.TokenBatch.from_padded(**(given | changes))

    build()
    for name, value in (
        ("action_mask", torch.ones(2, 2, dtype=torch.bool)),
        ("advantages", torch.ones(3)),
        ("old_logprobs", torch.zeros(2, 2)),
    ):
        refused(pg.DataError, lambda name=name, value=value: build(**{name: value}), name)


def test_an_empty_mask_is_refused() -> None:
    """With no action anywhere there is nothing to train; one empty row among others is refused by name."""
    spec = pg.presets.reinforce()
    refused(pg.DataError, lambda: pg.plan([pictured("cccc")], spec, split=ONE), "action")
    half = pictured("cA", "cc", sample_ids=["good", "empty"])
    refused(pg.DataError, lambda: pg.plan([half], spec, split=ONE), "sample 'empty'")


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_a_selected_value_that_is_not_finite_is_refused(value: float) -> None:
    """A frozen stream before the first forward pass; a log-prob of the policy by `finish`, after it was selected out
    and counted."""
    broken = pictured("ccAA", advantages=[1.0, 1.0, 2.0, value], sample_ids=["a"])
    words = ("non-finite value inside component 'rl'", "sample 'a', token 3, stream 'advantages'")
    refused(pg.DataError, lambda: pg.plan([broken], pg.presets.reinforce(), split=ONE), *words)
    answer = solve(pictured("ccAA", advantages=2.0), pg.presets.reinforce(), [NAN, value, -0.7, NAN])
    assert answer.metrics["rl/fault"] == 1.0 and answer.metrics["rl/fault_at"] == 1.0
    assert answer.grad_T.tolist() == [0.0, 0.0, -1.0, 0.0]
    from megatron_pgloss.megatron.finish import Collected, nonfinite

    found = Collected(metrics=answer.outs[0].metrics, place="rank 0", updated=True)
    error = nonfinite(found, answer.plan, gradients=True)
    assert isinstance(error, pg.NonFiniteError) and "1 such tokens" in str(error)


@pytest.mark.parametrize("budget", [0, -4, NAN, float("inf")])
def test_a_budget_that_is_not_positive_is_refused(budget: float) -> None:
    refused(pg.SpecError, lambda: pg.presets.dr_grpo(budget), "divisor")
    refused(pg.SpecError, lambda: pg.presets.reinforce(normalizer=f"mean(sequence) > sum(token)/{budget}"), "divisor")
