"""Callers' arguments, checked and brought to one form. `S` rows, `T` tokens of all rows end to end, target-aligned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import Id, Termination, TokenBatch, arrays, concatenate

Batches = TypeVar("Batches", bound=TokenBatch | Sequence[TokenBatch])
Key = tuple[Any, ...]
"""Key of an episode: its prompt id and its own id, so that episode 0 of two prompts are two episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """Prompt, episode and name of each row, and how it ended."""

    rows: int
    prompts: tuple[Id, ...] | None = None
    episodes: tuple[Id, ...] | None = None
    names: tuple[Id, ...] | None = None
    terminations: tuple[Termination, ...] | None = None

    @staticmethod
    def of(batch: TokenBatch | None) -> Ids:
        """The ids of a batch; None: there are no rows."""
        if batch is None:
            return Ids(rows=0)
        return Ids(
            rows=len(batch), prompts=batch.prompt_ids, episodes=batch.episode_ids, names=batch.sample_ids,
            terminations=batch.terminations,
        )  # fmt: skip

    def key(self, row: int, rank: int) -> Key:
        """The key of the row's episode; a row without an episode id is an episode of its own."""
        prompt = () if self.prompts is None else (self.prompts[row],)
        return (*prompt, self.episodes[row]) if self.episodes is not None else (*prompt, "row", rank, row)

    def name(self, row: int) -> str:
        """The row's name in errors."""
        return f"sample {self.names[row]!r}" if self.names is not None else f"row {row}"

    def state(self, row: int) -> Termination | None:
        """How the row ended; None where it is unknown."""
        return None if self.terminations is None else self.terminations[row]


def merge(batches: TokenBatch | Sequence[TokenBatch]) -> TokenBatch | None:
    """All rows as one batch (None: no batch). An error that a batch holds (`TokenBatch.fault`) is raised here."""
    if isinstance(batches, TokenBatch):
        if batches.fault is not None:
            raise batches.fault
        return batches
    if not isinstance(batches, Sequence) or not all(isinstance(item, TokenBatch) for item in batches):
        raise DataError("not a TokenBatch or a list of them", got=type(batches).__name__)
    return concatenate(batches)


def deal(batches: Batches, streams: Mapping[str, Tensor]) -> Batches:
    """Set streams ``[T]`` of the merged batch on the caller's batches, each batch its part."""
    if isinstance(batches, TokenBatch):
        return cast(Batches, replace(batches, streams={**batches.streams, **streams}))
    given = cast(Sequence[TokenBatch], batches)
    sizes = [batch.tokens_T.numel() for batch in given]
    cut = {name: stream_T.split(sizes) for name, stream_T in streams.items()}
    return cast(
        Batches,
        [
            replace(batch, streams={**batch.streams, **{name: parts[i] for name, parts in cut.items()}})
            for i, batch in enumerate(given)
        ],
    )


def numbers(name: str, given: Any, rows: int) -> tuple[Tensor, torch.dtype]:
    """One number per row as float64 [rows], and the dtype in which results are returned.

    Args:
        name: the argument's name, for errors.
        given: a tensor or list of float, int or bool, or a list of such tensors, one per batch.
        rows: how many rows there are.
    """
    value = _joined(name, given)
    if value.is_complex() or value.dtype in (torch.float16, torch.bfloat16):
        raise DataError(f"{name} has the wrong dtype", expected="float32, float64 or whole numbers", got=value.dtype)
    if tuple(value.shape) != (rows,) and not (rows == 0 and value.numel() == 0):
        raise DataError(f"{name} has the wrong shape", expected=f"[{rows}], one per row", got=list(value.shape))
    kind = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value.to(torch.float64).reshape(rows), kind


def _joined(name: str, given: Any) -> Tensor:
    """A dense CPU tensor of what the caller gave: numbers, or a list of tensors, one a batch."""
    if isinstance(given, Sequence) and given and all(isinstance(item, Tensor) and item.dim() for item in given):
        return torch.cat([arrays.tensor(name, item).reshape(-1) for item in given])
    return arrays.tensor(name, given)


def real(name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> float:
    """One number of Python's own, finite and within ``[low, high]``, or ``(low, high]`` where it lies ``above``.

    Raises:
        DataError: it is none, or lies outside.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise DataError(f"{name} must be one finite number", expected="float", got=repr(value)[:64])
    if not low <= value <= high or (above and value == low):
        bracket = "(" if above else "["
        raise DataError(f"{name} must lie in {bracket}{low:g}, {high:g}]", got=value)
    return float(value)


def tokenwise(name: str, given: Tensor | None, batch: TokenBatch | None) -> tuple[Tensor | None, torch.dtype]:
    """A target-aligned stream as float64 [T], and its own dtype.

    Args:
        name: the argument's name, for errors.
        given: float32/64 [T]: position t is about ``targets_T[t]``.
    """
    if given is None or batch is None:
        return None, torch.float32
    if not isinstance(given, Tensor) or given.dtype not in (torch.float32, torch.float64):
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise DataError(f"{name} has the wrong dtype", expected="float32 or float64", got=kind)
    if given.shape != batch.tokens_T.shape:
        raise DataError(
            f"{name} has the wrong shape",
            expected=f"{list(batch.tokens_T.shape)}: the rows end to end, position t about the token after it",
            got=list(given.shape),
        )
    # Rewards and values are constants: nothing is differentiated through them.
    return given.detach().cpu().to(torch.float64), given.dtype


def finite(name: str, stream_T: Tensor, over_T: Tensor, batch: TokenBatch) -> None:
    """Refuse NaN and infinity at the positions ``over_T``."""
    bad_T = over_T & ~stream_T.isfinite()
    if bool(bad_T.any()):
        position = int(bad_T.to(torch.int8).argmax())
        raise DataError(
            f"{name} is not finite where it is read",
            got=f"{float(stream_T[position])} and {int(bad_T.sum()) - 1} more",
            where=batch.where(position),
        )


def voting(given: Any, rows: int) -> Tensor:
    """The caller's voters, bool [rows]; by default all rows vote."""
    if given is None:
        return torch.ones(rows, dtype=torch.bool)
    value = _joined("voters", given)
    if value.dtype != torch.bool or tuple(value.shape) != (rows,):
        raise DataError(
            "voters has the wrong type",
            expected=f"bool [{rows}], one per row",
            got=f"{value.dtype} {list(value.shape)}",
        )
    return value
