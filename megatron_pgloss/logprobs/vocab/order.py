"""Logits with any leading dimensions seen as rows, without a copy.

Shapes: `T` rows (tokens), `V` vocabulary columns. Rows are numbered in the order in which they
lie in memory, so that a transposed view of contiguous logits is still one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How the leading dimensions of the logits become one row number, and back."""

    shape: tuple[int, ...]
    """Sizes of the leading dimensions, in the caller's order."""

    dims: tuple[int, ...]
    """Indices of the leading dimensions, outermost in memory first."""

    @staticmethod
    def of(logits: Tensor) -> RowOrder:
        """Order the leading dimensions of ``logits`` [..., V] by falling stride."""
        strides = logits.stride()
        dims = sorted(range(logits.dim() - 1), key=lambda d: -strides[d])
        return RowOrder(tuple(logits.shape[:-1]), tuple(dims))

    @property
    def rows(self) -> int:
        """T: the number of rows."""
        return math.prod(self.shape)

    def flatten(self, per_token: Tensor) -> Tensor:
        """[..., *rest] to [T, *rest]; a view where the strides allow it."""
        rest = range(len(self.dims), per_token.dim())
        return per_token.permute((*self.dims, *rest)).reshape(self.rows, *per_token.shape[len(self.dims) :])

    def flatten_some(self, per_token: Tensor | None) -> Tensor | None:
        """`flatten`, or None for None."""
        return None if per_token is None else self.flatten(per_token)

    def unflatten(self, rows: Tensor) -> Tensor:
        """[T, *rest] to [..., *rest]: always a view."""
        lead = [self.shape[d] for d in self.dims]
        back = [self.dims.index(d) for d in range(len(self.dims))]
        rest = range(len(lead), len(lead) + rows.dim() - 1)
        return rows.view([*lead, *rows.shape[1:]]).permute([*back, *rest])

    def output(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, *rest] as a new contiguous [..., *rest]: memory that callers may write to."""
        out = torch.empty((*self.shape, *rows.shape[1:]), dtype=dtype, device=rows.device)
        return out.copy_(self.unflatten(rows))

    def blocks(self, logits: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first row, [rows, V] view): one block where the strides allow it, else several."""
        if self.rows:
            yield from _blocks(logits.permute(*self.dims, -1), 0)

    def chunks(self, logits: Tensor, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of row numbers, [rows, V] view) for at most ``step`` rows at a time, in order."""
        for first, z_RV in self.blocks(logits):
            for start in range(0, z_RV.size(0), step):
                part_RV = z_RV[start : start + step]
                yield slice(first + start, first + start + part_RV.size(0)), part_RV


def _blocks(z: Tensor, first: int) -> Iterator[tuple[int, Tensor]]:
    while z.dim() > 2 and z.size(0) == 1:
        z = z[0]
    if z.dim() < 3:
        yield first, z if z.dim() == 2 else z[None]
        return
    sizes, strides = zip(
        *((n, s) for n, s in zip(z.shape[:-1], z.stride()[:-1], strict=True) if n > 1),
        strict=True,
    )
    if all(strides[i] == sizes[i + 1] * strides[i + 1] for i in range(len(sizes) - 1)):
        yield first, z.view(-1, z.size(-1))
        return
    step = math.prod(z.shape[1:-1])
    for i, part in enumerate(z.unbind(0)):
        yield from _blocks(part, first + i * step)
