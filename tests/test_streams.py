"""What a user's term sees: streams, and statistics over units against sums in plain loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.maths import UnitSums
from megatron_pgloss.objective import Streams
from support.steps import NAN, ONE, arrange, near, pictured, refused, solve

# Turns of 2, 1 and 3 tokens; of 1 after an answer that no turn owns; none at all.
ROWS = ("cAAoAcoAAA", "ccoAo", "cco", "cA")
TEXT = "".join(ROWS)
STARTS = (0, 10, 15, 18)
KEEP = [k not in (2, 8, 19) for k in range(len(TEXT))]  # drops an action of the first and of the last turn, and row 3's
SPLITS = {
    "padded": pg.Split(sequences=4),
    "one by one": pg.Split(sequences=1),
    "packed": pg.Split(max_tokens=64),
    "packed, padded": pg.Split(max_tokens=32, multiple_of=4),
}


def batch(**more: Any) -> pg.TokenBatch:
    return pictured(*ROWS, masks={"keep": KEEP}, old_logprobs=-1.0, **more)


def spec_of(fn: Callable[[Any], Tensor], **more: Any) -> pg.LossSpec:
    term = pg.Term("t", fn, normalizer="sum(token)", **more)
    return pg.LossSpec(components=[term], masks=[pg.UserMask(name="keep")], empty_sequences="exclude")


def brute(value_T: Tensor, statistic: str, unit: str, over: str) -> Tensor:
    """By loops over tokens, in token order, moved to target alignment at the end. [T]"""
    owner: list[tuple[int, int] | None] = []
    for row, picture in enumerate(ROWS):
        turn, before = -1, False
        for letter in picture:
            turn, before = turn + (letter == "A" and not before), letter == "A"
            owner.append((row, 0) if unit == "sequence" else (row, turn) if turn >= 0 else None)
    votes = [c == "A" and (over == "sampled" or KEEP[k]) for k, c in enumerate(TEXT)]
    zero = value_T.new_zeros(())
    out = []
    for k, mine in enumerate(owner):
        group = [j for j, other in enumerate(owner) if votes[j] and other == mine and mine is not None]
        group = [j for j in group if j <= k] if statistic == "prefix_sum" else group
        total = sum((value_T[j - 1] for j in group), zero)  # position j - 1 holds what is about token j
        out.append(total / len(group) if statistic == "unit_mean" and group else total)
    return torch.stack([zero if k + 1 in (*STARTS, len(TEXT)) else out[k + 1] for k in range(len(TEXT))])


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("over", ["sampled", "members"])
@pytest.mark.parametrize("unit", ["sequence", "turn"])
@pytest.mark.parametrize("statistic", ["unit_mean", "unit_sum", "prefix_sum"])
def test_statistics_of_units_equal_sums_in_loops(statistic: str, unit: str, over: str, split: pg.Split) -> None:
    """Values, and gradients through them, in every arrangement."""
    logp = torch.sin(torch.arange(len(TEXT), dtype=torch.float64)) - 2
    pull = torch.cos(torch.arange(len(TEXT), dtype=torch.float64))
    expected_leaf = logp.clone().requires_grad_()
    expected = brute(expected_leaf, statistic, unit, over)
    member = torch.tensor([c == "A" and KEEP[k] for k, c in enumerate(TEXT)]).roll(-1)
    (expected.square() * pull)[member].sum().backward()
    spec = spec_of(lambda x: x.logp)
    leaf = logp.clone().requires_grad_()
    for micro in pg.plan([batch()], spec, split=split).microbatches():
        x = Streams(micro, spec.components[0], spec, arrange(micro, leaf).reshape(-1), None)
        found = getattr(x, statistic)(x.logp, unit, over)
        real = micro.index_N >= 0
        near(found[x.members], expected[micro.index_N[x.members]], 1e-13)
        assert not found[~real].any()
        (found.square() * arrange(micro, pull).reshape(-1))[x.members].sum().backward()
    assert expected_leaf.grad is not None and leaf.grad is not None
    near(leaf.grad, expected_leaf.grad, 1e-12)


def test_masks_do_not_shrink_statistics_of_what_was_sampled() -> None:
    """Log-ratios 1, 3, 2 with the middle one masked; the term is 3 times their mean, at both members. As sampled:
    2 * 3 * 2 = 12, gradient 2 * 3/3 by all three tokens. Over members: 2 * 3 * 1.5 = 9, gradient 2 * 3/2 by two."""
    rows = pictured("cAAA", old_logprobs=-6.0, masks={"keep": [True, True, False, True]})
    for over, value, slopes in (("sampled", 12.0, [2.0, 2.0, 2.0, 0.0]), ("members", 9.0, [3.0, 0.0, 3.0, 0.0])):
        fn = functools.partial(lambda x, over: 3 * x.unit_mean(x.log_ratio, over=over), over=over)
        answer = solve(rows, spec_of(fn), [-5.0, -3.0, -4.0, NAN])
        near(answer.loss, value)
        near(answer.grad_T, slopes)


def test_a_stream_that_nobody_reads_does_not_silence_a_unit() -> None:
    """The reference holds NaN; the mean of log-ratios 1 and 3 is 2. Where the ratio's own base is NaN, at a masked
    action, that token has no vote, 3, and is a fault with its place: the step must not be made."""
    spec = spec_of(lambda x: x.unit_mean(x.log_ratio))
    unread = pictured("cAA", old_logprobs=-5.0, ref_logprobs=NAN, rollout_logprobs=NAN, masks={"keep": [True] * 3})
    near(solve(unread, spec, [-4.0, -2.0, NAN]).loss, 4.0)
    masked = pictured("cAA", old_logprobs=[NAN, NAN, -5.0], masks={"keep": [True, False, True]})
    answer = solve(masked, spec, [-4.0, -2.0, NAN])
    near(answer.loss, 3.0)
    assert answer.grad_T.tolist() == [0.0, 1.0, 0.0] and answer.metrics["t/fault"] == 1.0


def test_a_unit_without_voters_is_zero() -> None:
    spec = spec_of(lambda x: x.unit_mean(x.logp, "turn", over="members") + x.unit_sum(x.logp) + 1.0, on="observation")
    answer = solve(pictured("co", masks={"keep": [True, True]}), spec, [-1.0, NAN])
    assert answer.loss == 1.0 and answer.grad_T.tolist() == [0.0, 0.0]


def test_statistics_over_prompts_are_refused_with_the_reason() -> None:
    for unit in ("prompt", "episode", "sentence"):
        words = (repr(unit), "'sequence' or 'turn'", "straddle micro-batches")
        spec = spec_of(lambda x, unit=unit: x.unit_mean(x.logp, unit))
        refused(pg.SpecError, lambda spec=spec: solve(batch(), spec, [-1.0] * len(TEXT)), *words)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (1, 2, 0, 3)])
def test_prefix_sums_know_chunks_of_a_sequence_in_any_order(order: tuple[int, ...]) -> None:
    """Two sequences of 8 tokens, cut into 4 chunks as context parallelism deals them; all on one rank here."""
    value = torch.arange(1.0, 17.0, dtype=torch.float64)
    votes = torch.tensor([k % 3 != 0 for k in range(16)])
    place = torch.tensor([8 * row + 2 * chunk + k for row in (0, 1) for chunk in order for k in (0, 1)])
    chunk = (place % 8) // 2
    sums = UnitSums(place // 8, 2, None, chunk, 4)
    plain = torch.where(votes, value, 0).reshape(2, 8).cumsum(1).reshape(-1)
    near(sums.prefix(value[place], votes[place]), plain[place])


def test_prefix_sums_in_float32_keep_their_digits_late_in_a_long_shard() -> None:
    """100,000 tokens of 0.1 before it must not cost the second sequence a digit."""
    unit = torch.cat([torch.zeros(100_000, dtype=torch.int64), torch.ones(3, dtype=torch.int64)])
    found = UnitSums(unit, 2).prefix(torch.full((100_003,), 0.1), torch.ones(100_003, dtype=torch.bool))
    torch.testing.assert_close(found[-3:], torch.tensor([0.1, 0.2, 0.3]), rtol=1e-6, atol=0)


def test_streams_read_zero_outside_and_carry_one_gradient() -> None:
    given_streams = {"rollout_logprobs": -2.0, "ref_logprobs": -3.0, "advantages": 4.0}
    seen: dict[str, Tensor] = {}

    def look(x: Any) -> Tensor:
        for name in ("logp", "old", "rollout", "ref", "advantage", "entropy", "log_ratio", "ratio", "members"):
            seen[name] = getattr(x, name)
        return x.logp

    rows = pictured("cAcA", masks={"keep": [True, True, True, False]}, old_logprobs=-1.0, **given_streams)
    solve(rows, spec_of(look, needs=("entropy",)), [-0.5, NAN, -21.5, NAN], [0.7, NAN, 0.9, NAN])
    # The second action is masked: no member, but it is there for statistics over what was sampled.
    expected = {
        "logp": [-0.5, 0.0, -21.5, 0.0], "old": [-1.0, 0.0, -1.0, 0.0], "rollout": [-2.0, 0.0, -2.0, 0.0],
        "ref": [-3.0, 0.0, -3.0, 0.0], "advantage": [4.0, 0.0, 4.0, 0.0], "entropy": [0.7, 0.0, 0.9, 0.0],
        "log_ratio": [0.5, 0.0, -20.5, 0.0], "members": [True, False, False, False],
    }  # fmt: skip
    for name, values in expected.items():
        assert seen[name].tolist() == values, name
    near(seen["ratio"][0], 1.6487212707001282)
    tracked = {name for name, value in seen.items() if value.requires_grad}
    assert tracked == {"logp", "entropy", "log_ratio", "ratio"}


def test_old_of_a_term_follows_the_spec() -> None:
    for old, value in (("given", 0.5), ("rollout", 1.5), ("policy", 0.0)):
        rows = pictured("cA", old_logprobs=-1.0, rollout_logprobs=-2.0)
        spec = pg.LossSpec(old=old, components=[pg.Term("t", lambda x: x.log_ratio)])
        answer = solve(rows, spec, [-0.5, NAN])
        assert answer.loss == value and answer.grad_T.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x.logp.sum(), ("term 't'", "one number per position", "float [2]", "got []")),
        (lambda x: x.logp[:, None], ("got [2, 1]",)),
        (lambda x: x.members.long(), ("one number per position", "got [2]")),
        (lambda x: 1.0, ("one number per position", "got float")),
        (lambda x: x.ref, ("reads ref", "the ref stream", "needs=('ref',)")),
        (lambda x: x.rollout, ("reads rollout", "needs=('rollout',)")),
        (lambda x: x.log_ratio, ("reads old", "the old stream")),
        (lambda x: x.entropy, ("reads entropy", "entropy=True", "needs=('entropy',)")),
    ],
)
def test_terms_that_cannot_be_are_refused_by_name(fn: Callable[[Any], Any], words: tuple[str, ...]) -> None:
    spec = pg.LossSpec(components=[pg.Term("t", fn)])
    refused(pg.DataError, lambda: solve(pictured("cA"), spec, [-1.0, NAN]), *words)


def test_logprobs_that_do_not_fit_are_refused() -> None:
    micro = next(pg.plan([pictured("cAA")], pg.presets.reinforce(entropy=0.1), split=ONE).microbatches())

    def loss(logprob: Tensor, entropy: Tensor | None) -> pg.LossOutput:
        return pg.policy_loss(pg.TokenLogprobs(logprob=logprob, entropy=entropy), micro)

    good = torch.zeros(1, 3)
    loss(good, good)
    words = ("logprob has the wrong shape", "[1, 3]", "got [3]", "micro.targets")
    refused(pg.DataError, lambda: loss(good[0], good), *words)
    refused(pg.DataError, lambda: loss(good[:, 1:], good), "logprob has the wrong shape", "got [1, 2]")
    refused(pg.DataError, lambda: loss(good, good[:, 1:]), "entropy has the wrong shape")
    refused(pg.DataError, lambda: loss(good.bfloat16(), good), "logprob must be float32 or float64", "bfloat16")
    refused(pg.DataError, lambda: loss(good, None), "reads the entropy", "entropy=spec.needs_entropy")
    refused(pg.DataError, lambda: pg.weighted_sum(good[0], micro, "rl"), "wrong shape", "[1, 3]", "[3]")
    refused(pg.DataError, lambda: pg.weighted_sum(good, micro, "ce"), "no component 'ce'", "rl, entropy")
    refused(pg.DataError, lambda: micro.weight("kl"), "no component 'kl'", "rl, entropy")


def test_weighted_sum_selects_before_it_multiplies() -> None:
    rows = pictured("cAA", masks={"m": [True, True, False]})
    micro = next(pg.plan([rows], pg.presets.reinforce(masks=[pg.UserMask(name="m")]), split=ONE).microbatches())
    for garbage in (NAN, float("inf"), 1e4):
        values = torch.tensor([[3.0, garbage, garbage]], dtype=torch.float32, requires_grad=True)
        found = pg.weighted_sum(values, micro, "rl")
        found.backward()
        assert found.item() == 3.0 and found.dtype == torch.float32
        assert values.grad is not None and values.grad.tolist() == [[1.0, 0.0, 0.0]]


def test_a_turn_whose_id_comes_back_is_summed_across_the_gap() -> None:
    """Turn 0 holds the first and the third action, turn 1 the second."""
    term = pg.Term("t", lambda x: x.prefix_sum(x.logp, "turn") * x.logp.detach(), normalizer="sum(token)")
    batch = pictured("cAAA", turn_ids=[-1, 0, 1, 0])
    logp = [2.0, 3.0, 5.0, 0.0]
    answer = solve(batch, pg.LossSpec(components=[term]), logp)
    assert answer.loss == 2 * 2 + 3 * 3 + (2 + 5) * 5
    assert answer.grad_T.tolist() == [2 + 5, 3, 5, 0]
