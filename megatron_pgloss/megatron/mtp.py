"""Multi-token prediction beside the policy loss: Megatron's own term over the sampled tokens, at its configured weight.

Megatron adds the gradient of ``mtp_loss_scaling_factor`` times a mean over each micro-batch shard, whatever
``loss_func`` returns. Without per-token losses this package does not touch that. With them, every gradient is divided
by the step's token count: Megatron's own loss would have counted the tokens that MTP trains, and this package counts
the tokens that enter the model, so for the step the term's scale is multiplied by the ratio of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.megatron.factors import per_token_factor
from megatron_pgloss.planning import MicroBatch


def active(config: Any) -> bool:
    """Whether the model has multi-token prediction layers."""
    return getattr(config, "mtp_num_layers", None) is not None


def weighable(config: Any) -> bool:
    """Whether the installed Megatron-Core lets a step set the term's scale (0.19 on)."""
    return "mtp_grad_scale_func" in vars(config)


def loss_mask(micro: MicroBatch) -> Tensor:
    """1 at the tokens that MTP learns to predict, which are those that the policy sampled; float32, the micro-batch's
    shape.

    The mask is in token order, unlike every stream of ``micro``: the entry at a position is about the token that stands
    there. Without labels Megatron makes them from the inputs, and shifts this mask along with them.
    """
    action_T, before_N = micro.table["action"], micro.index_N - 1
    if action_T.numel() == 0:
        return torch.zeros(micro.shape, device=micro.device)
    # A row's first token follows the last position of the row before it, which predicts nothing.
    mask_N = (before_N >= 0) & action_T[before_N.clamp(min=0)]
    return mask_N.reshape(micro.shape).to(micro.device, torch.float32, non_blocking=True)


class Weight:
    """The term's scale while a step is open: `open` sets it, and `close` restores what was there before."""

    def __init__(self) -> None:
        self._restore: Callable[[], None] | None = None

    def open(self, config: Any, counted: int, trained: int) -> None:
        """Set ``config.mtp_grad_scale_func``.

        Args:
            config: the model's.
            counted: tokens of the step by which Megatron will divide the gradients.
            trained: tokens of the step that MTP trains; without any the term's scale is 0.
        """
        self.close()
        before = config.mtp_grad_scale_func
        ratio = per_token_factor(trained) / per_token_factor(counted) if trained else 0.0

        def scale() -> Any:
            # This scale replaces Megatron's own, so it has to include the loss scale of fp16.
            if before is not None:
                return before() * ratio
            if config.grad_scale_func is None:
                return ratio
            device = "cuda" if torch.cuda.is_available() else "cpu"
            return config.grad_scale_func(torch.ones(1, device=device)) * ratio

        config.mtp_grad_scale_func = scale
        self._restore = lambda: setattr(config, "mtp_grad_scale_func", before)

    def close(self) -> None:
        """Put back what was there before `open`."""
        if self._restore is not None:
            self._restore()
            self._restore = None
