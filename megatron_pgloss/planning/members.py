"""Which tokens each component trains on, which it counts, and the constant factor of each. `T` tokens, `S` rows.

Rules act in one order: authorship, infrastructure fault, the spec's masks, its plan-time corrections. Masks shrink the
count set too, unless the component counts a set of its own; rejections shrink it where the component says
``count_rejected=False``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import flags
from megatron_pgloss.planning import frozen, kept_sets, weighing
from megatron_pgloss.planning.component_table import Corrected
from megatron_pgloss.planning.presence import base, empty_rows
from megatron_pgloss.rollouts import Termination, TokenBatch
from megatron_pgloss.rules import Verdict, masks
from megatron_pgloss.rules.masks import tokens_ended
from megatron_pgloss.spec import Component, LossSpec, Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSet:
    """The tokens of one component on this rank."""

    component: Component
    base_T: Tensor
    """bool [T]: the tokens that the component is defined on by authorship alone, before any rule."""
    before_T: Tensor
    """bool [T]: the tokens that the masks leave, before any rejection."""
    member_T: Tensor
    """bool [T]: the tokens that are trained."""
    count_T: Tensor
    """bool [T]: the tokens that the normaliser counts. They include ``member_T``, except tokens that a statistics pass
    rejected under ``count_rejected=False``: those stay members, with factor 0."""
    factor_T: Tensor
    """float64 [T]: the user's weight times the corrections' weights before these are divided by their mean; 1 at a
    member that has neither, 0 outside the members."""
    user_T: Tensor
    """float64 [T]: the user's weight alone; 1 at a counted token that has none, 0 outside the count set."""
    corrected: Corrected | None
    """What the plan-time corrections made of the tokens, before weights are divided by their mean; None where no
    correction acts on the component."""
    means: tuple[tuple[float, int], ...]
    """For each correction of `normalized`: the sum and the number of the weights that its mean is taken over."""
    dropped: tuple[int, ...]
    """How many tokens each of `reasons` takes out, in order; a token counts for the first rule that takes it."""


