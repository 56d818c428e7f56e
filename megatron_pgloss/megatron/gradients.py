"""The gradients of a step as this rank holds them: their largest size, NaN kept, before the optimizer sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss import finishing
from megatron_pgloss.megatron.factors import grad_buffers


def largest(chunks: Sequence[Any], device: torch.device) -> Tensor:
    """The infinity norm of every gradient that this rank holds, 0-d float64 on ``device``: NaN where one is NaN.

    This is one pass over the gradients' memory, without a copy. With the distributed optimizer a rank's buffer holds
    the reduced gradients of its own part, and elsewhere sums of this rank alone. A gradient that is not finite in the
    job is not finite in some rank's buffer, so that looking at whole buffers is right and enough.
    """
    return finishing.largest(_gradients(chunks), device)


def zero(chunks: Sequence[Any]) -> None:
    """Set every gradient to zero, as a trainer does before a step."""
    for chunk in chunks:
        if grad_buffers(chunk):
            chunk.zero_grad_buffer()
        else:
            chunk.zero_grad(set_to_none=False)


def loss_scaler_decides(config: Any) -> bool:
    """Whether Megatron's loss scaler judges the gradients itself: with fp16 it skips a step that overflowed, on every
    rank, and finds its scale by that.
    """
    return bool(getattr(config, "fp16", False)) and getattr(config, "grad_scale_func", None) is not None


def _gradients(chunks: Sequence[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        if buffers := grad_buffers(chunk):
            for buffer, _ in buffers:
                yield buffer.grad_data
                yield from getattr(buffer, "extra_main_grads", ())
            continue
        for parameter in chunk.parameters():
            grad = getattr(parameter, "main_grad", None)
            grad = parameter.grad if grad is None else grad
            if grad is not None:
                yield grad
