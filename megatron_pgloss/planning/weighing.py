"""What metrics report about a component's plan-time corrections. `T` tokens of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from megatron_pgloss.planning import frozen
from megatron_pgloss.planning.component_table import Corrected
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.rules import Verdict
from megatron_pgloss.spec import Component, LossSpec


def acts(spec: LossSpec, component: Component) -> bool:
    """Whether any correction acts on the component, at plan time or inside the loss."""
    return any(rule.acts_on(component) for rule in spec.corrections)


def corrected(
    batch: TokenBatch, component: Component, spec: LossSpec, verdicts: Sequence[Verdict | None], before_T: Tensor
) -> Corrected | None:
    """The corrections' weights before they are divided by their mean; None where none acts on the component.

    Args:
        verdicts: one entry per correction of ``spec``.
        before_T: bool [T]: the tokens after the masks.
    """
    if not acts(spec, component):
        return None
    one_T = torch.ones_like(before_T, dtype=torch.float64)
    found = Corrected(
        before=before_T, first=_first_of_each(batch, before_T), weight=one_T, raw=one_T,
        truncated=torch.zeros_like(before_T), chi2=torch.zeros_like(one_T), chi2_sequence=torch.zeros_like(one_T),
    )  # fmt: skip
    weighs = False
    for rule, said in zip(spec.corrections, verdicts, strict=True):
        if said is None or said.weight is None or not rule.acts_on(component):
            continue
        weighs = True
        raw_T = said.weight if said.raw is None else said.raw
        found = replace(found, weight=found.weight * said.weight, raw=found.raw * raw_T)
        if said.truncated is not None:
            found = replace(found, truncated=found.truncated | said.truncated & before_T)
    if not weighs:
        return found
    log_T, known_T = frozen.log_ratio(batch)
    sequence_T = frozen.unit_sums(batch)["sequence"].total(log_T, before_T & known_T)
    bound = spec.log_ratio_bound
    chi2_T, chi2_sequence_T = ((2 * x.clamp(-bound, bound)).expm1() for x in (log_T, sequence_T))
    return replace(found, chi2=chi2_T, chi2_sequence=chi2_sequence_T)


def finished(found: Corrected | None, mean: float, dtype: torch.dtype) -> Corrected | None:
    """``found`` with the weights as they are applied, in the dtype of the loss.

    Args:
        mean: the product of the means that normalised weights are divided by.
    """
    if found is None:
        return None
    found = replace(found, weight=found.weight / mean)
    cast = {one.name: getattr(found, one.name) for one in fields(found)}
    return Corrected(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in cast.items()})


def none(dtype: torch.dtype) -> Corrected:
    """`finished` for a rank without rows: empty tensors."""
    flag, number = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=dtype)
    return Corrected(
        before=flag, first=flag, weight=number, raw=number, truncated=flag, chi2=number, chi2_sequence=number
    )


def _first_of_each(batch: TokenBatch, mask_T: Tensor) -> Tensor:
    """bool [T]: the first token of ``mask_T`` in each row."""
    so_far_T = mask_T.cumsum(0)
    start_S = batch.cu_S1[:-1]
    before_S = torch.where(start_S > 0, so_far_T[(start_S - 1).clamp(min=0)], 0) if len(so_far_T) else start_S
    return mask_T & (so_far_T - before_S[batch.seq_T] == 1)
