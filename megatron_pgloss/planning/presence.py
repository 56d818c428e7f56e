"""The rows that count: those that hold a token of some component, and that no fault ended. `S` rows, `T` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.planning.units import per_row
from megatron_pgloss.rollouts import Termination, TokenBatch
from megatron_pgloss.rules.masks import ended
from megatron_pgloss.spec import Component, LossSpec


def base(batch: TokenBatch, component: Component) -> Tensor:
    """bool [T]: the tokens that the component runs over, by their author."""
    return batch.action_T if component.over == "action" else batch.target_T


def empty_rows(batch: TokenBatch, spec: LossSpec) -> Tensor:
    """bool [S]: rows with tokens, but without one that a component runs over."""
    any_T = torch.zeros_like(batch.action_T)
    for part in spec.components:
        any_T = any_T | base(batch, part)
    return (batch.lengths_S > 0) & (per_row(any_T, batch.cu_S1) == 0)


def present_rows(batch: TokenBatch, spec: LossSpec) -> Tensor:
    """bool [S]: the rows that ``units="all"`` counts, and that statistics over episodes and prompts run over. They are
    neither padding, nor without a token of any component, nor ended by a fault.
    """
    return (batch.lengths_S > 0) & ~empty_rows(batch, spec) & ~ended(batch, Termination.FAULT)
