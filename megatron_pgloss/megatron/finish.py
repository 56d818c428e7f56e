"""The end of a step: one gather over the world that carries metrics and the fault flag."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_pgloss.errors import LayoutError, NonFiniteError
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.metrics import Metric, fold
from megatron_pgloss.planning import Plan

_TEXT = 64
"""int64 words of text for the place of a fault."""
_HEAD = 4  # speaks, micro-batch reports beyond the plan's, length of the text, whether a gradient was asked for


def collect(
    reports: Sequence[Mapping[str, Tensor]], names: Sequence[str], plan: Plan, layout: Layout
) -> tuple[dict[str, Metric], str | None, bool]:
    """Metrics of the whole job, the place of the first fault, and whether it was an update: the same on every rank.

    Args:
        reports: what the schedule collected on this rank; ``[]`` before the last stage.
        names: metric names in order, equal on all ranks.

    Raises:
        LayoutError: a last-stage rank saw another number of micro-batches than planned (on every rank).
    """
    # A report without our entries is none: better said on every rank than a KeyError on this one.
    ours = [report for report in reports if all(name in report for name in names)]
    mine = fold(names, torch.stack([torch.stack([report[name] for name in names]) for report in ours])) if ours else {}
    row = torch.zeros(_HEAD + _TEXT + 2 * len(names), dtype=torch.int64)
    row[0], row[3] = int(layout.speaks), int(plan.updated)
    row[1] = len(ours) - plan.num_microbatches if layout.last_stage else 0
    if layout.last_stage and mine:
        numbers = torch.stack([mine[name].pack() for name in names]).to("cpu", torch.float64)
        row[_HEAD + _TEXT :] = numbers.contiguous().view(torch.int64).reshape(-1)
        text = _place(mine, plan).encode()[: 8 * _TEXT]
        row[2] = len(text)
        row[_HEAD : _HEAD + _TEXT] = torch.frombuffer(bytearray(text.ljust(8 * _TEXT)), dtype=torch.int64)
    ranks = layout.ranks
    rows = ranks.gather(row, ranks.world, ranks.world_size)
    wrong = rows[:, 1].nonzero().flatten().tolist()
    if wrong:
        raise LayoutError(
            "finish got another number of micro-batch reports than planned",
            expected=plan.num_microbatches,
            got=plan.num_microbatches + int(rows[wrong[0], 1]),
            where=f"rank {wrong[0]}",
            fix="pass finish what forward_backward_func returned for this step, once",
        )
    speaking = rows[:, 0] == 1
    numbers = rows[speaking, _HEAD + _TEXT :].contiguous().view(torch.float64).reshape(-1, len(names), 2)
    place = None
    faulty = (speaking & (rows[:, 2] > 0)).nonzero().flatten().tolist()
    if faulty:
        text = rows[faulty[0], _HEAD:].contiguous().view(torch.uint8).numpy().tobytes()[: int(rows[faulty[0], 2])]
        # Cut to its room in bytes, which may split a character.
        place = f"rank {faulty[0]}, {text.decode(errors='ignore')}"
    return fold(names, numbers), place, bool((rows[speaking, 3] == 1).any())


def _place(mine: Mapping[str, Metric], plan: Plan) -> str:
    """Where this rank's first fault is, or the empty string."""
    for name, metric in mine.items():
        if name.endswith("/fault_at") and math.isfinite(float(metric.value)) and plan.batch is not None:
            return f"component {name.split('/')[0]}, {plan.batch.where(int(metric.value), 'logits')}"
    return ""


def nonfinite(metrics: Mapping[str, Metric], place: str | None) -> NonFiniteError | None:
    """The error for non-finite values inside a component, or None."""
    count = sum(int(metric.value) for name, metric in metrics.items() if name.endswith("/fault"))
    if not count:
        return None
    return NonFiniteError(
        "log-probs or terms inside a component are not finite; they were selected out and did not reach the gradient",
        expected="finite values at every member",
        got=f"{count} such tokens",
        where=place,
        fix="look at the model's logits there (on kept sets, -inf is a sampled token outside of its set: "
        "KeptSet(outside='drop') or 'add'); on_nonfinite='skip' or 'report' goes on",
    )
