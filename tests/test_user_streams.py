"""Constant streams of the user's own: shifted with the rest, checked where they are read, equal on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.planning import agreement
from support.steps import NAN, ONE, near, pictured, refused, solve


def spec_of(fn: Any, **more: Any) -> pg.LossSpec:
    return pg.LossSpec(components=[pg.Term("t", fn, normalizer="sum(token)", **more)])


def test_a_stream_is_given_in_token_order_and_read_at_the_position_that_predicts_it() -> None:
    """Row "cAA" carries 7, 2, 3: positions 0 and 1 are about the tokens of 2 and 3."""
    batch = pictured("cAA", streams={"mine": [7.0, 2.0, 3.0]})
    assert batch.streams["mine"].tolist() == [2.0, 3.0, 0.0]
    answer = solve(batch, spec_of(lambda x: x.stream("mine") * x.logp, needs=("mine",)), [-1.0, -1.0, NAN])
    assert answer.loss == -5.0 and answer.grad_T.tolist() == [2.0, 3.0, 0.0]


def test_padded_rows_carry_them_too() -> None:
    batch = pg.TokenBatch.from_padded(
        tokens=torch.ones(2, 3, dtype=torch.int64), lengths=[2, 3], advantages=torch.ones(2),
        action_mask=torch.tensor([[False, True, False], [False, True, True]]),
        streams={"mine": torch.tensor([[9.0, 1.0, NAN], [9.0, 2.0, 3.0]])},
    )  # fmt: skip
    assert batch.streams["mine"].tolist() == [1.0, 0.0, 2.0, 3.0, 0.0]
    assert batch.with_stream("mine", torch.zeros(5)).streams["mine"].tolist() == [0.0] * 5
    assert batch.select([1]).streams["mine"].tolist() == [2.0, 3.0, 0.0]


def test_what_is_masked_may_hold_anything() -> None:
    spec = pg.LossSpec(
        components=[pg.PolicyGradient(surrogate=pg.Clip(low="lo", high=0.2))], masks=[pg.UserMask(name="keep")]
    )
    answers = []
    for wild in (0.1, NAN, float("inf"), -1e4):
        batch = pictured(
            "cAAA", old_logprobs=[9.0, -2.0, wild, -2.0], advantages=[wild, -1.0, wild, 1.0],
            streams={"lo": [wild, 0.2, wild, 0.2]}, masks={"keep": [True, True, False, True]},
        )  # fmt: skip
        answers.append(solve(batch, spec, [-2.5, wild, -1.5, NAN]))
    for other in answers[1:]:
        assert torch.equal(other.grad_T, answers[0].grad_T) and other.loss == answers[0].loss


@pytest.mark.parametrize(
    ("ratio", "surrogate"),
    [("sequence", pg.Clip()), ("turn_token", pg.Clip()), ("prefix_min", pg.CISPO(high=4.0)), ("token", pg.GMPO())],
)
def test_a_masked_action_that_is_broken_has_no_vote_and_leaves_no_trace(ratio: str, surrogate: Any) -> None:
    """The model's log-prob of it is NaN or infinite: the unit's statistic runs over the others, and every gradient is
    finite; an advantage that no statistic reads may be broken too. An old log-prob that one reads is refused."""
    part = pg.PolicyGradient(surrogate=surrogate, ratio=ratio, normalizer="mean(sequence) > mean(token)")
    spec = pg.LossSpec(components=[part], masks=[pg.UserMask(name="keep")])
    keep = {"keep": [True, True, False, True]}
    answers = []
    for wild in (NAN, float("inf"), -float("inf")):
        advantage = [
            1.0 if surrogate.token_ratio_only else wild,
            -1.0,
            1.0 if surrogate.token_ratio_only else wild,
            1.0,
        ]
        batch = pictured("cAAA", old_logprobs=[9.0, -2.0, -2.0, -2.0], advantages=advantage, masks=keep)
        answers.append(solve(batch, spec, [-2.1, wild, -1.95, NAN]))
        broken = pictured("cAAA", old_logprobs=[9.0, -2.0, wild, -2.0], masks=keep)
        refused(pg.DataError, lambda broken=broken: solve(broken, spec, [-2.1, -1.0, -1.95, NAN]), "stream 'old'")
    for answer in answers:
        assert answer.grad_T.isfinite().all() and answer.metrics["rl/fault"] == 0
        near(answer.loss, answers[0].loss)
        near(answer.grad_T, answers[0].grad_T)


def test_names_that_are_taken_are_refused() -> None:
    for name in ("old", "advantages", "tokens", "temperature", "a b"):
        refused(pg.DataError, lambda name=name: pictured("cA", streams={name: 1.0}), repr(name), "no name for a stream")
    refused(
        pg.DataError, lambda: pictured("cA", streams={"mine": torch.ones(2, dtype=torch.bfloat16)}), "streams['mine']",
        "float32",
    )  # fmt: skip
    refused(pg.DataError, lambda: pictured("cA").with_stream("mine", torch.ones(2)), "no stream 'mine'")


def test_absent_or_broken_streams_are_named_with_their_reader() -> None:
    read = spec_of(lambda x: x.stream("mine"), needs=("mine",))
    refused(pg.DataError, lambda: pg.plan([pictured("cA")], read, split=ONE), "mine is absent", "read by t")
    broken = pictured("cA", streams={"mine": [1.0, NAN]})
    refused(pg.DataError, lambda: pg.plan([broken], read, split=ONE), "non-finite", "stream 'mine'", "token 1")
    unsaid = spec_of(lambda x: x.stream("mine"))
    refused(pg.DataError, lambda: solve(pictured("cA"), unsaid, [-1.0, NAN]), "reads mine", "needs=('mine',)")
    some = [pictured("cA", streams={"mine": 1.0}), pictured("cA")]
    refused(pg.DataError, lambda: pg.plan(some, read, split=ONE), "'mine'", "absent in batch 1")


def test_ranks_that_differ_in_them_are_found() -> None:
    one, two = pictured("cA", streams={"mine": 1.0}), pictured("cA", streams={"yours": 1.0})
    assert len({agreement.presence(batch) for batch in (one, two, pictured("cA"))}) == 3
    same = pictured("cA", streams={"mine": 2.0})
    assert agreement.presence(same) == agreement.presence(one)
    assert agreement.batch_digest(same) != agreement.batch_digest(one)


def test_a_rank_without_rows_takes_the_same_path() -> None:
    """What others have and it lacks reads as nothing; every term is evaluated and connected."""
    spec = pg.LossSpec(
        components=[
            pg.Value(clip=0.2),
            pg.KL(to="rollout"),
            pg.Term("t", lambda x: x.unit_mean(x.stream("mine") * x.logp), needs=("mine",)),
        ]
    )
    plan = pg.plan([], spec, split=ONE)
    assert {"mine", "values", "returns"} <= set(plan.table)
    for micro in plan.microbatches():
        logp, value = (torch.zeros(micro.shape, requires_grad=True) for _ in range(2))
        out = pg.policy_loss(pg.TokenLogprobs(logprob=logp, entropy=None), micro, value=value)
        out.loss.backward()
        assert out.loss == 0.0 and logp.grad is not None and value.grad is not None
        assert not logp.grad.any() and not value.grad.any()
