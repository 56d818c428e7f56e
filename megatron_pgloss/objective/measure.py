"""Metrics of one component on one micro-batch, as typed sums. No host sync. `N` positions."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.metrics import Metric
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.surrogates import Clipped
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import Clip, Component, CrossEntropy, Entropy, LossSpec, PolicyGradient
from megatron_pgloss.terms import bounded, k3


def names(part: Component, spec: LossSpec, streams: frozenset[str], entropy: bool) -> list[str]:
    """The metrics of ``part``, in order: a function of the spec and of what the step carries, equal on all ranks."""
    out = ["loss", "fault", "fault_at"]
    if isinstance(part, PolicyGradient):
        if _has_ratio(part):
            out += ["ratio", "ratio_sq", "ratio_min", "ratio_max", "bounded", "k1_old", "k3_old"]
        if isinstance(part.surrogate, Clip):
            out += ["clip_low", "clip_high", "clip_dual"]
        out += [f"k3_{base}" for base in ("rollout", "ref") if base in streams]
        out += ["entropy"] if entropy else []
        if any(part.name in rule.on for rule in spec.corrections):
            out += ["is_weight", "is_truncated"]
    if isinstance(part, CrossEntropy):
        out.append("nll")
    if isinstance(part, Entropy):
        out.append("entropy")
    return [f"{part.name}/{name}" for name in out]


def measure(
    part: Component,
    x: Streams,
    value: Tensor,
    bad_N: Tensor,
    clipped: Clipped | None,
    micro: MicroBatch,
    spec: LossSpec,
) -> dict[str, Metric]:
    """All metrics that `names` lists."""
    member_N = x.members
    place_N = micro.index_N.to(bad_N.device, non_blocking=True)
    found: dict[str, Metric] = {
        "loss": Metric.sum(value),
        "fault": Metric.sum(bad_N.sum()),
        "fault_at": Metric.extreme("min", place_N, bad_N),
    }
    with torch.no_grad():
        if isinstance(part, PolicyGradient):
            if _has_ratio(part):
                found |= _ratio(x, member_N)
            if clipped is not None:
                found["clip_low"] = Metric.mean(clipped.low_N.double(), member_N)
                found["clip_high"] = Metric.mean(clipped.high_N.double(), member_N)
                found["clip_dual"] = Metric.mean(clipped.dual_N.double(), member_N)
            for base in ("rollout", "ref"):
                if x.has(base):
                    found[f"k3_{base}"] = Metric.mean(k3(bounded(x.logp - getattr(x, base), x.bound)), member_N)
            if x.has_entropy:
                found["entropy"] = Metric.mean(x.entropy, member_N)
            for rule in spec.corrections:
                if part.name in rule.on:
                    weight_N = bounded(x.old - x.rollout, x.bound).exp()
                    found["is_weight"] = Metric.mean(weight_N.clamp(max=rule.high), member_N)
                    found["is_truncated"] = Metric.mean((weight_N > rule.high).double(), member_N)
        if isinstance(part, CrossEntropy):
            found["nll"] = Metric.mean(-x.logp, member_N)
        if isinstance(part, Entropy):
            found["entropy"] = Metric.mean(x.entropy, member_N)
    return {f"{part.name}/{name}": metric for name, metric in found.items()}


def _has_ratio(part: PolicyGradient) -> bool:
    return isinstance(part.surrogate, Clip) and part.ratio == "token"


def _ratio(x: Streams, member_N: Tensor) -> dict[str, Metric]:
    raw_N = x.raw_log_ratio.double()
    ratio_N = raw_N.exp()
    return {
        "ratio": Metric.mean(ratio_N, member_N),
        "ratio_sq": Metric.mean(ratio_N.square(), member_N),
        "ratio_min": Metric.extreme("min", ratio_N, member_N),
        "ratio_max": Metric.extreme("max", ratio_N, member_N),
        "bounded": Metric.mean((raw_N.abs() > x.bound).double(), member_N),
        "k1_old": Metric.mean(raw_N, member_N),
        "k3_old": Metric.mean(k3(bounded(raw_N, x.bound)), member_N),
    }
