"""The statistics pass: what is decided over a whole step from one forward-only pass of the model. `T` tokens of this
rank's rows.

It decides gates by quantile, second moment or covariance, mean weights, the terms of whole groups, and which tokens
``count_rejected=False`` takes out of the denominators.

A data-parallel rank holds whole rows, so its rows are treated as one large micro-batch; statistics over the rows of all
ranks are taken by `megatron_pgloss.planning.select`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import UnitSums
from megatron_pgloss.objective import links
from megatron_pgloss.objective.grouped import group_terms
from megatron_pgloss.objective.late import corrected, gate_key
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.planning import Plan
from megatron_pgloss.planning.carried import Carried
from megatron_pgloss.planning.component_table import Decided, GroupTerm
from megatron_pgloss.planning.select import Job, draws
from megatron_pgloss.rules import Verdict, gates
from megatron_pgloss.spec import (
    Component,
    Correction,
    CovarianceGate,
    EntropyGate,
    LossSpec,
    PolicyGradient,
    SecondMomentGate,
)


@dataclass(frozen=True, slots=True)
class Looked:
    """What the pass knows of one component on this rank's rows before it decides over all rows."""

    x: Streams
    told: dict[Hashable, Tensor]
    """Statistics over prompts and episodes, by key: [T] or [2, T]."""
    gates: dict[int, Tensor]
    """Place of a gate in the spec to bool [T], the tokens that pass: gates that need no other rank."""
    said: list[tuple[int, Correction, Verdict]]
    """The verdicts of the late corrections."""


def look(
    plan: Plan, rows: Callable[[], tuple[Tensor, Tensor | None]]
) -> tuple[list[Looked], Tensor, Tensor | None]:  # fmt: skip
    """Let every rule look at this rank's rows, users' functions too. A collective over the world: what one rank raises
    is raised on all.

    Args:
        rows: a function that gives the policy's log-probs at the start of the step, float [T], and the entropy where
            the spec reads it.

    Returns:
        What was found for each component, and what ``rows`` gave.
    """
    spec, micro = plan.spec, plan.whole()
    assert spec is not None
    told: list[dict[Hashable, Tensor]] = [{} for _ in spec.components]
    with Carried() as here:
        logp_T, entropy_T = rows()
        streams = [Streams(micro, part, spec, logp_T, entropy_T) for part in spec.components]
        asked = links.ask(streams, micro, spec)
    if spec.unit_readers:  # all ranks hold what they ask before they exchange it
        here.gather(plan.ranks)
        told = links.take(asked, plan.job_rows)
    if here.error is None:
        with here:
            links.answer(asked, micro, spec)
            looked = [
                Looked(x, known, _gates(x.component, x, spec), corrected(x.component, x, spec))
                for x, known in zip(streams, told, strict=True)
            ]
            for x in streams:
                _refuse_lost(plan, x)
    here.gather(plan.ranks)
    return looked, logp_T, entropy_T


def _refuse_lost(plan: Plan, x: Streams) -> None:
    if x.lost is None or not bool(x.lost.any()):
        return
    assert plan.batch is not None
    at = int(x.lost.to(torch.int8).argmax())
    holes = [name for name, one in plan.batch.streams.items() if one.dim() == 1 and not one[at].isfinite()]
    raise DataError(
        f"a non-finite value that a statistic of component {x.component.name!r} reads",
        expected="finite values at all action tokens of a unit that is trained on, masked or not",
        where=plan.batch.where(at, " or ".join(holes)), fix="mend the source, or take the whole unit out",
    )  # fmt: skip


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
        told = {key: each if each.dim() == 1 else each.T for key, each in one.told.items()}
        found = Decided(group=group, told=told)
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
        passes_T = passes_T & _corrections(one, plan, job, found)
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


def _corrections(one: Looked, plan: Plan, job: Job, found: Decided) -> Tensor:
    """bool [T]: the tokens that the late corrections leave. The means of normalised weights go into ``found.means``.

    A mean is over the members that all corrections leave; gates, which shrink the numerator alone, do not matter to it.
    """
    x = one.x
    passes_T = torch.ones_like(x.members)
    for _, _, verdict in one.said:
        passes_T = passes_T if verdict.passes is None else passes_T & verdict.passes
    trained_T = x.members & passes_T
    for i, rule, verdict in one.said:
        if rule.normalizes and verdict.weight is not None:
            counted_T = _counted(rule, x, plan, trained_T)
            # The mean over no token is 0: nothing is trained then, and nothing is divided.
            found.means[i] = job.mean(verdict.weight, counted_T) or 1.0
    return passes_T


def _counted(rule: Correction, x: Streams, plan: Plan, trained_T: Tensor) -> Tensor:
    """bool [T]: the tokens whose weights enter the mean: all that are trained, or one for each unit of the job."""
    if rule.statistic_unit is None:
        return trained_T
    if not rule.straddles:
        return _one_each(x._units(rule.statistic_unit), trained_T)
    rows, row_T = plan.job_rows, x._units("sequence").unit_N
    one_T = _one_each(x._units("sequence"), trained_T)
    alive_S1 = torch.zeros(len(rows.there_S), 1, dtype=torch.bool)
    alive_S1[row_T[one_T]] = True
    first_S1 = rows.firsts(alive_S1, [rule.statistic_unit])
    return one_T & first_S1[row_T, 0]


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
    """The context in which a gate of the statistics pass is decided."""

    plan: Plan
    job: Job
    """Statistics over the tokens of all data-parallel ranks."""
    thresholds: dict[str, float]
    """Thresholds by name, for the report; a gate enters the one that it found."""


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
