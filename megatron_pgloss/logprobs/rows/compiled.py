"""The row passes through torch.compile: one loop nest over all rows of a block, no scratch memory.

Shapes: `R` rows of one call, `V` columns of this shard that are no padding, `S` pieces of them.

Each loop body (`_BODIES`) is compiled once per dtype and memory layout with all sizes dynamic, first on a
block of typical size (`_WARM`): Inductor decides from the first sizes it sees which loops run in parallel.
Inductor adds up a piece of a row in one go. In float32 that loses 1e-5 where one token has most of the probability and
thousands share the rest, so sums are float64. Pieces of at most 2^14 columns stay in a core's cache between the maximum
and the sum.

The loops need no scratch memory, so one call takes all rows. A call costs some 0.1 ms, and threads share
its rows: with chunks of three rows (as many as fit a cache at V = 150k), one of two threads idles half of
the time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.logprobs.rows.eager import ChunkedRows
from megatron_pgloss.logprobs.rows.per_row import FLOOR, LN2, RowFactors, RowSums

PIECE = 2**14
ROWS_A_THREAD = 8
_WARM = (256, PIECE)


class CompiledRows(ChunkedRows):
    """Loop bodies of one chunk, compiled by Inductor. Torch compiles sizes 0 and 1 apart, so one row is run as two."""

    def __init__(self, logits: Tensor, width: int, rows: int, chunk_elements: int):
        super().__init__(logits, width, rows, chunk_elements)
        self.dense_step = rows
        # Where dead rows lie between live ones, chunks of live rows are copied out and back; a chunk has enough rows
        # for all threads.
        self.step = max(self.step, min(ROWS_A_THREAD * torch.get_num_threads(), rows))
        # Pieces have nearly equal sizes, none has one column, and each starts at a cache line if the row does.
        equal = -(-width // -(-width // PIECE))
        self.piece = -(-equal // min(64, PIECE)) * min(64, PIECE)
        self.pieces = -(-width // self.piece)
        self._warm = (logits.dtype, logits.device)

    def chunk_sums(self, z_RV: Tensor, rate_R1: Tensor | None, out: RowSums) -> None:
        """Fill ``out`` for one chunk, each piece of columns by itself."""
        count = z_RV.size(0)
        if count == 1:
            z_RV = z_RV.repeat(2, 1)
        rate_R1 = _full_rate(rate_R1, z_RV)
        body = _body("sums" if out.moment is None else "moments", *self._warm)
        for i, piece_RV in enumerate(z_RV.split(self.piece, 1)):
            for place, found in zip(out, body(piece_RV, rate_R1), strict=False):
                if place is not None:
                    place[i] = found[:count]

    def chunk_gradient(self, z_RV: Tensor, out_RV: Tensor, factors: RowFactors) -> None:
        """Write e (a + b d)."""
        if z_RV.size(0) == 1:
            pair_RV = z_RV.repeat(2, 1)
            self.chunk_gradient(pair_RV, pair_RV, factors)
            out_RV.copy_(pair_RV[:1])
            return
        a, b, shift, rate = factors
        a, shift, rate = (_rows_of(x, z_RV) for x in (a, shift, _full_rate(rate, z_RV)))
        more = () if b is None else (_rows_of(b, z_RV),)
        kind = "plain" if b is None else "mixed"
        if out_RV.data_ptr() == z_RV.data_ptr():
            _body(f"{kind}, in place", *self._warm)(z_RV, a, shift, rate, *more)
        else:
            _body(kind, *self._warm, out_RV.dtype)(out_RV, z_RV, a, shift, rate, *more)


def _rows_of(x_R1: Tensor, z_RV: Tensor) -> Tensor:
    """[R, 1] in contiguous memory; where one row is run as two, its number serves both."""
    return x_R1.expand(z_RV.size(0), 1).contiguous()


def _full_rate(rate_R1: Tensor | None, z_RV: Tensor) -> Tensor:
    if rate_R1 is None:
        return torch.full((z_RV.size(0), 1), 1 / LN2, device=z_RV.device)
    return _rows_of(rate_R1, z_RV)


def _sums(z_RV: Tensor, rate_R1: Tensor) -> tuple[Tensor, ...]:
    wide_RV = z_RV.to(torch.float32)
    peak_R = wide_RV.amax(-1)
    return peak_R, torch.exp2((wide_RV - peak_R[:, None]) * rate_R1).sum(-1, dtype=torch.float64)


def _moments(z_RV: Tensor, rate_R1: Tensor) -> tuple[Tensor, ...]:
    wide_RV = z_RV.to(torch.float32)
    peak_R = wide_RV.amax(-1)
    d_RV = (wide_RV - peak_R[:, None]) * rate_R1
    e_RV = torch.exp2(d_RV)
    moment_R = (d_RV.clamp(min=FLOOR) * e_RV).sum(-1, dtype=torch.float64)
    return peak_R, e_RV.sum(-1, dtype=torch.float64), moment_R


def _plain(out_RV: Tensor, z_RV: Tensor, a: Tensor, shift: Tensor, rate: Tensor) -> None:
    out_RV.copy_(torch.exp2((z_RV.to(torch.float32) - shift) * rate) * a)


def _plain_in_place(z_RV: Tensor, a: Tensor, shift: Tensor, rate: Tensor) -> None:
    z_RV.copy_(torch.exp2((z_RV.to(torch.float32) - shift) * rate) * a)


def _mixed(out_RV: Tensor, z_RV: Tensor, a: Tensor, shift: Tensor, rate: Tensor, b: Tensor) -> None:
    d_RV = (z_RV.to(torch.float32) - shift) * rate
    out_RV.copy_(torch.exp2(d_RV) * (d_RV.clamp(min=FLOOR) * b + a))


def _mixed_in_place(z_RV: Tensor, a: Tensor, shift: Tensor, rate: Tensor, b: Tensor) -> None:
    d_RV = (z_RV.to(torch.float32) - shift) * rate
    z_RV.copy_(torch.exp2(d_RV) * (d_RV.clamp(min=FLOOR) * b + a))


_BODIES: dict[str, Callable[..., Any]] = {
    "sums": _sums,
    "moments": _moments,
    "plain": _plain,
    "plain, in place": _plain_in_place,
    "mixed": _mixed,
    "mixed, in place": _mixed_in_place,
}


@functools.cache
def _compiled(kind: str) -> Callable[..., Any]:
    # Without fullgraph, torch would silently run the uncompiled body once the limit of recompilations is reached.
    more = {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    return torch.compile(_BODIES[kind], dynamic=True, fullgraph=True, **more)  # type: ignore[call-overload,no-any-return]


@functools.cache
def _body(kind: str, dtype: torch.dtype, device: torch.device, out: torch.dtype | None = None) -> Callable[..., Any]:
    body = _compiled(kind)
    z_RV = torch.zeros(_WARM, dtype=dtype, device=device)
    factor = torch.zeros(_WARM[0], 1, device=device)
    if kind in ("sums", "moments"):
        body(z_RV[:, 1:], factor)
        return body
    factors = [factor, factor.clone(), factor.clone()] + ([factor.clone()] if kind.startswith("mixed") else [])
    body(*([z_RV] if kind.endswith("in place") else [z_RV.to(out or dtype, copy=True), z_RV]), *factors)
    return body
