"""Surrogates of a whole group of rollouts: their value and slope, from all sequences of a prompt. `T` tokens of this
rank's rows.

A group's sequences may lie on any ranks and in any micro-batches. From a statistics pass each rank knows the log-ratio
of every sequence of the step, and with it the loss of the group and its derivative by each log-ratio, two constants per
token. ``value + slope (s - sg(s))`` then has the loss's value and its exact gradient, and is a plain sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.planning import Plan, Ranks
from megatron_pgloss.planning.component_table import GroupTerm
from megatron_pgloss.spec import REAL, PolicyGradient

Key = tuple[int, int]
Sequence = tuple[Key, int, float]
"""A labelled sequence: its prompt's key, its label, its log-ratio."""


def group_terms(part: PolicyGradient, x: Streams, plan: Plan) -> GroupTerm:
    """Value and slope of ``part`` at every token, float [T] each. Two gathers over the data-parallel ranks: of counts,
    then of four integers per labelled sequence.

    Args:
        x: streams of all rows of this rank, with the log-ratio of the component's axis.
    """
    assert isinstance(part.surrogate, REAL)
    row_R, table_R4 = _labelled(x, plan)
    value_R, slope_R = (torch.zeros(len(row_R), dtype=torch.float64) for _ in range(2))
    losses = _losses(_of_all_ranks(table_R4, plan.ranks), part.surrogate.tau)
    for i, (group, label, log_ratio) in enumerate(_read(table_R4)):
        total, number = losses[group, label]
        logit = -label * log_ratio / part.surrogate.tau
        value_R[i] = total / number
        slope_R[i] = -label * math.exp(logit - total) / part.surrogate.tau
    kind = plan.components[part.name].weight_T.dtype
    out = []
    for of_R in (value_R, slope_R):
        of_S = torch.zeros(0 if plan.batch is None else len(plan.batch), dtype=torch.float64)
        of_S[row_R] = of_R
        out.append((of_S if plan.batch is None else of_S[plan.batch.seq_T]).to(kind))
    return GroupTerm(value=out[0], slope=out[1])


def _labelled(x: Streams, plan: Plan) -> tuple[Tensor, Tensor]:
    """This rank's sequences with a label, int64 [R]: their rows; and int64 [R, 4]: their prompt's key, label (1 or -1)
    and the bits of their log-ratio.
    """
    units, batch = plan.local.units, plan.batch
    if batch is None or units is None:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.int64)
    s_T, seq_T = x.bounded(x.log_ratio).detach().double(), batch.seq_T
    # Float64 sums in token order: rows are whole, so no partition changes them.
    inside_T = x.members & s_T.isfinite()
    picked_3T = torch.stack([inside_T.double(), s_T, x.advantage.double()])
    table_3S = torch.zeros(3, len(batch), dtype=torch.float64)
    count_S, s_S, advantage_S = table_3S.index_add(1, seq_T[inside_T], picked_3T[:, inside_T])
    row_R = ((count_S > 0) & (advantage_S != 0)).nonzero().flatten()
    s_R = s_S[row_R] / count_S[row_R]
    key_R2 = units.key["prompt"][units.parent["sequence", "prompt"][row_R]]
    label_R = advantage_S[row_R].sign().to(torch.int64)
    return row_R, torch.cat([key_R2, label_R[:, None], s_R.view(torch.int64)[:, None]], 1)


def _read(table_R4: Tensor) -> Iterable[Sequence]:
    """Rows of `_labelled`: prompt's key, label, log-ratio."""
    first_R, second_R, label_R, bits_R = table_R4.T
    log_ratios = bits_R.contiguous().view(torch.float64).tolist()
    return zip(zip(first_R.tolist(), second_R.tolist(), strict=True), label_R.tolist(), log_ratios, strict=True)


def _of_all_ranks(mine_R4: Tensor, ranks: Ranks) -> Iterable[Sequence]:
    sizes = ranks.gather(torch.tensor([len(mine_R4)]), ranks.data, ranks.data_size).flatten().tolist()
    padded = torch.zeros(max(sizes), 4, dtype=torch.int64)
    padded[: len(mine_R4)] = mine_R4
    table = ranks.gather(padded, ranks.data, ranks.data_size)
    return _read(torch.cat([table[rank, :size] for rank, size in enumerate(sizes)]))


def _losses(sequences: Iterable[Sequence], tau: float) -> dict[tuple[Key, int], tuple[float, int]]:
    """Prompt's key and label to ``log(1 + sum exp(-label s / tau))`` and the number of sequences."""
    logits: dict[tuple[Key, int], list[float]] = {}
    for group, label, log_ratio in sequences:
        logits.setdefault((group, label), [0.0]).append(-label * log_ratio / tau)
    found = {}
    for key, some in logits.items():
        top = max(some)
        # fsum rounds once, so the order of ranks and rows changes no bit.
        found[key] = top + math.log(math.fsum(math.exp(logit - top) for logit in some)), len(some) - 1
    return found
