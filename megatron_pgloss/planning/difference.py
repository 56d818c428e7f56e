"""What two ranks disagree on, field by field: looked up where digests differ, and only then."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_pgloss.planning.agreement import Ranks, digest, of_words, to_words

_LONGEST = 120
"""Characters of a value that are sent."""
_SHOWN = 6
"""Fields that an error lists with their values."""
_NAMED = 12
"""Fields of which it gives the names alone:"""
CONTENT = "content "
"""those whose value's text begins so, with a digest behind."""
Fields = dict[str, str]
"""Path of a field (``components[0].surrogate.high``) to its value as text."""


def fields_of(value: Any, name: str = "") -> Fields:
    """The leaves of nested mappings, sequences and dataclasses by their paths, as text of at most `_LONGEST` characters
    (of a longer one the beginning and a digest).
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping) and value:
        parts = [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        parts = [(f"{name}[{place}]", item) for place, item in enumerate(value)]
    else:
        text = repr(value)
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST // 2]}... ({len(text)} characters, digest {digest(text.encode()):x})"
        return {name: text}
    return {path: text for key, item in parts for path, text in fields_of(item, key).items()}


def exchanged(mine: Fields, one: int, other: int, ranks: Ranks) -> tuple[Fields, Fields]:
    """The fields of ranks ``one`` and ``other``, on every rank. A collective: two sums over the world, of two numbers
    and of two texts.
    """
    text = json.dumps(mine).encode()
    places = [place for place, rank in enumerate((one, other)) if rank == ranks.world_rank]
    sizes = torch.zeros(2, dtype=torch.int64)
    sizes[places] = len(text)
    sizes = ranks.total(sizes, ranks.world)
    words = torch.zeros(2, -(-int(sizes.max()) // 8), dtype=torch.int64)
    for place in places:
        words[place] = to_words(text, words.size(1))
    words = ranks.total(words, ranks.world)
    first, second = (json.loads(of_words(row, int(size))) for row, size in zip(words, sizes, strict=True))
    return first, second


def said(first: Fields, second: Fields, one: int, other: int) -> str:
    """The fields in which two ranks differ, with both values, in words."""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    hashed = [name for name in names if CONTENT in first.get(name, "") and CONTENT in second.get(name, "")]
    shown = [name for name in names if name not in hashed]
    parts = [
        f"{name} = {first.get(name, '(absent)')} on rank {one} and {second.get(name, '(absent)')} on rank {other}"
        for name in shown[:_SHOWN]
    ]
    if len(shown) > _SHOWN:
        parts.append(f"{len(shown) - _SHOWN} more fields")
    if hashed:
        more = f", {len(hashed) - _NAMED} more" if len(hashed) > _NAMED else ""
        parts.append(f"other contents of {', '.join(hashed[:_NAMED])}{more}")
    return ", ".join(parts)
