"""Inputs that broke other people's losses: shifting, packing, and cutting rows for context parallelism.

The name of each case is that of docs/cases.md. Tokens stand for themselves; a label is a target that is trained.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_context_parallel import IGN, held, micro_of
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.megatron.context_parallel import shard
from megatron_pgloss.scoring import gather_tokens
from support.steps import NAN, ONE, near, pictured, solve

T, F = True, False


def summed_over_shards(cp: int, mask: list[int], values: list[float], path: str = "mean(token)") -> float:
    """The loss of one row whose token t has loss ``values[t]``, added up over the ranks that share it."""
    micro = micro_of([list(range(len(mask)))], [mask], cp, pg.Split(sequences=1), path)
    total = 0.0
    for rank in range(cp):
        part = shard(micro, rank, cp, None) if cp > 1 else micro
        own = torch.tensor(values, dtype=torch.float64)[(part.index_N + 1) % len(mask)].reshape(part.shape)
        total += float(pg.weighted_sum(own, part, "rl"))
    return total


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize(
    ("mask", "values", "right"),
    [
        ([0, 0, 0, 0, 0, 1, 0, 0], [9, 9, 9, 9, 9, 3, 9, 9], 3.0),  # MLM-01 a: 1.5 and 0.75 by means of shard means
        ([0, 1, 1, 1, 0, 0, 0, 0], [9, 1, 2, 3, 9, 9, 9, 9], 2.0),  # MLM-01 b
        ([0] + [1] * 15, list(range(16)), 8.0),  # MLM-03, of 1 to 15: a shard weighs by what it holds
        ([0, 1, 1, 1, 1, 0, 0, 0], [9, 1, 1, 1, 1, 9, 9, 9], 1.0),  # SLIME-02 b: each token is counted once
    ],
)
def test_a_token_mean_over_context_shards_is_that_of_the_whole_row(
    cp: int, mask: list[int], values: list[float], right: float
) -> None:
    near(summed_over_shards(cp, mask, values), right, 1e-6)


def test_a_row_cut_in_contiguous_pieces_keeps_its_labels() -> None:
    """VERL-03: tokens 10 to 17 are shifted before anyone cuts them: the first half's labels are 11 to 14."""
    batch = pg.TokenBatch.from_padded(
        tokens=torch.arange(10, 18)[None], lengths=[8], action_mask=torch.tensor([[F] + [T] * 7]),
        advantages=torch.ones(1),
    )  # fmt: skip
    assert batch.targets_T[:4].tolist() == [11, 12, 13, 14] and batch.targets_T[4:7].tolist() == [15, 16, 17]


def test_labels_never_leak_over_the_border_of_padded_documents() -> None:
    """MLM-09: [1, 2, 3] and [4, 5], each padded to 4: labels [2, 3, -, - | 5, -, -, -], 3 tokens."""
    micro = micro_of([[1, 2, 3], [4, 5]], [[0, 1, 1], [0, 1]], 2, pg.Split(max_tokens=8))
    assert micro.input_ids.tolist() == [[1, 2, 3, 0, 4, 5, 0, 0]]
    labels = torch.where(micro.members("rl"), micro.targets, IGN)
    assert labels.tolist() == [[2, 3, IGN, IGN, 5, IGN, IGN, IGN]]
    assert int(micro.members("rl").sum()) == 3


def test_the_logical_end_of_a_padded_row_moves_with_the_shift() -> None:
    """MLM-09: 5 tokens in 8 slots, of which 4 are predicted by the one before; 5 if the end did not move."""
    batch = pg.TokenBatch.from_padded(
        tokens=torch.arange(8)[None],
        lengths=[5],
        action_mask=torch.tensor([[F, T, T, T, T, F, F, F]]),
        advantages=torch.ones(1),
    )
    (micro,) = pg.plan([batch], pg.presets.reinforce(), split=ONE).microbatches()
    assert micro.members("rl").tolist() == [[T] * 4 + [F] * 4]


def test_rows_are_scored_alike_packed_and_padded() -> None:
    """MLM-16: two rows of 3 tokens, arbitrary logits."""
    logits_TV = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = pg.TokenBatch.from_padded(
        tokens=torch.tensor([[0, 1, 2], [3, 4, 0]]), lengths=[3, 3], action_mask=torch.tensor([[F, T, T]] * 2),
        advantages=torch.ones(2, dtype=torch.float64),
    )  # fmt: skip
    found = []
    for split in (pg.Split(sequences=2), pg.Split(sequences=1), pg.Split(max_tokens=6)):
        plan = pg.plan([batch], pg.presets.reinforce(), split=split)
        pairs = [
            (micro, pg.token_logprobs(logits_TV[micro.index_N].reshape(*micro.shape, 5), micro.targets).logprob)
            for micro in plan.microbatches()
        ]
        found.append(gather_tokens(pairs, 6, torch.float64)[[0, 1, 3, 4]])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_row_without_actions_keeps_the_log_probs_of_its_prompt() -> None:
    """MLM-29: three prompt tokens and nothing generated: no slice that ends at minus zero."""
    batch = pictured("cccc")
    (micro,) = pg.plan([batch], None, split=ONE).microbatches()
    scored = torch.tensor([[-1.0, -2.0, -3.0, NAN]])
    assert gather_tokens([(micro, scored)], 4, torch.float32)[:3].tolist() == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize("bad", [-float("inf"), NAN])
