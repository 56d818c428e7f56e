"""Context parallelism: which positions a rank holds, what it is scored on there, and ranks that hold nothing to train.

Zigzag by hand: a sequence in 2 cp chunks, rank r holds chunks r and 2 cp - 1 - r; packed rows are cut per document.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.megatron.context_parallel import shard, zigzag
from megatron_pgloss.planning import Arrangement
from support import jobs, layouts
from support.jobs import Job
from support.worlds import world_fixture

IGN = -100
PACKED = pg.Split(max_tokens=32)


def micro_of(
    tokens: list[list[int]], masks: list[list[int]], cp: int, split: pg.Split, path: str = "mean(token)"
) -> Any:
    """The one micro-batch of these rows; ``masks[i][t]``: the policy sampled token t."""
    flat = torch.tensor([token for row in tokens for token in row])
    batch = pg.TokenBatch.from_packed(
        tokens=flat, lengths=[len(row) for row in tokens],
        action_mask=torch.tensor([bool(flag) for row in masks for flag in row]),
        advantages=torch.ones(flat.numel(), dtype=torch.float64),
    )  # fmt: skip
    plan = pg.plan(
        [batch], pg.presets.reinforce(normalizer=path), split=split, group="local",
        arrangement=Arrangement(multiple=2 * cp, fixed=True, left=True),
    )  # fmt: skip
    (micro,) = plan.microbatches()
    return micro


def held(micro: Any, cp: int) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Every rank's tokens and its labels, IGN where nothing is trained."""
    shards = [shard(micro, rank, cp, None) for rank in range(cp)]
    return [(part.input_ids.tolist(), torch.where(part.members("rl"), part.targets, IGN).tolist()) for part in shards]


def test_tokens_and_labels_at_chunk_borders_by_hand() -> None:
    micro = micro_of([[*range(10, 18)]], [[0, *[1] * 7]], 2, pg.Split(sequences=1))
    assert held(micro, 2) == [([[10, 11, 16, 17]], [[11, 12, 17, IGN]]), ([[12, 13, 14, 15]], [[13, 14, 15, 16]])]


def test_packed_rows_are_cut_per_document_by_hand() -> None:
    # Documents of 8 and of 3 tokens, the second padded to 4; the rest of the row is a document of padding.
    micro = micro_of([[*range(10, 18)], [20, 21, 22]], [[0, *[1] * 7], [0, 1, 1]], 2, pg.Split(max_tokens=12))
    assert micro.cu_seqlens.tolist() == [0, 8, 12]
    assert held(micro, 2) == [
        ([[10, 11, 16, 17, 20, 0]], [[11, 12, 17, IGN, 21, IGN]]),
        ([[12, 13, 14, 15, 21, 22]], [[13, 14, 15, 16, 22, IGN]]),
    ]
    positions = [shard(micro, rank, 2, None).position_ids.tolist() for rank in (0, 1)]
    assert positions == [[[0, 1, 6, 7, 0, 3]], [[2, 3, 4, 5, 1, 2]]]


@pytest.mark.parametrize("split", [pg.Split(sequences=1), pg.Split(max_tokens=8)])
def test_a_shard_knows_its_chunks_and_how_many_there_are(split: pg.Split) -> None:
    part = shard(micro_of([[*range(10, 18)]], [[0, *[1] * 7]], 2, split), 1, 2, None)
    assert part.chunks == 4
    assert part.chunk_N.tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("split", [pg.Split(sequences=3), PACKED])
def test_shards_are_a_partition_with_every_label_once(cp: int, split: pg.Split) -> None:
    tokens = [[*range(100, 100 + 13)], [*range(200, 200 + 4)], [*range(300, 300 + 7)]]
    split = split if not split.packed else pg.Split(max_tokens=100)
    micro = micro_of(tokens, [[0, *[1] * (len(row) - 1)] for row in tokens], cp, split)
    pairs = sorted(
        (token, label)
        for rows, labels in held(micro, cp)
        for row, line in zip(rows, labels, strict=True)
        for token, label in zip(row, line, strict=True)
        if label != IGN
    )
    assert pairs == [(token, token + 1) for row in tokens for token in row[:-1]]


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(pg.LayoutError, match="multiple of 4"):
        zigzag(10, 0, 2)


def test_tokens_of_the_prompt_stay_out_where_a_chunk_lies_inside_it() -> None:
    # 16 tokens, prompt of 14, two ranks: positions 13 and 14 are scored, both rank 0's; rank 1 holds 4 to 11, none.
    micro = micro_of([[*range(16)]], [[0] * 14 + [1, 1]], 2, pg.Split(sequences=1))
    first, second = (shard(micro, rank, 2, None) for rank in (0, 1))
    assert first.position_ids[first.members("rl")].tolist() == [13, 14]
    assert second.position_ids.tolist() == [[*range(4, 12)]]
    assert not second.members("rl").any()
    assert not second.weight("rl").any()


