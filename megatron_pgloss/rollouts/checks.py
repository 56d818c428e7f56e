"""Checks of the shapes, dtypes and padding of what the caller hands over. Values are checked by the plan, which knows
the spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import arrays
from megatron_pgloss.rollouts.streams import StreamSpec


def stream(row: StreamSpec, value: Tensor, low: Sequence[str] = (), name: str | None = None) -> Tensor:
    """A stream in the dtype that the table gives it.

    Args:
        low: keywords whose streams may come in low precision.
        name: the name of the stream in errors; by default its keyword.
    """
    name = row.argument if name is None else name
    if row.dtype == "flag":
        return boolean(name, value)
    if row.dtype == "ids":
        return ids(name, value)
    return whole(name, value) if row.dtype == "whole" else floating(name, value, low)


def tokens(value: Any, shape: tuple[int | None, ...]) -> Tensor:
    """int64 of the given shape (None: any extent)."""
    found = arrays.tensor("tokens", value)
    if found.dtype not in (torch.int64, torch.int32):
        raise DataError(
            "tokens must be an integer tensor", expected="torch.int64", got=found.dtype,
            fix="give the sampler's token ids as whole numbers",
        )  # fmt: skip
    fits = found.dim() == len(shape) and all(w is None or w == g for w, g in zip(shape, found.shape, strict=True))
    if not fits:
        raise DataError(
            "tokens has the wrong shape",
            expected=["any" if extent is None else extent for extent in shape],
            got=list(found.shape),
        )
    return found.to(torch.int64)


def lengths(value: Any, rows: int | None) -> Tensor:
    """int64 [S] of non-negative lengths."""
    given = arrays.tensor("lengths", value)
    # An empty list has no dtype that could be judged.
    lengths_S = whole("lengths", given) if given.numel() else given.to(torch.int64)
    if lengths_S.dim() != 1 or (rows is not None and lengths_S.numel() != rows):
        raise DataError(
            "lengths has the wrong shape", expected=f"[{'S' if rows is None else rows}]", got=list(lengths_S.shape)
        )
    if lengths_S.numel() and int(lengths_S.min()) < 0:
        raise DataError("a length is negative", got=int(lengths_S.min()), where=f"row {int(lengths_S.argmin())}")
    return lengths_S


def contiguous(attention_mask: Any, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Lengths and offsets of the one unbroken run of every row."""
    mask_BL = boolean("attention_mask", arrays.tensor("attention_mask", attention_mask))
    if tuple(mask_BL.shape) != shape:
        raise DataError("attention_mask has the wrong shape", expected=list(shape), got=list(mask_BL.shape))
    lengths_S = mask_BL.sum(1)
    edges_BL = mask_BL.to(torch.int8).diff(dim=1, prepend=torch.zeros(shape[0], 1, dtype=torch.int8))
    runs_S = (edges_BL == 1).sum(1)
    if bool((runs_S > 1).any()):
        row = int(runs_S.argmax())
        raise DataError(
            "attention_mask has holes",
            expected="one unbroken run per row",
            got=f"{int(runs_S[row])} runs",
            where=f"row {row}",
            fix="pad on one side only; several sequences in one row go through from_packed",
        )
    # The run begins at the column whose number is that of the positions before it.
    return lengths_S, (mask_BL.cumsum(1) == 0).sum(1)


def whole(name: str, value: Tensor) -> Tensor:
    """An integer tensor, as int64."""
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        raise DataError(f"{name} must be whole numbers", expected="torch.int64", got=value.dtype)
    found = value.to(torch.int64)
    if value.dtype == torch.uint64 and found.numel() and int(found.min()) < 0:
        raise DataError(f"{name} holds a number beyond int64", expected="torch.int64", got=value.dtype)
    return found


def boolean(name: str, value: Tensor) -> Tensor:
    """A bool tensor; 0/1 integers are read as such, anything else is refused."""
    if value.dtype == torch.bool:
        return value
    if value.is_floating_point() or value.is_complex() or bool(((value != 0) & (value != 1)).any()):
        raise DataError(f"{name} must be bool", expected="torch.bool", got=value.dtype, fix=f"{name}.bool()")
    return value.bool()


def floating(name: str, value: Tensor, low: Sequence[str] = ()) -> Tensor:
    """A float32 or float64 tensor; lower precision is accepted only where it is allowed by name, and becomes
    float32.
    """
    if value.dtype in (torch.float32, torch.float64):
        return value
    if not value.is_floating_point():
        raise DataError(f"{name} must be a float tensor", expected="float32 or float64", got=value.dtype)
    if name in low:
        return value.float()
    raise DataError(
        f"{name} is {value.dtype}: rounding log-probs to it makes an error of 0.5 to 5 percent in ratios",
        expected="float32 or float64",
        got=value.dtype,
        fix=f"keep it in float32 where it is made, or allow_low_precision=({name!r},)",
    )


def ids(name: str, value: Tensor) -> Tensor:
    """int64 [T, k] of token ids, -1 where a token has fewer than k."""
    if value.dim() != 2:
        raise DataError(f"{name} has one number a token", expected="int64 [..., k]", got=value.dtype)
    found = whole(name, value)
    if found.numel() and int(found.min()) < -1:
        raise DataError(f"{name} holds a negative id", expected="0 or more, or -1 for none", got=int(found.min()))
    return found


def own_stream(name: str, value: Tensor) -> Tensor:
    """A stream of the user's own: floats, or several ids per token."""
    return ids(name, value) if value.dim() == 2 and not value.is_floating_point() else floating(name, value)
