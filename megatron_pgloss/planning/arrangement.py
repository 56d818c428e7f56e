"""How a rank's rows are laid out for the model: padded, packed, or end to end. `N` positions, `T` tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.planning.microbatch import MicroBatch, Shared
from megatron_pgloss.planning.split import round_up
from megatron_pgloss.planning.units import Units
from megatron_pgloss.rollouts import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How rows are laid out for the model."""

    multiple: int = 1
    """Row widths (padded) or sequence lengths (packed) are rounded up to a multiple of this."""
    fixed: bool = False
    """All micro-batches of all ranks have one shape (pipelines without variable sequence lengths)."""
    left: bool = False
    """Rows begin at column 0 whatever the caller's padding was."""
    agreed: tuple[tuple[str, object], ...] = ()
    """The caller's options that must be the same on all ranks: name and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What micro-batches are cut from."""

    batch: TokenBatch | None
    """This rank's rows, or None."""
    units: Units | None
    """Their units."""
    arrangement: Arrangement
    shared: Shared


def padded(
    number: int, rows: list[int], source: Source, *, width: int, height: int, device: torch.device
) -> MicroBatch:
    """Rows ``rows`` as a matrix of ``height`` rows, padded on the right or as the caller padded them."""
    batch, left = source.batch, source.arrangement.left
    first_B1, start_B1, length_B1 = torch.zeros(3, height, 1, dtype=torch.int64)
    if rows:
        assert batch is not None
        row_B = torch.tensor(rows)
        start_B1[: len(rows), 0], length_B1[: len(rows), 0] = batch.cu_S1[row_B], batch.lengths_S[row_B]
        if not left:
            first_B1[: len(rows), 0] = batch.offset_S[row_B]
    position_BL = torch.arange(width) - first_B1
    off_BL = _off((position_BL >= 0) & (position_BL < length_B1))
    return _finish(
        number, (height, width), (start_B1 + position_BL | off_BL).reshape(-1), position_BL.clamp(min=0).reshape(-1),
        (torch.arange(height)[:, None] | off_BL).reshape(-1), rows, None, source, device,
    )  # fmt: skip


def _off(real: Tensor) -> Tensor:
    """int64: 0 where ``real``, -1 elsewhere: whatever is or-ed with it becomes -1 there."""
    return real.view(torch.uint8).to(torch.int64) - 1


def packed(number: int, rows: list[int], source: Source, *, width: int | None, device: torch.device) -> MicroBatch:
    """Rows ``rows`` end to end in one row; each padded to the arrangement's multiple, all filled up to ``width``."""
    multiple, cu, index, position, seq = source.arrangement.multiple, [0], [], [], []
    for document, row in enumerate(rows):
        assert source.batch is not None
        start, end = int(source.batch.cu_S1[row]), int(source.batch.cu_S1[row + 1])
        size = round_up(end - start, multiple)
        index += [torch.arange(start, end), torch.full((size - (end - start),), -1)]
        seq += [torch.full((end - start,), document), torch.full((size - (end - start),), -1)]
        position.append(torch.arange(size))
        cu.append(cu[-1] + size)
    rest = (width if width is not None else max(cu[-1], multiple)) - cu[-1]
    if rest:
        # The positions left over are a document of padding: causal attention keeps it apart from the others.
        index.append(torch.full((rest,), -1))
        seq.append(torch.full((rest,), -1))
        position.append(torch.arange(rest))
        cu.append(cu[-1] + rest)
    return _finish(
        number, (1, cu[-1]), torch.cat(index), torch.cat(position), torch.cat(seq), rows,
        torch.tensor(cu, dtype=torch.int32), source, device,
    )  # fmt: skip


def whole(source: Source) -> MicroBatch:
    """All rows of this rank end to end, on the CPU: for statistics over whole rows, not for a model."""
    batch, units, total = source.batch, source.units, source.shared.table["tokens"].numel()
    index_T = torch.arange(total)
    start_T = torch.repeat_interleave(batch.cu_S1[:-1], batch.lengths_S) if batch is not None else index_T
    return MicroBatch(
        number=-1, shape=(1, total), index_N=index_T, position_N=index_T - start_T,
        seq_N=batch.seq_T if batch is not None else index_T, turn_N=source.shared.table["turn"],
        units={name: units.size[name] if units is not None else 0 for name in ("sequence", "turn")},
        shared=source.shared, device=torch.device("cpu"),
    )  # fmt: skip


def _finish(
    number: int, shape: tuple[int, int], index_N: Tensor, position_N: Tensor, seq_N: Tensor, rows: list[int],
    cu_seqlens: Tensor | None, source: Source, device: torch.device,
) -> MicroBatch:  # fmt: skip
    turn_N, turns = torch.full_like(index_N, -1), 0
    if rows and source.shared.table["turn"].numel():
        # A row's turns have consecutive numbers, and the row is here as a whole, so its numbers only shift.
        assert source.units is not None
        begin_S1 = source.units.first_turn_S1
        row_B = torch.tensor(rows)
        size_B = begin_S1[row_B + 1] - begin_S1[row_B]
        turns = int(size_B.sum())
        moved_B = size_B.cumsum(0) - size_B - begin_S1[row_B]
        turn_N = source.shared.table["turn"].index_select(0, index_N.clamp(min=0))
        off_N = _off((turn_N >= 0) & (index_N >= 0))
        turn_N = turn_N + moved_B.index_select(0, seq_N.clamp(min=0)) | off_N
    return MicroBatch(
        number=number, shape=shape, index_N=index_N, position_N=position_N, seq_N=seq_N, turn_N=turn_N,
        units={"sequence": len(rows), "turn": turns}, cu_seqlens=cu_seqlens, shared=source.shared,
        device=device,
    )  # fmt: skip