def test_a_shard_without_members_gives_a_zero_that_backward_can_reach(bad: float) -> None:
    """SLIME-13: members [1, 0, 0, 1] over two ranks, of which rank 1 holds none; its logits have a broken column."""
    micro = micro_of([[0, 1, 2, 3, 0, 1, 2, 3]], [[0, 1, 0, 0, 0, 0, 0, 1]], 2, pg.Split(sequences=1))
    part = shard(micro, 1, 2, None)
    assert not part.members("rl").any()
    logits = torch.zeros(*part.shape, 5, dtype=torch.float64)
    logits[..., 4] = bad
    logits.requires_grad_()
    out = pg.policy_loss(pg.token_logprobs(logits, part.targets), part)
    assert out.loss.requires_grad and float(out.loss.detach()) == 0.0
    out.loss.backward()
    assert not logits.grad.any()


def test_log_probs_of_later_rows_keep_their_place() -> None:
    """PRIME-04: rows of 3 and 2 tokens with log-probs (a1, a2) and (b1): [a1, a2, -, b1, -] position by position."""
    batch = pictured("cAA", "cA", old_logprobs=[0.0, -1.0, -2.0, 0.0, -3.0])
    assert batch.streams["old"][batch.action_T].tolist() == [-1.0, -2.0, -3.0]
    assert batch.action_T.tolist() == [T, T, F, T, F]


def test_an_action_mask_on_the_first_token_alone_trains_nothing() -> None:
    """NRL-06: [1, 0, 0] holds no token that anything predicts; the mask's sum of 1 fools nobody. In company the row is
    named or left out, and the others' loss is theirs."""
    rest = pictured("ccc", "cAA")
    spec = pg.presets.reinforce(empty_sequences="exclude")
    near(solve(rest, spec, [NAN, NAN, NAN, -1.0, -3.0, NAN]).loss, 2.0)
    spec = pg.presets.reinforce(masks=[pg.UserMask(name="m")], normalizer="mean(sequence) > mean(token)")
    for split in (pg.Split(sequences=1), ONE):
        emptied = pictured("cAA", "cAA", masks={"m": [T, F, F, F, T, T]})
        # A micro-batch that the filter emptied is one of the step all the same.
        answer = solve(emptied, spec, [NAN, NAN, NAN, -1.0, -3.0, NAN], split=split)
        near(answer.loss, 2.0)
        near(answer.grad_T, [0.0, 0.0, 0.0, -0.5, -0.5, 0.0])


def test_what_an_optimizer_step_counts_is_its_own() -> None:
    """TRL-02: six slices of 2 tokens, two of them a step: 4 tokens of gradient 1 over 4, not over all 12."""
    batch = pictured(*["cAA"] * 6, prompt_ids=list(range(6)))
    weights = []
    for mini in pg.minibatches([batch], 3, by="prompt", seed=0):
        plan = pg.plan(mini, pg.presets.reinforce(old="given", normalizer="mean(token)"), split=ONE)
        weights += plan.components["rl"].weight_T[plan.components["rl"].member_T].tolist()
    assert weights == [0.25] * 12


def test_borders_are_those_of_the_rows_wherever_a_shard_begins() -> None:
    """PRIME-09: a rank that begins inside a row, at positions [3, 4 | 0, 1]: unit sums go by the row, not by the
    positions."""
    micro = micro_of([[*range(8)], [*range(20, 24)]], [[0] + [1] * 7, [0, 1, 1, 1]], 2, pg.Split(max_tokens=12))
    first, second = held(micro, 2)[0], held(micro, 2)[1]
    assert first == ([[0, 1, 6, 7, 20, 23]], [[1, 2, 7, IGN, 21, IGN]])
    assert second == ([[2, 3, 4, 5, 21, 22]], [[3, 4, 5, 6, 22, 23]])
    assert shard(micro, 1, 2, None).seq_N.tolist() == [0, 0, 0, 0, 1, 1]


def test_gradients_of_all_micro_batches_stay() -> None:
    """OTHER-08: gradients 1 and 2 add up to 3; nothing is cleared in between."""
    parameter = torch.ones((), dtype=torch.float64, requires_grad=True)
    plan = pg.plan([pictured("cA", "cA")], pg.presets.reinforce(normalizer="sum(token)"), split=pg.Split(sequences=1))
    for micro, slope in zip(plan.microbatches(), (1.0, 2.0), strict=True):
        logp: Tensor = -slope * parameter * torch.ones(micro.shape, dtype=torch.float64)
        pg.policy_loss(pg.TokenLogprobs(logprob=logp), micro).loss.backward()
    assert parameter.grad is not None and float(parameter.grad) == 3.0


def test_an_evaluation_is_divided_by_nothing_of_the_training() -> None:
    """TRL-08: mean 2.0 over 4 micro-batches is 2.0, not 0.5."""
    for split in (pg.Split(sequences=1), ONE):
        plan = pg.plan([pictured(*["cA"] * 4)], pg.presets.reinforce(), split=split)
        with torch.no_grad():
            parts = [
                pg.policy_loss(pg.TokenLogprobs(logprob=torch.full(micro.shape, -2.0)), micro).loss
                for micro in plan.microbatches()
            ]
        near(sum(map(float, parts)), 2.0)


def test_nothing_of_the_size_of_the_logits_lives_after_backward() -> None:
    """MLM-27: what backward read is let go with the graph."""
    import gc

    size = 16 * 1000
    plan = pg.plan([pictured("c" + "A" * 15)], pg.presets.reinforce(), split=ONE)
    (micro,) = plan.microbatches()
    head = torch.randn(8, 1000, requires_grad=True)

    def step() -> Any:
        logits = (torch.ones(1, 16, 8) @ head).requires_grad_()
        out = pg.policy_loss(pg.token_logprobs(logits, micro.targets), micro)
        out.loss.backward()
        return out

    out = step()
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is Tensor and x.numel() == size]
    assert not alive and out.metrics
