"""`MicroBatch`: the tokens of one forward pass, arranged for the model. `N` positions of the arrangement, `T` of the
rank.

One internal form serves padded rows, packed rows and context-parallel shards: a flat list of positions, each pointing
at a token of the rank's streams or at nothing (padding).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths.kept import Kept
from megatron_pgloss.planning.component_table import ComponentTable, Corrected, GroupTerm
from megatron_pgloss.planning.ledger import Ledger
from megatron_pgloss.rollouts.streams import FILL
from megatron_pgloss.spec import KeptSet, LossSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """What all micro-batches of one rank's step share."""

    spec: LossSpec | None
    """None in a forward-only plan."""
    coef: Mapping[str, float]
    """Coefficient of every component in this step."""
    table: dict[str, Tensor]
    """The rank's target-aligned streams [T]."""
    components: Mapping[str, ComponentTable]
    """Every component's tokens, weights and constants."""
    ledger: Ledger
    num_microbatches: int
    """Micro-batches of this rank."""
    needs_statistics_pass: bool
    """Whether the spec decides something over the whole step that is not decided yet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The tokens of one forward pass. Position [b, t] of every stream is about the token predicted from it."""

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
    shared: Shared = field(repr=False)
    """What all micro-batches of the step have in common."""
    chunk_N: Tensor | None = None
    """int64 [N]: which of the ``chunks`` pieces of its sequence a position lies in, under context parallelism."""
    chunks: int = 1
    group: Any = None
    """Context-parallel process group that shares the sequences of this micro-batch."""
    device: torch.device
    _made: dict[Hashable, Tensor | None] = field(default_factory=dict, repr=False)
    """Streams arranged so far: several components read the same ones."""

    @property
    def spec(self) -> LossSpec | None:
        """The spec of the step; None in a forward-only plan."""
        return self.shared.spec

    @property
    def table(self) -> dict[str, Tensor]:
        """The rank's target-aligned streams [T]."""
        return self.shared.table

    def stream(self, name: str) -> Tensor | None:
        """A stream of the step in this arrangement, of ``shape``, or ``[*shape, k]`` where it has k numbers a token;
        None where the step has no such stream. Padding holds the stream's own filling (-1 for ids, 1 for temperature,
        0 or false for most).
        """
        source_T = self.table.get(name)
        if source_T is None:
            return None
        wide = source_T.dim() > 1
        return self._arranged(name, source_T, FILL.get(name, -1 if wide and not source_T.is_floating_point() else 0))

    def _arranged(self, key: Hashable, source_T: Tensor, fill: float = 0) -> Tensor:
        """``source_T`` in this arrangement; ``key`` says which stream it is."""
        made = self._made.get(key)
        if made is None:
            if source_T.numel() == 0:
                out_N = source_T.new_zeros(self.index_N.numel(), *source_T.shape[1:])
            else:
                out_N = source_T.index_select(0, self._place("/clamped"))
            out_N = out_N.index_fill_(0, self._place("/padding"), fill)
            made = out_N.reshape(*self.shape, *source_T.shape[1:]).to(self.device, non_blocking=True)
            self._made[key] = made
        return made

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
        """int64: ``/clamped`` [N], the token at each position (any token at padding); ``/padding``, the positions of
        padding.
        """
        if what not in self._made:
            self._made["/clamped"] = self.index_N.clamp(min=0)
            self._made["/padding"] = (self.index_N < 0).nonzero().flatten()
        return self._made[what]  # type: ignore[return-value]

    def _component(self, name: str) -> ComponentTable:
        found = self.shared.components.get(name)
        if found is None:
            names = self.spec.names if self.spec is not None else ()
            raise DataError(f"no component {name!r} in this step", expected=", ".join(names) or "a plan with a spec")
        return found

    def weight(self, name: str) -> Tensor:
        """Weight u*w of every position in component ``name``, without its coefficient; 0 outside its members."""
        return self._arranged((name, "weight"), self._component(name).weight_T)

    def members(self, name: str) -> Tensor:
        """bool: the positions whose target component ``name`` trains on."""
        return self._arranged((name, "member"), self._component(name).member_T)

    def gate(self, name: str, i: int) -> Tensor | None:
        """bool: the positions of component ``name`` that pass the spec's gate ``i``; None where the loss decides it."""
        decided_T = self._component(name).gates.get(i)
        return None if decided_T is None else self._arranged((name, "gate", i), decided_T)

    def mean_weight(self, name: str, i: int) -> float:
        """The mean over the job of the weights of the spec's normalised correction ``i`` on component ``name``."""
        return self._component(name).means[i]

    def corrected(self, name: str) -> Corrected | None:
        """What the plan-time corrections made of component ``name``; None where no correction acts on it."""
        found = self._component(name).corrected
        if found is None:
            return None
        return Corrected(
            **{
                one.name: self._arranged((name, one.name, "corrected"), getattr(found, one.name))
                for one in fields(found)
            }
        )

    def group_term(self, name: str) -> GroupTerm | None:
        """The term of whole groups of component ``name``; None where no statistics pass found one."""
        found = self._component(name).group
        if found is None:
            return None
        return GroupTerm(
            value=self._arranged((name, "value"), found.value), slope=self._arranged((name, "slope"), found.slope)
        )

    def told(self, name: str, key: Hashable) -> Tensor | None:
        """A statistic over prompts or episodes that component ``name`` asks for under ``key``, float64 [N] or [2, N];
        None where no statistics pass took it.
        """
        found_T = self._component(name).told.get(key)
        if found_T is None:
            return None
        found = self._arranged((name, key, "told"), found_T)
        return found.reshape(-1) if found_T.dim() == 1 else found.reshape(-1, 2).T

    def slope(self, name: str) -> Tensor | None:
        """float: the derivative of component ``name``'s whole loss, by the token's log-prob, through its ratio over a
        prompt or episode; None where there is no such ratio.
        """
        found_T = self._component(name).slope_T
        return None if found_T is None else self._arranged((name, "slope of the unit"), found_T)

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
        return self.kept_by(self.spec.kept if self.spec is not None else None)

    def kept_by(self, rule: KeptSet | None) -> Kept | None:
        """`kept` by the rule of another spec: for a scoring pass, whose own plan has no spec."""
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
