"""`plan`: everything about one optimizer step that can be known before its first forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.planning import joining, wire
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.planning.arrangement import Arrangement, Source, packed, padded, whole
from megatron_pgloss.planning.carried import Carried
from megatron_pgloss.planning.component_table import ComponentTable
from megatron_pgloss.planning.counts import Local, count
from megatron_pgloss.planning.job_rows import JobRows
from megatron_pgloss.planning.ledger import Ledger
from megatron_pgloss.planning.microbatch import MicroBatch, Shared
from megatron_pgloss.planning.preflight import Request, preflight, request
from megatron_pgloss.planning.report import report
from megatron_pgloss.planning.split import Split, refine, round_up
from megatron_pgloss.planning.tables import component_tables, token_table
from megatron_pgloss.planning.token_weights import unit_totals
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.words import closed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One optimizer step: who trains what with which weight, cut into micro-batches. Made by `plan`."""

    request: Request
    """What was asked for: spec, split, coefficients, version."""
    ranks: Ranks
    local: Local = field(repr=False)
    """This rank's rows, and what was counted on them."""
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
    counts: wire.Counts
    """Component to counts over all ranks: `wire.SLOTS`, prompts and episodes where named, and one per mask reason."""
    job: dict[str, int]
    """Rows, tokens, tokens the policy sampled, excluded rows, empty ranks and micro-batches, over all ranks."""
    ledger: Ledger
    """Which rows were updated on, and what was recorded of them."""
    most_rows: int
    """The largest number of rows of any rank."""
    decided: bool = False
    """Whether a statistics pass was made."""

    @property
    def spec(self) -> LossSpec | None:
        """What is trained; None in a forward-only plan."""
        return self.request.spec

    @property
    def coef(self) -> dict[str, float]:
        """Coefficient of every component in this step."""
        return self.request.coef

    @property
    def split(self) -> Split:
        """How rows become micro-batches."""
        return self.request.split

    @property
    def arrangement(self) -> Arrangement:
        """How rows are laid out for the model."""
        return self.request.arrangement

    @property
    def version(self) -> int | None:
        """Version of the weights being trained, where given."""
        return self.request.version

    @property
    def batch(self) -> TokenBatch | None:
        """This rank's rows, or None."""
        return self.local.batch

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

    @property
    def job_rows(self) -> JobRows:
        """This rank's rows among those of the job."""
        return joining.rows_of_job(self.local, self.spec, self.ranks, self.most_rows)

    def report(self) -> str:
        """The plan in words: layout, counts per level and component, tokens per mask rule and reason."""
        return report(
            spec=self.spec, coef=self.coef, counts=self.counts, components=self.components, job=self.job,
            data_ranks=self.ranks.data_size, microbatches=self.num_microbatches,
            needs_statistics_pass=self.needs_statistics_pass, has_signal=self.has_signal,
        )  # fmt: skip


@closed
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

    One gather of a row over the world; where a normaliser names prompts or episodes, one over the data-parallel ranks.
    Corrections over prompts or episodes take one more over these ranks (two where some are normalised) and the row once
    more.

    Args:
        batches: this rank's rollouts; ``[]`` is legal where others have some.
        spec: what to train; None plans a forward-only pass.
        split: how rows become micro-batches.
        group: process group of data-parallel ranks, each with its own data; ``"local"``: this process alone, although
            there are others; None: this process alone, refused in a world of several ranks.
        coef: coefficients of this step by component name, in place of the spec's.
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
    ranks = ranks or Ranks.named(group, "plan")
    with Carried() as here:
        asked = request(spec, split, arrangement, coef, interleaved, vocab_size, version)
        local = count(preflight(batches, asked), asked)
        here.row, here.about = wire.pack(local, asked, ranks, asked.digest), wire.fields(local, asked)
    agreed = wire.read(here.gather(ranks), asked)
    if asked.spec is not None and asked.spec.straddling:
        here, rows = Carried(), joining.rows_of_job(local, asked.spec, ranks, agreed.most_rows)
        local = joining.joined(local, asked.spec, rows, here)
        with here:
            here.row = wire.pack(local, asked, ranks, asked.digest)
        agreed = wire.read(here.gather(ranks), asked)
    return assemble(asked, local, agreed, ranks)


def assemble(asked: Request, local: Local, agreed: wire.Agreed, ranks: Ranks) -> Plan:
    """The plan that this rank's rows and the job's counts make. A collective where a normaliser names prompts or
    episodes: their counts are gathered over the data-parallel ranks.
    """
    totals = unit_totals(local, asked.spec, list(agreed.counts.values()), ranks, agreed.unit_rows)
    parts = [] if local.rows is None else local.rows.parts
    return Plan(
        request=asked,
        ranks=ranks,
        local=local,
        table=token_table(local, asked.spec, agreed.dtype, agreed.streams),
        components=component_tables(local, asked.spec, totals, agreed.dtype, agreed.means),
        parts=refine(parts, agreed.number, asked.split.packed),
        height=agreed.height,
        width=agreed.width,
        counts=agreed.counts,
        job=agreed.job,
        ledger=Ledger(local.batch, asked.spec),
        most_rows=agreed.most_rows,
    )
