"""`MicroBatch`: the tokens of one forward pass, arranged for the model. `N` positions of the arrangement, `T` of the
rank.

One internal form serves padded rows, packed rows and context-parallel shards: a flat list of positions, each pointing
at a token of the rank's streams or at nothing (padding).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.planning.split import round_up

_FILL = {"temperature": 1.0, "seq": -1, "turn": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How rows are laid out for the model."""

    multiple: int = 1
    """Row widths (padded) or sequence lengths (packed) are rounded up to this."""
    fixed: bool = False
    """All micro-batches of all ranks have one shape (pipelines without variable sequence lengths)."""
    left: bool = False
    """Rows begin at column 0 whatever the caller's padding was."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Position [b, t] of everything here is about the token predicted from it."""

    number: int
    """Place in the step."""
    shape: tuple[int, int]
    """Rows and width of what the model reads; one row where packed."""
    index_N: Tensor
    """int64 [N]: the token of the rank's streams at each position, -1 for padding."""
    position_N: Tensor
    """int64 [N]: position inside its sequence."""
    seq_N: Tensor
    """int64 [N]: sequence inside this micro-batch, -1 for padding."""
    turn_N: Tensor
    """int64 [N]: turn inside this micro-batch, -1 for none."""
    units: dict[str, int]
    """How many sequences and turns the whole micro-batch has, the same on every context-parallel rank."""
    cu_seqlens: Tensor | None = None
    """int32 [docs + 1] of the whole packed row, padding included; None for padded rows."""
    table: dict[str, Tensor] = field(repr=False)
    """The rank's target-aligned streams [T]."""
    plan: Any = field(repr=False)
    chunk_N: Tensor | None = None
    """int64 [N]: which of the ``chunks`` pieces of its sequence a position lies in, under context parallelism."""
    chunks: int = 1
    group: Any = None
    """Context-parallel process group that shares the sequences of this micro-batch."""
    device: torch.device
    _made: dict[str, Tensor | None] = field(default_factory=dict, repr=False)
    """Streams arranged so far: several components read the same ones."""

    def stream(self, name: str) -> Tensor | None:
        """A stream of the step in this arrangement, ``shape``; padding is 0, false, -1, or 1 for temperature."""
        if name not in self._made:
            self._made[name] = self._arrange(name)
        return self._made[name]

    def _arrange(self, name: str) -> Tensor | None:
        source_T = self.table.get(name)
        if source_T is None:
            return None
        if source_T.numel() == 0:
            out_N = torch.zeros(self.index_N.shape, dtype=source_T.dtype)
        else:
            out_N = source_T[self.index_N.clamp(min=0)]
        out_N = torch.where(self.index_N >= 0, out_N, torch.full_like(out_N, _FILL.get(name, 0)))
        return out_N.reshape(self.shape).to(self.device, non_blocking=True)

    def _known(self, kind: str, name: str) -> Tensor:
        stream = self.stream(f"{kind}/{name}")
        if stream is None:
            names = self.plan.spec.names if self.plan.spec is not None else ()
            raise DataError(f"no component {name!r} in this step", expected=", ".join(names) or "a plan with a spec")
        return stream

    def weight(self, name: str) -> Tensor:
        """Weight u*w of every position in component ``name``, without its coefficient; 0 outside its members."""
        return self._known("weight", name)

    def members(self, name: str) -> Tensor:
        """bool: the positions whose target component ``name`` trains on."""
        return self._known("member", name)

    @property
    def input_ids(self) -> Tensor:
        """int64: what the model reads; 0 at padding."""
        return self.stream("tokens")  # type: ignore[return-value]

    @property
    def targets(self) -> Tensor:
        """int64: the token to score at each position; 0 at padding and at a sequence's last position."""
        return self.stream("targets")  # type: ignore[return-value]

    @property
    def temperature(self) -> Tensor | None:
        """float: the sampler's temperature per position, or None where it is 1 everywhere."""
        return self.stream("temperature")

    @property
    def position_ids(self) -> Tensor:
        """int64: position inside the sequence."""
        return self.position_N.reshape(self.shape).to(self.device, non_blocking=True)

    @property
    def attention_mask(self) -> Tensor | None:
        """bool [b, L] of real tokens, for padded rows; a padding row keeps its first column, so that softmax is
        defined.
        """
        if self.cu_seqlens is not None:
            return None
        mask = (self.index_N >= 0).reshape(self.shape)
        mask[:, 0] |= ~mask.any(1)
        return mask.to(self.device, non_blocking=True)

    @property
    def max_seqlen(self) -> int:
        """Longest padded document of a packed row, or the width."""
        return int(self.cu_seqlens.diff().max()) if self.cu_seqlens is not None else self.shape[1]

    def take(self, picked_K: Tensor, shape: tuple[int, int], chunk_K: Tensor, chunks: int, group: Any) -> MicroBatch:
        """The positions ``picked_K`` as a shard of this micro-batch that knows the group sharing it."""
        return replace(
            self, shape=shape, index_N=self.index_N[picked_K], position_N=self.position_N[picked_K],
            seq_N=self.seq_N[picked_K], turn_N=self.turn_N[picked_K], chunk_N=chunk_K, chunks=chunks, group=group,
            _made={},
        )  # fmt: skip


