"""Checks of what a caller hands to the log-prob pass, and the temperature as a factor per token.

Shapes: logits [..., Vl], targets [...]. No check reads the memory of an accelerator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError, UnsupportedError

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_inputs(logits: Tensor, targets: Tensor, chunk_elements: int) -> None:
    """Refuse shapes, dtypes and devices that the pass is not defined for."""
    if logits.dtype not in LOGIT_DTYPES:
        raise DataError(
            "logits have an unusable dtype",
            expected="bfloat16, float16, float32 or float64",
            got=logits.dtype,
        )
    if targets.dtype != torch.int64:
        raise DataError("targets must be token ids", expected="int64", got=targets.dtype)
    if logits.dim() < 1 or logits.shape[:-1] != targets.shape:
        raise DataError(
            "logits and targets do not belong together",
            expected="logits [..., Vl] with targets [...]",
            got=f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
        )
    if logits.device != targets.device:
        raise DataError(
            "logits and targets are on different devices",
            got=f"logits on {logits.device}, targets on {targets.device}",
        )
    if chunk_elements < 1:
        raise SpecError("chunk_elements must be positive", got=chunk_elements)


def usual_chunk_elements(device: torch.device) -> int:
    """How many logits are worked on at a time by default: on a CPU as many as fit the cores' caches."""
    return 2**18 * torch.get_num_threads() if device.type == "cpu" else 2**24


def rows_per_chunk(chunk_elements: int, width: int) -> int:
    """How many rows of ``width`` columns one chunk holds; at least one."""
    return max(1, chunk_elements // max(width, 1))


def check_backward(spent: bool) -> None:
    """Refuse a backward with create_graph=True, and one over logits that an earlier backward has overwritten."""
    if torch.is_grad_enabled():  # once_differentiable lets a constant upstream pass
        raise UnsupportedError(
            "token_logprobs has first derivatives only, and its gradient would be a constant",
            got="a backward with create_graph=True",
            fix="call backward or autograd.grad without create_graph",
        )
    if spent:
        raise UnsupportedError(
            "second backward through token_logprobs(reuse_logits=True): the first one wrote "
            "its gradient over the logits",
            fix="pass reuse_logits=False, or add the losses up and call backward once",
        )


def check_reference(ref_logits: Tensor, logits: Tensor, backend: str | None) -> None:
    """Refuse reference logits of another shape, device or unusable dtype, and a backend that has no exact KL."""
    if ref_logits.shape != logits.shape or ref_logits.device != logits.device:
        raise DataError(
            "reference logits do not belong to the logits",
            expected=f"{list(logits.shape)} on {logits.device}",
            got=f"{list(ref_logits.shape)} on {ref_logits.device}",
        )
    if ref_logits.dtype not in LOGIT_DTYPES:
        raise DataError("reference logits have an unusable dtype", expected="a floating dtype", got=ref_logits.dtype)
    if backend not in (None, "eager"):
        raise UnsupportedError(f"the exact KL does not run on backend {backend!r}", fix="backend=None")


def check_separate_rows(logits: Tensor) -> None:
    """Refuse to write a gradient over logits whose elements share memory (expanded views)."""
    reach = 0
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise DataError(
                "reuse_logits=True writes the gradient over the logits, but their rows overlap",
                got=f"shape {tuple(logits.shape)} with strides {logits.stride()}",
                fix="pass logits that own their memory, or reuse_logits=False",
            )
        reach += stride * max(size - 1, 0)


def inverse_temperature(temperature: float | Tensor | None, targets: Tensor) -> Tensor | None:
    """1/tau as float64 of targets' shape (expanded where it is one number), or None for tau = 1.

    tau <= 0, NaN and infinity are refused. Looking for them in a tensor on an accelerator would cost a
    host sync, so the factor is NaN there instead, and so is everything computed from it.
    """
    if temperature is None:
        return None
    if isinstance(temperature, Tensor):
        return _inverse_tensor(temperature.detach(), targets)  # the sampler's temperature is a constant
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise SpecError(
            "temperature has an unusable type",
            expected="None, a number or a tensor",
            got=type(temperature).__name__,
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise SpecError(
            "temperature must be positive and finite",
            got=temperature,
            fix="give the temperature that the rollouts were sampled with; greedy decoding has no log-probs",
        )
    if temperature == 1:
        return None
    one = torch.tensor(1.0 / temperature, dtype=torch.float64, device=targets.device)
    return one.expand(targets.shape)


def _inverse_tensor(tau: Tensor, targets: Tensor) -> Tensor:
    if tau.dtype not in (torch.float32, torch.float64):
        raise DataError("temperature is too coarse", expected="float32 or float64", got=tau.dtype)
    # As many dimensions as the targets: [B] against [B, L] would broadcast along the wrong axis where B == L.
    fits = tau.dim() == targets.dim() and all(a in (1, b) for a, b in zip(tau.shape, targets.shape, strict=True))
    if tau.dim() and not fits:
        raise DataError(
            "temperature does not fit the targets",
            expected=f"one number, or {tuple(targets.shape)} (size 1 where it does not vary)",
            got=tuple(tau.shape),
        )
    if tau.device.type == "cpu" and bool(reciprocal(tau).isnan().any()):
        first = tuple(reciprocal(tau).isnan().nonzero()[0].tolist())
        raise DataError(
            "temperature must be positive and finite at every token",
            got=float(tau[first]),
            where=f"position {first}",
            fix="give 1.0 where a token was not sampled",
        )
    if tau.dim() and tau.device != targets.device:
        raise DataError("temperature is on another device than the targets", got=tau.device)
    return reciprocal(tau).to(targets.device).expand(targets.shape)


def reciprocal(tau: Tensor) -> Tensor:
    """1/tau in float64, NaN where tau is not positive and finite."""
    return torch.where(torch.isfinite(tau) & (tau > 0), tau.double().reciprocal(), math.nan)
