"""Streams of several numbers a token (ids with -1 for none, floats beside them): the same shift, selection, packing,
context-parallel slicing and digest as every other stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.megatron.context_parallel import shard
from megatron_pgloss.planning import agreement
from megatron_pgloss.rollouts import concatenate

IDS = [[[9, -1], [1, 2], [3, -1]], [[8, 7], [5, -1], [6, 4]]]


def batch(ids: Any = IDS, **more: Any) -> pg.TokenBatch:
    """Rows of 3 and 2 tokens; ids in token order, floats ten times them."""
    wide = torch.tensor(ids)
    return pg.TokenBatch.from_padded(
        **{
            "tokens": torch.tensor([[1, 2, 3], [4, 5, 0]]), "lengths": [3, 2], "advantages": torch.ones(2),
            "action_mask": torch.tensor([[False, True, True], [False, True, False]]),
            "streams": {"ids": wide, "floats": wide.float() * 10}, **more,
        }
    )  # fmt: skip


def planned(one: pg.TokenBatch, split: pg.Split) -> pg.MicroBatch:
    return next(iter(pg.plan([one], pg.presets.reinforce(), split=split).microbatches()))


def test_they_are_shifted_with_the_rest() -> None:
    """Position 0 is about token 1; a row's last position has none."""
    made = batch()
    assert made.streams["ids"].tolist() == [[1, 2], [3, -1], [-1, -1], [5, -1], [-1, -1]]
    assert made.streams["floats"].tolist() == [[10, 20], [30, -10], [0, 0], [50, -10], [0, 0]]
    packed = pg.TokenBatch.from_packed(
        tokens=made.tokens_T, action_mask=torch.tensor([False, True, True, False, True]), lengths=[3, 2],
        advantages=torch.ones(2), streams={"ids": torch.tensor([*IDS[0], *IDS[1][:2]])},
    )  # fmt: skip
    assert torch.equal(packed.streams["ids"], made.streams["ids"])


def test_rows_are_chosen_and_joined_with_them() -> None:
    made = batch()
    assert made.select([1, 0]).streams["ids"].tolist() == [[5, -1], [-1, -1], [1, 2], [3, -1], [-1, -1]]
    wider = batch([[[*token, 0] for token in row] for row in IDS])
    both = concatenate([made, wider])
    assert both is not None and both.streams["ids"].shape == (10, 3) and both.streams["floats"].shape == (10, 3)
    assert both.streams["ids"][:2].tolist() == [[1, 2, -1], [3, -1, -1]]
    assert both.streams["ids"][5:7].tolist() == [[1, 2, 0], [3, -1, 0]]


def test_micro_batches_carry_them_padded_packed_and_cut() -> None:
    made = batch()
    padded = planned(made, pg.Split(sequences=2))
    assert padded.wide("ids").tolist() == [[[1, 2], [3, -1], [-1, -1]], [[5, -1], [-1, -1], [-1, -1]]]
    assert padded.wide("floats").dtype == torch.float32
    packed = planned(made, pg.Split(max_tokens=8, multiple_of=4))
    assert packed.wide("ids").shape == (1, 8, 2)
    order = [int(row) for row in packed.index_N]
    want = [made.streams["ids"][i].tolist() if i >= 0 else [-1, -1] for i in order]
    assert packed.wide("ids")[0].tolist() == want
    parts = [shard(packed, rank, 2, None) for rank in range(2)]
    for part in parts:
        want = [made.streams["ids"][i].tolist() if i >= 0 else [-1, -1] for i in part.index_N.tolist()]
        assert part.wide("ids")[0].tolist() == want


def test_a_function_reads_them_where_its_component_sees() -> None:
    seen: list[torch.Tensor] = []

    def term(x: Any) -> torch.Tensor:
        seen.append(x.wide("ids"))
        return torch.where(x.wide("ids") >= 0, x.wide("floats"), 0).sum(-1) * x.logp

    spec = pg.LossSpec(components=[pg.Term("t", term, normalizer="sum(token)", needs=("ids", "floats"))])
    micro = next(iter(pg.plan([batch()], spec, split=pg.Split(sequences=2)).microbatches()))
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    pg.policy_loss(pg.TokenLogprobs(logprob=logp), micro).loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == [[30.0, 30.0, 0.0], [50.0, 0.0, 0.0]]
    assert seen[0].tolist() == [[1, 2], [3, -1], [-1, -1], [5, -1], [-1, -1], [-1, -1]]


def test_the_digest_and_the_presence_bits_know_them() -> None:
    other = [[[9, -1], [1, 2], [3, 1]], IDS[1]]
    assert agreement.batch_digest(batch()) != agreement.batch_digest(batch(other))
    assert agreement.presence(batch()) != agreement.presence(batch(streams={}))


def test_a_rank_without_rows_has_none_of_them() -> None:
    plan = pg.plan([batch()], pg.presets.reinforce(), split=pg.Split(sequences=2))
    micro = next(iter(plan.microbatches()))
    empty = micro.take(torch.zeros(0, dtype=torch.int64), (1, 0), torch.zeros(0, dtype=torch.int64), 1, None)
    assert empty.wide("ids").shape == (1, 0, 2)
    empty.table.clear()
    empty.table["tokens"] = torch.zeros(0, dtype=torch.int64)
    assert empty.take(torch.zeros(0, dtype=torch.int64), (1, 0), torch.zeros(0, dtype=torch.int64), 1, None).wide(
        "ids"
    ).shape == (1, 0, 0)


@pytest.mark.parametrize(
    ("streams", "what"),
    [
        ({"ids": torch.full((2, 3, 2), -2)}, "negative id"),
        ({"ids": torch.zeros(2, 2, 2, dtype=torch.int64)}, "wrong shape"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, "must be a float tensor"),
    ],
)
def test_refused(streams: Any, what: str) -> None:
    with pytest.raises(pg.DataError, match=what):
        batch(streams=streams)


def test_one_number_is_asked_for_and_several_are_there() -> None:
    spec = pg.LossSpec(components=[pg.PolicyGradient(surrogate=pg.Clip(low="floats", high=0.2))])
    plan = pg.plan([batch(old_logprobs=torch.zeros(2, 3))], spec, split=pg.Split(sequences=2))
    micro = next(iter(plan.microbatches()))
    with pytest.raises(pg.DataError, match="several numbers a token"):
        pg.policy_loss(pg.TokenLogprobs(logprob=torch.zeros(2, 3)), micro)
    with pytest.raises(pg.DataError, match="no stream 'other'"):
        micro.wide("other")
