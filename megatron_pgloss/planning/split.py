"""How rows become micro-batches: so many rows each, so many micro-batches, or a token budget.

The cut is a pure function of the rows' lengths, so all stages of a pipeline make the same micro-batches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.spec.words import closed


@closed
@dataclass(frozen=True, slots=True)
class Split:
    """How rows become micro-batches: exactly one of ``sequences``, ``microbatches`` and ``max_tokens``.

    Args:
        sequences: rows per micro-batch, padded, in batch order.
        microbatches: number of micro-batches per rank, padded rows spread evenly.
        max_tokens: token budget; rows are packed into one row of tokens (thd). Only for models that take
            ``cu_seqlens``.
        multiple_of: with ``max_tokens``, every sequence is padded to a multiple of this.

    Raises:
        SpecError: none or several given, or not positive.
    """

    sequences: int | None = None
    microbatches: int | None = None
    max_tokens: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        given = [value for value in (self.sequences, self.microbatches, self.max_tokens) if value is not None]
        whole = all(type(value) is int and value > 0 for value in (*given, self.multiple_of))
        if len(given) != 1 or not whole:
            raise SpecError(
                "Split takes exactly one of sequences, microbatches and max_tokens",
                expected="a positive integer",
                got=str(self),
                fix="for example Split(sequences=4)",
            )
        if self.multiple_of != 1 and self.max_tokens is None:
            raise SpecError("multiple_of goes with max_tokens", got=str(self))

    @property
    def packed(self) -> bool:
        """Whether sequences share a row."""
        return self.max_tokens is not None


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def legal_count(count: int, group: int, stages: int) -> int:
    """The smallest number of micro-batches >= ``count`` that an interleaved schedule accepts.

    Megatron-Core runs micro-batches in groups of ``group`` (at least ``stages``, the pipeline size): there must be a
    whole group, and a last, partial one must still fill the pipeline.
    """
    count = max(count, group)
    rest = count % group
    return count + stages - rest if 0 < rest < stages else count


def bins(split: Split, lengths: list[int], multiple: int = 1) -> list[list[int]]:
    """Rows of every micro-batch, at least one row each.

    Args:
        split: how to cut.
        lengths: length of every row.
        multiple: each packed sequence is padded to a multiple of this.

    Raises:
        DataError: a sequence is longer than the token budget.
    """
    rows = list(range(len(lengths)))
    if split.sequences is not None:
        return [rows[i : i + split.sequences] for i in range(0, len(rows), split.sequences)]
    if split.microbatches is not None:
        return _evenly(rows, min(split.microbatches, len(rows)))
    budget = split.max_tokens or 0
    padded = [round_up(length, multiple) for length in lengths]
    out: list[list[int]] = []
    room: list[int] = []
    # First fit, longest first; ties in row order. Zero-length rows are padding and are not packed.
    for row in sorted((row for row in rows if lengths[row]), key=lambda row: (-padded[row], row)):
        if padded[row] > budget:
            raise DataError(
                "a sequence is longer than the token budget",
                expected=f"<= {budget} (padded to {multiple})",
                got=padded[row],
                where=f"row {row}",
                fix="raise Split(max_tokens=...)",
            )
        at = next((i for i, free in enumerate(room) if free >= padded[row]), None)
        if at is None:
            out.append([])
            room.append(budget)
            at = len(out) - 1
        out[at].append(row)
        room[at] -= padded[row]
    return [sorted(part) for part in out]


def refine(parts: list[list[int]], count: int, packed: bool) -> list[list[int]]:
    """Split micro-batches further until there are ``count``; empty ones are added only where rows run out."""
    if len(parts) < count and not packed:
        rows = [row for part in parts for row in part]
        parts = _evenly(rows, min(count, len(rows)))
    parts = [list(part) for part in parts]
    while len(parts) < count and any(len(part) > 1 for part in parts):
        at = max(range(len(parts)), key=lambda i: (len(parts[i]), -i))
        part = parts[at]
        parts[at : at + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts + [[] for _ in range(count - len(parts))]


def _evenly(rows: list[int], count: int) -> list[list[int]]:
    if count == 0:
        return []
    size, extra = divmod(len(rows), count)
    edges = [i * size + min(i, extra) for i in range(count + 1)]
    return [rows[a:b] for a, b in itertools.pairwise(edges)]
