"""Several batches as one. `T` tokens of all rows end to end, `S` rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts.batch import ROW_TUPLES, STREAM_DICTS, TokenBatch


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch | None:
    """One batch of all rows in order; None for no batches.

    Raises:
        DataError: a stream, mask, weight or id is given by some batches and absent in others.
    """
    batches = [batch for batch in batches if batch.fault is not None or len(batch)]
    for batch in batches:
        if batch.fault is not None:
            raise batch.fault
    if not batches:
        return None
    if len(batches) == 1:
        return batches[0]
    sizes = torch.tensor([0] + [int(batch.cu_S1[-1]) for batch in batches]).cumsum(0).tolist()
    starts = [batch.cu_S1[1:] + base for batch, base in zip(batches, sizes, strict=False)]
    words = tuple(dict.fromkeys(word for batch in batches for word in batch.words))
    changes: dict[str, Any] = {
        "cu_S1": torch.cat([torch.zeros(1, dtype=torch.int64), *starts]),
        "records_S": sum((batch.records_S for batch in batches), ()),
        "width": max(batch.width for batch in batches),
        "words": words,
    }
    for item in fields(batches[0]):
        values = [getattr(batch, item.name) for batch in batches]
        if item.name == "labels":
            values = [_reworded(batch, words) for batch in batches]
        if item.name in changes:
            continue
        if item.name.endswith("_T") or item.name in ("offset_S", "first_action_S"):
            changes[item.name] = torch.cat(values)
        elif item.name in STREAM_DICTS:
            names = sorted({name for value in values for name in value})
            if item.name == "labels":  # for people to read: those that every batch has
                names = [name for name in names if all(name in value for value in values)]
            for name in names:
                _all_or_none(f"{item.name} {name!r}", [name in value for value in values])
            changes[item.name] = {
                name: _joined(f"{item.name} {name!r}", [value[name] for value in values]) for name in names
            }
        elif item.name in ROW_TUPLES:
            _all_or_none(item.name, [value is not None for value in values])
            changes[item.name] = None if values[0] is None else sum(values, ())
    return replace(batches[0], **changes)


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    """The parts end to end; wide ones filled up to the widest, ids with -1."""
    kinds = {(part.dim(), part.is_floating_point()) for part in parts}
    if len(kinds) > 1:
        raise DataError(
            f"{name} is of another kind in some batches of this step than in others",
            expected="one number a token, ids, or floats beside ids",
            got=", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)[:64],
            fix="give it alike in every batch",
        )
    if parts[0].dim() > 1:
        width = max(part.size(1) for part in parts)
        fill = 0 if parts[0].is_floating_point() else -1
        parts = [torch.nn.functional.pad(part, (0, width - part.size(1)), value=fill) for part in parts]
    return torch.cat(parts)


def _reworded(batch: TokenBatch, words: tuple[str, ...]) -> dict[str, Tensor]:
    place = {word: i for i, word in enumerate(words)}
    table = torch.tensor([place[word] for word in batch.words], dtype=torch.int32)
    return {name: table[codes_T.long()] for name, codes_T in batch.labels.items()}


def _all_or_none(name: str, present: list[bool]) -> None:
    if any(present) and not all(present):
        raise DataError(
            f"{name} is given by some batches of this step and absent in others",
            expected="all or none",
            got=f"absent in batch {present.index(False)} of {len(present)}",
            fix="give it for every batch",
        )
