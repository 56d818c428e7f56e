"""The row passes in plain torch, chunk by chunk. They work everywhere, and `compiled` shares their loop over chunks.

Shapes: `R` rows of one block or chunk, `V` columns of this shard that are no padding, `N` rows a
scratch buffer has room for.

exp2 is chosen for its steady cost on CPUs (torch.exp falls to a slow path where results underflow), and
exp2 with a sum of its own for accuracy (the sum inside torch.softmax loses 1e-5 at V = 150k in float32).
On CPUs plain in-place passes are also faster than the fused operators.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_pgloss.logprobs.inputs import rows_per_chunk
from megatron_pgloss.logprobs.rows.per_row import (
    FLOOR,
    LN2,
    RowFactors,
    RowMarks,
    RowSums,
    maths_dtype,
    put_one_per_row,
)


class ChunkedRows:
    """Cuts blocks of rows into chunks and leaves out rows without a gradient; a subclass runs one chunk."""

    pieces = 1

    def __init__(self, logits: Tensor, width: int, rows: int, chunk_elements: int):
        self.width = width
        self.step = max(1, min(rows_per_chunk(chunk_elements, width), rows))
        self.dense_step = self.step
        """Rows of one chunk where the chunk is worked on in place, without a copy of its rows."""
        # Finding the rows that are live costs a host sync, which is free on a CPU only.
        self.skips = logits.device.type == "cpu"

    def sums(self, z_RV: Tensor, rate_R1: Tensor | None, out: RowSums) -> None:
        """Fill ``out`` for one block. ``rate_R1`` is log2(e)/tau, None at tau = 1."""
        for rows in _chunks(z_RV.size(0), self.dense_step):
            self.chunk_sums(z_RV[rows], None if rate_R1 is None else rate_R1[rows], out.take(rows))

    def gradient(self, z_RV: Tensor, out_RV: Tensor, factors: RowFactors, marks: RowMarks) -> None:
        """Write the gradient of one block to ``out_RV``, which may be ``z_RV`` itself."""
        (self._fill_live if self.skips else self._fill_all)(z_RV, out_RV, factors, marks.live)
        # Rows whose target is no column of this shard write back what is there.
        kept_R = out_RV.gather(1, marks.column[:, None])[:, 0]
        put_one_per_row(out_RV, marks.column, marks.entry.where(marks.hit, kept_R))

    def chunk_sums(self, z_RV: Tensor, rate_R1: Tensor | None, out: RowSums) -> None:
        """Fill ``out`` for one chunk."""
        raise NotImplementedError

    def chunk_gradient(self, z_RV: Tensor, out_RV: Tensor, factors: RowFactors) -> None:
        """Write e (a + b d) of one chunk to ``out_RV``, which may be ``z_RV`` itself."""
        raise NotImplementedError

    def _fill_live(self, z_RV: Tensor, out_RV: Tensor, factors: RowFactors, live_R: Tensor) -> None:
        """Compute the gradient of live rows alone; the other rows are filled with 0."""
        live = live_R.nonzero()[:, 0]
        if live.numel() == live_R.numel():
            self._fill_dense(z_RV, out_RV, factors)
            return
        out_RV.index_fill_(0, (~live_R).nonzero()[:, 0], 0)
        for chunk in _chunks(live.numel(), self.step):
            index = live[chunk]
            run = slice(int(index[0]), int(index[-1]) + 1)
            if run.stop - run.start == index.numel():  # the rows are consecutive, so that a view will do
                self.chunk_gradient(z_RV[run], out_RV[run], factors.take(run))
            else:
                part_RV = z_RV.index_select(0, index)
                self.chunk_gradient(part_RV, part_RV, factors.take(index))
                out_RV.index_copy_(0, index, part_RV.to(out_RV.dtype))

    def _fill_all(self, z_RV: Tensor, out_RV: Tensor, factors: RowFactors, live_R: Tensor) -> None:
        """Compute the gradient of every row and zero that of dead rows, without a host sync."""
        self._fill_dense(z_RV, out_RV, factors)
        out_RV.masked_fill_(~live_R[:, None], 0)

    def _fill_dense(self, z_RV: Tensor, out_RV: Tensor, factors: RowFactors) -> None:
        for chunk in _chunks(z_RV.size(0), self.dense_step):
            self.chunk_gradient(z_RV[chunk], out_RV[chunk], factors.take(chunk))


class EagerRows(ChunkedRows):
    """Plain torch operators on two scratch buffers."""

    def __init__(self, logits: Tensor, width: int, rows: int, chunk_elements: int):
        super().__init__(logits, width, rows, chunk_elements)
        # The only memory that grows with V; allocated once per pass.
        self._flat = logits.new_empty(2, self.step * width, dtype=maths_dtype(logits))

    def chunk_sums(self, z_RV: Tensor, rate_R1: Tensor | None, out: RowSums) -> None:
        """Fill ``out`` for one chunk. A row of -inf alone has no maximum to subtract; its sums are NaN, as
        `shard_stats` expects.
        """
        d_RV, e_RV = self._scratch(z_RV)
        wide_RV = _widened(z_RV, d_RV)
        torch.amax(wide_RV, -1, out=out.peak[0])
        _shifted(wide_RV, out.peak[0, :, None], rate_R1, d_RV)
        torch.sum(torch.exp2(d_RV, out=e_RV), -1, out=out.total[0])
        if out.moment is not None:
            torch.sum(d_RV.clamp_(min=FLOOR).mul_(e_RV), -1, out=out.moment[0])

    def chunk_gradient(self, z_RV: Tensor, out_RV: Tensor, factors: RowFactors) -> None:
        """Write e (a + b d)."""
        d_RV, e_RV = self._scratch(z_RV)
        _shifted(_widened(z_RV, d_RV), factors.shift, factors.rate, d_RV)
        torch.exp2(d_RV, out=e_RV)
        if factors.b is None:
            out_RV.copy_(e_RV.mul_(factors.a))
        else:
            out_RV.copy_(e_RV.mul_(d_RV.clamp_(min=FLOOR).mul_(factors.b).add_(factors.a)))

    def _scratch(self, z_RV: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self._flat[:, : z_RV.numel()]
        return first.view(z_RV.shape), second.view(z_RV.shape)


def _widened(z_RV: Tensor, buffer_RV: Tensor) -> Tensor:
    """The logits in the dtype of the maths: themselves, or copied into ``buffer_RV``."""
    return z_RV if z_RV.dtype == buffer_RV.dtype else buffer_RV.copy_(z_RV)


def _shifted(wide_RV: Tensor, shift_R1: Tensor, rate_R1: Tensor | None, out_RV: Tensor) -> None:
    """out = (z - shift) rate."""
    torch.sub(wide_RV, shift_R1, out=out_RV).mul_(1 / LN2 if rate_R1 is None else rate_R1)


def _chunks(rows: int, step: int) -> Iterator[slice]:
    """Slices of at most ``step`` rows and of nearly equal size. For ``step`` >= 3 none has one row, unless there is
    one.
    """
    count = -(-rows // step)
    for i in range(count):
        yield slice(i * rows // count, (i + 1) * rows // count)
