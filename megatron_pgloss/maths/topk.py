"""Divergences between two distributions of which only k log-probs are known. Shapes: `N` tokens, `k` ids of each.

With q the teacher's and p the policy's probabilities on the ids K, Q and P their sums over K:

| direction | tail | value |
|---|---|---|
| forward | drop | ``sum_K q (log q - log p)`` |
| forward | renormalize | ``sum_K (q/Q) (log q/Q - log p/P)`` |
| reverse | renormalize | ``sum_K (p/P) (log p/P - log q/Q)`` |
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def topk_divergence(
    policy_Nk: Tensor,
    teacher_Nk: Tensor,
    there_Nk: Tensor,
    direction: Literal["forward", "reverse"],
    tail: Literal["drop", "renormalize"],
) -> Tensor:
    """The table's value for every token, float [N]; 0 for a token without ids. See `megatron_pgloss.TopKDistill`.

    Args:
        policy_Nk: log-probs of the policy at the ids, differentiable.
        teacher_Nk: log-probs of the teacher at the ids.
        there_Nk: bool [N, k]: which ids the token has (it may have fewer than k).
        direction: ``forward`` is KL(teacher || policy), ``reverse`` is KL(policy || teacher).
        tail: whether the probability outside the ids is dropped, or both distributions renormalised on the ids.
    """
    # Selected before any arithmetic: where an id is missing, the log-probs may hold anything.
    p_Nk, q_Nk = (torch.where(there_Nk, given_Nk, 0) for given_Nk in (policy_Nk, teacher_Nk))
    if tail == "renormalize":
        p_Nk, q_Nk = p_Nk - log_mass(p_Nk, there_Nk)[:, None], q_Nk - log_mass(q_Nk, there_Nk)[:, None]
    first_Nk, second_Nk = (q_Nk, p_Nk) if direction == "forward" else (p_Nk, q_Nk)
    return torch.where(there_Nk, first_Nk.exp() * (first_Nk - second_Nk), 0).sum(1)


def log_mass(logp_Nk: Tensor, there_Nk: Tensor) -> Tensor:
    """Log of the sum of the probabilities at the ids that are there, [N]; 0 for a token without ids."""
    if not logp_Nk.size(1):
        return logp_Nk.new_zeros(len(logp_Nk))
    some_N = there_Nk.any(1)
    # A token without ids gets a row of zeros: a row of minus infinity would have a gradient of NaN.
    held_Nk = torch.where(there_Nk, logp_Nk, torch.where(some_N[:, None], -torch.inf, 0))
    return torch.where(some_N, held_Nk.logsumexp(1), 0)
