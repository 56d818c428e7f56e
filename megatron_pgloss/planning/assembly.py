"""From all ranks' rows to the counts of the job and the weights of this rank's tokens. `T` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.planning import agreement, normalizers, sets
from megatron_pgloss.planning.agreement import FIELDS, HEAD, Ranks
from megatron_pgloss.planning.local import SLOTS, Local
from megatron_pgloss.spec import LossSpec, PolicyGradient

Counts = dict[str, dict[str, int | float]]


def job_counts(spec: LossSpec | None, mine: Tensor) -> Counts:
    """Every component's counts over the job, from one row of each replica.

    Raises:
        DataError: a policy-gradient component without a token anywhere (the same on every rank).
    """
    counts: Counts = {}
    if spec is None:
        return counts
    why = sets.reasons(spec)
    stride = len(SLOTS) + len(why)
    for c, part in enumerate(spec.components):
        body = mine[:, HEAD + c * stride : HEAD + (c + 1) * stride]
        sums = body.sum(0).tolist()
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


def unit_totals(
    local: Local, spec: LossSpec | None, counts: list[dict[str, int | float]], ranks: Ranks, capacity: int
) -> normalizers.Totals:
    """Counts of units over the job; gathers the keyed ones over the data-parallel ranks where a path names any."""
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


def token_table(
    local: Local, spec: LossSpec | None, totals: normalizers.Totals, dtype: torch.dtype, streams: int
) -> dict[str, Tensor]:
    """Streams, weights and members of this rank's tokens; where it has no rows, empty streams of the same names."""
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
        **{name: stream_T.to(dtype) for name, stream_T in batch.streams.items() if name != "temperature"},
    }
    if "temperature" in batch.streams:
        # Nobody trains on the other tokens, and what a sampler reports there may be 0.
        scored_T = batch.action_T | batch.target_T
        table["temperature"] = torch.where(scored_T, batch.streams["temperature"], 1.0)
    for c, part in enumerate(local.counts):
        name = part.tokens.component.name
        weight_T = normalizers.weights(c, part, found, totals)
        table[f"weight/{name}"] = weight_T.to(dtype)
        table[f"member/{name}"] = part.tokens.member_T
    return table
