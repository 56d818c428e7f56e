"""Terms beside the policy gradient: KL in its forms, entropy, cross entropy, value. Elementwise on `[N]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.maths import bounded, k1, k2, k3
from megatron_pgloss.maths.topk import topk_divergence
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.users import checked
from megatron_pgloss.spec import KL, Term, TopKDistill, Value

Found = tuple[Tensor, Tensor | None]
"""A term, float [N], and where the clip of a value loss decided it, bool [N], or None."""
_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": torch.abs}


def kl(part: KL, x: Streams) -> Found:
    """The estimate of KL(pi || base) with the gradient that ``part`` names."""
    return _kl(part, x), None


def _kl(part: KL, x: Streams) -> Tensor:
    if part.estimator == "exact":
        return x.kl
    bases: dict[str, Callable[[], Tensor]] = {"ref": lambda: x.ref, "old": lambda: x.old, "rollout": lambda: x.rollout}
    d_N = bounded(x.logp - bases[part.to](), x.bound)
    value_N = _ESTIMATORS[part.estimator](d_N)
    if part.gradient == "k2":
        slope_N = k2(d_N)
        return value_N.detach() + (slope_N - slope_N.detach())  # straight-through: this value, that gradient
    if part.gradient == "weighted":
        return bounded(x.logp - bases[part.base](), x.bound).exp() * value_N
    return value_N


def topk(part: TopKDistill, x: Streams) -> Found:
    """The divergence from the teacher on its ids."""
    return topk_divergence(x.chosen, x.wide(part.logprobs), x.wide(part.ids) >= 0, part.direction, part.tail), None


def entropy(part: Any, x: Streams) -> Found:
    """``-H(pi)``."""
    return -x.entropy, None


def cross_entropy(part: Any, x: Streams) -> Found:
    """``-log pi``."""
    return -x.logp, None


def own(part: Term, x: Streams) -> Found:
    """What the user's function gives."""
    return checked(part.fn(x), x, f"term {part.name!r}"), None


def value(part: Value, x: Streams) -> Found:
    """Half the larger of the squared errors of V and of V clipped around the old value; and where the clip decided."""
    miss_N = x.value - x.stream("returns")
    if part.clip is None:
        return miss_N.square() / 2, torch.zeros_like(miss_N, dtype=torch.bool)
    old_N = x.stream("values")
    held_N = old_N + (x.value - old_N).clamp(-part.clip, part.clip) - x.stream("returns")
    decided_N = held_N.square() > miss_N.square()
    return torch.where(decided_N, held_N, miss_N).square() / 2, decided_N


TERMS: dict[str, Callable[[Any, Streams], Found]] = {
    "kl": kl,
    "entropy": entropy,
    "cross_entropy": cross_entropy,
    "topk_distill": topk,
    "value": value,
    "term": own,
}
"""Kind of component to its function; that of the policy gradient is made of a ratio and a surrogate."""
