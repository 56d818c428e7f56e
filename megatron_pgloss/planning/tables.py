"""Last stage of a plan: streams, weights and members of this rank's tokens. `T` tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_pgloss.planning import agreement, kept_sets, token_weights, values, weighing
from megatron_pgloss.planning.component_table import ComponentTable, Corrected
from megatron_pgloss.planning.counts import Local
from megatron_pgloss.rollouts.streams import BY_NAME, FILL
from megatron_pgloss.spec import LossSpec


def token_table(local: Local, spec: LossSpec | None, dtype: torch.dtype, streams: int) -> dict[str, Tensor]:
    """Streams of this rank's tokens; where it has no rows, empty streams of the same names."""
    if local.rows is None or local.units is None:
        return _empty_table(spec, dtype, streams)
    batch = local.rows.batch
    table = {
        "tokens": batch.tokens_T,
        "targets": batch.targets_T,
        "turn": local.units.index["turn"],
        "action": batch.action_T,
    }
    for name, stream_T in (batch.streams | kept_sets.at_actions(batch) | local.rows.streams).items():
        # Streams that the log-prob pass reads keep the dtype that they came in.
        of_loss = name not in BY_NAME or BY_NAME[name].read_by == "loss"
        table[name] = stream_T.to(dtype) if of_loss and stream_T.is_floating_point() else stream_T
    if "temperature" in batch.streams:
        # Nobody trains on the other tokens, and the temperature given for them may be 0.
        scored_T = batch.action_T | batch.target_T
        table["temperature"] = torch.where(scored_T, batch.streams["temperature"], FILL["temperature"])
    return table


def _empty_table(spec: LossSpec | None, dtype: torch.dtype, streams: int) -> dict[str, Tensor]:
    """Empty streams of the names that other ranks have: terms and metrics must take the same path on this rank."""
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
    totals: token_weights.Totals,
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
        doubtful: dict[str, Tensor] = {}
        if local.units is None:
            weight_T, member_T = number, flag
            if weighing.acts(spec, part):
                corrected = weighing.none(dtype)
        else:
            counts = local.counts[c]
            if local.rows is not None:
                doubtful = values.doubtful(local.rows.batch, spec, part, counts.tokens.member_T)
            weight_T, member_T = token_weights.weights(c, counts, local.units, totals), counts.tokens.member_T
            for mean in means[part.name].values():
                weight_T = weight_T / mean
            mean = math.prod(means[part.name].values())
            corrected = weighing.finished(counts.tokens.corrected, mean, dtype)
        found[part.name] = ComponentTable(
            weight_T=weight_T.to(dtype), member_T=member_T, corrected=corrected, means=means[part.name],
            doubtful=doubtful,
        )  # fmt: skip
    return found