def padded(number: int, rows: list[int], plan: Any, *, width: int, height: int, device: torch.device) -> MicroBatch:
    """Rows ``rows`` as a right- or caller-padded matrix of ``height`` rows."""
    index_BL = torch.full((height, width), -1, dtype=torch.int64)
    seq_BL = torch.full((height, width), -1, dtype=torch.int64)
    batch, left = plan.batch, plan.arrangement.left
    for b, row in enumerate(rows):
        start, end = int(batch.cu_S1[row]), int(batch.cu_S1[row + 1])
        offset = 0 if left else int(batch.offset_S[row])
        index_BL[b, offset : offset + end - start] = torch.arange(start, end)
        seq_BL[b, offset : offset + end - start] = b
    position_BL = torch.arange(width).expand(height, width)
    if not left:
        first_B1 = torch.tensor([int(batch.offset_S[row]) for row in rows] + [0] * (height - len(rows)))[:, None]
        position_BL = (position_BL - first_B1).clamp(min=0)
    return _finish(
        number, (height, width), index_BL.reshape(-1), position_BL.reshape(-1), seq_BL.reshape(-1), len(rows), None,
        plan, device,
    )  # fmt: skip


def packed(number: int, rows: list[int], plan: Any, *, width: int | None, device: torch.device) -> MicroBatch:
    """Rows ``rows`` end to end in one row; each padded to the arrangement's multiple, all filled up to ``width``."""
    multiple, cu, index, position, seq = plan.arrangement.multiple, [0], [], [], []
    for document, row in enumerate(rows):
        start, end = int(plan.batch.cu_S1[row]), int(plan.batch.cu_S1[row + 1])
        size = round_up(end - start, multiple)
        index += [torch.arange(start, end), torch.full((size - (end - start),), -1)]
        seq += [torch.full((end - start,), document), torch.full((size - (end - start),), -1)]
        position.append(torch.arange(size))
        cu.append(cu[-1] + size)
    rest = (width if width is not None else max(cu[-1], multiple)) - cu[-1]
    if rest:
        # What is left over is a document of padding: causal attention keeps it apart from the others.
        index.append(torch.full((rest,), -1))
        seq.append(torch.full((rest,), -1))
        position.append(torch.arange(rest))
        cu.append(cu[-1] + rest)
    return _finish(
        number, (1, cu[-1]), torch.cat(index), torch.cat(position), torch.cat(seq), len(rows),
        torch.tensor(cu, dtype=torch.int32), plan, device,
    )  # fmt: skip


def whole(plan: Any) -> MicroBatch:
    """All rows of this rank end to end, on the CPU: for statistics over whole rows, not for a model."""
    batch, total = plan.batch, plan.table["tokens"].numel()
    index_T = torch.arange(total)
    start_T = torch.repeat_interleave(batch.cu_S1[:-1], batch.lengths_S) if batch is not None else index_T
    return MicroBatch(
        number=-1, shape=(1, total), index_N=index_T, position_N=index_T - start_T,
        seq_N=batch.seq_T if batch is not None else index_T, turn_N=plan.table["turn"],
        units={"sequence": len(batch), "turn": plan.local.units.size["turn"]} if batch is not None
        else {"sequence": 0, "turn": 0},
        table=plan.table, plan=plan, device=torch.device("cpu"),
    )  # fmt: skip


def _finish(
    number: int, shape: tuple[int, int], index_N: Tensor, position_N: Tensor, seq_N: Tensor, sequences: int,
    cu_seqlens: Tensor | None, plan: Any, device: torch.device,
) -> MicroBatch:  # fmt: skip
    turn_T = plan.table["turn"]
    turn_N = torch.full_like(index_N, -1)
    real_N = index_N >= 0
    turn_N[real_N] = turn_T[index_N[real_N]]
    some_N = turn_N >= 0
    names, dense = torch.unique(turn_N[some_N], return_inverse=True)
    turn_N[some_N] = dense
    return MicroBatch(
        number=number, shape=shape, index_N=index_N, position_N=position_N, seq_N=seq_N, turn_N=turn_N,
        units={"sequence": sequences, "turn": names.numel()}, cu_seqlens=cu_seqlens, table=plan.table, plan=plan,
        device=device,
    )  # fmt: skip
