"""What trying the package from outside brought up about rollouts: the input that was taken, and what is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.rollouts import concatenate
from support.steps import NAN, ONE, pictured, refused, solve

KL = pg.presets.grpo(old="given")
F, T = False, True


def trace(**policy: Any) -> pg.Trace:
    spans = [pg.Span(role="user", author="harness", tokens=[1]), pg.Span(role="a", author="policy", **policy)]
    return pg.Trace(spans=spans, advantage=1.0)


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ({"tokens": [1.7, 2.2]}, ("tokens of trace 0, span 1 of role 'a' must be whole numbers", "torch.float32")),
        ({"tokens": [True, False]}, ("tokens of trace 0", "must be whole numbers", "torch.bool")),
        ({"tokens": b"ab"}, ("tokens of trace 0", "is not a tensor", "bytes")),
        ({"tokens": [2], "version": [1.9]}, ("version of trace 0", "must be whole numbers")),
        ({"tokens": [2], "version": 1.9}, ("version of trace 0", "must be whole numbers")),
        ({"tokens": [2], "version": True}, ("version of trace 0", "must be whole numbers", "torch.bool")),
        ({"tokens": [2], "kept_sets": [[1.5]]}, ("kept_sets of trace 0", "must be whole numbers")),
        ({"tokens": [2], "kept_sets": [[True]]}, ("kept_sets of trace 0", "must be whole numbers", "torch.bool")),
        ({"tokens": [2], "logprobs": ["-1"]}, ("logprobs of trace 0", "no number", "str '-1'")),
        ({"tokens": [2], "logprobs": [True]}, ("logprobs of trace 0", "must be a float tensor", "torch.bool")),
        ({"tokens": [2], "logprobs": [[-1.0]]}, ("another number of log-probs",)),
        ({"tokens": [2], "streams": {"old_logprob": [-1.0]}}, ("no stream 'old_logprob'", "old_logprobs")),
        ({"tokens": [2], "streams": {"temperature": [0.7]}}, ("no stream 'temperature'",)),
        ({"tokens": [2], "logprobs": [-1.0], "streams": {"rollout_logprobs": [-1.0]}}, ("logprobs twice",)),
        ({"tokens": [2], "streams": {"advantages": [2.0]}}, ("by traces and by their spans",)),
    ],
)
def test_nothing_in_a_trace_is_converted_in_silence(span: dict[str, Any], words: tuple[str, ...]) -> None:
    """C8: [1.7, 2.2] were the tokens 1 and 2, version 1.9 was 1, and bools and bytes were numbers."""
    refused(pg.DataError, lambda: pg.TokenBatch.from_traces([trace(**span)]), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampler": pg.Sampler(top_k=2.5)}, ("top_k must be whole numbers",)),  # type: ignore[arg-type]
        ({"sampler": pg.Sampler(temperature="0.7")}, ("temperature holds something that is no number",)),  # type: ignore[arg-type]
        ({"sampler": pg.Sampler(logprobs="Raw")}, ("no known sampler", "'Raw'")),  # type: ignore[arg-type]
        ({"sampler": None}, ("no known sampler", "None")),
        ({"spans": [1]}, ("something else than spans",)),
        ({"advantage": "1.0"}, ("advantage holds something that is no number", "str '1.0'")),
        ({"spans": [pg.Span(role=7, author="harness", tokens=[1])]}, ("a role that is no text", "int")),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_beside_the_tokens_is_named_too(change: dict[str, Any], words: tuple[str, ...]) -> None:
    given = {"spans": trace(tokens=[2]).spans, "advantage": 1.0} | change
    refused(pg.DataError, lambda: pg.TokenBatch.from_traces([pg.Trace(**given)]), *words)
    refused(pg.DataError, lambda: pg.TokenBatch.from_traces([7]), "takes a list of traces")  # type: ignore[list-item]


def test_40000_roles_keep_their_names() -> None:
    """C8: role 32,768 wrapped int16 and was read as another word."""
    spans = [pg.Span(role=f"r{i}", author="harness", tokens=[1]) for i in range(40_000)]
    batch = pg.TokenBatch.from_traces([pg.Trace(spans=spans)])
    both = concatenate([batch, batch])
    assert both is not None
    for made in (batch, both):
        assert [made.words[made.labels["role"][at]] for at in (0, 32_766, 32_767, 39_998)] == [
            "r1", "r32767", "r32768", "r39999",
        ]  # fmt: skip


def test_traces_take_arrays_and_further_streams() -> None:
    """Tokens 2 3 of the policy; the harness's token has no log-prob, which a wrong reader would see as NaN."""
    policy = {
        "tokens": np.array([2, 3]), "logprobs": torch.tensor([-1.0, -2.0]), "version": np.int64(4),
        "kept_sets": np.array([[2, 9], [3, -1]]), "streams": {"old_logprobs": [-1.5, -2.5], "values": np.ones(2)},
    }  # fmt: skip
    batch = pg.TokenBatch.from_traces([pg.Trace(spans=[*trace(**policy).spans, trace(tokens=[5]).spans[0]])])
    rollout, old = batch.streams["rollout"].tolist(), batch.streams["old"].tolist()
    assert rollout[:2] == [-1.0, -2.0] and rollout[2] != rollout[2] and rollout[3] == 0.0
    assert old[:2] == [-1.5, -2.5] and batch.streams["values"].tolist()[:2] == [1.0, 1.0]
    assert batch.streams["versions"].tolist() == [4, 4, 0, 0]
    assert batch.streams["kept"].tolist() == [[2, 9], [3, -1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize("stream", ["old", "ref"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_log_prob_above_zero_is_refused_beyond_rounding(stream: str, dtype: torch.dtype) -> None:
    """C9: +1.4, a negative log-likelihood with the wrong sign. 2^-10 is what two roundings of float32 logits of 2^13
    cost (half a unit in the last place, 2^-11, each): the next number above it is refused, itself it is not."""
    part = "rl" if stream == "old" else "kl"

    def planned(value: float) -> pg.Plan:
        values = torch.tensor([9.0, -1.0, value, -1.0], dtype=dtype)
        given = {"old_logprobs": -1.0, "ref_logprobs": -1.0} | {f"{stream}_logprobs": values}
        return pg.plan([pictured("cAAA", dtype=dtype, sample_ids=["s"], **given)], KL, split=ONE)

    above = float(torch.nextafter(torch.tensor(2.0**-10, dtype=dtype), torch.tensor(1.0, dtype=dtype)))
    for value in (1.4, above):
        words = (f"a log-prob above 0 inside component {part!r}", f"sample 's', token 2, stream {stream!r}", "(1 such")
        refused(pg.DataError, lambda value=value: planned(value), *words)
    planned(2.0**-10)


def test_a_log_prob_above_zero_where_nobody_reads_is_anything() -> None:
    given = {"old_logprobs": [5.0, -1.0, 5.0], "ref_logprobs": -1.0, "rollout_logprobs": 5.0}
    pg.plan([pictured("cAo", **given)], KL, split=ONE)
    corrected = KL.replace(corrections=[pg.TruncatedIS()])
    refused(
        pg.DataError, lambda: pg.plan([pictured("cAo", **given)], corrected, split=ONE), "stream 'rollout'", "got 5.0"
    )


@pytest.mark.parametrize(
    ("rows", "action", "words"),
    [
        ({"lengths": [3, 2]}, [[F, T, T, F], [F, T, T, F]], ("1 such tokens", "row 1, column 2")),
        ({"attention_mask": [[F, T, T, T], [F, F, T, T]]}, [[F, F, T, T], [F, T, F, T]], ("row 1, column 1",)),
        ({"lengths": [3, 2]}, [[F, T, T, T], [F, T, F, T]], ("2 such tokens", "row 0, column 3")),
    ],
)
def test_an_action_outside_of_its_row_is_refused(rows: Any, action: Any, words: tuple[str, ...]) -> None:
    """C14: an end token that has the id of padding, and was left out of lengths, was trained by nobody."""
    form = {"tokens": [[1, 2, 3, 0], [4, 5, 0, 0]], "action_mask": action, "advantages": 1.0, **rows}
    words = ("action_mask is true outside of its row", *words, "an end token is no padding")
    refused(pg.DataError, lambda: pg.TokenBatch.from_padded(**form), *words)


@pytest.mark.parametrize("form", ["a number", "a number a row", "traces"])
def test_a_temperature_is_the_same_number_everywhere(form: str) -> None:
    """A12: 0.7 was float32 in the batch and float64 in `token_logprobs`: log-probs differed by 7e-7."""
    rows: dict[str, Any] = {"tokens": [1, 2, 3], "action_mask": [F, T, T], "lengths": [3], "advantages": [1.0]}
    if form == "traces":
        spans = trace(tokens=[2, 3]).spans
        batch = pg.TokenBatch.from_traces([pg.Trace(spans=spans, advantage=1.0, sampler=pg.Sampler(temperature=0.7))])
    else:
        batch = pg.TokenBatch.from_packed(**rows, temperature=0.7 if form == "a number" else [0.7])
    (micro,) = pg.plan([batch], pg.presets.reinforce(), split=ONE).microbatches()
    logits = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    here = pg.token_logprobs(logits, micro.targets, temperature=micro.temperature).logprob[:, :2]
    there = pg.token_logprobs(logits, micro.targets, temperature=0.7).logprob[:, :2]
    by_hand = (logits / 0.7).log_softmax(-1).gather(-1, micro.targets[..., None])[..., 0][:, :2]
    assert torch.equal(here, there)
    torch.testing.assert_close(here, by_hand, rtol=0, atol=1e-14)
    assert micro.weight("rl").dtype == torch.float32  # and it alone makes no float64 loss


def test_so_are_the_sampler_s_other_numbers() -> None:
    rows: dict[str, Any] = {"tokens": [1, 2], "action_mask": [F, T], "lengths": [2]}
    batch = pg.TokenBatch.from_packed(**rows, top_p=0.7, min_p=[0.1])
    assert batch.streams["top_p"].tolist() == [0.7, 1.0] and batch.streams["min_p"].tolist() == [0.1, 0.0]


def test_a_very_long_id_does_not_push_the_place_out_of_the_error() -> None:
    """C12: with an id of 100 kB the error lost token and stream."""
    name = "begin" + "x" * 100_000 + "end"
    long = pictured("cAA", sample_ids=[name], old_logprobs=[-1.0, -1.0, NAN])
    spec = pg.presets.ppo()
    place = "token 2, stream 'old'"
    error = refused(pg.DataError, lambda: pg.plan([long], spec, split=ONE), "sample 'begin", place, "end'", "100008")
    assert len(str(error)) < 400
    assert long.where(1, "old") == f"{long.sample_name(0)}, {place}"
    assert long.where(1, "tokens", read=True) == f"{long.sample_name(0)}, token 1, stream 'tokens'"
    short = pictured("cA", "cAA", sample_ids=["a", 7])
    assert short.where(3) == "sample 7, token 2" and pictured("cA", "cAA").where(3) == "row 1, token 2"


def test_streams_of_one_name_and_two_kinds_do_not_go_into_one_step() -> None:
    floats = pictured("cA", streams={"mine": 1.0})
    ids = pictured("cA", streams={"mine": torch.ones(2, 3, dtype=torch.int64)})
    words = ("streams 'mine' is of another kind", "torch.float64", "torch.int64")
    refused(pg.DataError, lambda: pg.plan([floats, ids], pg.presets.reinforce(), split=ONE), *words)


def test_versions_are_a_stream_like_the_others() -> None:
    """A function may read them, which the batch kept apart before."""
    spec = pg.LossSpec(
        components=[pg.Term("t", lambda x: x.stream("versions") * x.logp, normalizer="sum(token)", needs=("versions",))]
    )
    assert solve(pictured("cAA", versions=torch.tensor([9, 2, 3])), spec, [-1.0, -1.0, NAN]).loss == -5.0
