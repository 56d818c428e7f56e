"""Terms beside the policy gradient: KL in its forms, a teacher's top-k, entropy, cross entropy, value, the user's own.
Elementwise on `[N]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.maths import k1, k2, k3, sloped
from megatron_pgloss.maths.topk import topk_divergence
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.token_term import TokenTerm
from megatron_pgloss.objective.users import checked
from megatron_pgloss.spec import KL, Term, TopKDistill, Value

_Of = Callable[[Tensor], Tensor]
_ESTIMATES: dict[str, tuple[_Of, _Of, _Of]] = {
    "k1": (k1, torch.ones_like, lambda d_N: 1 + d_N),
    "k2": (k2, lambda d_N: d_N, lambda d_N: d_N.square() / 2 + d_N),
    "k3": (k3, lambda d_N: -(-d_N).expm1(), lambda d_N: d_N),
    "abs": (torch.abs, torch.sign, lambda d_N: d_N.abs() + d_N.sign()),
}
"""Estimator to three functions of d: its value, its derivative, and their sum, which is the derivative of r times the
value, over r. The sum has its own formula: in k3, value and derivative hold exp(-d) with opposite signs, and adding
them would leave d with their rounding."""


def kl(part: KL, x: Streams) -> TokenTerm:
    """The estimate of KL(pi || base) with the gradient that ``part`` names. Where the bound holds a ratio, it holds the
    whole term: no gradient is left to the other factor.
    """
    if part.estimator == "exact":
        return TokenTerm(x.kl)
    d_N = (x.logp - x.policy(part.to)).detach()
    value, slope, weighted = _ESTIMATES[part.estimator]
    value_N, held_N = value(x.bounded(d_N) if part.estimator == "k3" else d_N), torch.zeros_like(x.members)
    if part.estimator == "k3" and part.gradient != "k2":
        held_N = x.beyond(d_N)
    if part.gradient == "k2":
        slope_N = d_N  # straight-through: the value as it is, the gradient of k2
    elif part.gradient == "plain":
        slope_N = slope(d_N)
    else:
        log_N = (x.logp - getattr(x, part.base)).detach()
        ratio_N = x.bounded(log_N).exp()
        value_N, slope_N, held_N = ratio_N * value_N, ratio_N * weighted(d_N), held_N | x.beyond(log_N)
    return TokenTerm(sloped(value_N, torch.where(held_N, 0, slope_N), x.logp), held_N=held_N & (slope_N != 0))


def topk(part: TopKDistill, x: Streams) -> TokenTerm:
    """The divergence from the teacher on its ids."""
    there_Nk = x.wide(part.ids) >= 0
    return TokenTerm(topk_divergence(x.chosen, x.wide(part.logprobs), there_Nk, part.direction, part.tail))


def entropy(part: Any, x: Streams) -> TokenTerm:
    """``-H(pi)``."""
    return TokenTerm(-x.entropy)


def cross_entropy(part: Any, x: Streams) -> TokenTerm:
    """``-log pi``."""
    return TokenTerm(-x.logp)


def own(part: Term, x: Streams) -> TokenTerm:
    """The term that the user's function returns."""
    x.ratio_was_read = False
    term_N = checked(x.call("term", part), x, f"term {part.name!r}")
    return TokenTerm(term_N, held_N=x.beyond(x.log_ratio) if x.ratio_was_read else None)


def value(part: Value, x: Streams) -> TokenTerm:
    """Half the larger of the squared errors of V and of V clipped around the old value; and where the clip decided."""
    miss_N = x.value - x.stream("returns")
    if part.clip is None:
        return TokenTerm(miss_N.square() / 2, decided_N=torch.zeros_like(miss_N, dtype=torch.bool))
    old_N = x.stream("values")
    # Not old + clip(V - old): inside the clip that would be V up to a rounding, and the rounding would decide.
    near_N = x.value.clamp(old_N - part.clip, old_N + part.clip) - x.stream("returns")
    decided_N = near_N.square() > miss_N.square()
    return TokenTerm(torch.where(decided_N, near_N, miss_N).square() / 2, decided_N=decided_N)


TERMS: dict[str, Callable[[Any, Streams], TokenTerm]] = {
    "kl": kl,
    "entropy": entropy,
    "cross_entropy": cross_entropy,
    "topk_distill": topk,
    "value": value,
    "term": own,
}
"""Kind of component to its function. The policy gradient is not among them: its surrogate has the function."""
