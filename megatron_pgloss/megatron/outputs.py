"""The parts of a model's output that a loss reads: logits or hidden states, values, or both.

Shapes: `b` rows and `s` positions of this rank's shard of a micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import LossSpec, Value


def reads_value(spec: LossSpec) -> bool:
    """Whether a component trains a value head."""
    return any(isinstance(part, Value) for part in spec.components)


def reads_logprobs(spec: LossSpec) -> bool:
    """Whether anything but a value head is trained."""
    return not all(isinstance(part, Value) for part in spec.components)


def for_logprobs(output: Any) -> Any:
    """The part of a model's output that log-probs are made of: all of it, or the first of two."""
    return output[0] if isinstance(output, tuple | list) else output


def for_values(output: Any) -> Any:
    """The part of a model's output that is the value: all of it, or the second of two."""
    return output[1] if isinstance(output, tuple | list) and len(output) == 2 else output


def values(micro: MicroBatch, output: Any, *, beside: bool) -> Tensor:
    """The values at the positions of ``micro.targets``, float32 (float64) ``[b, s]``.

    Args:
        output: the model's output: the value ``[b, s, 1]`` or ``[b, s]``; or ``(logits, value)``.
        beside: whether the spec reads log-probs as well, so that the output must have both.

    Raises:
        DataError: the output has another form or shape.
    """
    value = for_values(output)
    if beside and value is output:
        raise DataError(
            "the spec trains a policy and a value head, and the model gave one output",
            expected="(logits [b, s, V/tp], value [b, s, 1])",
            got=list(output.shape) if isinstance(output, Tensor) else type(output).__name__,
            fix="return both from the model or the forward step; a critic alone takes presets.critic()",
        )
    shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if shape not in ([*micro.shape, 1], list(micro.shape)):
        raise DataError(
            "the value has the wrong shape", expected=[*micro.shape, 1], got=shape,
            fix="model.output_layer = pgm.ValueHead(model.config) on the last stage, before wrapping",
        )  # fmt: skip
    flat: Tensor = value.reshape(micro.shape)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
