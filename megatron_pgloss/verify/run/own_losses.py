"""Losses that Megatron itself adds to a step: is its gradient beside ours what it is beside its own?

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
        step: of a model whose coefficients are those under test.
        batches: makes this rank's share of the rows; called afresh for each run.
        run: drives Megatron's schedule, ``run(plan, forward_step, iterators)``.
        beside: which loss the step has otherwise. Megatron's cross entropy is over every position that enters the
            model, so that its token count is what MoE losses are scaled for; with multi-token prediction over the
            tokens that it trains.
    """
    found = _run(step, batches(), run, beside)
    with _without(step.config):
        rest = _run(step, batches(), run, beside)
    return {name: grad - rest[name] for name, grad in found.items()}


def strength(gradient: Gradients, reference: Gradients) -> float:
    """The factor f by which ``gradient`` is f times ``reference``, by least squares over all parameters."""
    product = sum(float((gradient[name] * grad).sum()) for name, grad in reference.items())
    return product / sum(float(grad.square().sum()) for grad in reference.values())


def upstream_strength(step: PolicyLossStep) -> float:
    """What the installed Megatron-Core makes of a configured MoE coefficient on this layout: 1, where it is right.

    Before 0.19 both MoE losses are multiplied by the tokens of one tensor- and context-parallel rank, and divided by
    those of all of them, under ``calculate_per_token_loss``: 1 / (tp * cp).
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
        # Not through `begin`: the step's scale of multi-token prediction must not be in place.
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
    """Coefficients of Megatron's own losses at 0; the modules read them from the config at every forward pass."""
    before = {name: getattr(config, name) for name in _COEFFICIENTS if getattr(config, name, None)}
    for name, value in before.items():
        off = None if name == "moe_z_loss_coeff" else [0.0] * len(value) if isinstance(value, list) else 0.0
        setattr(config, name, off)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
