"""Which tokens each component trains on, which it counts, and with what constant factor. `T` tokens, `S` rows.

Rules act in one order: authorship, infrastructure fault, the spec's masks, its plan-time corrections. Masks shrink the
count set too, unless the component counts a set of its own; rejections do where it says ``count_rejected=False``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import flags
from megatron_pgloss.planning import frozen, kept_sets
from megatron_pgloss.planning.frozen import Verdict
from megatron_pgloss.planning.units import per_row
from megatron_pgloss.rollouts import Termination, TokenBatch
from megatron_pgloss.rules.masks import TAKEN, tokens_ended
from megatron_pgloss.spec import Component, LossSpec, Mask, TruncatedIS


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSet:
    """The tokens of one component on this rank."""

    component: Component
    base_T: Tensor
    """bool [T]: by authorship alone, before rules."""
    before_T: Tensor
    """bool [T]: after the masks, before any rejection."""
    member_T: Tensor
    """bool [T]: what is trained."""
    count_T: Tensor
    """bool [T]: what the normaliser counts; holds ``member_T``, but for what a statistics pass rejected under
    ``count_rejected=False``, whose factor is 0."""
    factor_T: Tensor
    """float64 [T]: user weight times corrections before they are normalised; 1 where neither applies."""
    user_T: Tensor
    """float64 [T]: user weight alone."""
    is_weight_T: Tensor
    """float64 [T]: the corrections' weights alone."""
    clipped_T: Tensor
    """bool [T]: where one of them was clipped."""
    means: tuple[tuple[float, int], ...]
    """Of each of `normalized`: the sum of the weights that its mean is over, and their number."""
    dropped: tuple[int, ...]
    """Tokens taken out by each of `reasons`, in order; a token counts for the first rule that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The tokens of every component on this rank."""

    sets: list[ComponentSet]
    verdicts: list[Verdict | None]
    """What the plan-time corrections say."""


def find(
    batch: TokenBatch, spec: LossSpec, version: int | None, uncorrected: list[ComponentSet] | None = None
) -> Members:
    """Second stage of a plan: who is trained and counted, and with what constant factor.

    Args:
        version: of the weights being trained.
        uncorrected: the tokens of every component without the spec's corrections, where they are known.

    Raises:
        DataError: a member lies outside the set its component counts; see `frozen.verdicts`.
    """
    verdicts = frozen.verdicts(batch, spec, version)
    if uncorrected and not spec.corrections:
        return Members(sets=uncorrected, verdicts=verdicts)
    return Members(sets=[component_set(batch, part, spec, verdicts) for part in spec.components], verdicts=verdicts)


def without(found: Members, batch: TokenBatch, spec: LossSpec, rejected: Mapping[str, Tensor]) -> Members:
    """The same after a statistics pass.

    Args:
        rejected: component to bool [T]: what leaves its denominators.
    """
    verdicts = found.verdicts
    sets = [component_set(batch, part, spec, verdicts, rejected.get(part.name)) for part in spec.components]
    return Members(sets=sets, verdicts=verdicts)


def reasons(spec: LossSpec) -> tuple[str, ...]:
    """Names of the plan-time rules that can take tokens out, in the order they act."""
    rejecting = [rule for rule in spec.corrections if rule.rejects and not spec.is_late(rule)]
    outside = (spec.kept.reason,) if spec.kept is not None and spec.kept.outside == "drop" else ()
    return ("fault", *(mask.reason for mask in spec.masks), *outside, *(rule.reason for rule in rejecting))


def normalized(spec: LossSpec) -> tuple[int, ...]:
    """Indices of the plan-time corrections whose weights are divided by their mean over the batch."""
    return tuple(
        i for i, rule in enumerate(spec.corrections)
        if rule.normalizes and not spec.is_late(rule)
    )  # fmt: skip


def weighed(spec: LossSpec, component: Component) -> bool:
    """Whether a plan-time correction weighs the component's tokens."""
    return any(rule.weighs for rule in spec.corrections_on(component, late=False))


def base(batch: TokenBatch, component: Component) -> Tensor:
    """bool [T]: the tokens the component is defined on, by authorship."""
    return batch.action_T if component.over == "action" else batch.target_T


def empty_rows(batch: TokenBatch, spec: LossSpec) -> Tensor:
    """bool [S]: rows with tokens but without a member of any component before rules."""
    any_T = torch.zeros_like(batch.action_T)
    for part in spec.components:
        any_T = any_T | base(batch, part)
    return (batch.lengths_S > 0) & (per_row(any_T, batch.cu_S1) == 0)


