"""The keywords of the constructors: the streams of the table, keywords about rows, and tensors that the caller names.

`B` rows, `L` width, `T` tokens of all rows end to end.
"""

# No `from __future__ import annotations` here: which keywords are required is read from the annotations.
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Required, TypeVar

from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts.arrays import Array
from megatron_pgloss.rollouts.place import Id
from megatron_pgloss.rollouts.streams import Flags, Floats, Ids, StreamArguments, Wholes
from megatron_pgloss.spec.words import nearest

WideFloats = Sequence[Sequence[Sequence[float]]]


class BatchArguments(StreamArguments, total=False):
    """Keywords of both constructors."""

    streams: Mapping[str, Floats | Ids | WideFloats] | None
    """Constants of the user's own by name: float [B, L], read as ``x.stream(name)`` and as bounds; or several numbers
    per token, [B, L, k], read as ``x.wide(name)``: token ids, -1 where a token has fewer than k, or one float for each
    of these ids."""
    weights: Mapping[str, Floats] | None
    """Component name to float [B, L]: the user's weights."""
    masks: Mapping[str, Flags] | None
    """Name to bool [B, L]: the user's masks."""
    prompt_ids: Sequence[Id] | Tensor | Array | None
    """[B]: which task each row is an attempt at."""
    episode_ids: Sequence[Id] | Tensor | Array | None
    """[B]: which rollout of its prompt each row is a part of."""
    sample_ids: Sequence[Id] | Tensor | Array | None
    """[B]: the id of each row, its name in errors and its key where rows are dealt or drawn by a seed."""
    terminations: Sequence[str] | None
    """[B] of `Termination` or its values: how each rollout ended."""
    allow_low_precision: Sequence[str]
    """Keywords of float streams that may be bf16 or fp16; they are kept as float32."""


class PaddedArguments(BatchArguments, total=False):
    """Keywords of `TokenBatch.from_padded`."""

    lengths: Wholes | None
    """[B]: tokens of each row, where rows are padded on the right; or"""
    attention_mask: Flags | None
    """bool [B, L]: the tokens of each row, in one unbroken run."""


class PackedArguments(BatchArguments, total=False):
    """Keywords of `TokenBatch.from_packed`."""

    lengths: Required[Wholes]
    """[S]: tokens of each row, summing to T."""


def check_names(given: Mapping[str, Any], of: Any, caller: str) -> None:
    """Refuse a keyword that a constructor does not have, and a required one that is not given.

    Python itself would raise a TypeError, and on one rank alone.

    Args:
        of: `PaddedArguments` or `PackedArguments`.
        caller: the constructor's name.
    """
    known = of.__required_keys__ | of.__optional_keys__
    for name in given:
        if name not in known:
            raise DataError(
                f"no argument {name!r}",
                expected=", ".join(_ordered(of)),
                fix=nearest(name, _ordered(of)) or f"remove {name!r}",
            )
    for name in _ordered(of):
        if name in of.__required_keys__ and name not in given:
            raise DataError(f"{caller} has no {name}", expected=f"{caller}({name}=...)")


Method = TypeVar("Method", bound=Callable[..., Any])


def takes(of: Any) -> Callable[[Method], Method]:
    """Show the keywords of ``of`` in the signature that is seen at run time (``help``, notebooks)."""

    def mark(method: Method) -> Method:
        cls = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if name in of.__required_keys__ else None,
            )
            for name in _ordered(of)
        ]  # fmt: skip
        method.__signature__ = inspect.Signature([cls, *keywords])  # type: ignore[attr-defined]
        return method

    return mark


def _ordered(of: Any) -> list[str]:
    """The keywords of ``of``: tokens and actions, those that say where rows lie, then the rest in the table's order."""
    names = list(of.__annotations__)
    own = [name for name in ("lengths", "attention_mask") if name in names]
    rest = [name for name in names if name not in own]
    return [*rest[:2], *own, *rest[2:]]
