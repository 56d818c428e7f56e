"""Losses that Megatron itself adds to a step: is their gradient beside our loss the same as beside Megatron's own?

MoE auxiliary and z-loss, and multi-token prediction, keep Megatron's definition: an average over micro-batches that
does not know how the policy loss is normalised. Their gradient is measured by difference, a step with their
coefficients minus the same step without, once beside ours (`own_gradient` with ``beside="policy"``) and once beside
Megatron's cross entropy over the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss.megatron import PolicyLossStep, mtp
from megatron_pgloss.planning import MicroBatch, Plan
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.verify.layouts.reshard import full_gradients

Gradients = dict[str, Tensor]
_COEFFICIENTS = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_loss_scaling_factor")


def own_gradient(
    step: PolicyLossStep,
    batches: Callable[[], Sequence[TokenBatch]],
    run: Callable[[Plan, Any, Any], None],
    *,
    beside: Literal["policy", "cross entropy"],
) -> Gradients:
    """Gradient of the losses that Megatron adds, by parameter's global name, float64. A collective.

    Args:
        step: the step of a model whose config has the coefficients under test.
        batches: a function that makes this rank's share of the rows; called once for each run.
        run: a function that drives Megatron's schedule, ``run(plan, forward_step, iterators)``.
        beside: the loss that the step has besides. Megatron's cross entropy is over every position that enters the
            model, because its token count scales the MoE losses; with multi-token prediction it is over the tokens
            that multi-token prediction trains.
    """
    found = _run(step, batches(), run, beside)
    with _without(step.config):
        rest = _run(step, batches(), run, beside)
    return {name: grad - rest[name] for name, grad in found.items()}


def strength(gradient: Gradients, reference: Gradients) -> float:
    """The factor f for which ``f * reference`` is nearest to ``gradient``, by least squares over all parameters."""
    product = sum(float((gradient[name] * grad).sum()) for name, grad in reference.items())
    return product / sum(float(grad.square().sum()) for grad in reference.values())


def upstream_strength(step: PolicyLossStep) -> float:
    """The factor by which the installed Megatron-Core changes a configured MoE coefficient on this layout; 1 if it is
    right.

    Under ``calculate_per_token_loss``, Megatron-Core before 0.19 multiplies both MoE losses by the tokens of one
    tensor- and context-parallel rank and divides them by the tokens of all these ranks: the factor is 1 / (tp * cp).
    """
    if step.per_token and not mtp.weighable(step.config):
        return 1 / (step.layout.tp_size * step.layout.cp_size)
    return 1.0


def _run(step: PolicyLossStep, batches: Sequence[TokenBatch], run: Any, beside: str) -> Gradients:
    for chunk in step.chunks:
        chunk.zero_grad_buffer()
    if beside == "policy":
        made = step.begin(batches)
        run(made, step.forward_step, step.data_iterator())
        step.close()
    else:
        # Without `begin`, which would set the step's scale of multi-token prediction.
        made = step.make_plan(batches, step.spec)
        step.masked = step.masks_padding(made)
        run(made, cross_entropy_step(step), step.iterators(made))
    return full_gradients(step.chunks)


def cross_entropy_step(step: PolicyLossStep) -> Callable[..., Any]:
    """A ``forward_step_func`` with Megatron's own cross entropy and token count, as its pretraining scripts have it."""

    def forward_step(data_iterator: Iterator[MicroBatch], model: Any, *_: Any) -> Any:
        micro = next(data_iterator)
        trained = _trained(step, micro)
        losses = step.run_model(micro, model, labels=micro.targets, loss_mask=trained)

        def loss_func(losses: Tensor) -> Any:
            return (losses * trained).sum(), trained.sum().to(torch.int32), {}

        return losses, loss_func

    return forward_step


def _trained(step: PolicyLossStep, micro: MicroBatch) -> Tensor:
    """Float32, the micro-batch's shape: the positions whose target Megatron's own loss is over."""
    if mtp.active(step.config):
        return micro.stream("action").to(torch.float32)  # type: ignore[union-attr]
    if step.masked:
        return (micro.index_N >= 0).reshape(micro.shape).to(micro.device, torch.float32)
    return torch.ones(micro.shape, device=micro.device)


@contextmanager
def _without(config: Any) -> Iterator[None]:
    """Set the coefficients of Megatron's own losses to 0 in the block. Modules read the config at every forward."""
    before = {name: getattr(config, name) for name in _COEFFICIENTS if getattr(config, name, None)}
    for name, value in before.items():
        off = None if name == "moe_z_loss_coeff" else [0.0] * len(value) if isinstance(value, list) else 0.0
        setattr(config, name, off)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
