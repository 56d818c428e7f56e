"""Megatron's token count under ``calculate_per_token_loss``: what each micro-batch reports, and what they add up to.

Any count would do for the policy loss, which is multiplied by the sum and divided by it again. Losses that Megatron
scales by the tokens of a micro-batch (MoE auxiliary and z-loss) keep their weight only if every position that enters
the model counts, padding too. Where there are no such losses and shapes differ from rank to rank, real tokens are
counted: the plan knows their number already, and no collective is needed.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_pgloss.errors import LayoutError
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.planning import MicroBatch, Plan

_INT32 = 2**31


def has_moe_losses(config: Any) -> bool:
    """Whether the model adds MoE auxiliary or z-losses, which Megatron averages over micro-batches."""
    if not getattr(config, "num_moe_experts", None):
        return False
    aux = getattr(config, "moe_aux_loss_coeff", 0) or 0
    return bool(max(aux) if isinstance(aux, list | tuple) else aux) or bool(config.moe_z_loss_coeff)


def refuse_empty(made: Plan, config: Any) -> None:
    """Refuse an empty micro-batch where MoE losses would average over it.

    Raises:
        LayoutError: a micro-batch is empty, and the model has such losses (on every rank alike).
    """
    if (empty := made.job["empty_microbatches"]) and has_moe_losses(config):
        raise LayoutError(
            "a micro-batch would be empty, and MoE auxiliary losses average over it",
            expected="no empty micro-batch",
            got=f"{empty} of {made.num_microbatches * made.ranks.data_size}",
            fix="fewer micro-batches (a larger Split), more rows, or allow_empty_microbatches=True",
        )


def all_positions(config: Any, *, fixed: bool) -> bool:
    """Whether padding counts too: it does where it must, and where all micro-batches have one shape, so that the total
    is known anyway.
    """
    return fixed or has_moe_losses(config) or getattr(config, "experimental_attention_variant", None) is not None


def of(micro: MicroBatch, *, padding: bool) -> int:
    """Tokens of this shard, with or without its padding."""
    return math.prod(micro.shape) if padding else int((micro.index_N >= 0).sum())


def total(made: Plan, layout: Layout, *, padding: bool) -> int:
    """The sum of `of` over all shards of the job. It takes a gather over data parallelism only where no rank can know
    the sum by itself.

    Raises:
        LayoutError: the sum is more than Megatron's int32 counter holds (on every rank alike).
    """
    count = _total(made, layout, padding=padding)
    if count >= _INT32:
        raise LayoutError(
            "the step routes more tokens than Megatron's int32 counter holds",
            expected=f"< {_INT32}",
            got=count,
            fix="calculate_per_token_loss=False, or smaller steps",
        )
    return count


def _total(made: Plan, layout: Layout, *, padding: bool) -> int:
    if not padding:
        return max(made.job["tokens"], 1)  # a step without a row still divides by something
    return positions(made)


def positions(made: Plan) -> int:
    """Number of positions that enter the model in the step, padding included. It takes a gather over data parallelism
    where shapes differ from rank to rank.
    """
    if made.arrangement.fixed:
        return made.width * made.rows_per_microbatch * made.num_microbatches * made.ranks.data_size
    mine = sum(math.prod(micro.shape) for micro in made.microbatches("cpu"))
    return int(made.ranks.gather(torch.tensor([mine]), made.ranks.data, made.ranks.data_size).sum())
