"""Which tokens each component trains on, which it counts, and with what constant factor. `T` tokens, `S` rows.

Rules act in one order: authorship, infrastructure fault, then the spec's masks; corrections multiply. Masks shrink
the count set too, unless the component counts a set of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import Termination, TokenBatch
from megatron_pgloss.spec import Component, DropTruncated, DropZeroAdvantage, LossSpec, PolicyGradient, UserMask


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSet:
    """The tokens of one component on this rank."""

    component: Component
    base_T: Tensor
    """bool [T]: by authorship alone, before rules."""
    member_T: Tensor
    """bool [T]: what is trained."""
    count_T: Tensor
    """bool [T]: what the normaliser counts; holds ``member_T``."""
    factor_T: Tensor
    """float64 [T]: user weight times correction; 1 where neither applies."""
    user_T: Tensor
    """float64 [T]: user weight alone."""
    dropped: tuple[int, ...]
    """Tokens taken out by each of `reasons`, in order; a token counts for the first rule that takes it."""


def reasons(spec: LossSpec) -> tuple[str, ...]:
    """Names of the rules that can take tokens out, in the order they act."""
    return ("fault", *(mask.reason for mask in spec.masks))


def base(batch: TokenBatch, component: Component) -> Tensor:
    """bool [T]: the tokens the component is defined on, by authorship."""
    return batch.action_T if component.over == "action" else batch.target_T


def ended(batch: TokenBatch, state: Termination) -> Tensor:
    """bool [S]: rows that ended in this state."""
    states = batch.terminations if batch.terminations is not None else (None,) * len(batch)
    return torch.tensor([other is state for other in states], dtype=torch.bool)


def _tokens_ended(batch: TokenBatch, state: Termination) -> Tensor:
    return torch.repeat_interleave(ended(batch, state), batch.lengths_S)


def component_set(batch: TokenBatch, component: Component, spec: LossSpec) -> ComponentSet:
    """Members, count set and factors of ``component``.

    Raises:
        DataError: a member lies outside the set the component counts.
    """
    base_T = base(batch, component)
    fault_T = _tokens_ended(batch, Termination.FAULT)
    kept_T = base_T & ~fault_T
    dropped = [int(base_T.sum() - kept_T.sum())]
    for mask in spec.masks:
        before = int(kept_T.sum())
        if component.name in mask.on if mask.on is not None else _by_default(mask, component):
            kept_T = kept_T & ~_taken(batch, mask)
        dropped.append(before - int(kept_T.sum()))
    count_T = kept_T
    if component.count == "observations":
        count_T = batch.observation_T & ~fault_T
    elif component.count != "members":
        over_T = batch.action_T if component.over == "action" else batch.observation_T
        count_T = batch.masks[component.count] & over_T & ~fault_T
    outside_T = kept_T & ~count_T
    if bool(outside_T.any()):
        position = int(outside_T.to(torch.int8).argmax())
        raise DataError(
            f"{component.name}: a trained token is not in the set it counts ({component.count!r})",
            expected="members inside the count set",
            got=f"{int(outside_T.sum())} outside",
            where=where(batch, position),
            fix=f"widen {component.count!r} or narrow the members by a UserMask",
        )
    user_T = batch.weights.get(component.name, torch.ones_like(base_T, dtype=torch.float64)).to(torch.float64)
    user_T = torch.where(count_T, user_T, 0)
    factor_T = torch.where(kept_T, user_T, 0) * _correction(batch, component, spec, kept_T)
    return ComponentSet(
        component=component, base_T=base_T, member_T=kept_T, count_T=count_T, factor_T=factor_T,
        user_T=user_T, dropped=tuple(dropped),
    )  # fmt: skip


def live(batch: TokenBatch, tokens: ComponentSet) -> int:
    """Members that can move the policy: factor not 0 and, for a policy gradient, advantage not 0."""
    alive_T = tokens.member_T & (tokens.factor_T != 0)
    if isinstance(tokens.component, PolicyGradient):
        alive_T = alive_T & (batch.streams["advantages"] != 0)
    return int(alive_T.sum())


def where(batch: TokenBatch, position: int, stream: str | None = None) -> str:
    """``sample ..., position ... of the row, stream ...``: position is that of the target token in its row."""
    row = int(torch.searchsorted(batch.cu_S1, position, right=True)) - 1
    inside = position - int(batch.cu_S1[row]) + 1
    return f"{batch.sample_name(row)}, token {inside}" + (f", stream {stream!r}" if stream else "")


def _by_default(mask: DropTruncated | DropZeroAdvantage | UserMask, component: Component) -> bool:
    return not isinstance(mask, DropTruncated) or component.over == "action"


def _taken(batch: TokenBatch, mask: DropTruncated | DropZeroAdvantage | UserMask) -> Tensor:
    if isinstance(mask, DropTruncated):
        return _tokens_ended(batch, Termination.TRUNCATED)
    if isinstance(mask, DropZeroAdvantage):
        return batch.streams["advantages"] == 0
    return ~batch.masks[mask.name]


def _correction(batch: TokenBatch, component: Component, spec: LossSpec, member_T: Tensor) -> Tensor:
    weight_T = torch.ones(member_T.shape, dtype=torch.float64)
    for rule in spec.corrections:
        if component.name not in rule.on:
            continue
        # Select before arithmetic: what lies outside may be NaN or infinite.
        log_T = torch.where(member_T, batch.streams["old"], 0).double()
        log_T = log_T - torch.where(member_T, batch.streams["rollout"], 0).double()
        bounded_T = log_T.clamp(-spec.log_ratio_bound, spec.log_ratio_bound)
        weight_T = weight_T * bounded_T.exp().clamp(max=rule.high)
    return weight_T
