"""The end of a step: one gather over the world that carries metrics, the largest gradient and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_pgloss import finishing
from megatron_pgloss.errors import Caught, DataError, LayoutError, NonFiniteError, PGLossError
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.metrics import Metric, fold
from megatron_pgloss.objective import measure
from megatron_pgloss.planning import Plan
from megatron_pgloss.planning.agreement import error_code, error_of, error_text, of_words, to_words
from megatron_pgloss.spec import LossSpec

_TEXT = 64
"""int64 words of text: the place of a fault, or an error."""
_HEAD = ("speaks", "missing", "length", "updated", "gradient", "error")
_SPEAKS, _MISSING, _LENGTH, _UPDATED, _GRADIENT, _ERROR = range(len(_HEAD))
_NUMBERS = len(_HEAD) + _TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What the ranks told each other; the same on every rank."""

    metrics: dict[str, Metric]
    place: str | None
    """Where the first fault inside the loss is; None where there is none."""
    updated: bool
    """Whether a gradient went back through the loss; in an evaluation none does."""
    gradient: float = 0.0
    """The largest gradient of any rank after an update, NaN where one is NaN."""
    broken: list[int] = field(default_factory=list)
    """Ranks whose gradients are not finite."""


def expected(spec: LossSpec, plan: Plan) -> list[str]:
    """Names of the step's metrics, in order: the same on every rank, since the plan's streams are agreed."""
    streams = frozenset(plan.table)
    return [name for part in spec.components for name in measure.names(part, spec, streams, spec.needs_entropy)]


def collect(
    reports: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    plan: Plan,
    layout: Layout,
    *,
    gradient: Tensor | None = None,
    error: PGLossError | None = None,
) -> Collected:
    """Metrics of the whole job, the place of the first fault, and the largest gradient: the same on every rank.

    Args:
        reports: what the schedule collected on this rank; ``[]`` before the last stage.
        names: metric names in order, equal on all ranks.
        gradient: 0-d float64, the largest gradient of this rank (`megatron_pgloss.megatron.gradients`).
        error: the error of this rank, to be raised on all.

    Raises:
        LayoutError: a last-stage rank saw another number of micro-batches than planned (on every rank).
        PGLossError: any rank's ``error``, or reports that are not what the loss function returned (on every rank).
    """
    mine, missing = dict[str, Metric](), 0
    with Caught() as here:
        mine, missing = _own(reports, names, plan, layout)
    error = error or here.error
    row = torch.zeros(_NUMBERS + 2 * len(names), dtype=torch.int64)
    row[_SPEAKS], row[_UPDATED], row[_MISSING] = int(layout.speaks), int(plan.ledger.pulled), missing
    text = b""
    numbers = _to_host(gradient, mine, names)
    row[_GRADIENT] = numbers[:1].view(torch.int64)
    if mine:
        row[_NUMBERS:] = numbers[1:].view(torch.int64)
        text = finishing.place_of_fault(fold(names, numbers[1:].reshape(1, -1, 2)), plan).encode()[: 8 * _TEXT]
    if error is not None:
        row[_ERROR], text = error_code(error), error_text(error, 8 * _TEXT)
    row[_LENGTH] = len(text)
    row[len(_HEAD) : _NUMBERS] = to_words(text, _TEXT)
    ranks = layout.ranks
    return _agreed(ranks.gather(row, ranks.world, ranks.world_size), names, plan)


def _own(
    reports: Sequence[Mapping[str, Tensor]], names: Sequence[str], plan: Plan, layout: Layout
) -> tuple[dict[str, Metric], int]:
    """This rank's metrics, and how many reports there are beyond those planned."""
    if not isinstance(reports, list | tuple):
        raise DataError(
            "finish takes what forward_backward_func returned", expected="a list of reports",
            got=type(reports).__name__,
        )  # fmt: skip
    # A report without the step's metrics is not one of the step's.
    ours = [one for one in reports if isinstance(one, Mapping) and all(name in one for name in names)]
    for number, report in enumerate(ours):
        for name in names:
            entry = report[name]
            if not isinstance(entry, Tensor) or tuple(entry.shape) != (2,):
                got = list(entry.shape) if isinstance(entry, Tensor) else type(entry).__name__
                raise DataError(
                    "finish got reports that the step's loss function did not return", expected="tensors [2]", got=got,
                    where=f"report {number}, {name}",
                    fix="pass finish what forward_backward_func returned for this step, unreduced",
                )  # fmt: skip
    missing = len(ours) - plan.num_microbatches if layout.last_stage else 0
    if not ours or not layout.last_stage:
        return {}, missing
    return fold(names, torch.stack([torch.stack([report[name] for name in names]) for report in ours])), missing


