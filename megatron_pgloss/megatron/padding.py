"""Padding must not count where the router of a mixture of experts balances the load, nor take up experts' capacity.

Megatron-Core leaves padding out of auxiliary and z-losses where the model is given ``padding_mask``. By the installed
router (0.16.1 and 0.19.2) that is right only in some cases: the mean of the z-loss is taken on each tensor- and
context-parallel rank by itself; the auxiliary loss of a per-token step is multiplied once too often by the tokens of
all these ranks; later pipeline stages do not cut the mask for sequence parallelism; selection biases crash.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import LayoutError
from megatron_pgloss.megatron import counting, mtp
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.planning import MicroBatch, Plan

_FIX = (
    "rows without padding (variable_seq_lengths=True with one row a micro-batch, without expert parallelism), or "
    "allow_routed_padding=True"
)


def masked(config: Any, layout: Layout, made: Plan, *, takes_mask: bool, allowed: bool) -> bool:
    """Whether the model is to be given ``padding_mask`` in this step. For a mixture of experts with variable lengths it
    takes a gather over data parallelism.

    Args:
        takes_mask: whether the ``forward`` of every chunk takes ``padding_mask``.
        allowed: whether padding may be routed, as Megatron does by itself.

    Raises:
        LayoutError: padding would be routed, and the mask cannot be given (on every rank alike).
    """
    reads = reads_padding(config)
    if allowed or not reads or made.job["tokens"] == counting.positions(made):
        return False
    problem = "" if takes_mask else "the model's forward takes no padding_mask"
    problem = problem or unusable(config, layout)
    if not problem:
        return True
    raise LayoutError(
        f"padding would be routed, which changes {', '.join(reads)}", expected="padding_mask, or no padding",
        got=problem, fix=_FIX,
    )  # fmt: skip


def reads_padding(config: Any) -> list[str]:
    """Names of what depends on routed padding in the model's mixture of experts."""
    if not getattr(config, "num_moe_experts", None):
        return []
    kind = getattr(config, "moe_router_load_balancing_type", "")
    return [
        name
        for name, there in {
            "MoE auxiliary and z-losses": counting.has_moe_losses(config),
            "the selection bias of experts": getattr(config, "moe_router_enable_expert_bias", False),
            "quantile balancing": "quantile_balancing" in (kind if isinstance(kind, list | tuple) else [kind]),
            "who finds a place under moe_expert_capacity_factor": getattr(config, "moe_expert_capacity_factor", None)
            is not None,
        }.items()
        if there
    ]


def unusable(config: Any, layout: Layout) -> str:
    """Why the installed router cannot be given the mask on this layout; the empty string where it can."""
    shards = layout.tp_size * layout.cp_size
    others = [name for name in reads_padding(config) if name != "MoE auxiliary and z-losses"]
    return next(
        (
            text
            for text, there in {
                f"padding_mask does not help {', '.join(others)}": bool(others),
                "the z-loss averages over each tensor- and context-parallel rank": bool(config.moe_z_loss_coeff)
                and shards > 1,
                "calculate_per_token_loss with tensor or context parallelism counts masked tokens twice":
                bool(config.calculate_per_token_loss) and shards > 1,
                "sequence parallelism does not cut padding_mask on later pipeline stages": layout.pp_size > 1
                and bool(config.sequence_parallel),
                "padding_mask beside multi-token prediction has not been verified by this package": mtp.active(config),
            }.items()
            if there
        ),
        "",
    )  # fmt: skip


def mask(micro: MicroBatch) -> Tensor | None:
    """bool ``[b, s]``, True at padding, as GPTModel's ``padding_mask``; None where the whole micro-batch is padding,
    since Megatron's means over its tokens would be 0 / 0.
    """
    if micro.units["sequence"] == 0:
        return None
    return (micro.index_N < 0).reshape(micro.shape).to(micro.device, torch.bool, non_blocking=True)
