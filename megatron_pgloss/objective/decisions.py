"""The statistics pass: what is decided over a whole step from one forward-only pass of the model. `T` tokens of this
rank's rows.

Decided are gates by quantile, second moment or covariance, mean weights, the terms of whole groups, and everything that
``count_rejected=False`` takes out of the denominators.

A data-parallel rank holds whole rows, so the streams of its rows are those of one large micro-batch; what goes over
all rows of the job is counted by `megatron_pgloss.planning.select`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import UnitSums
from megatron_pgloss.objective.grouped import group_terms
from megatron_pgloss.objective.late import corrected, gate_key
from megatron_pgloss.objective.links import settle
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.planning import MicroBatch, Plan
from megatron_pgloss.planning.component_table import Decided, GroupTerm
from megatron_pgloss.planning.select import Job, draws
from megatron_pgloss.rules import Verdict, gates
from megatron_pgloss.spec import (
    Component,
    CovarianceGate,
    EntropyGate,
    LossSpec,
    PolicyGradient,
    SecondMomentGate,
)
from megatron_pgloss.spec.corrections import Correction


@dataclass(frozen=True, slots=True)
class Looked:
    """One component on this rank's rows: all that the pass finds out without another rank, by users' functions too."""

    x: Streams
    gates: dict[int, Tensor]
    """Gate by its place in the spec to bool [T], which tokens it lets pass: those that need no other rank."""
    said: list[tuple[int, Correction, Verdict]]
    """What the late corrections say."""


def look(plan: Plan, micro: MicroBatch, logp_T: Tensor, entropy_T: Tensor | None) -> list[Looked]:
    """The part of the pass that a rank makes alone. What it raises is to be carried before `decide` begins.

    Args:
        micro: all rows of this rank as one micro-batch (`Plan.whole`).
        logp_T: log-probs of the policy at the start of the step; entropy_T where the spec reads it.
    """
    spec = plan.spec
    assert spec is not None
    streams = [Streams(micro, part, spec, logp_T, entropy_T) for part in spec.components]
    settle(streams, micro, spec)
    looked = [Looked(x, _gates(x.component, x, spec), corrected(x.component, x, spec)) for x in streams]
    for x in streams:
        if x.lost is not None and bool(x.lost.any()):
            assert plan.batch is not None
            at = int(x.lost.to(torch.int8).argmax())
            holes = [name for name, one in plan.batch.streams.items() if one.dim() == 1 and not one[at].isfinite()]
            raise DataError(
                f"a non-finite value that a statistic of component {x.component.name!r} reads",
                expected="finite values at all action tokens of a unit that is trained on, masked or not",
                where=plan.batch.where(at, " or ".join(holes)), fix="mend the source, or take the whole unit out",
            )  # fmt: skip
    return looked


def decide(plan: Plan, looked: Sequence[Looked]) -> dict[str, Decided]:
    """Decide gates and mean weights of ``plan``, for every component. A collective over the data-parallel ranks.

    Args:
        looked: what every component's rules say on this rank's own rows.
    """
    assert plan.spec is not None
    findings, job = {}, Job(plan.ranks)
    for one in looked:
        x, part = one.x, one.x.component
        group: GroupTerm | None = None
        if isinstance(part, PolicyGradient) and part.needs_statistics_pass:
            group = group_terms(part, x, plan)
        found = Decided(group=group)
        passes_T = torch.ones_like(x.members)
        for i, gate in enumerate(plan.spec.gates):
            if not gate.acts_on(part):
                continue
            if gate.needs_statistics_pass:
                scene = Scene(plan, job, found.thresholds.setdefault(i, {}))
                found.gates[i] = DECIDE[gate.kind](gate, x, scene)
            elif i in one.gates:
                found.gates[i] = one.gates[i]
            else:
                continue
            passes_T = passes_T & found.gates[i]
        passes_T = passes_T & _corrections(one, job, found)
        rejecting: list[object] = [gate for gate in plan.spec.gates if gate.acts_on(part)]
        rejecting += [rule for rule in plan.spec.corrections_on(part, late=True) if rule.rejects]
        if not part.count_rejected and rejecting:
            found = replace(found, rejected_T=x.members & ~passes_T)
        findings[part.name] = found
    return findings


def _gates(part: Component, x: Streams, spec: LossSpec) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for i, gate in enumerate(spec.gates):
        if not gate.acts_on(part) or gate.needs_statistics_pass or part.count_rejected:
            continue
        said = gates.apply(gate, x, gate_key(i))
        if said.passes is None:
            raise DataError(
                f"{part.name}: count_rejected=False with a soft gate: a factor rejects nothing",
                expected="a gate that returns bool",
                got="a factor",
                fix="count_rejected=True",
            )
        found[i] = said.passes
    return found


def _corrections(one: Looked, job: Job, found: Decided) -> Tensor:
    """What the late corrections keep, bool [T]; notes the mean of those that are normalised.

    A mean is over the members that all corrections leave; gates shrink the numerator alone and are not asked.
    """
    x = one.x
    passes_T = torch.ones_like(x.members)
    for _, _, verdict in one.said:
        passes_T = passes_T if verdict.passes is None else passes_T & verdict.passes
    trained_T = x.members & passes_T
    for i, rule, verdict in one.said:
        if rule.normalizes and verdict.weight is not None:
            unit = rule.statistic_unit
            counted_T = trained_T if unit is None else _one_each(x._units(unit), trained_T)
            # Nothing is trained: nothing is divided.
            found.means[i] = job.mean(verdict.weight, counted_T) or 1.0
    return passes_T


def _one_each(unit: UnitSums, mask_T: Tensor) -> Tensor:
    """bool [T]: the first token of each unit that has one in ``mask_T``."""
    inside_T, total = mask_T & (unit.unit_N >= 0), mask_T.numel()
    first_U = torch.full((unit.units,), total, dtype=torch.int64)
    first_U = first_U.scatter_reduce(0, unit.unit_N[inside_T], torch.arange(total)[inside_T], "amin")
    one_T = torch.zeros_like(mask_T)
    one_T[first_U[first_U < total]] = True
    return one_T


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a gate of the statistics pass is decided."""

    plan: Plan
    job: Job
    """Statistics over the tokens of all data-parallel ranks."""
    thresholds: dict[str, float]
    """Takes the threshold that was found, by name, for the report."""


