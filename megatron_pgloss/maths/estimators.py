"""Bounded log-ratios and the k-estimators of KL. All functions are elementwise on `[T]` tokens.

Source: Schulman, "Approximating KL divergence" (2020). With d = log pi - log base at tokens sampled from pi, E[k1] =
E[k3] = KL(pi || base).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bounded(log_ratio_T: Tensor, bound: float) -> Tensor:
    """``clip(d, -bound, bound)``, so that exp stays finite. The gradient is exactly 0 at the bound and beyond: clipped
    tokens do not move the policy.
    """
    # Same values as clamp; the backward of hardtanh is vectorised on a CPU.
    return F.hardtanh(log_ratio_T, -bound, bound)


def k1(d_T: Tensor) -> Tensor:
    """``d``: unbiased, signed, high variance."""
    return d_T


def k2(d_T: Tensor) -> Tensor:
    """``d^2 / 2``: its value is biased; on-policy, its plain gradient is in expectation that of the KL."""
    return d_T.square() / 2


def k3(d_T: Tensor) -> Tensor:
    """``exp(-d) + d - 1``: unbiased, never negative. ``expm1`` keeps the digits near d = 0."""
    return (-d_T).expm1() + d_T
