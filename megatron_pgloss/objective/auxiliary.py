"""Terms beside the policy gradient: KL in its forms, entropy, cross entropy, value. Elementwise on `[N]`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.spec import KL, TopKDistill, Value
from megatron_pgloss.terms import bounded, k1, k2, k3
from megatron_pgloss.terms.topk import topk_divergence

_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": torch.abs}


def kl(part: KL, x: Streams) -> Tensor:
    """The estimate of KL(pi || base) with the gradient that ``part`` names."""
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


def topk(part: TopKDistill, x: Streams) -> Tensor:
    """The divergence from the teacher on its ids."""
    return topk_divergence(x.chosen, x.wide(part.logprobs), x.wide(part.ids) >= 0, part.direction, part.tail)


def value(part: Value, x: Streams) -> tuple[Tensor, Tensor]:
    """Half the larger of the squared errors of V and of V clipped around the old value; and where the clip decided."""
    miss_N = x.value - x.stream("returns")
    if part.clip is None:
        return miss_N.square() / 2, torch.zeros_like(miss_N, dtype=torch.bool)
    old_N = x.stream("values")
    held_N = old_N + (x.value - old_N).clamp(-part.clip, part.clip) - x.stream("returns")
    decided_N = held_N.square() > miss_N.square()
    return torch.where(decided_N, held_N, miss_N).square() / 2, decided_N
