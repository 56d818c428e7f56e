"""`plan`: everything about one optimizer step that can be known before its first forward pass."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.errors import LayoutError, PGLossError, SpecError
from megatron_pgloss.planning import agreement
from megatron_pgloss.planning.agreement import FIELDS, Ranks
from megatron_pgloss.planning.arrangement import Arrangement, Source, packed, padded, whole
from megatron_pgloss.planning.assembly import (
    Counts,
    component_tables,
    job_counts,
    mean_weights,
    token_table,
    unit_totals,
)
from megatron_pgloss.planning.component_table import ComponentTable
from megatron_pgloss.planning.ledger import Ledger
from megatron_pgloss.planning.local import Local, body, coefficients, head, prepare
from megatron_pgloss.planning.microbatch import MicroBatch, Shared
from megatron_pgloss.planning.split import Split, legal_count, refine, round_up
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec import LossSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One optimizer step: who trains what with which weight, cut into micro-batches. Made by `plan`."""

    spec: LossSpec | None
    coef: dict[str, float]
    """Coefficient of every component in this step."""
    split: Split
    arrangement: Arrangement
    ranks: Ranks
    batch: TokenBatch | None
    """This rank's rows, or None."""
    table: dict[str, Tensor]
    """Target-aligned streams [T] of this rank."""
    components: dict[str, ComponentTable]
    """Every component's weights, members and constants."""
    parts: list[list[int]]
    """Rows of every micro-batch."""
    height: int
    """Rows per micro-batch, where fixed."""
    width: int
    """Agreed width of padded rows, or tokens of a packed row, where fixed."""
    counts: Counts
    """Component to counts over all ranks: `local.SLOTS`, prompts and episodes where named, and one per mask reason."""
    job: dict[str, int]
    """Rows, tokens, tokens the policy sampled, excluded rows, empty ranks and micro-batches, over all ranks."""
    ledger: Ledger
    """Which rows were updated on, and what was recorded of them."""
    version: int | None = None
    """Version of the weights being trained, where given."""
    decided: bool = False
    """Whether a statistics pass was made."""
    local: Local = field(default_factory=Local, repr=False)
    """What this rank counted."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of this rank, equal on all ranks."""
        return len(self.parts)

    @property
    def rows_per_microbatch(self) -> int:
        """Rows the schedule is told each micro-batch has: 1 where packed."""
        return 1 if self.split.packed else max(self.height, 1)

    @property
    def gradient_scale(self) -> float:
        """Factor for the loss under a wrapper that averages gradients over the data-parallel ranks."""
        return float(self.ranks.data_size)

    @property
    def needs_statistics_pass(self) -> bool:
        """Whether the spec decides something over the whole step, and this plan does not know it yet: a statistics pass
        (`megatron_pgloss.statistics`) is to come.
        """
        return self.spec is not None and self.spec.needs_statistics_pass and not self.decided

    @property
    def has_signal(self) -> bool:
        """Whether any component with a coefficient has a token that can move the policy, on any rank."""
        return any(self.counts[name]["live"] and coef for name, coef in self.coef.items())

    def microbatches(self, device: torch.device | str | None = None) -> Iterator[MicroBatch]:
        """The step's micro-batches in order, on ``device`` (default: where the tokens came from)."""
        home = self.batch.device if self.batch is not None else torch.device("cpu")
        place = torch.device(device) if device is not None else home
        source = self._source()
        for number, rows in enumerate(self.parts):
            yield self._arrange(number, rows, source, place)

    def whole(self) -> MicroBatch:
        """All rows of this rank as one micro-batch on the CPU: for statistics over whole rows, not for a model."""
        return whole(self._source())

    def _source(self) -> Source:
        shared = Shared(
            spec=self.spec, coef=self.coef, table=self.table, components=self.components, ledger=self.ledger,
            num_microbatches=self.num_microbatches, needs_statistics_pass=self.needs_statistics_pass,
        )  # fmt: skip
        return Source(batch=self.batch, units=self.local.units, arrangement=self.arrangement, shared=shared)

    def _arrange(self, number: int, rows: list[int], source: Source, device: torch.device) -> MicroBatch:
        fixed = self.arrangement.fixed
        if self.split.packed:
            return packed(number, rows, source, width=self.width if fixed else None, device=device)
        width, height = self.width, self.height
        if not fixed:
            # An empty micro-batch keeps one row of padding: the model must run and its collectives be entered.
            width, height = (self.batch.width if self.batch is not None else 1) or 1, max(len(rows), 1)
            if self.arrangement.left:
                longest = max((int(self.batch.lengths_S[row]) for row in rows), default=1) if self.batch else 1
                width = round_up(max(longest, 1), self.arrangement.multiple)
                height = self.height
        return padded(number, rows, source, width=width, height=height, device=device)

    @property
    def updated(self) -> bool:
        """Whether a gradient of this plan's loss has been asked for on this rank."""
        return self.ledger.updated

    def report(self) -> str:
        """The plan in words: layout, counts per level and component, tokens per mask rule and reason."""
        from megatron_pgloss.planning.report import report

        return report(self)


