# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The row passes as Triton kernels. Forward reads the logits once; backward reads and writes them once.

Shapes: `R` rows of one block, `V` columns of this shard that are no padding, `S` pieces of them.

Forward runs one program per row and piece. It goes over blocks of columns once, in the exp2 domain, and
keeps (maximum, sum, moment) in float32; pieces keep a GPU busy where rows are few. Backward is
elementwise, one program per row and block; rows without a gradient are stored as zeros and never read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pgloss.logprobs.rows.per_row import FLOOR, LN2, RowFactors, RowMarks, RowSums

FORWARD_BLOCK = 4096
BACKWARD_BLOCK = 4096
# This many programs fill a large GPU several times over; where there are fewer rows, rows are cut into pieces.
PROGRAMS = 1024
_FLOOR = tl.constexpr(FLOOR)
_INVERSE_LN2 = tl.constexpr(1 / LN2)


@triton.jit
def sums_kernel(
    z_ptr, rate_ptr, peak_ptr, total_ptr, moment_ptr,
    row_stride, column_stride, out_stride, columns, piece_columns,
    HAS_RATE: tl.constexpr, HAS_MOMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(max z, sum e, sum e d) of columns [piece x piece_columns, ...) of one row, d = (z - max) rate, e = 2^d."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    rate = tl.load(rate_ptr + row) if HAS_RATE else _INVERSE_LN2
    first = piece * piece_columns
    last = tl.minimum(first + piece_columns, columns)
    peak = -float("inf")
    total = 0.0
    moment = 0.0
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = z_ptr + row * row_stride + column.to(tl.int64) * column_stride
        # A piece ends at a block's end or at the row's: one plain bound keeps the loads 128 bits wide.
        z = tl.load(place, mask=column < columns, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        before = peak
        peak = tl.maximum(before, tl.max(z, 0))
        # While all columns so far are -inf there is no maximum to subtract, and e = 2^-inf = 0.
        centre = tl.where(peak == -float("inf"), 0.0, peak)
        d = (z - centre) * rate
        e = tl.exp2(d)
        gap = (before - centre) * rate
        shrink = tl.exp2(gap)
        if HAS_MOMENT:
            moment = shrink * (moment + tl.maximum(gap, _FLOOR) * total) + tl.sum(e * tl.maximum(d, _FLOOR), 0)
        total = total * shrink + tl.sum(e, 0)
    # A GPU's maximum ignores NaN; its sum does not.
    peak = tl.where(total == total, peak, total)
    out = piece * out_stride + row
    tl.store(peak_ptr + out, peak)
    tl.store(total_ptr + out, total)
    if HAS_MOMENT:
        tl.store(moment_ptr + out, moment)


@triton.jit
def gradient_kernel(
    z_ptr, out_ptr, a_ptr, b_ptr, shift_ptr, rate_ptr, live_ptr, column_ptr, hit_ptr, entry_ptr,
    row_stride, column_stride, out_row_stride, out_column_stride, columns, blocks,
    HAS_RATE: tl.constexpr, HAS_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """e (a + b d) of one block of one row, with the entry of the target in its column."""
    program = tl.program_id(0)  # one grid axis alone: the others are limited to 65,535 programs
    row = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    wide = column.to(tl.int64)
    to = out_ptr + row * out_row_stride + wide * out_column_stride
    if tl.load(live_ptr + row) == 0:
        tl.store(to, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=inside)
    else:
        rate = tl.load(rate_ptr + row) if HAS_RATE else _INVERSE_LN2
        place = z_ptr + row * row_stride + wide * column_stride
        z = tl.load(place, mask=inside, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        d = (z - tl.load(shift_ptr + row)) * rate
        factor = tl.load(a_ptr + row)
        if HAS_B:
            factor = factor + tl.load(b_ptr + row) * tl.maximum(d, _FLOOR)
        gradient = (tl.exp2(d) * factor).to(out_ptr.dtype.element_ty)
        if tl.load(hit_ptr + row) != 0:
            gradient = tl.where(wide == tl.load(column_ptr + row), tl.load(entry_ptr + row), gradient)
        tl.store(to, gradient, mask=inside)


class TritonRows:
    """Launches the kernels; no scratch memory."""

    def __init__(self, logits: Tensor, width: int, rows: int):
        blocks = -(-width // FORWARD_BLOCK)
        pieces = max(1, min(blocks, PROGRAMS // max(rows, 1)))
        self._piece = -(-blocks // pieces) * FORWARD_BLOCK  # whole blocks, so that loads stay aligned
        self.pieces = max(1, -(-width // self._piece))
        self._width = width

    def sums(self, z_RV: Tensor, rate_R1: Tensor | None, out: RowSums) -> None:
        """Fill ``out`` for one block."""
        with _on(z_RV):
            sums_kernel[(z_RV.size(0), self.pieces)](
                z_RV, rate_R1, out.peak, out.total, out.moment,
                z_RV.stride(0), z_RV.stride(1), out.peak.stride(0), self._width, self._piece,
                HAS_RATE=rate_R1 is not None, HAS_MOMENT=out.moment is not None,
                BLOCK=_block(self._piece if self.pieces > 1 else self._width, FORWARD_BLOCK), num_warps=8,
            )  # fmt: skip

    def gradient(self, z_RV: Tensor, out_RV: Tensor, factors: RowFactors, marks: RowMarks) -> None:
        """Write the gradient of one block to ``out_RV``, which may be ``z_RV`` itself."""
        block = _block(self._width, BACKWARD_BLOCK)
        blocks = -(-self._width // block)
        with _on(z_RV):
            gradient_kernel[(z_RV.size(0) * blocks,)](
                z_RV, out_RV, factors.a, factors.b, factors.shift, factors.rate,
                marks.live.view(torch.uint8), marks.column, marks.hit.view(torch.uint8), marks.entry,
                z_RV.stride(0), z_RV.stride(1), out_RV.stride(0), out_RV.stride(1), self._width, blocks,
                HAS_RATE=factors.rate is not None, HAS_B=factors.b is not None, BLOCK=block, num_warps=8,
            )  # fmt: skip


def _block(columns: int, most: int) -> int:
    return int(min(most, max(16, triton.next_power_of_2(columns))))


def _on(z: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device_of(z)
