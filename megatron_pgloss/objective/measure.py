"""Metrics of one component on one micro-batch, as typed sums. No host sync. `N` positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.metrics import Metric
from megatron_pgloss.objective.late import Late
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.surrogates import Clipped
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import (
    CISPO,
    FIPO,
    GMPO,
    KL,
    TOPR,
    Clip,
    Component,
    CrossEntropy,
    Entropy,
    LossSpec,
    PolicyGradient,
    Value,
)
from megatron_pgloss.terms import bounded, k3

_BOUNDED = (Clip, FIPO, GMPO, CISPO, TOPR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A component's term before gates and weights, and what decided it."""

    term_N: Tensor
    late: Late
    clipped: Clipped | None = None
    decided_N: Tensor | None = None
    """bool [N]: where the clip of a value loss decided."""


def names(part: Component, spec: LossSpec, streams: frozenset[str], entropy: bool) -> list[str]:
    """The metrics of ``part``, in order: a function of the spec and of what the step carries, equal on all ranks."""
    out = ["loss", "fault", "fault_at"]
    if isinstance(part, PolicyGradient):
        if _has_ratio(part):
            out += ["ratio", "ratio_sq", "ratio_min", "ratio_max", "bounded", "k1_old", "k3_old"]
            out += ["unit_ratio", "unit_ratio_min", "unit_ratio_max"] if part.ratio != "token" else []
        if isinstance(part.surrogate, _BOUNDED):
            out += ["clip_low", "clip_high", "clip_dual"]
        out += [f"k3_{base}" for base in ("rollout", "ref") if base in streams]
        out += ["entropy"] if entropy else []
    out += dict.fromkeys(f"gate_{gate.kind}" for gate in spec.gates if part.name in gate.on)
    if any(rule.weighs for late in (False, True) for rule in spec.corrections_on(part, late=late)):
        out += ["is_weight", "is_truncated"]
    if any(rule.rejects for rule in spec.corrections_on(part, late=True)):
        out.append("rejected")
    if isinstance(part, CrossEntropy):
        out.append("nll")
    if isinstance(part, Entropy):
        out.append("entropy")
    if isinstance(part, KL):
        out.append("kl")
    if isinstance(part, Value):
        out += ["value", "returns", "value_error", "value_clipped"]
    return [f"{part.name}/{name}" for name in out]


def measure(
    part: Component, x: Streams, worth: Tensor, bad_N: Tensor, seen: Seen, micro: MicroBatch, spec: LossSpec
) -> dict[str, Metric]:
    """All metrics that `names` lists.

    Args:
        worth: the component's own value, before its coefficient.
        bad_N: bool [N]: where the term or what it reads was not finite.
    """
    member_N = x.members
    place_N = micro.index_N.to(bad_N.device, non_blocking=True)
    found: dict[str, Metric] = {
        "loss": Metric.sum(worth),
        "fault": Metric.sum(bad_N.sum()),
        "fault_at": Metric.extreme("min", place_N, bad_N),
    }
    with torch.no_grad():
        if isinstance(part, PolicyGradient):
            found |= _policy(part, x, member_N, seen)
        for kind, taken_N in seen.late.gated.items():
            found[f"gate_{kind}"] = Metric.mean(taken_N, member_N)
        if any(rule.weighs for late in (False, True) for rule in spec.corrections_on(part, late=late)):
            found |= _weights(part, x, seen.late, micro)
        if seen.late.rejected_N is not None:
            found["rejected"] = Metric.mean(seen.late.rejected_N.double(), member_N)
        if isinstance(part, CrossEntropy):
            found["nll"] = Metric.mean(-x.logp, member_N)
        if isinstance(part, Entropy):
            found["entropy"] = Metric.mean(x.entropy, member_N)
        if isinstance(part, KL):
            found["kl"] = Metric.mean(seen.term_N, member_N)
        if isinstance(part, Value):
            returns_N = x.stream("returns")
            found["value"], found["returns"] = Metric.mean(x.value, member_N), Metric.mean(returns_N, member_N)
            found["value_error"] = Metric.mean((x.value - returns_N).square(), member_N)
            assert seen.decided_N is not None
            found["value_clipped"] = Metric.mean(seen.decided_N.double(), member_N)
    return {f"{part.name}/{name}": metric for name, metric in found.items()}


def _has_ratio(part: PolicyGradient) -> bool:
    return "old" in part.reads


def _policy(part: PolicyGradient, x: Streams, member_N: Tensor, seen: Seen) -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    if _has_ratio(part):
        found |= _ratio(x, member_N)
        if part.ratio != "token":
            unit_N = x.ratio.double()
            found["unit_ratio"] = Metric.mean(unit_N, member_N)
            found["unit_ratio_min"] = Metric.extreme("min", unit_N, member_N)
            found["unit_ratio_max"] = Metric.extreme("max", unit_N, member_N)
    if seen.clipped is not None:
        found["clip_low"] = Metric.mean(seen.clipped.low_N.double(), member_N)
        found["clip_high"] = Metric.mean(seen.clipped.high_N.double(), member_N)
        found["clip_dual"] = Metric.mean(seen.clipped.dual_N.double(), member_N)
    for base in ("rollout", "ref"):
        if x.has(base):
            found[f"k3_{base}"] = Metric.mean(k3(bounded(x.logp - getattr(x, base), x.bound)), member_N)
    if x.has_entropy:
        found["entropy"] = Metric.mean(x.entropy, member_N)
    return found


def _weights(part: Component, x: Streams, late: Late, micro: MicroBatch) -> dict[str, Metric]:
    """Importance weights of the plan and of the loss, over the members before any rejection."""
    before, cut = micro.stream(f"before/{part.name}"), micro.stream(f"is_truncated/{part.name}")
    weight = micro.stream(f"is_weight/{part.name}")
    over_N = x.members if before is None else before.reshape(-1)
    weight_N = torch.ones_like(x.logp, dtype=torch.float64) if weight is None else weight.reshape(-1).double()
    cut_N = torch.zeros_like(over_N) if cut is None else cut.reshape(-1)
    if late.weight_N is not None:
        weight_N = weight_N * late.weight_N
    if late.truncated_N is not None:
        cut_N = cut_N | late.truncated_N
    return {"is_weight": Metric.mean(weight_N, over_N), "is_truncated": Metric.mean(cut_N.double(), over_N)}


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
