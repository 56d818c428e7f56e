"""From the upstream gradients of log-prob, entropy and lse to the factors of each row's logit gradient.

Shapes: `T` rows. With u = z/tau, y = u - lse, p = exp(y) and upstream gradients g of the log-prob, g_H of the entropy
and g_lse of the log-sum-exp, a row's logits have the gradient

    dz_v = (1/tau) (p_v (A + B y_v) + g 1[v = target]),    A = -g - g_H H + g_lse,    B = -g_H
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pgloss.logprobs.vocab.merge import Merged


class Upstream(NamedTuple):
    """Factors of each row, [T]. ``a_T``, ``b_T`` and ``entry_T`` are float64 and include the 1/tau."""

    a_T: Tensor
    b_T: Tensor | None
    """None where no entropy gradient arrives."""
    entry_T: Tensor
    """The whole gradient at the target's column."""
    hit_T: Tensor
    """bool: the target has a part in the gradient. In other rows no bit of the gradient depends on it."""
    live_T: Tensor
    """bool: the row has a gradient at all."""

    def take(self, rows: slice | Tensor) -> Upstream:
        """Some rows, by slice or index."""
        return Upstream(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


def upstream_factors(
    g_T: Tensor | None,
    h_T: Tensor | None,
    whole: Merged,
    inverse_tau_T: Tensor | None,
    *,
    lse_grad_T: Tensor | None = None,
) -> Upstream:
    """The factors, in float64.

    Args:
        g_T, h_T: gradients that arrived for log-prob and entropy, [T]; None for none.
        whole: the forward pass's statistics over the whole vocabulary.
        inverse_tau_T: 1/tau, float64 [T]; None for 1.
        lse_grad_T: gradient that arrived for the log-sum-exp, [T]; None for none.
    """
    g_T = torch.zeros_like(whole.lse) if g_T is None else g_T.double()
    scale_T = torch.ones_like(g_T) if inverse_tau_T is None else inverse_tau_T
    a_T, b_T, live_T = -g_T, None, g_T != 0
    if h_T is not None and whole.entropy is not None:
        h_T = h_T.double()
        a_T, b_T, live_T = a_T - h_T * whole.entropy, -h_T * scale_T, live_T | (h_T != 0)
    if lse_grad_T is not None:
        a_T, live_T = a_T + lse_grad_T.double(), live_T | (lse_grad_T != 0)
    # A log-prob that is not finite (a target off the vocabulary, say) gets gradient NaN, never a plausible number.
    lost_T = (g_T != 0) & ~torch.isfinite(whole.logprob)
    a_T = torch.where(lost_T, math.nan, a_T * scale_T)
    # The target's own entry, once and in float64: its 1 - p must survive where p is nearly 1.
    p_T = whole.logprob.exp()
    entry_T = p_T * (a_T if b_T is None else a_T + b_T * whole.logprob) + g_T * scale_T
    return Upstream(a_T, b_T, entry_T, g_T != 0, live_T)
