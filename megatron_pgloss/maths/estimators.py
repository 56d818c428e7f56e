"""Log-ratios and the k-estimators of KL. All elementwise on `[T]`.

Source: Schulman, "Approximating KL divergence" (2020). With d = log pi - log base at tokens sampled from pi, E[k1] =
E[k3] = KL(pi || base).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bounded(log_ratio_T: Tensor, bound: float) -> Tensor:
    """``clip(d, -bound, bound)``; gradient exactly 0 at the bound and beyond, so that exp stays finite and clipped
    tokens do not pull.
    """
    # The same as clamp, but its backward is vectorised on a CPU.
    return F.hardtanh(log_ratio_T, -bound, bound)


def k1(d_T: Tensor) -> Tensor:
    """``d``: unbiased, signed, high variance."""
    return d_T


def k2(d_T: Tensor) -> Tensor:
    """``d^2 / 2``: biased value; its plain gradient is the KL's on-policy."""
    return d_T.square() / 2


def k3(d_T: Tensor) -> Tensor:
    """``exp(-d) + d - 1``: unbiased, never negative. ``expm1`` keeps the digits near d = 0."""
    return (-d_T).expm1() + d_T