def plan(
    batches: Sequence[TokenBatch],
    spec: LossSpec | None,
    *,
    split: Split,
    group: Any = None,
    coef: Mapping[str, float] | None = None,
    ranks: Ranks | None = None,
    arrangement: Arrangement | None = None,
    interleaved: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    version: int | None = None,
) -> Plan:
    """Plan one optimizer step. A collective: every rank of the job calls it, also with no batches.

    Args:
        batches: this rank's rollouts; ``[]`` is legal where others have some.
        spec: what to train; None plans a forward-only pass.
        split: how rows become micro-batches.
        group: process group of data-parallel ranks, each with its own data; ``"local"``: this process alone, although
            there are others; None: this process alone, refused in a world of several ranks.
        coef: coefficients of this step by component name, over the spec's.
        ranks: the full layout, instead of ``group`` (made by `megatron_pgloss.megatron`).
        arrangement: how rows are laid out; default: as the caller padded them.
        interleaved: group size and pipeline size of an interleaved schedule, which limit the number of micro-batches.
        vocab_size: tokens at or beyond it are refused.
        version: version of the weights being trained, read by `Staleness` and ``old="interpolate"``.

    Returns:
        The same counts on every rank; weights of this rank's tokens.

    Raises:
        PGLossError: the same on every rank: the first faulty rank's error, a disagreement, or no action anywhere.
    """
    ranks = ranks or _ranks(group)
    arrangement = arrangement or Arrangement(multiple=split.multiple_of)
    error: PGLossError | None = None
    local, counted = Local(), torch.zeros(0, dtype=torch.int64)
    try:
        if spec is not None and not isinstance(spec, LossSpec):
            got, spec = type(spec).__name__, None
            raise SpecError("plan takes a LossSpec", got=got, fix="LossSpec.from_dict(...), or pg.presets")
        coefs = coefficients(spec, coef)
        local = prepare(batches, spec, split, arrangement, vocab_size, version)
        counted = body(local)
    except PGLossError as caught:
        # Raised below, on every rank alike.
        error, coefs = caught, {}
    setup = agreement.digest(
        repr((split, arrangement, interleaved, vocab_size, version, sorted(coefs.items()))).encode()
    )
    row = agreement.pack(head(local, spec, arrangement, ranks, setup), counted, error)
    rows = ranks.gather(row, ranks.world, ranks.world_size)
    agreement.raise_agreed(rows)
    return assemble(local, spec, coefs, split, arrangement, ranks, rows, interleaved, version)


def _ranks(group: Any) -> Ranks:
    if isinstance(group, str):
        if group != "local":
            raise LayoutError(f"group={group!r}", expected="a process group, 'local' or None")
        return Ranks()
    if group is not None:
        return Ranks.of(group)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise LayoutError(
            "plan(group=None) in a world of several ranks would normalise each rank by itself",
            expected="group=the data-parallel process group",
            got=f"world size {dist.get_world_size()}",
            fix="pass the group, or group='local' if each rank really trains its own model",
        )
    return Ranks()


def assemble(
    local: Local,
    spec: LossSpec | None,
    coefs: dict[str, float],
    split: Split,
    arrangement: Arrangement,
    ranks: Ranks,
    rows: Tensor,
    interleaved: tuple[int, int] | None,
    version: int | None,
) -> Plan:
    """A plan from what this rank counted and the rows of all ranks; `plan` and `revise` call it."""
    mine = rows[agreement.firsts(rows)]
    fields = {name: mine[:, i] for i, name in enumerate(FIELDS)}
    counts = job_counts(spec, mine)
    number = max(int(fields["microbatches"].max()), 1)
    if interleaved is not None:
        number = legal_count(number, *interleaved)
    parts = refine(local.parts, number, split.packed)
    streams = functools.reduce(operator.or_, fields["streams"].tolist(), 0)
    means = mean_weights(spec, mine)
    totals = unit_totals(local, spec, list(counts.values()), ranks, int(fields["unit_rows"].max()))
    dtype = torch.float64 if bool(fields["double"].any()) else torch.float32
    width = int(fields["bin_tokens" if split.packed else "width"].max())
    return Plan(
        spec=spec,
        coef=coefs,
        split=split,
        arrangement=arrangement,
        ranks=ranks,
        batch=local.batch,
        table=token_table(local, spec, dtype, streams),
        components=component_tables(local, spec, totals, dtype, means),
        parts=parts,
        height=int(fields["bin_rows"].max()),
        width=round_up(max(width, 1), arrangement.multiple),
        counts=counts,
        job={
            "rows": int(fields["rows"].sum()),
            "tokens": int(fields["tokens"].sum()),
            "actions": int(fields["actions"].sum()),
            "excluded": int(fields["excluded"].sum()),
            "empty_ranks": int((fields["rows"] == 0).sum()),
            # After refining, a rank has an empty micro-batch only for want of rows.
            "empty_microbatches": int((number - torch.minimum(fields["rows"], torch.tensor(number))).sum()),
        },
        ledger=Ledger(local.batch, spec),
        version=version,
        local=local,
    )
