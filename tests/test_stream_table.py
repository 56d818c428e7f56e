"""The table of token streams is the one list of them: what must be written twice is compared with it, by name."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_type_hints

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.planning import agreement
from megatron_pgloss.rollouts import STREAMS, streams
from megatron_pgloss.rollouts.keywords import PackedArguments, PaddedArguments
from megatron_pgloss.rollouts.streams import BY_NAME, OPTIONAL, StreamSpec
from megatron_pgloss.verify.oracle import scene as oracle_scene
from support.steps import ONE, pictured, refused

# Rows of 3 tokens and 2. Per stream: what is given for tokens 0, 1, 2 | 3, 4, and the same by hand where position t is
# about the token after it: the first entry of each row leaves, its last is filled.
CASES: dict[str, tuple[list[Any], list[Any]]] = {
    "advantages": ([9.0, 1.5, -2.0, 9.0, 0.5], [1.5, -2.0, 0.0, 0.5, 0.0]),
    "old": ([-9.0, -1.5, -2.0, -9.0, -0.5], [-1.5, -2.0, 0.0, -0.5, 0.0]),
    "rollout": ([-9.0, -1.0, -3.0, -9.0, -0.25], [-1.0, -3.0, 0.0, -0.25, 0.0]),
    "ref": ([-9.0, -4.0, -5.0, -9.0, -6.0], [-4.0, -5.0, 0.0, -6.0, 0.0]),
    "values": ([9.0, 0.25, 0.5, 9.0, 0.75], [0.25, 0.5, 0.0, 0.75, 0.0]),
    "returns": ([9.0, 1.25, 1.5, 9.0, 1.75], [1.25, 1.5, 0.0, 1.75, 0.0]),
    "temperature": ([9.0, 0.5, 0.7, 9.0, 2.0], [0.5, 0.7, 1.0, 2.0, 1.0]),
    "versions": ([9, 4, 5, 9, 6], [4, 5, 0, 6, 0]),
    "kept": ([[9, 9], [1, 2], [3, -1], [9, 9], [-1, -1]], [[1, 2], [3, -1], [-1, -1], [-1, -1], [-1, -1]]),
    "top_k": ([9, 3, 4, 9, -1], [3, 4, 0, -1, 0]),
    "top_p": ([0.1, 0.7, 0.9, 0.1, 1.0], [0.7, 0.9, 1.0, 1.0, 1.0]),
    "min_p": ([0.9, 0.1, 0.2, 0.9, 0.0], [0.1, 0.2, 0.0, 0.0, 0.0]),
}
ACTION = [False, True, True, False, True]


def padded(flat: list[Any], fill: Any) -> list[list[Any]]:
    return [flat[:3], [*flat[3:], fill]]


def test_every_stream_of_the_table_has_a_case() -> None:
    assert sorted(set(OPTIONAL) ^ set(CASES)) == [], "give these streams a case in CASES, with the shift by hand"


@pytest.mark.parametrize("name", [name for name in CASES if name in BY_NAME])
def test_it_is_shifted_filled_and_kept_in_its_type(name: str) -> None:
    row, (given, want) = BY_NAME[name], CASES[name]
    packed = pg.TokenBatch.from_packed(
        tokens=[1, 2, 3, 4, 5], lengths=[3, 2], action_mask=ACTION, **{row.argument: given}
    )  # type: ignore[misc]
    assert (
        packed.streams[name].tolist() == pytest.approx(want)
        if row.dtype != "ids"
        else (packed.streams[name].tolist() == want)
    )
    matrix = padded(given, given[0])
    rows = pg.TokenBatch.from_padded(  # type: ignore[misc]
        tokens=[[1, 2, 3], [4, 5, 0]], lengths=[3, 2], action_mask=padded(ACTION, False), **{row.argument: matrix}
    )
    assert torch.equal(rows.streams[name], packed.streams[name])
    dtype = {"whole": torch.int64, "ids": torch.int64, "flag": torch.bool}.get(row.dtype)
    assert packed.streams[name].dtype == (dtype or (torch.float32 if row.read_by == "loss" else torch.float64))
    again = rows.with_stream(name, packed.streams[name] if dtype else packed.streams[name].double())
    assert again.streams[name].tolist() == packed.streams[name].tolist()


def test_a_batch_says_which_of_them_it_has() -> None:
    """One presence bit each: no two batches that differ in one stream look alike."""
    form: dict[str, Any] = {"tokens": [1, 2, 3, 4, 5], "lengths": [3, 2], "action_mask": ACTION}
    made = [pg.TokenBatch.from_packed(**form, **{BY_NAME[name].argument: CASES[name][0]}) for name in CASES]
    assert len({agreement.presence(batch) for batch in (pg.TokenBatch.from_packed(**form), *made)}) == len(CASES) + 1
    bits = agreement.presence(made[0]) ^ agreement.presence(pg.TokenBatch.from_packed(**form))
    assert bits == 1 << agreement.OPTIONAL.index(next(iter(CASES)))


def test_the_keywords_are_the_table_by_name_and_order() -> None:
    for build, more in ((pg.TokenBatch.from_padded, ["attention_mask"]), (pg.TokenBatch.from_packed, [])):
        shown = list(inspect.signature(build).parameters)
        assert shown[:2] == ["tokens", "action_mask"] and shown[2 : 3 + len(more)] == ["lengths", *more]
        assert shown[3 + len(more) :][: len(STREAMS) - 2] == [row.argument for row in STREAMS[2:]]
    assert PackedArguments.__required_keys__ == {"tokens", "action_mask", "lengths"}
    assert PaddedArguments.__required_keys__ == {"tokens", "action_mask"}


@pytest.mark.parametrize("row", STREAMS, ids=lambda row: row.argument)
def test_the_type_of_a_keyword_is_that_of_its_row(row: StreamSpec) -> None:
    """What mypy and an editor are told, against what is checked at run time."""
    accepted = {
        "float": streams.Floats, "log-prob": streams.Floats, "whole": streams.Wholes, "ids": streams.Ids,
        "flag": streams.Flags,
    }[row.dtype]  # fmt: skip
    number = {"float": float, "whole": int}[row.dtype] if row.shape == "row" else None
    told = get_type_hints(PaddedArguments)[row.argument]
    assert set(get_args(told)) == {*get_args(accepted), *([number] if number else []), *_absent(row)}


def _absent(row: StreamSpec) -> list[type]:
    return [] if row.argument in PaddedArguments.__required_keys__ else [type(None)]


def test_the_oracle_s_own_list_is_the_table_s() -> None:
    """The oracle shares nothing with what it judges, so its list is written again."""
    of_loss = {row.name for row in STREAMS if row.is_float and row.read_by == "loss"}
    assert sorted(of_loss ^ set(oracle_scene.STREAMS)) == [], "the oracle does not know these streams"


def test_what_presets_read_is_in_the_table() -> None:
    presets = pg.presets.PRESETS
    read = {name for key, preset in presets.items() for name in pg.presets.get(key, **preset.example).readers}
    assert "advantages" in read and sorted(read - set(OPTIONAL)) == []


def test_names_of_the_table_cannot_be_a_stream_of_one_s_own() -> None:
    for row in STREAMS:
        for name in {row.name, row.argument}:
            refused(
                pg.DataError, lambda name=name: pictured("cA", streams={name: 1.0}), repr(name), "no name for a stream"
            )


@pytest.mark.parametrize("name", [row.name for row in STREAMS if not row.optional])
def test_needs_names_what_a_batch_may_lack(name: str) -> None:
    """What every batch has was told to be given as streams={...}, and then refused there."""
    spec = pg.LossSpec(components=[pg.Term("t", lambda x: x.logp, needs=(name,))])
    words = (f"needs= names {name!r}", "which every batch has", "old, rollout, ref", f"leave {name!r} out")
    refused(pg.DataError, lambda: pg.plan([pictured("cA")], spec, split=ONE), *words)


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_absent_stream_is_asked_for_by_its_keyword(name: str) -> None:
    spec = pg.LossSpec(components=[pg.Term("t", lambda x: x.logp, needs=(name,))])
    batch = pg.TokenBatch.from_packed(tokens=[1, 2], lengths=[2], action_mask=[False, True])
    keyword = BY_NAME[name].argument
    refused(
        pg.DataError, lambda: pg.plan([batch], spec, split=ONE), f"{name} is absent", f"give {keyword}=", "read by t"
    )


def test_a_rank_without_rows_has_them_in_their_types() -> None:
    """It takes the same path as the others: every stream that the spec reads is there, with no tokens."""
    own = pg.Term("t", lambda x: x.logp, needs=(*OPTIONAL, "mine"))
    plan = pg.plan([], pg.LossSpec(components=[own]), split=ONE)
    for name in OPTIONAL:
        row = BY_NAME[name]
        assert plan.table[name].shape == ((0, 0) if row.dtype == "ids" else (0,)), name
        assert plan.table[name].is_floating_point() == row.is_float, name
    assert plan.table["mine"].shape == (0,)
