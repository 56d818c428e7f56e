"""From all ranks' rows to the counts of the job and the weights of this rank's tokens. `T` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.planning import agreement, kept_sets, normalizers, sets
from megatron_pgloss.planning.agreement import FIELDS, HEAD, Ranks
from megatron_pgloss.planning.component_table import ComponentTable, Corrected
from megatron_pgloss.planning.keyed import KeyedRows
from megatron_pgloss.planning.local import SLOTS, Local
from megatron_pgloss.rollouts.streams import BY_NAME, FILL
from megatron_pgloss.spec import LossSpec, PolicyGradient

Counts = dict[str, dict[str, int | float]]


def stride_of(spec: LossSpec) -> int:
    """Numbers that a component takes in a row: `SLOTS`, its reasons, and two for each normalised correction."""
    return len(SLOTS) + len(sets.reasons(spec)) + 2 * len(sets.normalized(spec))


def job_counts(spec: LossSpec | None, mine: Tensor) -> Counts:
    """Every component's counts over the job, from one row of each replica.

    Raises:
        DataError: a policy-gradient component without a token anywhere (the same on every rank).
    """
    counts: Counts = {}
    if spec is None:
        return counts
    why = sets.reasons(spec)
    stride = stride_of(spec)
    for c, part in enumerate(spec.components):
        body = mine[:, HEAD + c * stride : HEAD + (c + 1) * stride]
        sums = body[:, : len(SLOTS) + len(why)].sum(0).tolist()
        counts[part.name] = dict.fromkeys((*SLOTS, *why), 0)
        for slot, value in zip((*SLOTS, *why), sums, strict=True):
            counts[part.name][slot] += value  # two masks of one name share a reason
        if part.divide_by == "weights":
            counts[part.name]["token"] = body[:, SLOTS.index("token")].contiguous().view(torch.float64).sum().item()
        if isinstance(part, PolicyGradient) and counts[part.name]["base"] == 0:
            raise DataError(
                f"no action anywhere: no rank has a token for component {part.name!r}",
                expected="at least one action token in the step",
                got=f"{int(mine[:, FIELDS.index('rows')].sum())} rows",
                fix="check action_mask; an empty step must not reach the optimizer",
            )
    return counts


def mean_weights(spec: LossSpec | None, mine: Tensor) -> dict[str, dict[int, float]]:
    """Component to the mean over the job of each normalised correction's weights, by the correction's index."""
    found: dict[str, dict[int, float]] = {}
    for c, part in enumerate(spec.components if spec is not None else ()):
        assert spec is not None
        at = HEAD + c * stride_of(spec) + len(SLOTS) + len(sets.reasons(spec))
        found[part.name] = {}
        for k, i in enumerate(sets.normalized(spec)):
            pair = mine[:, at + 2 * k : at + 2 * k + 2]
            total = pair[:, 0].contiguous().view(torch.float64).sum().item()
            number = int(pair[:, 1].sum())
            if number:
                found[part.name][i] = total / number
    return found


def unit_totals(
    local: Local, spec: LossSpec | None, counts: list[dict[str, int | float]], ranks: Ranks, capacity: int
) -> normalizers.Totals:
    """Counts of units over the job; gathers the keyed ones over the data-parallel ranks where a path names any."""
    unit = normalizers.finest(spec) if spec is not None else None
    if spec is None or unit is None:
        return normalizers.Totals(counts, None, None)
    parts = local.counts or []
    mine = (
        normalizers.keyed_rows(parts, local.units, unit, capacity)
        if local.batch is not None
        else KeyedRows.zeros(capacity, len(spec.components)).table
    )
    table = ranks.gather(mine, ranks.data, ranks.data_size).reshape(-1, mine.shape[1])
    return normalizers.Totals(counts, table, unit)


def token_table(local: Local, spec: LossSpec | None, dtype: torch.dtype, streams: int) -> dict[str, Tensor]:
    """Streams of this rank's tokens; where it has no rows, empty streams of the same names."""
    batch, found = local.batch, local.units
    if batch is None or found is None:
        return _empty_table(spec, dtype, streams)
    table = {
        "tokens": batch.tokens_T,
        "targets": batch.targets_T,
        "turn": found.index["turn"],
        "action": batch.action_T,
    }
    for name, stream_T in (batch.streams | kept_sets.at_actions(batch) | local.constants).items():
        # What the log-prob pass reads stays as exact as it came.
        of_loss = name not in BY_NAME or BY_NAME[name].read_by == "loss"
        table[name] = stream_T.to(dtype) if of_loss and stream_T.is_floating_point() else stream_T
    if "temperature" in batch.streams:
        # Nobody trains on the other tokens, and what a sampler reports there may be 0.
        scored_T = batch.action_T | batch.target_T
        table["temperature"] = torch.where(scored_T, batch.streams["temperature"], FILL["temperature"])
    return table


def _empty_table(spec: LossSpec | None, dtype: torch.dtype, streams: int) -> dict[str, Tensor]:
    """The streams that other ranks have: terms and metrics must take the same path here."""
    none = torch.zeros(0, dtype=torch.int64)
    flag, number = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=dtype)
    table = {"tokens": none, "targets": none, "turn": none, "action": flag}
    there = [name for bit, name in enumerate(agreement.OPTIONAL) if streams >> bit & 1]
    table |= {name: BY_NAME[name].empty(dtype) for name in there if name in BY_NAME}
    if spec is None:
        return table
    for name in spec.readers:
        table.setdefault(name, BY_NAME[name].empty(dtype) if name in BY_NAME else number)
    table |= {"recorded": flag} if spec.old == "record" else {}
    table |= {"interpolation": number} if spec.old == "interpolate" else {}
    return table


def component_tables(
    local: Local,
    spec: LossSpec | None,
    totals: normalizers.Totals,
    dtype: torch.dtype,
    means: dict[str, dict[int, float]],
) -> dict[str, ComponentTable]:
    """Weights, members and constants of every component; empty ones where this rank has no rows."""
    found: dict[str, ComponentTable] = {}
    if spec is None:
        return found
    flag, number = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=dtype)
    for c, part in enumerate(spec.components):
        corrected: Corrected | None = None
        if local.batch is None or local.units is None:
            weight_T, member_T = number, flag
            if sets.weighed(spec, part):
                corrected = Corrected(before=flag, weight=number, truncated=flag)
        else:
            counts = local.counts[c]
            weight_T, member_T = normalizers.weights(c, counts, local.units, totals), counts.tokens.member_T
            for mean in means[part.name].values():
                weight_T = weight_T / mean
            if sets.weighed(spec, part):
                tokens = counts.tokens
                corrected = Corrected(
                    before=tokens.before_T, weight=tokens.is_weight_T.to(dtype), truncated=tokens.clipped_T
                )
        found[part.name] = ComponentTable(
            weight_T=weight_T.to(dtype), member_T=member_T, corrected=corrected, means=means[part.name]
        )
    return found
