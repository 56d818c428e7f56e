"""How the caller laid out rows, and how they are put end to end. `B` rows, `L` width, `T` tokens end to end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import arrays, checks


class Frame:
    """Rows of a padded matrix, or rows end to end.

    Args:
        index_T: int64 [T]: where each token lies in the caller's flattened form.
        shape: shape of the caller's form: [B, L], or [T].
        lengths_S: int64 [S]: the lengths of the rows.
        offset_S: int64 [S]: the column where each row begins.
    """

    def __init__(self, index_T: Tensor, shape: tuple[int, ...], lengths_S: Tensor, offset_S: Tensor) -> None:
        self.index_T, self.shape, self.lengths_S, self.offset_S = index_T, shape, lengths_S, offset_S
        self.rows = lengths_S.numel()
        self.cu_S1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)])
        longest = int(lengths_S.max()) if self.rows else 0
        self.width = shape[1] if len(shape) == 2 else longest

    @classmethod
    def padded(cls, shape: tuple[int, int], lengths: Any, attention_mask: Any) -> Frame:
        """Rows of a matrix, from their lengths or from a mask of their tokens."""
        rows, width = shape
        if (lengths is None) == (attention_mask is None):
            raise DataError("give either lengths or attention_mask", expected="one of the two")
        if attention_mask is None:
            lengths_S, offset_S = checks.lengths(lengths, rows), torch.zeros(rows, dtype=torch.int64)
            if rows and int(lengths_S.max()) > width:
                raise DataError(
                    "a length is larger than the width of tokens",
                    expected=f"<= {width}",
                    got=int(lengths_S.max()),
                    where=f"row {int(lengths_S.argmax())}",
                )
        else:
            lengths_S, offset_S = checks.contiguous(attention_mask, (rows, width))
        start_S = torch.arange(rows) * width + offset_S - (lengths_S.cumsum(0) - lengths_S)
        index_T = torch.arange(int(lengths_S.sum())) + torch.repeat_interleave(start_S, lengths_S)
        return cls(index_T, (rows, width), lengths_S, offset_S)

    @classmethod
    def packed(cls, lengths_S: Tensor) -> Frame:
        """Rows end to end."""
        total = int(lengths_S.sum())
        return cls(torch.arange(total), (total,), lengths_S, torch.zeros_like(lengths_S))

    def take(
        self, name: str, given: Any, *, floats: torch.dtype | None = None, per_row: bool = False, wide: bool = False
    ) -> Tensor:
        """``given`` in token order, [T]; or [T, k] where it has several numbers per token.

        Args:
            name: the argument, for errors.
            floats: the dtype that Python's numbers get, see `arrays.tensor`.
            per_row: whether it may be one number per row, or one for all.
            wide: whether it may have several numbers per token.

        Raises:
            DataError: it is no tensor, array or list, or has another shape.
        """
        value = arrays.tensor(name, given, floats)
        shape = tuple(value.shape)
        if per_row and shape == ():
            return value.expand(int(self.cu_S1[-1])).clone()
        if per_row and shape == (self.rows,):
            if (self.rows,) == self.shape and bool((self.lengths_S != 1).any()):
                raise DataError(
                    f"{name} can be read as one number a row and as one a token",
                    got=f"{self.rows} rows and as many tokens",
                    fix="leave out rows of length 0, which are padding",
                )
            return torch.repeat_interleave(value, self.lengths_S)
        if wide and len(shape) == len(self.shape) + 1 and shape[:-1] == self.shape:
            return value.reshape(-1, shape[-1])[self.index_T] if value.numel() else value.reshape(len(self.index_T), -1)
        if shape != self.shape:
            options = f"{list(self.shape)}" + (f" or [{self.rows}]" if per_row else "")
            options += f" or {[*self.shape, 'k']}" if wide else ""
            raise DataError(f"{name} has the wrong shape", expected=options, got=list(shape))
        return value.reshape(-1)[self.index_T]

    def check_inside(self, name: str, given: Any) -> None:
        """Refuse a mask that marks padding: those marks would be lost silently."""
        marked_N = checks.boolean(name, arrays.tensor(name, given)).reshape(-1)
        outside_N = marked_N.index_fill(0, self.index_T, False)
        if bool(outside_N.any()):
            at = int(outside_N.to(torch.int8).argmax())
            raise DataError(
                f"{name} is true outside of its row",
                expected="false where attention_mask is false, and from lengths on",
                got=f"{int(outside_N.sum())} such tokens",
                where=f"row {at // self.width}, column {at % self.width}",
                fix="count the row's last token in lengths or attention_mask (an end token is no padding, also where "
                "they share an id), or unmark it",
            )
