"""Join the parts of one softmax: log-sum-exp and entropy of a row from those of its pieces.

Shapes: `S` pieces or shards, `T` rows; all in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def join_lse(lse_ST: Tensor) -> Tensor:
    """log sum_s exp(lse_s) over the first dimension; -inf where every lse_s is."""
    if lse_ST.size(0) == 1:
        return lse_ST[0]
    peak_T = lse_ST.amax(0)
    centre_T = torch.where(peak_T == -math.inf, 0.0, peak_T)
    return centre_T + (lse_ST - centre_T).exp().sum(0).log()


def join_entropy(lse_ST: Tensor, entropy_ST: Tensor, lse_T: Tensor) -> Tensor:
    """H = sum_s W_s (H_s - log W_s), W_s = exp(lse_s - lse): the chain rule of entropy.

    Parts with lse_s = -inf are selected out; where lse is -inf the result is NaN.
    """
    empty_ST = lse_ST == -math.inf  # a NaN must not be selected out
    log_weight_ST = lse_ST - lse_T
    share_ST = log_weight_ST.exp() * (entropy_ST - log_weight_ST)
    total_T = torch.where(empty_ST, 0.0, share_ST).sum(0)
    return torch.where(lse_T == -math.inf, math.nan, total_T)
