"""The factors that Megatron applies to a returned loss: the schedule's is measured, the wrapper's is read.

The gradient that reaches the optimizer is ``factor * sum over ranks and micro-batches of d(returned)``, times 1/n in
per-token mode, with ``factor = schedule * wrapper``. The schedule's part is found by driving the installed
``forward_step_calc_loss``, whose branches differ between versions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from megatron_pgloss.errors import UnsupportedError
from megatron_pgloss.megatron.layout import Layout

_PROBES = (1, 2, 3)


def schedule_factor(config: Any, layout: Layout) -> float:
    """The constant ``a``, where the schedule multiplies the returned loss by ``a / num_microbatches`` (2-tuple), or by
    ``a`` (3-tuple, in per-token mode).

    Raises:
        UnsupportedError: the installed schedule scales the loss in another way.
    """
    per_token = bool(config.calculate_per_token_loss)
    measured = {count: _drive(config, layout, count, explicit=True) for count in _PROBES}
    if layout.collection is None and layout.last_stage and parallel_state.model_parallel_is_initialized():
        fallback = {count: _drive(config, layout, count, explicit=False) for count in _PROBES}
        if fallback != measured:
            raise UnsupportedError(
                "forward_step_calc_loss scales differently with an explicit cp size and with parallel_state",
                expected=measured,
                got=fallback,
            )
    scale = {count: value * (1 if per_token else count) for count, value in measured.items()}
    reference = scale[1]
    if any(abs(value - reference) > 1e-12 * abs(reference) for value in scale.values()) or not reference:
        raise UnsupportedError(
            "the installed schedule scales a loss in a way this package does not know",
            expected="a constant (per token), or a constant over num_microbatches",
            got=measured,
            fix="report the megatron-core version",
        )
    return reference


def _drive(config: Any, layout: Layout, count: int, *, explicit: bool) -> float:
    probe = copy.copy(config)
    # The probe must not set the process-wide scales of auxiliary losses, nor stop a timer that never started.
    for name in ("num_moe_experts", "mtp_num_layers", "timers", "experimental_attention_variant"):
        if hasattr(probe, name):
            object.__setattr__(probe, name, None)
    loss = torch.ones((), dtype=torch.float64)
    per_token = bool(config.calculate_per_token_loss)
    returned: tuple[Any, ...] = (loss, torch.tensor(1, dtype=torch.int32), {}) if per_token else (loss, {})
    place = {"cp_group_size": layout.cp_size, "is_last_stage": True} if explicit else {}
    vp_stage = None
    if not explicit:
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        vp_stage = None if chunks is None else chunks - 1
    out, tokens = schedules.forward_step_calc_loss(
        torch.nn.Identity(), torch.zeros(()), lambda _: returned, probe, vp_stage, False, count, [], **place
    )
    if int(tokens) != int(per_token):
        raise UnsupportedError(
            "the installed schedule changes the token count", expected=int(per_token), got=int(tokens)
        )
    return float(out)


def per_token_factor(routed: int) -> float:
    """The factor by which finalize_model_grads multiplies gradients in per-token mode: 1/n, rounded to float32 as it is
    there.

    Undoing the exact 1/n instead would leave a relative error of 6e-8 in a float64 gradient.
    """
    return float(1.0 / torch.tensor(routed, dtype=torch.int32))


def wrapper_factor(chunks: Sequence[Any], layout: Layout) -> float:
    """The factor by which the data-parallel wrapper multiplies a gradient, beside summing it over DP x CP.

    Raises:
        UnsupportedError: the factor cannot be read, or differs between parameters.
    """
    found: set[float] = set()
    for chunk in chunks:
        buffers = grad_buffers(chunk)
        if not buffers:
            if layout.dp_cp_size == 1:
                found.add(1.0)
                continue
            raise UnsupportedError(
                f"cannot read the gradient factor of {type(chunk).__name__}",
                expected="megatron.core.distributed.DistributedDataParallel",
                fix="wrap the model as it will be trained before making the PolicyLossStep",
            )
        average = bool(chunk.ddp_config.average_in_collective)
        for buffer, expert in buffers:
            group = _expert_size(chunk) if expert else layout.dp_cp_size
            found.add(float(buffer.gradient_scaling_factor) / (group if average else 1))
    spread = max(found) - min(found)
    if spread > 1e-12 * max(found):
        raise UnsupportedError("the wrapper scales parameters differently", expected="one factor", got=sorted(found))
    return max(found)


def grad_buffers(chunk: Any) -> list[tuple[Any, bool]]:
    """The gradient buffers of a wrapped chunk, each with a bool: whether it holds the gradients of experts. The list is
    empty where the wrapper is not Megatron's DistributedDataParallel.
    """
    # A plain module's ``buffers`` is torch's method; Megatron's wrapper replaces it by its list of gradient buffers.
    if not hasattr(chunk, "ddp_config") or not isinstance(getattr(chunk, "buffers", None), list):
        return []
    experts = [(buffer, True) for buffer in getattr(chunk, "expert_parallel_buffers", [])]
    return [(buffer, False) for buffer in chunk.buffers] + experts


def _expert_size(chunk: Any) -> int:
    group = getattr(chunk, "expt_dp_group", None)
    if group is None:
        group = parallel_state.get_expert_data_parallel_group()
    return int(group.size())
