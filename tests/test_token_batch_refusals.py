"""Bad input is refused where it enters, by the name of the argument; never read in some other way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_token_batch import from_padded

import megatron_pgloss as pg
from support.steps import ONE, pictured, refused

SPAN = pg.Span(role="assistant", author="policy", tokens=[1, 2], logprobs=[-1.0, -1.0])


def trace(*spans: pg.Span, **more: Any) -> pg.Trace:
    return pg.Trace(**({"spans": spans or (SPAN,), "advantage": 1.0} | more))


def matrix(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.ones(shape or (2, 8), dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": matrix(torch.float32)}, ("tokens must be an integer tensor", "torch.float32")),
        ({"tokens": "12"}, ("tokens is not a tensor", "str")),
        ({"tokens": matrix(torch.int64, 8)}, ("tokens has the wrong shape", "[8]")),
        ({"lengths": [6, 3, 1]}, ("lengths has the wrong shape", "[2]", "[3]")),
        ({"lengths": [6.5, 3.0]}, ("lengths must be whole numbers", "torch.float32")),
        ({"lengths": matrix(torch.bool, 2)}, ("lengths must be whole numbers", "torch.bool")),
        ({"lengths": [[1], [2, 3]]}, ("lengths has rows of different lengths",)),
        ({"lengths": [6, -1]}, ("a length is negative", "-1", "row 1")),
        ({"lengths": [6, 9]}, ("a length is larger than the width", "<= 8", "9", "row 1")),
        ({"lengths": None}, ("either lengths or attention_mask",)),
        ({"attention_mask": matrix(torch.bool)}, ("either lengths or attention_mask",)),
        ({"action_mask": None}, ("action_mask is not a tensor", "NoneType")),
        ({"action_mask": matrix(torch.bool, 2, 7)}, ("action_mask has the wrong shape", "[2, 8]", "[2, 7]")),
        ({"action_mask": matrix(torch.float32)}, ("action_mask must be bool", "torch.float32")),
        ({"action_mask": 2 * matrix(torch.int64)}, ("action_mask must be bool", "torch.int64")),
        (
            {"observation_mask": matrix(torch.bool)},
            ("marked as action and as observation", "4 such tokens", "row 0, token 1"),
        ),
        ({"advantages": matrix(torch.float32, 3)}, ("advantages has the wrong shape", "[2, 8] or [2]", "[3]")),
        ({"advantages": matrix(torch.int64, 2)}, ("advantages must be a float tensor", "torch.int64")),
        ({"advantages": "high"}, ("advantages is not a tensor", "str")),
        (
            {"old_logprobs": matrix(torch.float32, 2)},
            ("old_logprobs has the wrong shape", "expected [2, 8];", "got [2]"),
        ),
        ({"ref_logprobs": matrix(torch.float16)}, ("ref_logprobs is torch.float16",)),
        ({"turn_ids": matrix(torch.float32)}, ("turn_ids must be whole numbers", "torch.float32")),
        ({"weights": matrix(torch.float32)}, ("weights must name its tensors", "Tensor")),
        ({"weights": {"rl": matrix(torch.int64)}}, ("weights['rl'] must be a float tensor",)),
        ({"masks": {"mine": matrix(torch.float32)}}, ("masks['mine'] must be bool",)),
        ({"masks": {"mine": matrix(torch.bool, 8)}}, ("masks['mine'] has the wrong shape", "[8]")),
        ({"temperature": matrix(torch.float32, 8)}, ("temperature has the wrong shape",)),
        ({"prompt_ids": ["a"]}, ("prompt_ids has the wrong length", "expected 2", "got 1")),
        ({"prompt_ids": [1.0, 2.0]}, ("prompt_ids must be int64 or str", "float")),
        ({"sample_ids": [True, False]}, ("sample_ids must be int64 or str", "bool")),
        ({"terminations": ["success", "eos"]}, ("unknown termination", "'eos'", "truncated")),
        ({"terminations": ["success"]}, ("terminations has the wrong length",)),
        ({"advantage": matrix(torch.float32)}, ("no argument 'advantage'", "did you mean 'advantages'?")),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(pg.DataError, lambda: from_padded(**changes), *words)


@pytest.mark.parametrize("row", ["11011000", "10000001", "01010000"])
def test_holes_in_the_attention_mask_are_refused_with_their_row(row: str) -> None:
    mask = torch.tensor([[c == "1" for c in picture] for picture in ("11100000", row)])
    refused(
        pg.DataError, lambda: from_padded(lengths=None, attention_mask=mask), "holes", "2 runs", "row 1", "from_packed"
    )
    words = ("attention_mask is not a tensor",)
    refused(pg.DataError, lambda: from_padded(lengths=None, attention_mask="11100000"), *words)
    wrong = mask[:, :6]
    refused(pg.DataError, lambda: from_padded(lengths=None, attention_mask=wrong), "attention_mask has the wrong shape")


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "weights['rl']"])
def test_low_precision_is_refused_unless_asked_for_by_name(name: str) -> None:
    """-5.37 in bf16 is -5.375, a ratio error of 0.5 percent."""
    low = torch.full((2, 8), -5.37, dtype=torch.bfloat16)
    given = {"weights": {"rl": low}} if name.startswith("weights") else {name: low}
    refused(pg.DataError, lambda: from_padded(**given), name, "torch.bfloat16", f"allow_low_precision=({name!r},)")
    refused(pg.DataError, lambda: from_padded(**given, allow_low_precision=("temperature",)), name)
    if not name.startswith("weights"):
        batch = from_padded(**given, allow_low_precision=(name,))
        stream_T = batch.streams[name.removesuffix("_logprobs")]
        assert stream_T.dtype == torch.float32 and stream_T[0] == -5.375


def test_packed_lengths_must_add_up_to_the_tokens() -> None:
    form = {"tokens": torch.arange(5), "action_mask": torch.ones(5).bool()}
    refused(
        pg.DataError,
        lambda: pg.TokenBatch.from_packed(lengths=[2, 2], **form),
        "tokens has the wrong shape",
        "[4]",
        "[5]",
    )


def test_one_number_a_row_must_not_be_taken_for_one_a_token() -> None:
    """Two rows, one of them empty, and two tokens: [0.5, -2] is the advantage of each row, or of each token?"""
    form = {"tokens": torch.arange(2), "lengths": [2, 0], "action_mask": torch.tensor([False, True])}
    words = ("advantages can be read as one number a row and as one a token", "2 rows", "leave out rows of length 0")
    refused(pg.DataError, lambda: pg.TokenBatch.from_packed(advantages=torch.tensor([0.5, -2.0]), **form), *words)
    same = {"tokens": torch.arange(2), "lengths": [1, 1], "action_mask": torch.zeros(2).bool()}
    assert len(pg.TokenBatch.from_packed(advantages=torch.tensor([0.5, -2.0]), **same)) == 2


def test_scored_streams_must_fit_the_batch() -> None:
    batch = pictured("cAA")
    for stream_T, word in ((torch.zeros(2), "wrong length"), (torch.zeros(3).bfloat16(), "torch.bfloat16")):
        refused(pg.DataError, lambda stream_T=stream_T: batch.with_stream("old", stream_T), "'old'", word)
    refused(pg.DataError, lambda: batch.with_stream("mu", torch.zeros(3)), "no stream 'mu'", "rollout")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("streams 'ref'", {"ref_logprobs": -1.0}),
        ("streams 'temperature'", {"temperature": 0.5}),
        ("masks 'm'", {"masks": {"m": True}}),
        ("weights 'rl'", {"weights": {"rl": 1.0}}),
        ("prompt_ids", {"prompt_ids": [1]}),
        ("sample_ids", {"sample_ids": ["a"]}),
        ("terminations", {"terminations": ["success"]}),
    ],
)
def test_what_only_some_batches_of_a_step_have_is_refused_by_name(name: str, given: dict[str, Any]) -> None:
    batches = [pictured("cA", **given), pictured("cA")]
    spec = pg.presets.reinforce()
    refused(pg.DataError, lambda: pg.plan(batches, spec, split=ONE), name, "absent in batch 1 of 2")
    refused(pg.DataError, lambda: pg.plan(batches[::-1], spec, split=ONE), name, "absent in batch 0 of 2")
    pg.plan([batches[0], pictured("cA").select([])], spec, split=ONE)  # no rows, no say


@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ([trace(pg.Span(role="user", author="env", tokens=[1]))], ("unknown author", "'env'", "environment")),
        (
            [trace(pg.Span(role="a", author="policy", tokens=[1, 2], logprobs=[-1.0]), SPAN)],
            ("log-probs", "2", "1", "'a'"),
        ),
        ([trace(pg.Span(role="a", author="policy", tokens=[1, 2]), SPAN)], ("some have none", "all or none")),
        ([trace(sampler=pg.Sampler(temperature=0.7, logprobs="raw"), sample_id="s")], ("raw log-probs", "0.7", "'s'")),
        ([trace(prompt_id=1), trace()], ("prompt_id is given for some traces only", "trace 1")),
        ([trace(termination="eos")], ("unknown termination", "'eos'")),
    ],
)
def test_traces_that_do_not_fit_are_refused(traces: list[pg.Trace], words: tuple[str, ...]) -> None:
    refused(pg.DataError, lambda: pg.TokenBatch.from_traces(traces), *words)


def test_raw_logprobs_are_taken_where_no_processor_was_active() -> None:
    batch = pg.TokenBatch.from_traces([trace(sampler=pg.Sampler(temperature=1.0, logprobs="raw"))])
    assert batch.streams["rollout"].tolist() == [-1.0, 0.0]
