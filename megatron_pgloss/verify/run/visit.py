"""One visit: build a layout, run every spec on it, and compare each step with the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.errors import LayoutError, PGLossError
from megatron_pgloss.planning import Split
from megatron_pgloss.verify.data.batches import batches_of
from megatron_pgloss.verify.layouts.reshard import full_gradients
from megatron_pgloss.verify.layouts.scenario import Scenario
from megatron_pgloss.verify.run.compare import distance, metric_gap, worst
from megatron_pgloss.verify.run.drive import build, leave, make_step, run_schedule
from megatron_pgloss.verify.run.judge import Judge
from megatron_pgloss.verify.run.outcome import Bounds, Outcome
from megatron_pgloss.verify.run.visit_own import visit_own

__all__ = ["Bounds", "Outcome", "visit"]


def visit(layout: Scenario, judge: Judge, specs: Iterable[str] | None = None) -> list[Outcome]:
    """Run the specs on one layout. A collective over the world, whose size is the layout's.

    Args:
        layout: the layout to visit.
        judge: the oracle's answers, with their specs and precision.
        specs: names of the specs to run; None: all specs of the judge.

    Returns:
        One outcome for each spec, or a single one where the layout tests a loss that Megatron adds itself. An error
        that the package raises on all ranks alike is an outcome too.

    Raises:
        LayoutError: the world has another size than the layout.
    """
    if layout.world not in (None, dist.get_world_size()):
        raise LayoutError(
            "the layout does not fit the world", expected=f"{layout.world} processes", got=dist.get_world_size(),
            where=layout.name,
        )  # fmt: skip
    if layout.own:
        return [visit_own(layout, judge.precision.tolerance)]
    names = list(judge.specs) if specs is None else list(specs)
    judge.prepare(layout.data, names)
    if judge.precision.half:
        _one_process(layout, judge, names)
    return _agree([_judged(layout, judge, *ran) for ran in _runs(layout, judge, names)])


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The results of a step, or the error that it raised on all ranks alike."""

    metrics: dict[str, float] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def _runs(layout: Scenario, judge: Judge, names: list[str]) -> list[tuple[str, _Run]]:
    """Run every spec's step on one model. A collective."""
    chunks, where = build(layout, dtype=judge.precision.dtype, layer_spec=judge.precision.layers)
    found = [(name, _run(layout, judge, name, chunks, where)) for name in names]
    leave(chunks)
    return found


def _run(layout: Scenario, judge: Judge, name: str, chunks: list[Any], where: Any) -> _Run:
    spec, rows = judge.specs[name], judge.rows(layout.data)
    try:
        step, more = make_step(layout, chunks, spec)
        plan = step.begin(batches_of(layout, where, spec, rows, judge.precision.streams))
    except PGLossError as error:  # by contract the same on every rank
        return _Run(error=f"{type(error).__name__}: {error}")
    # The schedule may raise on one rank alone. That rank must not go on, so the error ends the process
    # (`megatron_pgloss.verify.run.launch.LastWords`).
    losses = run_schedule(step, chunks, **more)
    try:
        metrics, grads = step.finish(losses), full_gradients(chunks)
    except PGLossError as error:
        return _Run(error=f"{type(error).__name__}: {error}")
    facts = {"microbatches": plan.num_microbatches, "empty": plan.job["empty_microbatches"], "dp": where.dp}
    return _Run(metrics=metrics, grads={key: grad / layout.loss_scale for key, grad in grads.items()}, facts=facts)


def _judged(layout: Scenario, judge: Judge, name: str, run: _Run) -> Outcome:
    bounds = _bounds(layout, judge, name)
    if run.error:
        return Outcome(layout=layout, spec=name, bounds=bounds, error=run.error)
    reference, answer = judge.answer(layout.data, name)[1:]
    loss, gradient, parameter, norm = _errors(layout, judge, name, run)
    # In half precision the largest ratio is as far off as the worst log-prob, and says nothing about the layout.
    gap, metric = (0.0, "") if judge.precision.half else metric_gap(run.metrics, answer, judge.specs[name])
    facts = run.facts | {"largest": max(float(grad.abs().max()) for grad in reference.values()), "metrics": run.metrics}
    return Outcome(
        layout=layout, spec=name, bounds=bounds, loss_error=loss, gradient_error=gradient, parameter=parameter,
        norm_error=norm, metric_error=gap, metric=metric, facts=facts,
    )  # fmt: skip


def _errors(layout: Scenario, judge: Judge, name: str, run: _Run) -> tuple[float, float, str, float]:
    """Errors of the loss and of the worst parameter, that parameter's name, and the error of the whole gradient."""
    loss, reference, answer = judge.answer(layout.data, name)
    gradient, parameter = worst(run.grads, reference)
    scale = answer["magnitude"] if judge.precision.half else abs(loss)
    return abs(run.metrics["loss"] - loss) / (scale or 1.0), gradient, parameter, distance(run.grads, reference)


def _bounds(layout: Scenario, judge: Judge, name: str) -> Bounds:
    most = judge.precision.tolerance
    if not judge.precision.half:
        return Bounds(loss=most, gradient=most, norm=most, metric=most)
    loss, gradient, norm = judge.alone[layout.data, name]
    # The loss of one process may be right by luck, so that the whole gradient's error counts for it too.
    return Bounds(loss=most * max(loss, norm), gradient=most * gradient, norm=most * norm, metric=0.0)


def _one_process(layout: Scenario, judge: Judge, names: list[str]) -> None:
    """Measure the errors of the same model in one process: the first rank has all rows in one micro-batch."""
    missing = [name for name in names if (layout.data, name) not in judge.alone]
    if not missing:
        return
    data = layout.data
    one = Scenario(
        kind=data.kind, tied=data.tied, temperature=data.temperature, vocab=data.vocab, experts=data.experts,
        layers=data.layers, tail=data.tail, alone=True, split=Split(microbatches=1),
    )  # fmt: skip
    for name, run in _runs(one, judge, missing):
        if run.error:
            raise LayoutError(f"the model in one process fails: {run.error}", where=f"spec {name}")
        loss, gradient, _, norm = _errors(one, judge, name, run)
        judge.alone[data, name] = (loss, gradient, norm)


def _agree(outcomes: list[Outcome]) -> list[Outcome]:
    """Mark outcomes whose metrics differ between ranks. One collective for the whole visit."""
    # Compared as text, because NaN is not equal to itself.
    mine = [repr(sorted(one.facts.get("metrics", {}).items())) for one in outcomes]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    same = [len({row[i] for row in everyone}) == 1 for i in range(len(outcomes))]
    return [replace(one, agreed=flag) for one, flag in zip(outcomes, same, strict=True)]
