"""Log-ratios and the k-estimators of KL. All elementwise on `[N]`.

Source: Schulman, "Approximating KL divergence" (2020). With d = log pi - log base at tokens sampled from pi, E[k1] =
E[k3] = KL(pi || base).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_pgloss.maths.selection import flags, selected


def beyond(log_ratio_N: Tensor, bound: float) -> Tensor:
    """bool: farther from 0 than ``bound``. A log-ratio exactly at the bound is still free."""
    return log_ratio_N.detach().abs() > bound


def bounded(log_ratio_N: Tensor, bound: float) -> Tensor:
    """``clip(d, -bound, bound)``: the gradient up to and at the bound is that of d, beyond it exactly 0, so that exp
    stays finite and clipped tokens do not pull. NaN stays NaN.
    """
    fixed_N = log_ratio_N.detach()
    held_N = F.hardtanh(fixed_N, -bound, bound)
    if not log_ratio_N.requires_grad:
        return held_N
    # As clamp has it, whose backward is not vectorised on a CPU; that of hardtanh is, but takes the bound's gradient.
    free = flags(fixed_N.abs() <= bound, fixed_N.dtype)
    return selected(free, log_ratio_N) + selected(1 - free, held_N)


def sloped(value_N: Tensor, slope_N: Tensor, at_N: Tensor) -> Tensor:
    """``value`` with the gradient ``slope`` by ``at``: for a derivative that autograd would form from large parts that
    cancel.
    """
    return value_N.detach() + slope_N.detach() * (at_N - at_N.detach())


def k1(d_N: Tensor) -> Tensor:
    """``d``: unbiased, signed, high variance."""
    return d_N


def k2(d_N: Tensor) -> Tensor:
    """``d^2 / 2``: biased value; its plain gradient is the KL's on-policy."""
    return d_N.square() / 2


def k3(d_N: Tensor) -> Tensor:
    """``exp(-d) + d - 1``: unbiased, never negative. ``expm1`` keeps the digits near d = 0."""
    return (-d_N).expm1() + d_N
