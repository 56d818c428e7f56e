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
from megatron_pgloss.maths.kept import Kept
from megatron_pgloss.planning.split import round_up
from megatron_pgloss.rollouts.streams import FILL
from megatron_pgloss.spec import KeptSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How rows are laid out for the model."""

    multiple: int = 1
    """Row widths (padded) or sequence lengths (packed) are rounded up to this."""
    fixed: bool = False
    """All micro-batches of all ranks have one shape (pipelines without variable sequence lengths)."""
    left: bool = False
    """Rows begin at column 0 whatever the caller's padding was."""
    agreed: str = ""
    """Options of the caller's that all ranks must have in common."""


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
        """A stream of the step in this arrangement, ``shape``, or ``[*shape, k]`` where it is wide; padding is 0,
        false, -1 (ids among them), or 1 for temperature.
        """
        if name not in self._made:
            self._made[name] = self._arrange(name)
        return self._made[name]

    def _arrange(self, name: str) -> Tensor | None:
        source_T = self.table.get(name)
        if source_T is None:
            return None
        if source_T.numel() == 0:
            out_N = source_T.new_zeros(self.index_N.numel(), *source_T.shape[1:])
        else:
            out_N = source_T.index_select(0, self._place("/clamped"))
        wide = source_T.dim() > 1
        fill = FILL.get(name, -1 if wide and not source_T.is_floating_point() else 0)
        out_N = out_N.index_fill_(0, self._place("/padding"), fill)
        return out_N.reshape(*self.shape, *source_T.shape[1:]).to(self.device, non_blocking=True)

    def wide(self, name: str) -> Tensor:
        """A stream of several numbers a token, ``[*shape, k]``: int64 ids with -1 for none, or floats beside them.

        On a rank without rows k is 0, so that what is made of the stream takes the same path there.

        Raises:
            DataError: the step has no such stream.
        """
        found = self.stream(name)
        if found is not None and found.dim() == 3:
            return found
        if self.table["tokens"].numel() == 0:
            return torch.zeros(*self.shape, 0, dtype=torch.int64, device=self.device)
        raise DataError(f"no stream {name!r} of several numbers a token", expected=f"streams={{{name!r}: [B, L, k]}}")

    def _place(self, what: str) -> Tensor:
        """int64: ``/clamped`` [N], the token at each position (any at padding); or ``/padding``, where that is."""
        if what not in self._made:
            self._made["/clamped"] = self.index_N.clamp(min=0)
            self._made["/padding"] = (self.index_N < 0).nonzero().flatten()
        return self._made[what]  # type: ignore[return-value]

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
    def kept(self) -> Kept | None:
        """What the sampler could draw from at each position, for the log-prob pass; None where the spec scores the
        whole vocabulary.
        """
        return self.kept_by(self.plan.spec.kept if self.plan.spec is not None else None)

    def kept_by(self, rule: KeptSet | None) -> Kept | None:
        """The same by another spec's rule: for a scoring pass, whose plan has no spec."""
        if rule is None:
            return None
        add = rule.outside == "add"
        if rule.source == "recorded":
            return Kept(ids=self.stream("kept"), add_target=add)
        rules = {name: self.stream(name) for name in ("top_k", "top_p", "min_p")}
        return Kept(**rules, top_p_of=rule.top_p_of, add_target=add)

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
    batch, left = plan.batch, plan.arrangement.left
    first_B1, start_B1, length_B1 = torch.zeros(3, height, 1, dtype=torch.int64)
    if rows:
        row_B = torch.tensor(rows)
        start_B1[: len(rows), 0], length_B1[: len(rows), 0] = batch.cu_S1[row_B], batch.lengths_S[row_B]
        if not left:
            first_B1[: len(rows), 0] = batch.offset_S[row_B]
    position_BL = torch.arange(width) - first_B1
    off_BL = _off((position_BL >= 0) & (position_BL < length_B1))
    return _finish(
        number, (height, width), (start_B1 + position_BL | off_BL).reshape(-1), position_BL.clamp(min=0).reshape(-1),
        (torch.arange(height)[:, None] | off_BL).reshape(-1), rows, None, plan, device,
    )  # fmt: skip


def _off(real: Tensor) -> Tensor:
    """int64: 0 where ``real``, -1 elsewhere: whatever is or-ed with it becomes -1 there."""
    return real.view(torch.uint8).to(torch.int64) - 1


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
        number, (1, cu[-1]), torch.cat(index), torch.cat(position), torch.cat(seq), rows,
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
    number: int, shape: tuple[int, int], index_N: Tensor, position_N: Tensor, seq_N: Tensor, rows: list[int],
    cu_seqlens: Tensor | None, plan: Any, device: torch.device,
) -> MicroBatch:  # fmt: skip
    turn_N, turns = torch.full_like(index_N, -1), 0
    if rows and plan.table["turn"].numel():
        # A row's turns have consecutive numbers, and here all its tokens: they only begin elsewhere.
        begin_S1 = plan.local.units.first_turn_S1
        row_B = torch.tensor(rows)
        size_B = begin_S1[row_B + 1] - begin_S1[row_B]
        turns = int(size_B.sum())
        moved_B = size_B.cumsum(0) - size_B - begin_S1[row_B]
        turn_N = plan.table["turn"].index_select(0, index_N.clamp(min=0))
        off_N = _off((turn_N >= 0) & (index_N >= 0))
        turn_N = turn_N + moved_B.index_select(0, seq_N.clamp(min=0)) | off_N
    return MicroBatch(
        number=number, shape=shape, index_N=index_N, position_N=position_N, seq_N=seq_N, turn_N=turn_N,
        units={"sequence": len(rows), "turn": turns}, cu_seqlens=cu_seqlens, table=plan.table, plan=plan,
        device=device,
    )  # fmt: skip
