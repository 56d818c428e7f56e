"""How errors name a row and a token of it. `S` rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Id = int | str
"""The id of a row, an episode or a prompt."""
_LONGEST = 64
"""How many characters of an id or a stream's name errors show, so that the place fits into a line with the fault."""


def row_name(row: int, sample_ids: Sequence[Id] | None) -> str:
    """``sample 'id'``, or ``row 3`` where samples have no ids."""
    return f"row {row}" if sample_ids is None else f"sample {short(sample_ids[row])}"


def short(name: object) -> str:
    """``name`` as it is written in Python; a very long one is cut in the middle, and its length added."""
    text = repr(name)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 4 :]} ({len(str(name))} characters)"


def token_name(
    cu_S1: Tensor, index: int, sample_ids: Sequence[Id] | None, stream: str | None = None, *, predicted: bool = False
) -> str:
    """``sample 'id', token 3, stream 'old'``: the token's place in its row, as the caller counts it.

    Args:
        cu_S1: int64 [S + 1]: where each row begins.
        index: index of the token in the rows laid end to end.
        stream: the name of the stream that was looked at.
        predicted: whether the token predicted at ``index`` is meant, as in target-aligned streams, instead of the one
            read there.
    """
    row = int(torch.searchsorted(cu_S1, index, right=True)) - 1
    name = f"{row_name(row, sample_ids)}, token {index - int(cu_S1[row]) + int(predicted)}"
    return name if stream is None else f"{name}, stream {short(stream)}"