def component_set(
    batch: TokenBatch,
    component: Component,
    spec: LossSpec,
    verdicts: Sequence[Verdict | None] | None = None,
    rejected_T: Tensor | None = None,
) -> ComponentSet:
    """Members, count set and factors of ``component``.

    Args:
        verdicts: what the plan-time corrections say (`frozen.verdicts`); None: asked here.
        rejected_T: bool [T]: what a statistics pass found rejected by gates and by corrections inside the loss; matters
            where the component says ``count_rejected=False``.

    Raises:
        DataError: a member lies outside the set the component counts.
    """
    verdicts = frozen.verdicts(batch, spec, None) if verdicts is None else verdicts
    base_T = base(batch, component)
    fault_T = tokens_ended(batch, Termination.FAULT)
    left_T = base_T & ~fault_T
    numbers = [int(base_T.count_nonzero()), int(left_T.count_nonzero())]
    for mask in spec.masks:
        if mask.acts_on(component):
            left_T = left_T & ~_taken(batch, mask)
        numbers.append(int(left_T.count_nonzero()))
    if spec.kept is not None and spec.kept.outside == "drop":
        gone_T = kept_sets.leaving(batch, spec, component)
        left_T = left_T if gone_T is None else left_T & ~gone_T
        numbers.append(int(left_T.count_nonzero()))
    before_T, count_T = left_T, _counted(batch, component, spec, left_T, fault_T)
    weight_T, clipped_T = torch.ones_like(before_T, dtype=torch.float64), torch.zeros_like(before_T)
    weighs = False
    for rule, verdict in zip(spec.corrections, verdicts, strict=True):
        if verdict is None:
            continue
        acting = rule.acts_on(component)
        if verdict.passes_T is not None:
            left_T = left_T & verdict.passes_T if acting else left_T
            numbers.append(int(left_T.count_nonzero()))
        if acting and verdict.weight_T is not None:
            weight_T, weighs = weight_T * verdict.weight_T, True
        if acting and verdict.clipped_T is not None:
            clipped_T = clipped_T | verdict.clipped_T
    given_T = batch.weights.get(component.name)
    user_T = flags(count_T, torch.float64) if given_T is None else torch.where(count_T, given_T.double(), 0)
    factor_T = flags(left_T, torch.float64) if given_T is None else torch.where(left_T, user_T, 0)
    if weighs:
        factor_T = factor_T * torch.where(left_T, weight_T, 1)
    if not component.count_rejected:
        count_T = count_T & ~(before_T & ~left_T)
        if rejected_T is not None:
            count_T = count_T & ~rejected_T
            factor_T = torch.where(rejected_T, 0, factor_T)
        user_T = torch.where(count_T, user_T, 0)
    return ComponentSet(
        component=component, base_T=base_T, before_T=before_T, member_T=left_T, count_T=count_T, factor_T=factor_T,
        user_T=user_T, is_weight_T=weight_T, clipped_T=clipped_T & before_T,
        means=tuple(_mean(batch, component, spec, verdicts, i, left_T) for i in normalized(spec)),
        dropped=tuple(before - after for before, after in pairwise(numbers)),
    )  # fmt: skip


def _counted(batch: TokenBatch, component: Component, spec: LossSpec, left_T: Tensor, fault_T: Tensor) -> Tensor:
    """bool [T]: the count set before rejection. A set of the component's own holds no token of a row that left."""
    if component.count == "members":
        return left_T
    named_T = batch.observation_T if component.count == "observations" else batch.masks[component.count]
    count_T = named_T & ~fault_T & ~empty_rows(batch, spec)[batch.seq_T]
    outside_T = left_T & ~count_T
    if bool(outside_T.any()):
        position = int(outside_T.to(torch.int8).argmax())
        raise DataError(
            f"{component.name}: a trained token is not in the set it counts ({component.count!r})",
            expected="members inside the count set",
            got=f"{int(outside_T.sum())} outside",
            where=batch.where(position),
            fix=f"widen {component.count!r} or narrow the members by a UserMask",
        )
    return count_T


def _mean(
    batch: TokenBatch, component: Component, spec: LossSpec, verdicts: Sequence[Verdict | None], i: int, left_T: Tensor
) -> tuple[float, int]:
    """Sum and number of the weights of correction ``i`` on this rank: of trained tokens, or of units that hold one."""
    rule, verdict = spec.corrections[i], verdicts[i]
    assert isinstance(rule, TruncatedIS) and verdict is not None and verdict.weight_T is not None
    if not rule.acts_on(component):
        return 0.0, 0
    if rule.statistic_unit is None:
        return float(torch.where(left_T, verdict.weight_T, 0).sum()), int(left_T.count_nonzero())
    unit = frozen.unit_sums(batch)[rule.statistic_unit]
    inside_T = left_T & (unit.unit_N >= 0)
    weight_U = torch.zeros(unit.units, dtype=torch.float64)
    weight_U[unit.unit_N[inside_T]] = verdict.weight_T[inside_T]  # one number per unit
    alive_U = torch.zeros(unit.units, dtype=torch.bool).index_fill_(0, unit.unit_N[inside_T], True)
    return float(weight_U[alive_U].sum()), int(alive_U.sum())


def live(batch: TokenBatch, tokens: ComponentSet) -> int:
    """Members that can move the policy: factor not 0 and, where the surrogate reads it, advantage not 0."""
    alive_T = tokens.member_T & (tokens.factor_T != 0)
    if not tokens.component.moves_at_zero_advantage:
        alive_T = alive_T & (batch.streams["advantages"] != 0)
    return int(alive_T.count_nonzero())


def _taken(batch: TokenBatch, mask: Mask) -> Tensor:
    return TAKEN[mask.kind](batch, mask)
