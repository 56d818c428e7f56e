"""`plan`: everything about one optimizer step that can be known before its first forward pass."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss._version import __version__
from megatron_pgloss.errors import DataError, LayoutError, PGLossError
from megatron_pgloss.planning import agreement, faults, microbatch, normalizers, sets, units
from megatron_pgloss.planning.agreement import FIELDS, HEAD, Ranks
from megatron_pgloss.planning.microbatch import Arrangement, MicroBatch
from megatron_pgloss.planning.split import Split, bins, legal_count, refine, round_up
from megatron_pgloss.rollouts import TokenBatch, concatenate
from megatron_pgloss.spec import LossSpec, PolicyGradient

_SERIAL = itertools.count(1)
SLOTS = ("base", "members", "live", "sequence", "turn", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """What this rank knows before the gather."""

    batch: TokenBatch | None = None
    units: units.Units | None = None
    counts: list[normalizers.LocalCounts] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    parts: list[list[int]] = field(default_factory=list)
    excluded: int = 0


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
    """Target-aligned streams [T] of this rank, with ``weight/<name>`` and ``member/<name>``."""
    parts: list[list[int]]
    """Rows of every micro-batch."""
    height: int
    """Rows per micro-batch, where fixed."""
    width: int
    """Agreed width of padded rows, or tokens of a packed row, where fixed."""
    counts: dict[str, dict[str, int | float]]
    """Component to counts over all ranks: `SLOTS`, prompts and episodes where named, and one per mask reason."""
    job: dict[str, int]
    """Rows, tokens, excluded rows and empty micro-batches over all ranks."""
    serial: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of this rank, equal on all ranks."""
        return len(self.parts)

    @property
    def gradient_scale(self) -> float:
        """Factor for the loss under a wrapper that averages gradients over the data-parallel ranks."""
        return float(self.ranks.data_size)

    @property
    def has_signal(self) -> bool:
        """Whether any component with a coefficient has a token that can move the policy, on any rank."""
        return any(self.counts[name]["live"] and coef for name, coef in self.coef.items())

    def microbatches(self, device: torch.device | str | None = None) -> Iterator[MicroBatch]:
        """The step's micro-batches in order, on ``device`` (default: where the tokens came from)."""
        home = self.batch.device if self.batch is not None else torch.device("cpu")
        place = torch.device(device) if device is not None else home
        for number, rows in enumerate(self.parts):
            yield self._arrange(number, rows, place)

    def _arrange(self, number: int, rows: list[int], device: torch.device) -> MicroBatch:
        fixed = self.arrangement.fixed
        if self.split.packed:
            return microbatch.packed(number, rows, self, width=self.width if fixed else None, device=device)
        width, height = self.width, self.height
        if not fixed:
            # An empty micro-batch keeps one row of padding: the model must run and its collectives be entered.
            width, height = (self.batch.width if self.batch is not None else 1) or 1, max(len(rows), 1)
            if self.arrangement.left:
                longest = max((int(self.batch.lengths_S[row]) for row in rows), default=1) if self.batch else 1
                width = round_up(max(longest, 1), self.arrangement.multiple)
                height = self.height
        return microbatch.padded(number, rows, self, width=width, height=height, device=device)

    def check_open(self) -> None:
        """Refuse a second on-policy update on the same rows (`mark_updated` by another plan)."""
        if self.spec is not None and self.spec.old == "policy" and self.batch is not None:
            for row, record in enumerate(self.batch.records_S):
                if record.plan not in (None, self.serial):
                    raise DataError(
                        "a second update on the same rollouts with old='policy'",
                        where=self.batch.sample_name(row), fix="use old='given' with scored log-probs, or sample anew",
                    )

    def mark_updated(self) -> None:
        """Remember that these rows have been updated on by this plan."""
        if self.batch is not None:
            for record in self.batch.records_S:
                record.plan = self.serial

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

    Returns:
        The same counts on every rank; weights of this rank's tokens.

    Raises:
        PGLossError: the same on every rank: the first faulty rank's error, a disagreement, or no action anywhere.
    """
    ranks = ranks or _ranks(group)
    arrangement = arrangement or Arrangement(multiple=split.multiple_of)
    error: PGLossError | None = None
    local = _Local()
    try:
        coefs = _coefs(spec, coef)
        local = _prepare(batches, spec, split, arrangement, vocab_size)
    except PGLossError as caught:
        # Raised below, on every rank alike.
        error, coefs = caught, {}
    setup = agreement.digest(repr((split, arrangement, interleaved, vocab_size, sorted(coefs.items()))).encode())
    row = agreement.pack(_head(local, spec, arrangement, ranks, setup), _body(local), error)
    rows = ranks.gather(row, ranks.world, ranks.world_size)
    agreement.raise_agreed(rows)
    return _assemble(local, spec, coefs, split, arrangement, ranks, rows, interleaved)


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
            expected="group=the data-parallel process group", got=f"world size {dist.get_world_size()}",
            fix="pass the group, or group='local' if each rank really trains its own model",
        )
    return Ranks()


def _coefs(spec: LossSpec | None, given: Mapping[str, float] | None) -> dict[str, float]:
    if spec is None:
        return {}
    for name, value in (given or {}).items():
        spec.component(name)
        if not float("-inf") < float(value) < float("inf"):
            raise DataError(f"coef[{name!r}] is not finite", got=value)
    return {part.name: float((given or {}).get(part.name, part.coef)) for part in spec.components}


def _prepare(
    batches: Sequence[TokenBatch], spec: LossSpec | None, split: Split, arrangement: Arrangement, vocab_size: int | None
) -> _Local:
    for item in batches:
        if not isinstance(item, TokenBatch):
            raise DataError("plan takes TokenBatch objects", got=type(item).__name__, fix="TokenBatch.from_padded(...)")
    batch = concatenate(batches)
    if batch is None:
        return _Local()
    parts = bins(split, batch.lengths_S.tolist(), arrangement.multiple)
    found = units.find(batch)
    if spec is None:
        return _Local(batch=batch, units=found, parts=parts)
    faults.check(batch, spec, vocab_size=vocab_size)
    empty_S = faults.empty_rows(batch, spec)
    present_S = (batch.lengths_S > 0) & ~empty_S
    tokens = [sets.component_set(batch, part, spec) for part in spec.components]
    counts = [normalizers.local_counts(item, found, present_S) for item in tokens]
    live = [sets.live(batch, item) for item in tokens]
    return _Local(batch=batch, units=found, counts=counts, live=live, parts=parts, excluded=int(empty_S.sum()))


def _head(
    local: _Local, spec: LossSpec | None, arrangement: Arrangement, ranks: Ranks, setup: int
) -> dict[str, int]:
    batch = local.batch
    head = {
        "spec": spec.digest if spec is not None else 0,
        "version": agreement.digest(__version__.encode()),
        "data_rank": ranks.data_rank,
        "setup": setup,
    }
    if batch is None:
        return head
    longest = int(batch.lengths_S.max()) if len(batch) else 0
    packed = [sum(round_up(int(batch.lengths_S[row]), arrangement.multiple) for row in part) for part in local.parts]
    return head | {
        "batch": agreement.batch_digest(batch),
        "streams": agreement.presence(batch),
        "microbatches": len(local.parts),
        "rows": len(batch),
        "tokens": batch.tokens_T.numel(),
        "width": longest,
        "bin_rows": max((len(part) for part in local.parts), default=0),
        "bin_tokens": max(packed, default=0),
        "unit_rows": max(local.units.size.get("episode", 0), local.units.size.get("prompt", 0)) if local.units else 0,
        "double": int(any(stream_T.dtype == torch.float64 for stream_T in batch.streams.values())),
        "excluded": local.excluded,
    }


def _body(local: _Local) -> Tensor:
    values: list[int] = []
    for part, live in zip(local.counts, local.live, strict=True):
        tokens = part.tokens
        total = part.totals["token"]
        bits = int(torch.tensor(total, dtype=torch.float64).view(torch.int64)) if isinstance(total, float) else total
        values += [int(tokens.base_T.sum()), int(tokens.member_T.sum()), live]
        values += [int(part.totals["sequence"]), int(part.totals["turn"]), bits, *tokens.dropped]
    if len(values) > agreement.BODY:
        raise LayoutError(
            "too many components and masks for one agreement row", expected=f"<= {agreement.BODY} counts",
            got=len(values), fix="merge components, or use fewer masks",
        )
    return torch.tensor(values, dtype=torch.int64)


def _assemble(
    local: _Local,
    spec: LossSpec | None,
    coefs: dict[str, float],
    split: Split,
    arrangement: Arrangement,
    ranks: Ranks,
    rows: Tensor,
    interleaved: tuple[int, int] | None,
) -> Plan:
    # One row of every replica: its other ranks have the same batches.
    firsts = [int((rows[:, FIELDS.index("data_rank")] == r).nonzero()[0]) for r in range(ranks.data_size)]
    mine = rows[firsts]
    head = {name: mine[:, i] for i, name in enumerate(FIELDS)}
    counts = _counts(spec, mine)
    count = max(int(head["microbatches"].max()), 1)
    if interleaved is not None:
        count = legal_count(count, *interleaved)
    parts = refine(local.parts, count, split.packed)
    streams = functools.reduce(operator.or_, head["streams"].tolist(), 0)
    totals = _totals(local, spec, list(counts.values()), ranks, int(head["unit_rows"].max()))
    dtype = torch.float64 if bool(head["double"].any()) else torch.float32
    width = int(head["bin_tokens" if split.packed else "width"].max())
    return Plan(
        spec=spec,
        coef=coefs,
        split=split,
        arrangement=arrangement,
        ranks=ranks,
        batch=local.batch,
        table=_table(local, spec, totals, dtype, streams),
        parts=parts,
        height=int(head["bin_rows"].max()),
        width=round_up(max(width, 1), arrangement.multiple),
        counts=counts,
        job={
            "rows": int(head["rows"].sum()),
            "tokens": int(head["tokens"].sum()),
            "excluded": int(head["excluded"].sum()),
            "empty_ranks": int((head["rows"] == 0).sum()),
            # After refining, a rank has an empty micro-batch only for want of rows.
            "empty_microbatches": int((count - torch.minimum(head["rows"], torch.tensor(count))).sum()),
        },
        serial=next(_SERIAL),
    )


def _counts(spec: LossSpec | None, mine: Tensor) -> dict[str, dict[str, int | float]]:
    counts: dict[str, dict[str, int | float]] = {}
    if spec is None:
        return counts
    why = sets.reasons(spec)
    stride = len(SLOTS) + len(why)
    for c, part in enumerate(spec.components):
        body = mine[:, HEAD + c * stride : HEAD + (c + 1) * stride]
        sums = body.sum(0).tolist()
        counts[part.name] = dict(zip((*SLOTS, *why), sums, strict=True))
        if part.divide_by == "weights":
            counts[part.name]["token"] = body[:, SLOTS.index("token")].contiguous().view(torch.float64).sum().item()
        if isinstance(part, PolicyGradient) and counts[part.name]["base"] == 0:
            raise DataError(
                f"no action anywhere: no rank has a token for component {part.name!r}",
                expected="at least one action token in the step", got=f"{int(mine[:, FIELDS.index('rows')].sum())} rows",
                fix="check action_mask; an empty step must not reach the optimizer",
            )
    return counts


def _totals(
    local: _Local, spec: LossSpec | None, counts: list[dict[str, int | float]], ranks: Ranks, capacity: int
) -> normalizers.Totals:
    unit = normalizers.finest(spec) if spec is not None else None
    if spec is None or unit is None:
        return normalizers.Totals(counts, None, None)
    parts = local.counts or []
    width = 5 + 4 * len(spec.components)
    mine = (
        normalizers.keyed_rows(parts, local.units, unit, capacity)
        if local.batch is not None
        else torch.zeros(capacity, width, dtype=torch.int64)
    )
    table = ranks.gather(mine, ranks.data, ranks.data_size).reshape(-1, width)
    return normalizers.Totals(counts, table, unit)


def _table(
    local: _Local, spec: LossSpec | None, totals: normalizers.Totals, dtype: torch.dtype, streams: int
) -> dict[str, Tensor]:
    batch, found = local.batch, local.units
    if batch is None or found is None:
        none = torch.zeros(0, dtype=torch.int64)
        flag, number = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=dtype)
        empty = {"tokens": none, "targets": none, "turn": none, "action": flag}
        # The streams that other ranks have: terms and metrics must take the same path here.
        present = [name for bit, name in enumerate(agreement.OPTIONAL[:5]) if streams >> bit & 1]
        names = spec.names if spec is not None else ()
        return (
            empty
            | dict.fromkeys(present, number)
            | {f"weight/{name}": number for name in names}
            | {f"member/{name}": flag for name in names}
        )
    table = {
        "tokens": batch.tokens_T,
        "targets": batch.targets_T,
        "turn": found.index["turn"],
        "action": batch.action_T,
        **{
            name: stream_T if name == "temperature" else stream_T.to(dtype)
            for name, stream_T in batch.streams.items()
        },
    }
    for c, part in enumerate(local.counts):
        name = part.tokens.component.name
        weight_T = normalizers.weights(c, part, found, totals)
        table[f"weight/{name}"] = weight_T.to(dtype)
        table[f"member/{name}"] = part.tokens.member_T
    return table
