"""What one rank knows of a step before the gather: its rows checked and counted, and the row it sends. `T` tokens, `S`
rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_pgloss._version import __version__
from megatron_pgloss.errors import DataError, LayoutError
from megatron_pgloss.planning import agreement, faults, normalizers, recording, sets, units
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.planning.arrangement import Arrangement
from megatron_pgloss.planning.frozen import lags, verdicts
from megatron_pgloss.planning.split import Split, bins, round_up
from megatron_pgloss.rollouts import STREAMS, Termination, TokenBatch, concatenate
from megatron_pgloss.rules import Verdict
from megatron_pgloss.rules.corrections import interpolation
from megatron_pgloss.rules.masks import ended
from megatron_pgloss.spec import LossSpec

SLOTS = ("base", "members", "live", "sequence", "turn", "token")
"""Counts of a component in a row; the tokens each rule took out follow them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """This rank's rows, and what was counted on them."""

    batch: TokenBatch | None = None
    units: units.Units | None = None
    counts: list[normalizers.LocalCounts] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    verdicts: list[Verdict | None] = field(default_factory=list)
    """What the plan-time corrections say."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    """Further streams [T] of the plan's table: ``recorded``, ``interpolation``."""
    parts: list[list[int]] = field(default_factory=list)
    excluded: int = 0


def coefficients(spec: LossSpec | None, given: Mapping[str, float] | None) -> dict[str, float]:
    """Coefficient of every component: the spec's, or this step's own."""
    if spec is None:
        return {}
    for name, value in (given or {}).items():
        spec.component(name)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"coef[{name!r}] is not a finite number", got=repr(value))
    return {part.name: float((given or {}).get(part.name, part.coef)) for part in spec.components}


def prepare(
    batches: Sequence[TokenBatch],
    spec: LossSpec | None,
    split: Split,
    arrangement: Arrangement,
    vocab_size: int | None,
    version: int | None = None,
) -> Local:
    """Check and count this rank's rows.

    Args:
        version: the version of the weights being trained, where the spec reads it.

    Raises:
        DataError: the first fault, see `faults.check`.
    """
    if not isinstance(batches, Sequence) or not all(isinstance(item, TokenBatch) for item in batches):
        got = [type(item).__name__ for item in batches] if isinstance(batches, Sequence) else type(batches).__name__
        raise DataError("plan takes a list of TokenBatch objects", got=got, fix="plan([batch], spec, ...)")
    batch = concatenate(batches)
    if batch is None:
        return Local()
    parts = bins(split, batch.lengths_S.tolist(), arrangement.multiple)
    found = units.find(batch)
    if spec is None:
        faults.check_inputs(batch, vocab_size=vocab_size)
        return Local(batch=batch, units=found, parts=parts)
    constants: dict[str, Tensor] = {}
    if spec.old == "record":
        batch, constants["recorded"] = recording.recalled(batch)
    plain = faults.check(batch, spec, vocab_size=vocab_size)
    if spec.old == "interpolate":
        constants["interpolation"] = interpolation(lags(batch, version, "old='interpolate'"))
    local = Local(
        batch=batch, units=found, parts=parts, excluded=int(faults.empty_rows(batch, spec).sum()), constants=constants,
        verdicts=verdicts(batch, spec, version),
    )  # fmt: skip
    return count(local, spec, tokens=None if spec.corrections else plain)


def count(
    local: Local,
    spec: LossSpec,
    rejected: Mapping[str, Tensor] | None = None,
    tokens: list[sets.ComponentSet] | None = None,
) -> Local:
    """``local`` with its components counted.

    Args:
        tokens: their tokens, where they are known.
        rejected: component to bool [T]: what a statistics pass found rejected.

    Raises:
        DataError: a member lies outside the set its component counts.
    """
    batch, found = local.batch, local.units
    if batch is None or found is None:
        return local
    present_S = (batch.lengths_S > 0) & ~faults.empty_rows(batch, spec) & ~ended(batch, Termination.FAULT)
    tokens = tokens or [
        sets.component_set(batch, part, spec, local.verdicts, (rejected or {}).get(part.name))
        for part in spec.components
    ]
    counts = [normalizers.local_counts(item, found, present_S) for item in tokens]
    return replace(local, counts=counts, live=[sets.live(batch, item) for item in tokens])


def head(local: Local, spec: LossSpec | None, arrangement: Arrangement, ranks: Ranks, setup: int) -> dict[str, int]:
    """The head of this rank's row, by the names of `agreement.FIELDS`."""
    batch = local.batch
    known = {
        "spec": spec.digest if spec is not None else 0,
        "version": agreement.digest(__version__.encode()),
        "data_rank": ranks.data_rank,
        "setup": setup,
    }
    if batch is None:
        return known
    lengths = batch.lengths_S.tolist()
    longest = max(lengths, default=0)
    packed = [sum(round_up(lengths[row], arrangement.multiple) for row in part) for part in local.parts]
    return known | {
        # The digest lets the ranks of one replica compare their rows. Where every rank is a replica by itself, no other
        # rank has the same rows, and the digest is not computed.
        "batch": agreement.batch_digest(batch) if ranks.world_size > ranks.data_size else 0,
        "streams": agreement.presence(batch),
        "microbatches": len(local.parts),
        "rows": len(batch),
        "tokens": batch.tokens_T.numel(),
        "width": longest,
        "bin_rows": max((len(part) for part in local.parts), default=0),
        "bin_tokens": max(packed, default=0),
        "unit_rows": _unit_rows(local, spec),
        "double": int(_double(batch)),
        "excluded": local.excluded,
        "actions": int(batch.action_T.sum()),
    }


def _double(batch: TokenBatch) -> bool:
    """Whether a stream of the loss is float64, and with it the loss; what the log-prob pass reads has no say."""
    of_pass = {row.name for row in STREAMS if row.read_by != "loss"}
    return any(stream_T.dtype == torch.float64 for name, stream_T in batch.streams.items() if name not in of_pass)


def _unit_rows(local: Local, spec: LossSpec | None) -> int:
    """Rows that this rank will have in the keyed gather: one for each of its units of the finest kind named."""
    unit = normalizers.finest(spec) if spec is not None else None
    return local.units.size.get(unit, 0) if local.units is not None and unit is not None else 0


def body(local: Local) -> Tensor:
    """The counts of this rank's components, int64."""
    values: list[int] = []
    for part, live in zip(local.counts, local.live, strict=True):
        tokens = part.tokens
        total = part.totals["token"]
        bits = _bits(total) if isinstance(total, float) else total
        values += [int(tokens.base_T.count_nonzero()), int(tokens.member_T.count_nonzero()), live]
        values += [int(part.totals["sequence"]), int(part.totals["turn"]), bits, *tokens.dropped]
        for weight, number in tokens.means:
            values += [_bits(weight), number]
    if len(values) > agreement.BODY:
        raise LayoutError(
            "too many components and masks for one agreement row",
            expected=f"<= {agreement.BODY} counts",
            got=len(values),
            fix="merge components, or use fewer masks",
        )
    return torch.tensor(values, dtype=torch.int64)


def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float64).view(torch.int64))