def _to_host(gradient: Tensor | None, mine: Mapping[str, Metric], names: Sequence[str]) -> Tensor:
    """The largest gradient and this rank's numbers as float64 on the CPU, by one copy from the device and one wait."""
    first = torch.zeros((), dtype=torch.float64) if gradient is None else gradient
    if not mine:
        return first.reshape(1).to("cpu", torch.float64)
    packed = torch.stack([mine[name].pack() for name in names]).to(torch.float64)
    return torch.cat([first.to(packed.device).reshape(1), packed.reshape(-1)]).cpu()


def _agreed(rows: Tensor, names: Sequence[str], plan: Plan) -> Collected:
    if faulty := rows[:, _ERROR].nonzero().flatten().tolist():
        first = rows[faulty[0]]
        raise error_of(int(first[_ERROR]), _text(first), faulty)
    if wrong := rows[:, _MISSING].nonzero().flatten().tolist():
        raise LayoutError(
            "finish got another number of micro-batch reports than planned",
            expected=plan.num_microbatches,
            got=plan.num_microbatches + int(rows[wrong[0], _MISSING]),
            where=f"rank {wrong[0]}",
            fix="pass finish what forward_backward_func returned for this step, once",
        )
    speaking = rows[:, _SPEAKS] == 1
    place = None
    if faulty := (speaking & (rows[:, _LENGTH] > 0)).nonzero().flatten().tolist():
        # The text was cut to a number of bytes, which may have split a character.
        place = f"rank {faulty[0]}, {_text(rows[faulty[0]]).decode(errors='ignore')}"
    numbers = rows[speaking, _NUMBERS:].contiguous().view(torch.float64).reshape(-1, len(names), 2)
    updated = bool((rows[speaking, _UPDATED] == 1).any())
    sizes = rows[:, _GRADIENT].contiguous().view(torch.float64)
    return Collected(
        metrics=fold(names, numbers), place=place, updated=updated,
        gradient=float(sizes.amax()) if updated else 0.0,
        broken=(~sizes.isfinite()).nonzero().flatten().tolist() if updated else [],
    )  # fmt: skip


def _text(row: Tensor) -> bytes:
    return of_words(row[len(_HEAD) : _NUMBERS], int(row[_LENGTH]))


def results(found: Collected, plan: Plan) -> dict[str, float]:
    """The step's numbers by name, and the ranks whose gradients are not finite."""
    return finishing.results(found.metrics, plan) | {"gradient_fault": float(len(found.broken))}


def nonfinite(found: Collected, plan: Plan, *, gradients: bool) -> NonFiniteError | None:
    """The error for a step whose loss or gradient is not finite, or None.

    Args:
        gradients: whether gradients are judged here; False where a loss scaler judges them.
    """
    if count := sum(int(metric.value) for name, metric in found.metrics.items() if name.endswith("/fault")):
        return NonFiniteError(
            "log-probs or terms inside a component are not finite; they were selected out and did not reach the "
            "gradient",
            expected="finite values at every member",
            got=f"{count} such tokens",
            where=found.place,
            fix="look at the model's logits there, and whether they have a column for the token id (on kept sets, -inf "
            "is a sampled token outside of its set: KeptSet(outside='drop') or 'add'); on_nonfinite='skip' or 'report' "
            "goes on",
        )
    for name, coef in plan.coef.items():
        value = float(found.metrics[f"{name}/loss"].value)
        if not (math.isfinite(value) and math.isfinite(coef * value)):
            return NonFiniteError(
                "the loss is not finite, although every log-prob and term is: a product overflows",
                expected="a finite sum of weight times term, times the coefficient",
                got=f"{value} with coefficient {coef}",
                where=f"component {name}",
                fix="smaller advantages, weights or coefficients",
            )
    if found.broken and gradients:
        return NonFiniteError(
            "the gradients are not finite, although the loss is",
            expected="finite gradients",
            got=f"a largest size of {found.gradient}",
            where=f"rank {found.broken[0]}"
            + (f" (and {len(found.broken) - 1} more ranks)" if len(found.broken) > 1 else ""),
            fix="look for NaN or infinity in activations, at padding and context positions too (backward multiplies "
            "them by 0), and for products that overflow: coefficients, advantages, a loss scale",
        )
    return None