Heads = dict[tuple[int, str], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The tokens of every component on this rank."""

    sets: list[ComponentSet]
    verdicts: list[Verdict | None]
    """The verdict of each correction of the spec at plan time; None for those that act inside the loss."""
    open: dict[int, frozen.Open]
    """Corrections over prompts and episodes, by their index in the spec; before `joined`, ``verdicts`` has stand-ins
    for their verdicts."""
    heads: Heads = field(default_factory=dict)
    """(Normalised correction over prompts or episodes, component) to bool [S]: the rows of this rank that stand for
    their units in the mean weight, in which each unit of the job counts once."""


def find(
    batch: TokenBatch, spec: LossSpec, version: int | None, uncorrected: list[ComponentSet] | None = None
) -> Members:
    """Second stage of a plan: which tokens are trained and counted, and their constant factors.

    Args:
        version: version of the weights being trained.
        uncorrected: the tokens of every component without the spec's corrections, where they are known.

    Raises:
        DataError: a member lies outside the set its component counts; see `frozen.verdicts`.
    """
    found = frozen.verdicts(batch, spec, version)
    if uncorrected and not spec.corrections:
        return Members(sets=uncorrected, verdicts=found.said, open=found.open)
    sets = [component_set(batch, part, spec, found.said) for part in spec.components]
    return Members(sets=sets, verdicts=found.said, open=found.open)


def joined(found: Members, batch: TokenBatch, spec: LossSpec, answers: list[Tensor]) -> Members:
    """``found`` with the verdicts of the corrections over prompts and episodes, from the numbers of all ranks.

    Args:
        answers: the answer to the statistic of each of ``found.open``, in order.
    """
    verdicts = frozen.Verdicts(found.verdicts, found.open).completed(answers)
    sets = [component_set(batch, part, spec, verdicts) for part in spec.components]
    return replace(found, sets=sets, verdicts=verdicts)


def headed(found: Members, batch: TokenBatch, spec: LossSpec, heads: Heads) -> Members:
    """``found`` with the sums and numbers of weights from which the means over prompts and episodes are made."""
    sets = [
        replace(
            item,
            means=tuple(
                _mean(batch, item.component, spec, found.verdicts, i, item.member_T, heads) for i in normalized(spec)
            ),
        )
        for item in found.sets
    ]
    return replace(found, sets=sets, heads=heads)


def without(found: Members, batch: TokenBatch, spec: LossSpec, rejected: Mapping[str, Tensor]) -> Members:
    """``found`` after a statistics pass.

    Args:
        rejected: component to bool [T]: the tokens that leave its denominators.
    """
    verdicts = found.verdicts
    sets = [component_set(batch, part, spec, verdicts, rejected.get(part.name)) for part in spec.components]
    return headed(replace(found, sets=sets), batch, spec, found.heads)


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


def component_set(
    batch: TokenBatch,
    component: Component,
    spec: LossSpec,
    verdicts: Sequence[Verdict | None] | None = None,
    rejected_T: Tensor | None = None,
) -> ComponentSet:
    """Members, count set and factors of ``component``.

    Args:
        verdicts: what the plan-time corrections say (`frozen.verdicts`); None: they are asked here.
        rejected_T: bool [T]: the tokens that gates and corrections inside the loss reject, as a statistics pass found;
            it matters only where the component says ``count_rejected=False``.

    Raises:
        DataError: a member lies outside the set the component counts.
    """
    verdicts = frozen.verdicts(batch, spec, None).said if verdicts is None else verdicts
    base_T = base(batch, component)
    fault_T = tokens_ended(batch, Termination.FAULT)
    left_T = base_T & ~fault_T
    numbers = [int(base_T.count_nonzero()), int(left_T.count_nonzero())]
    for mask in spec.masks:
        if mask.acts_on(component):
            left_T = left_T & _left(batch, mask)
        numbers.append(int(left_T.count_nonzero()))
    if spec.kept is not None and spec.kept.outside == "drop":
        gone_T = kept_sets.leaving(batch, spec, component)
        left_T = left_T if gone_T is None else left_T & ~gone_T
        numbers.append(int(left_T.count_nonzero()))
    before_T, count_T = left_T, _counted(batch, component, spec, left_T, fault_T)
    corrected = weighing.corrected(batch, component, spec, verdicts, before_T)
    for rule, verdict in zip(spec.corrections, verdicts, strict=True):
        if verdict is None:
            continue
        acting = rule.acts_on(component)
        if verdict.passes is not None:
            left_T = left_T & verdict.passes if acting else left_T
            numbers.append(int(left_T.count_nonzero()))
    given_T = batch.weights.get(component.name)
    user_T = flags(count_T, torch.float64) if given_T is None else torch.where(count_T, given_T.double(), 0)
    factor_T = flags(left_T, torch.float64) if given_T is None else torch.where(left_T, user_T, 0)
    if corrected is not None:
        factor_T = factor_T * torch.where(left_T, corrected.weight, 1)
    if not component.count_rejected:
        count_T = count_T & ~(before_T & ~left_T)
        if rejected_T is not None:
            count_T = count_T & ~rejected_T
            factor_T = torch.where(rejected_T, 0, factor_T)
        user_T = torch.where(count_T, user_T, 0)
    return ComponentSet(
        component=component, base_T=base_T, before_T=before_T, member_T=left_T, count_T=count_T, factor_T=factor_T,
        user_T=user_T, corrected=corrected,
        means=tuple(_mean(batch, component, spec, verdicts, i, left_T, {}) for i in normalized(spec)),
        dropped=tuple(before - after for before, after in pairwise(numbers)),
    )  # fmt: skip


def _counted(batch: TokenBatch, component: Component, spec: LossSpec, left_T: Tensor, fault_T: Tensor) -> Tensor:
    """bool [T]: the count set before any rejection. A count set of the component's own loses the tokens of rows that a
    fault ended and of rows without a member of any component.
    """
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
    batch: TokenBatch, component: Component, spec: LossSpec, verdicts: Sequence[Verdict | None], i: int,
    left_T: Tensor, heads: Heads,
) -> tuple[float, int]:  # fmt: skip
    """Sum and number of the weights of correction ``i`` on this rank: one for each trained token or, where the
    correction joins tokens over a unit, one for each unit that holds a trained token (over prompts and episodes, which
    several ranks may hold: one for each of the ``heads``).
    """
    rule, verdict = spec.corrections[i], verdicts[i]
    assert verdict is not None and verdict.weight is not None
    if not rule.acts_on(component):
        return 0.0, 0
    if rule.statistic_unit is None:
        return float(torch.where(left_T, verdict.weight, 0).sum()), int(left_T.count_nonzero())
    if rule.straddles:
        head_S = heads.get((i, component.name), torch.zeros(len(batch), dtype=torch.bool))
        left_T = left_T & head_S[batch.seq_T]
    unit = frozen.unit_sums(batch)["sequence" if rule.straddles else rule.statistic_unit]
    inside_T = left_T & (unit.unit_N >= 0)
    weight_U = torch.zeros(unit.units, dtype=torch.float64)
    weight_U[unit.unit_N[inside_T]] = verdict.weight[inside_T]  # one number per unit
    alive_U = torch.zeros(unit.units, dtype=torch.bool).index_fill_(0, unit.unit_N[inside_T], True)
    return float(weight_U[alive_U].sum()), int(alive_U.sum())


def live(batch: TokenBatch, tokens: ComponentSet) -> int:
    """How many members can move the policy: their factor is not 0 and, unless the component moves at advantage 0, their
    advantage is not 0.
    """
    alive_T = tokens.member_T & (tokens.factor_T != 0)
    if not tokens.component.moves_at_zero_advantage:
        alive_T = alive_T & (batch.streams["advantages"] != 0)
    return int(alive_T.count_nonzero())


def _left(batch: TokenBatch, mask: Mask) -> Tensor:
    passes_T = masks.apply(mask, batch).passes
    assert passes_T is not None
    return passes_T