def _entropy_quantile(gate: EntropyGate, x: Streams, scene: Scene) -> Tensor:
    number = scene.job.count(x.members)
    if not number:
        return torch.ones_like(x.members)
    # The k-th largest; equal entropies pass together.
    k = max(_share(gate.share, number), 1)
    least = scene.job.smallest(x.entropy, x.members, number - k + 1)
    scene.thresholds["entropy"] = least
    return x.entropy.detach().double() >= least


def _second_moment(gate: SecondMomentGate, x: Streams, scene: Scene) -> Tensor:
    base_T = x.old if gate.base == "old" else x.rollout
    gap_T = (x.logp - base_T).detach().double()
    outward_T = x.members & (((x.advantage > 0) & (gap_T > 0)) | ((x.advantage < 0) & (gap_T < 0)))
    least = scene.job.cut(gap_T.square(), outward_T, gate.threshold)
    scene.thresholds["second_moment"] = least
    return ~(outward_T & (gap_T.square() >= least))


def _covariance(gate: CovarianceGate, x: Streams, scene: Scene) -> Tensor:
    selected_T = _covariant(gate, x, scene.plan, scene.job)
    return selected_T if gate.effect == "keep" else ~selected_T


def _covariant(gate: CovarianceGate, x: Streams, plan: Plan, job: Job) -> Tensor:
    members_T = x.members
    logp_T, advantage_T = x.logp.detach().double(), x.advantage.double()
    covariance_T = (advantage_T - job.mean(advantage_T, members_T)) * (logp_T - job.mean(logp_T, members_T))
    number = job.count(members_T)
    k = max(int(gate.share * number), 1)
    if gate.select == "band":
        band_T = members_T & (covariance_T >= gate.low) & (covariance_T <= gate.high)
        draw_T = draws(plan.batch, gate.seed)
        return job.lowest_draws(draw_T, band_T, k)
    if not number:
        return torch.zeros_like(members_T)
    return members_T & (covariance_T >= job.smallest(covariance_T, members_T, number - k + 1))


DECIDE: dict[str, Callable[[Any, Streams, Scene], Tensor]] = {
    "entropy_quantile": _entropy_quantile,
    "second_moment": _second_moment,
    "covariance": _covariance,
}
"""Kind of gate that needs the statistics pass to its function, bool [T]: which tokens pass."""


def _share(share: float, number: int) -> int:
    # Rounded first: 0.1 of 30 is 3, although the product is a bit more.
    return math.ceil(round(share * number, 9))
