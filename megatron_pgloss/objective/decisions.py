"""What is decided over a whole step from one forward-only pass: gates by quantile, second moment or covariance, mean
weights, the terms of whole groups, and everything that ``rejected="kept"`` takes out of the denominators. `T` tokens of
this rank's rows.

A data-parallel rank holds whole rows, so the streams of its rows are those of one large micro-batch; what goes over
all rows of the job is counted by `megatron_pgloss.planning.select`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.objective import ratios
from megatron_pgloss.objective.grouped import group_terms
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.planning import MicroBatch, Plan
from megatron_pgloss.planning.select import Job, draws
from megatron_pgloss.spec import (
    AnyGate,
    Component,
    CovarianceGate,
    EntropyGate,
    LossSpec,
    PolicyGradient,
    SecondMomentGate,
    Staleness,
    TruncatedIS,
    acts_on,
)
from megatron_pgloss.terms import UnitSums, corrections, gates
from megatron_pgloss.terms.corrections import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The findings of a statistics pass, per token and as numbers."""

    streams: dict[str, Tensor] = field(default_factory=dict)
    """``gate/<i>/<component>``: bool [T], True is kept; and `grouped.group_streams`. Read by the loss."""
    rejected: dict[str, Tensor] = field(default_factory=dict)
    """Component to bool [T]: what gates and late corrections reject, where ``rejected="kept"``."""
    constants: dict[str, float] = field(default_factory=dict)
    """Thresholds and means, equal on every rank."""


def decide(plan: Plan, micro: MicroBatch, logp_T: Tensor, entropy_T: Tensor | None) -> Decided:
    """Decide gates and mean weights of ``plan``. A collective over the data-parallel ranks.

    Args:
        micro: all rows of this rank as one micro-batch (`megatron_pgloss.planning.microbatch.whole`).
        logp_T: log-probs of the policy at the start of the step; entropy_T where the spec reads it.
    """
    assert plan.spec is not None
    found, job = Decided(), Job(plan.ranks)
    for part in plan.spec.components:
        x = Streams(micro, part, plan.spec, logp_T, entropy_T)
        if isinstance(part, PolicyGradient) and ("old" in part.reads or part.ratio == "none"):
            x.log_ratio = ratios.log_ratio(part.axis, x)
        if isinstance(part, PolicyGradient) and part.by_group:
            found.streams.update(group_terms(part, x, plan))
        kept_T = _gates(part, x, plan, job, found)
        kept_T = kept_T & _corrections(part, x, plan.spec, job, found)
        rejecting: list[object] = [gate for gate in plan.spec.gates if part.name in gate.on]
        rejecting += [rule for rule in plan.spec.corrections_on(part, late=True) if rule.rejects]
        if part.rejected == "kept" and rejecting:
            found.rejected[part.name] = x.members & ~kept_T
    return found


def _gates(part: Component, x: Streams, plan: Plan, job: Job, found: Decided) -> Tensor:
    assert plan.spec is not None
    kept_T = torch.ones_like(x.members)
    for i, gate in enumerate(plan.spec.gates):
        if part.name not in gate.on:
            continue
        if gate.needs_statistics:
            keep_T = _decided(i, gate, part, x, plan, job, found)
        elif part.rejected == "kept":
            keep_T = gates.keep(gate, x)
            if keep_T.dtype != torch.bool:
                raise DataError(
                    f"{part.name}: rejected='kept' with a soft gate: a factor rejects nothing",
                    expected="a gate that returns bool",
                    got=keep_T.dtype,
                    fix="rejected='original'",
                )
        else:
            continue
        found.streams[f"gate/{i}/{part.name}"] = keep_T
        kept_T = kept_T & keep_T
    return kept_T


def _corrections(part: Component, x: Streams, spec: LossSpec, job: Job, found: Decided) -> Tensor:
    """What the late corrections keep, bool [T]; notes the mean of those that are normalised.

    A mean is over the members that all corrections leave; gates shrink the numerator alone and are not asked.
    """
    kept_T = torch.ones_like(x.members)
    units = {name: x._units(name) for name in ("sequence", "turn")}
    weighed: list[tuple[int, TruncatedIS, Tensor]] = []
    for i, rule in enumerate(spec.corrections):
        if isinstance(rule, Staleness) or not (spec.is_late(rule) and acts_on(rule, part)):
            continue
        log_T = (x.old if rule.of == "old" else x.logp).detach() - x.rollout
        weight_T, keep_T = corrections.apply(rule, log_T, units, x._voters("sampled", log_T), x.bound)
        if keep_T is not None:
            kept_T = kept_T & keep_T
        if isinstance(rule, TruncatedIS) and rule.normalize:
            assert weight_T is not None
            weighed.append((i, rule, weight_T))
    trained_T = x.members & kept_T
    for i, rule, weight_T in weighed:
        counted_T = trained_T if rule.level == "token" else _one_each(units[LEVELS[rule.level][0]], trained_T)
        mean = job.mean(weight_T, counted_T)
        found.constants[f"is_mean/{i}/{part.name}"] = mean or 1.0  # nothing is trained: nothing is divided
    return kept_T


def _one_each(unit: UnitSums, mask_T: Tensor) -> Tensor:
    """bool [T]: the first token of each unit that has one in ``mask_T``."""
    inside_T, total = mask_T & (unit.unit_N >= 0), mask_T.numel()
    first_U = torch.full((unit.units,), total, dtype=torch.int64)
    first_U = first_U.scatter_reduce(0, unit.unit_N[inside_T], torch.arange(total)[inside_T], "amin")
    one_T = torch.zeros_like(mask_T)
    one_T[first_U[first_U < total]] = True
    return one_T


def _decided(i: int, gate: AnyGate, part: Component, x: Streams, plan: Plan, job: Job, found: Decided) -> Tensor:
    """One gate over the whole step, bool [T]."""
    members_T, place = x.members, f"gate/{i}/{part.name}"
    if isinstance(gate, EntropyGate):
        number = job.count(members_T)
        if not number:
            return torch.ones_like(members_T)
        # The k-th largest; equal entropies are kept together.
        k = max(_share(gate.share, number), 1)
        found.constants[f"{place}/entropy"] = least = job.smallest(x.entropy, members_T, number - k + 1)
        return x.entropy.detach().double() >= least
    if isinstance(gate, SecondMomentGate):
        base_T = x.old if gate.base == "old" else x.rollout
        gap_T = (x.logp - base_T).detach().double()
        outward_T = members_T & (((x.advantage > 0) & (gap_T > 0)) | ((x.advantage < 0) & (gap_T < 0)))
        found.constants[f"{place}/second_moment"] = least = job.cut(gap_T.square(), outward_T, gate.threshold)
        return ~(outward_T & (gap_T.square() >= least))
    assert isinstance(gate, CovarianceGate)
    selected_T = _covariant(gate, x, plan, job)
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


def _share(share: float, number: int) -> int:
    # Rounded first: 0.1 of 30 is 3, although the product is a bit more.
    return math.ceil(round(share * number, 9))
