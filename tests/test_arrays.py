"""Tensors, arrays, nested lists and single numbers are read alike; what would be read as something else is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_pgloss as pg
from support.steps import NAN, refused

ROOT = Path(__file__).resolve().parent.parent
FORM: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4, 5, 0]], "lengths": [3, 2], "action_mask": [[False, True, True], [False, True, False]],
}  # fmt: skip


def batch(**changes: Any) -> pg.TokenBatch:
    """Rows of 3 tokens and 2."""
    return pg.TokenBatch.from_padded(**(FORM | changes))


OLD = [[-9.0, -1.5, -2.25], [-9.0, -0.5, 0.0]]
LIKE_OLD = {
    "nested lists": OLD,
    "tuples": tuple(map(tuple, OLD)),
    "a list of tensors": [torch.tensor(row) for row in OLD],
    "a list of arrays": [np.array(row, dtype=np.float32) for row in OLD],
    "numpy, float32": np.array(OLD, dtype=np.float32),
    "numpy, read-only": np.broadcast_to(np.array(OLD, dtype=np.float32), (2, 3)),
    "numpy, backwards": np.array([row[::-1] for row in OLD[::-1]], dtype=np.float32)[::-1, ::-1],
    "numpy, big-endian": np.array(OLD, dtype=">f4"),
    "numpy scalars": [[np.float32(x) for x in row] for row in OLD],
    "whole numbers among them": [[-9, -1.5, -2.25], [-9, -0.5, 0]],
}


@pytest.mark.parametrize("given", LIKE_OLD.values(), ids=LIKE_OLD)
def test_floats_come_in_any_form(given: Any) -> None:
    stream_T = batch(old_logprobs=given).streams["old"]
    assert stream_T.dtype == torch.float32 and stream_T.tolist() == [-1.5, -2.25, 0.0, -0.5, 0.0]


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.uint64, list])
def test_whole_numbers_come_in_any_form(kind: Any) -> None:
    def make(value: list[Any]) -> Any:
        return value if kind is list else np.array(value, dtype=kind)

    tokens = make(FORM["tokens"]) if kind in (np.int64, np.int32, list) else FORM["tokens"]
    made = batch(tokens=tokens, lengths=make([3, 2]), versions=make([6, 7]), top_k=make([[1, 2, 3], [4, 5, 6]]))
    assert made.tokens_T.tolist() == [1, 2, 3, 4, 5] and made.targets_T.tolist() == [2, 3, 0, 5, 0]
    assert made.streams["versions"].tolist() == [6, 6, 0, 7, 0] and made.streams["top_k"].tolist() == [2, 3, 0, 5, 0]
    assert all(stream.dtype == torch.int64 for stream in made.streams.values())


def test_masks_ids_and_what_the_caller_names_come_in_any_form() -> None:
    form = {
        "lengths": None, "attention_mask": np.array([[1, 1, 1], [1, 1, 0]]), "prompt_ids": np.arange(2),
        "action_mask": np.array(FORM["action_mask"]), "sample_ids": np.array(["a", "b"]),
        "episode_ids": [np.int64(4), torch.tensor(5).item()], "terminations": np.array(["success", "failure"]),
        "masks": {"m": [[1, 0, 1], [1, 1, 0]]}, "weights": {"rl": [[1, 2, 3], [4, 5, 6]]},
        "streams": {"one": [[1, 2, 3], [4, 5, 6]], "ids": [[[1], [2], [-1]], [[3], [4], [5]]]},
    }  # fmt: skip
    made = batch(**form)
    assert made.prompt_ids == (0, 1) and made.sample_ids == ("a", "b") and made.episode_ids == (4, 5)
    assert all(type(name) in (int, str) for ids in (made.prompt_ids, made.sample_ids) for name in ids or ())
    assert made.masks["m"].tolist() == [False, True, False, True, False]
    assert made.weights["rl"].tolist() == [2.0, 3.0, 0.0, 5.0, 0.0]
    assert made.streams["one"].tolist() == [2.0, 3.0, 0.0, 5.0, 0.0]
    assert made.streams["ids"].tolist() == [[2], [-1], [-1], [4], [-1]]
    assert made.terminations == (pg.Termination.SUCCESS, pg.Termination.FAILURE)


def test_one_number_for_all_where_it_can_be_the_same() -> None:
    for number in (2, 2.0, np.float32(2), torch.tensor(2.0)):
        assert batch(advantages=number).streams["advantages"].tolist() == [2.0, 2.0, 0.0, 2.0, 0.0]
    assert batch(versions=3).streams["versions"].tolist() == [3, 3, 0, 3, 0]
    refused(pg.DataError, lambda: batch(old_logprobs=-1.0), "old_logprobs has the wrong shape", "[2, 3]", "got []")


def test_the_batch_owns_what_came_as_an_array() -> None:
    given = np.array(OLD, dtype=np.float32)
    made = batch(old_logprobs=given)
    given[:] = 7.0
    assert made.streams["old"][0] == -1.5


def test_float64_arrays_stay_float64_and_lists_are_float32() -> None:
    third = [[-1 / 3] * 3] * 2
    assert batch(old_logprobs=np.array(third)).streams["old"][0] == torch.tensor(-1 / 3, dtype=torch.float64)
    assert batch(old_logprobs=third).streams["old"].dtype == torch.float32


def test_a_scored_stream_may_be_an_array_or_a_list() -> None:
    for given in ([-1, -2.0, 0, -3, 0], np.array([-1, -2, 0, -3, 0], dtype=np.float32)):
        assert batch().with_stream("old", given).streams["old"].tolist() == [-1.0, -2.0, 0.0, -3.0, 0.0]
    words = ("stream 'versions' must be whole numbers", "torch.float32")
    refused(pg.DataError, lambda: batch().with_stream("versions", [1.5] * 5), *words)


HUGE = np.array([[2**63, 1, 1], [1, 1, 1]], dtype=np.uint64)
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"tokens": [[1.7, 2, 3], [4, 5, 0]]}, ("tokens must be an integer tensor", "torch.float32")),
    ({"tokens": np.ones((2, 3))}, ("tokens must be an integer tensor", "torch.float64")),
    ({"tokens": [[True, False, True]] * 2}, ("tokens must be an integer tensor", "torch.bool")),
    ({"tokens": [[1, True, 3], [4, 5, 0]]}, ("tokens mixes bools and numbers", "tokens[0][1]")),
    ({"tokens": [[1, 2, 3], [4, 5]]}, ("tokens has rows of different lengths", "[3]", "[2]", "tokens[1]")),
    ({"tokens": [[1, 2, 3], 4]}, ("tokens mixes rows and single numbers", "tokens[1]")),
    ({"tokens": [[1, 2, 3], [4, 5, 2**63]]}, ("tokens holds a number beyond int64", "tokens[1]")),
    ({"tokens": [["1", "2", "3"]] * 2}, ("tokens holds something that is no number", "str '1'", "tokens[0][0]")),
    ({"tokens": b"abc"}, ("tokens is not a tensor", "bytes")),
    ({"tokens": [b"abc", b"def"]}, ("tokens holds something that is no number", "bytes")),
    ({"tokens": torch.ones(2, 3, dtype=torch.int64, device="meta")}, ("tokens is a meta tensor",)),
    ({"tokens": torch.ones(2, 3, dtype=torch.int64).to_sparse()}, ("tokens is not a dense tensor", "sparse_coo")),
    ({"lengths": np.array([3.0, 2.0])}, ("lengths must be whole numbers", "torch.float64")),
    ({"action_mask": [[0.0, 1.0, 1.0]] * 2}, ("action_mask must be bool", "torch.float32")),
    ({"action_mask": [[0, 2, 1]] * 2}, ("action_mask must be bool", "torch.int64")),
    ({"advantages": [True, False]}, ("advantages must be a float tensor", "torch.bool")),
    ({"advantages": np.array([1, 2])}, ("advantages must be a float tensor", "torch.int64")),
    ({"advantages": [1.0, None]}, ("advantages holds something that is no number", "NoneType", "advantages[1]")),
    ({"advantages": [1.0, 1e39]}, ("advantages holds a number that torch.float32 cannot", "1e+39", "advantages[1]")),
    ({"advantages": [1.0, 2**24 + 1]}, ("advantages holds a number that torch.float32 cannot", "16777217")),
    ({"advantages": np.array([1.0, 2.0], dtype=object)}, ("advantages is an array of an unusable type", "object")),
    ({"advantages": np.array(["1", "2"])}, ("advantages is an array of an unusable type", "<U1")),
    ({"advantages": np.ma.masked_array([1.0, 2.0], [0, 1])}, ("advantages is a masked array", ".filled")),
    ({"advantages": np.array([1.0, 2.0], dtype=np.float16)}, ("advantages is torch.float16", "allow_low_precision")),
    ({"advantages": np.array([1.0, 2.0], dtype=complex)}, ("advantages is an array of an unusable type", "complex")),
    ({"advantages": torch.ones(2).to_sparse()}, ("advantages is not a dense tensor",)),
    ({"advantages": {"a": 1}}, ("advantages is not a tensor", "dict")),
    ({"top_k": HUGE}, ("top_k holds a number beyond int64",)),
    ({"top_k": 4.0}, ("top_k must be whole numbers", "torch.float32")),
    ({"versions": True}, ("versions must be whole numbers", "torch.bool")),
    ({"temperature": "0.7"}, ("temperature is not a tensor", "str")),
    ({"temperature": True}, ("temperature must be a float tensor", "torch.bool")),
    ({"kept_sets": [[[1], [2], [1.5]], [[1], [2], [3]]]}, ("kept_sets must be whole numbers", "torch.float32")),
    ({"prompt_ids": "ab"}, ("prompt_ids is no list", "str")),
    ({"prompt_ids": 3}, ("prompt_ids is no list", "int")),
    ({"prompt_ids": torch.tensor(3)}, ("prompt_ids is no list",)),
    ({"prompt_ids": np.array([1.0, 2.0])}, ("prompt_ids must be int64 or str", "float")),
    ({"prompt_ids": [np.bool_(True), 1]}, ("prompt_ids must be int64 or str",)),
    ({"terminations": "ab"}, ("terminations is no list", "str")),
    ({"masks": {3: [[1, 0, 1]] * 2}}, ("a name in masks is no text",)),
    ({"allow_low_precision": ["old"]}, ("allow_low_precision names 'old'", "old_logprobs")),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_would_be_read_as_something_else_is_refused_by_name(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(pg.DataError, lambda: batch(**changes), *words)


def test_what_a_constructor_lacks_is_an_error_of_its_own() -> None:
    """A TypeError of Python's would be raised on one rank alone, and the others would wait."""
    bare: Any = {key: value for key, value in FORM.items() if key != "action_mask"}
    refused(pg.DataError, lambda: pg.TokenBatch.from_padded(**bare), "from_padded has no action_mask")
    flat: Any = {"tokens": [1], "action_mask": [False]}
    refused(pg.DataError, lambda: pg.TokenBatch.from_packed(**flat), "from_packed has no lengths")
    refused(pg.DataError, lambda: pg.TokenBatch.from_packed(**flat, attention_mask=[1]), "no argument 'attention_mask'")


def test_numpy_is_not_needed_to_import_the_package() -> None:
    code = "import sys; sys.modules['numpy'] = None; import megatron_pgloss as pg; " + (
        "print(pg.TokenBatch.from_packed(tokens=[1, 2], lengths=[2], action_mask=[False, True]).targets_T.tolist())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "[2, 0]\n", done.stderr


def test_nan_is_a_float_like_any_other_where_nobody_reads() -> None:
    made = batch(old_logprobs=[[NAN, -1.0, -2.0], [NAN, -3.0, NAN]])
    assert made.streams["old"].tolist() == [-1.0, -2.0, 0.0, -3.0, 0.0]