def test_a_sequence_mean_over_shards_counts_the_whole_sequence() -> None:
    # Losses 1, 2, 3 at members [1, 1, 1, 0]: rank 0 holds positions 0 and 3, rank 1 holds 1 and 2; (1 + 2 + 3) / 3.
    micro = micro_of([[5, 6, 7, 8]], [[0, 1, 1, 1]], 2, pg.Split(sequences=1), "mean(sequence) > mean(token)")
    values = [torch.tensor([[1.0, 99.0]]), torch.tensor([[2.0, 3.0]])]
    sums = [pg.weighted_sum(v, shard(micro, r, 2, None), "rl").item() for r, v in enumerate(values)]
    assert sums == pytest.approx([1 / 3, 5 / 3], rel=1e-6)
    assert sum(sums) == pytest.approx(2.0, rel=1e-6)


# ---- a real model: context-parallel ranks without any member -------------------------------------------------------

SECONDS = 20.0


def sequence_statistic(x: Any) -> torch.Tensor:
    """A term of the whole sequence's drift, with gradient through the mean: two collectives per micro-batch."""
    return x.unit_mean(x.log_ratio, "sequence").square() + 0.1 * x.prefix_sum(x.log_ratio)


def spec() -> pg.LossSpec:
    return pg.LossSpec(
        components=[
            pg.PolicyGradient(normalizer="mean(sequence) > mean(token)"),
            pg.Term("drift", sequence_statistic, coef=0.5, needs=("old",), normalizer="mean(sequence) > mean(token)"),
        ]
    )


JOBS = {
    # name: (layout, rows with actions everywhere). Two data-parallel ranks of cp 2, or one of cp 4.
    "cp2, a rank without members": (Job(cp=2), 0),
    "cp2 packed, a rank without members": (Job(cp=2, split=PACKED), 0),
    "cp2, a shard without members": (Job(cp=2, split=pg.Split(sequences=1)), 3),
    "cp4, three ranks without members of most shards": (Job(cp=4, split=pg.Split(sequences=1)), 1),
    "cp4 packed, per-token": (Job(cp=4, split=PACKED, per_token=True), 0),
}


def visit(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    chunks, model_fn = jobs.oracle_model()
    answers = {}
    for hit in {hit for _, hit in JOBS.values()}:
        rows = jobs.rows_of_step(3, model_fn, tail=True, everywhere=hit)
        answers[hit] = (rows, *jobs.oracle_answer(chunks, model_fn, rows, spec()))
    layouts.leave(chunks)
    found: dict[str, Any] = {}
    for name, (job, hit) in JOBS.items():
        rows, loss, reference, _ = answers[hit]
        chunks, where = jobs.build(job)
        started = time.monotonic()
        metrics, grads, plan = jobs.one_step(job, chunks, where, spec(), rows)
        seconds = time.monotonic() - started
        members = [
            int(shard(micro, where.cp_rank, where.cp, None).members("rl").sum()) for micro in plan.microbatches()
        ]
        found[name] = (abs(metrics["loss"] / loss - 1), *jobs.worst(grads, reference), seconds, members)
        layouts.leave(chunks)
    found["megatron"] = against_megatron()
    return found


def against_megatron() -> list[bool]:
    """Whether a padded micro-batch is cut as Megatron's own helper cuts it, at cp 2 and 4."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatron_pgloss.verify.layouts.models import destroy_parallel, init_parallel

    same = []
    for cp in (2, 4):
        at = init_parallel(cp=cp)
        micro = micro_of(
            [[*range(100, 116)], [*range(200, 211)]], [[0, *[1] * 15], [0, *[1] * 10]], cp, pg.Split(sequences=2)
        )
        mine = shard(micro, at.cp_rank, cp, None)
        whole = {"tokens": micro.input_ids, "labels": micro.targets, "position_ids": micro.position_ids}
        more: dict[str, Any] = {"cp_group": parallel_state.get_context_parallel_group()}
        if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:  # from 0.18
            more["is_hybrid_cp"] = False
        theirs = get_batch_on_this_cp_rank(dict(whole), **more)
        ours = {"tokens": mine.input_ids, "labels": mine.targets, "position_ids": mine.position_ids}
        same += [torch.equal(theirs[name], ours[name]) for name in ours]
        destroy_parallel()
    return same


found = world_fixture(visit, 4)


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_ranks_and_shards_without_members_end_in_time_with_the_oracles_gradient(name: str, found: Any) -> None:
    for loss, gradient, parameter, seconds, _ in (by_rank[name] for by_rank in found):
        assert seconds < SECONDS
        assert loss < 1e-12
        assert gradient < 1e-10, parameter


@pytest.mark.multiproc
def test_some_ranks_really_had_no_member(found: Any) -> None:
    for name, (_, hit) in JOBS.items():
        by_rank = [sum(at[name][4]) for at in found]
        by_shard = [count for at in found for count in at[name][4]]
        assert 0 in by_shard, name
        assert any(by_rank), name
        if hit == 0:
            assert 0 in by_rank, name


@pytest.mark.multiproc
def test_padded_rows_are_cut_as_megatron_cuts_them(found: Any) -> None:
    assert [by_rank["megatron"] for by_rank in found] == [[True] * 6] * 4
