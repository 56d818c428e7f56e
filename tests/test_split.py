"""How rows become micro-batches, and how a micro-batch is laid out for the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_pgloss as pg
from megatron_pgloss.planning import Arrangement
from megatron_pgloss.planning.split import bins, legal_count, refine, round_up
from support.steps import pictured, refused

SPEC = pg.presets.reinforce()
ROWS = ("cAAA", "cA", "cAA", "cAAAA", "cA")  # tokens 1..4, 5..6, 7..9, 10..14, 15..16


@pytest.mark.parametrize(
    "given_split",
    [
        {},
        {"sequences": 2, "microbatches": 2},
        {"sequences": 0},
        {"microbatches": -1},
        {"sequences": 2.5},
        {"sequences": True},
        {"max_tokens": 8, "multiple_of": 0},
        {"sequences": 2, "multiple_of": 4},
    ],
)
def test_split_is_exactly_one_positive_whole_number(given_split: dict[str, int]) -> None:
    refused(pg.SpecError, lambda: pg.Split(**given_split))


def rows_of(split: pg.Split, **more: object) -> list[list[int]]:
    return pg.plan([pictured(*ROWS)], SPEC, split=split, **more).parts  # type: ignore[arg-type]


def test_split_by_rows_by_number_and_by_budget() -> None:
    assert rows_of(pg.Split(sequences=2)) == [[0, 1], [2, 3], [4]]
    assert rows_of(pg.Split(sequences=9)) == [[0, 1, 2, 3, 4]]
    assert rows_of(pg.Split(microbatches=3)) == [[0, 1], [2, 3], [4]]
    assert rows_of(pg.Split(microbatches=2)) == [[0, 1, 2], [3, 4]]
    # Longest first, each into the first bin with room: 5 | 4, then 3 fits neither, 2 fits beside 4, 2 beside 3.
    assert rows_of(pg.Split(max_tokens=6)) == [[3], [0, 1], [2, 4]]
    # Padded to multiples of 4 the lengths are 4 4 4 8 4.
    assert rows_of(pg.Split(max_tokens=8, multiple_of=4)) == [[3], [0, 1], [2, 4]]


def test_a_sequence_longer_than_the_budget_is_refused() -> None:
    refused(pg.DataError, lambda: rows_of(pg.Split(max_tokens=4)), "longer than the token budget", "<= 4", "5", "row 3")


@given(
    lengths=st.lists(st.integers(0, 20), max_size=12),
    split=st.one_of(
        st.integers(1, 6).map(lambda n: pg.Split(sequences=n)),
        st.integers(1, 6).map(lambda n: pg.Split(microbatches=n)),
        st.integers(1, 4).map(lambda m: pg.Split(max_tokens=24, multiple_of=m)),
    ),
    extra=st.integers(0, 8),
)
def test_every_row_lands_in_exactly_one_microbatch(lengths: list[int], split: pg.Split, extra: int) -> None:
    parts = bins(split, lengths, split.multiple_of)
    rows = [row for row, length in enumerate(lengths) if length or not split.packed]
    assert sorted(row for part in parts for row in part) == rows and all(parts)
    count = len(parts) + extra
    finer = refine(parts, count, split.packed)
    assert len(finer) == count and sorted(row for part in finer for row in part) == rows
    assert sum(not part for part in finer) == max(count - len(rows), 0)  # none is empty while there are rows
    for part in (*parts, *finer):
        assert part == sorted(part)
        assert not split.packed or sum(round_up(lengths[row], split.multiple_of) for row in part) <= 24
        assert split.sequences is None or len(part) <= split.sequences


def test_legal_counts_by_enumeration() -> None:
    """Megatron-Core's interleaved schedule takes groups of ``group`` >= ``stages`` micro-batches: there must be a whole
    one, and a last, partial one must hold at least ``stages``."""
    for stages in range(1, 6):
        for group in range(stages, 9):
            legal = [n for n in range(group, 60) if not 0 < n % group < stages]
            for count in range(1, 40):
                assert legal_count(count, group, stages) == min(n for n in legal if n >= count), (count, group, stages)


def test_an_interleaved_schedule_gets_a_count_it_accepts() -> None:
    plan = pg.plan([pictured(*ROWS)], SPEC, split=pg.Split(sequences=2), interleaved=(4, 4))
    assert plan.num_microbatches == 4 and plan.parts == [[0, 1], [2], [3], [4]]
    plan = pg.plan([pictured(*ROWS)], SPEC, split=pg.Split(sequences=1), interleaved=(4, 4))
    assert plan.num_microbatches == 8 and [len(part) for part in plan.parts] == [1] * 5 + [0] * 3
    assert plan.job["empty_microbatches"] == 3 and "3 of 8 micro-batches are empty" in plan.report()


def matrix(left: bool) -> pg.TokenBatch:
    """Rows of 4, 2 and 0 tokens in a matrix of width 6."""
    lengths = torch.tensor([4, 2, 0])
    column = torch.arange(6)[None]
    real = column >= 6 - lengths[:, None] if left else column < lengths[:, None]
    return pg.TokenBatch.from_padded(
        tokens=torch.arange(10, 28).reshape(3, 6),
        attention_mask=real,
        action_mask=real & (column >= 1 + real.int().argmax(1)[:, None]),
        advantages=torch.ones(3),
        temperature=0.5,
    )


@pytest.mark.parametrize("left", [False, True])
def test_padded_rows_keep_the_callers_padding(left: bool) -> None:
    first, second = (
        ([0, 0, 12, 13, 14, 15], [0, 0, 0, 0, 20, 21]) if left else ([10, 11, 12, 13, 0, 0], [16, 17, 0, 0, 0, 0])
    )
    after, next_ = (
        ([0, 0, 13, 14, 15, 0], [0, 0, 0, 0, 21, 0]) if left else ([11, 12, 13, 0, 0, 0], [17, 0, 0, 0, 0, 0])
    )
    attended = [[2, 3, 4, 5], [4, 5], [0]] if left else [[0, 1, 2, 3], [0, 1], [0]]  # a row of padding keeps one column
    (micro,) = pg.plan([matrix(left)], SPEC, split=pg.Split(sequences=3)).microbatches()
    assert micro.shape == (3, 6) and micro.input_ids.tolist() == [first, second, [0] * 6] and micro.cu_seqlens is None
    assert micro.targets.tolist() == [after, next_, [0] * 6]
    mask, heat, member = micro.attention_mask, micro.temperature, micro.members("rl")
    assert mask is not None and [row.nonzero().flatten().tolist() for row in mask] == attended
    assert [micro.position_ids[b][mask[b]].tolist() for b in (0, 1)] == [[0, 1, 2, 3], [0, 1]]
    assert [row.nonzero().flatten().tolist() for row in member] == [attended[0][:-1], attended[1][:-1], []]
    assert heat is not None and heat[member].eq(0.5).all() and heat[~member].eq(1).all()


def test_rows_of_several_batches_share_the_widest_matrix() -> None:
    plan = pg.plan([pictured("cAA"), pictured("cAAAA", "cA")], SPEC, split=pg.Split(sequences=2))
    assert [micro.shape for micro in plan.microbatches()] == [(2, 5), (1, 5)]


def test_packed_rows_know_their_borders() -> None:
    split = pg.Split(max_tokens=8, multiple_of=4)
    plan = pg.plan([pictured("cAAAA", "cA", "", "cAA")], SPEC, split=split)
    long, short = plan.microbatches()
    assert long.shape == (1, 8) and long.cu_seqlens is not None and long.cu_seqlens.tolist() == [0, 8]
    assert long.input_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]] and long.targets.tolist() == [[2, 3, 4, 5, 0, 0, 0, 0]]
    assert short.cu_seqlens is not None and short.cu_seqlens.tolist() == [0, 4, 8]
    assert short.input_ids.tolist() == [[6, 7, 0, 0, 8, 9, 10, 0]]
    assert short.targets.tolist() == [[7, 0, 0, 0, 9, 10, 0, 0]]
    assert short.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert short.attention_mask is None and short.max_seqlen == 4 and short.cu_seqlens.dtype == torch.int32
    assert short.members("rl").tolist() == [[True, False, False, False, True, True, False, False]]
    assert short.seq_N.tolist() == [0, 0, -1, -1, 1, 1, 1, -1] and short.units == {"sequence": 2, "turn": 2}


def test_fixed_shapes_are_filled_up_with_padding() -> None:
    batch = pictured(*ROWS)
    fixed = Arrangement(multiple=4, fixed=True, left=True)
    padded = pg.plan([batch], SPEC, split=pg.Split(sequences=2), arrangement=fixed)
    assert [micro.shape for micro in padded.microbatches()] == [(2, 8)] * 3  # longest 5, to a multiple of 4
    last = list(padded.microbatches())[-1]
    assert last.attention_mask is not None and last.attention_mask.sum(1).tolist() == [2, 1]  # a padding row keeps one
    packed = pg.plan([batch], SPEC, split=pg.Split(max_tokens=8, multiple_of=4), arrangement=fixed)
    assert {micro.shape for micro in packed.microbatches()} == {(1, 8)}
    loose = pg.plan([batch], SPEC, split=pg.Split(sequences=2), arrangement=Arrangement(multiple=4, left=True))
    assert [micro.shape for micro in loose.microbatches()] == [(2, 4), (2, 8), (2, 4)]


def test_an_empty_microbatch_still_has_something_to_run() -> None:
    for split, shape in ((pg.Split(sequences=1), (1, 2)), (pg.Split(max_tokens=4, multiple_of=2), (1, 2))):
        plan = pg.plan([pictured("cA")], SPEC, split=split, interleaved=(2, 2))
        empty = list(plan.microbatches())[1]
        assert empty.shape == shape and not empty.members("rl").any() and empty.targets.tolist() == [[0, 0]]
        assert empty.units == {"sequence": 0, "turn": 0}
        if empty.attention_mask is not None:
            assert empty.attention_mask.tolist() == [[True, False]]
