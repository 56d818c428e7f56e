"""Surrogates: log-ratio and advantage of each token to its policy-gradient term. All elementwise on `[N]`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.spec import Clip


@dataclass(frozen=True, slots=True)
class Clipped:
    """Which bound decided each token, bool [N]; their gradient is exactly 0."""

    low_N: Tensor
    high_N: Tensor
    dual_N: Tensor

    @property
    def any_N(self) -> Tensor:
        """bool [N]: no gradient here."""
        return self.low_N | self.high_N | self.dual_N


def reinforce(logp_N: Tensor, advantage_N: Tensor) -> Tensor:
    """``-A log pi`` (Williams 1992, eq. 4)."""
    return -advantage_N * logp_N


def clip(log_ratio_N: Tensor, advantage_N: Tensor, bounds: Clip) -> tuple[Tensor, Clipped]:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` with r = exp(log_ratio) (1707.06347 eq. 7); dual: 1912.09729 eq. 5.

    Args:
        log_ratio_N: float [N], bounded; differentiable.
        advantage_N: float [N], constant.

    Returns:
        The term [N], and which bound held where. The branch is chosen before exp, so that a clipped token has gradient
        exactly 0 and an unbounded one never meets ``0 * inf``.
    """
    ratio_N = log_ratio_N.detach().exp()  # the choice of branch is not differentiated
    high_N = (advantage_N > 0) & (ratio_N > 1 + bounds.high)
    low_N = (advantage_N < 0) & (ratio_N < 1 - bounds.low)
    dual_N = (advantage_N < 0) & (ratio_N > bounds.dual) if bounds.dual is not None else torch.zeros_like(low_N)
    which = Clipped(low_N, high_N, dual_N)
    free_N = torch.where(which.any_N, 0, log_ratio_N).exp()
    factor_N = torch.where(high_N, 1 + bounds.high, torch.where(low_N, 1 - bounds.low, free_N))
    if bounds.dual is not None:
        factor_N = torch.where(dual_N, bounds.dual, factor_N)
    return -advantage_N * factor_N, which
