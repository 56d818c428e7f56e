"""Metrics of one component on one micro-batch, as typed sums. No host sync. `N` positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.maths import bounded, flags, k3, selected
from megatron_pgloss.maths.topk import log_mass
from megatron_pgloss.metrics import Metric
from megatron_pgloss.objective.late import Late
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.surrogates import Clipped
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import (
    KL,
    Component,
    CrossEntropy,
    Entropy,
    LossSpec,
    PolicyGradient,
    TopKDistill,
    Value,
)


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
        if part.has_ratio:
            out += ["ratio", "ratio_sq", "ratio_min", "ratio_max", "bounded", "k1_old", "k3_old"]
            out += ["unit_ratio", "unit_ratio_min", "unit_ratio_max"] if part.ratio != "token" else []
        if part.surrogate.bounds:
            out += ["clip_low", "clip_high", "clip_dual"]
        out += [f"k3_{base}" for base in ("rollout", "ref") if base in streams]
        out += ["entropy"] if entropy else []
        out += ["kept_fraction", "outside"] if spec.kept is not None else []
    out += dict.fromkeys(f"gate_{gate.kind}" for gate in spec.gates if gate.acts_on(part))
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
    if isinstance(part, TopKDistill):
        out += ["divergence", "teacher_mass", "policy_mass"]
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
    with torch.no_grad():
        over = Among(x.members)
        found: dict[str, Metric] = {"loss": Metric.sum(worth), **_faults(bad_N, micro)}
        if isinstance(part, PolicyGradient):
            found |= _policy(part, x, over, seen)
            if x.outside is not None:
                found["kept_fraction"] = over.mean(torch.ones_like(x.logp) if x.kept is None else x.kept)
                found["outside"] = Among(x.members | x.outside).share(x.outside)
        for kind, taken_N in seen.late.gated.items():
            found[f"gate_{kind}"] = over.mean(taken_N)
        if any(rule.weighs for late in (False, True) for rule in spec.corrections_on(part, late=late)):
            found |= _weights(part, x, seen.late, micro)
        if seen.late.rejected_N is not None:
            found["rejected"] = over.share(seen.late.rejected_N)
        if isinstance(part, CrossEntropy):
            found["nll"] = over.mean(-x.logp)
        if isinstance(part, Entropy):
            found["entropy"] = over.mean(x.entropy)
        if isinstance(part, KL):
            found["kl"] = over.mean(seen.term_N)
        if isinstance(part, TopKDistill):
            there_Nk = x.wide(part.ids) >= 0
            taught = Among(x.members & there_Nk.any(1))
            found["divergence"] = taught.mean(seen.term_N)
            found["teacher_mass"] = taught.mean(log_mass(x.wide(part.logprobs), there_Nk).exp())
            found["policy_mass"] = taught.mean(log_mass(x.chosen, there_Nk).exp())
        if isinstance(part, Value):
            returns_N = x.stream("returns")
            found["value"], found["returns"] = over.mean(x.value), over.mean(returns_N)
            found["value_error"] = over.mean((x.value - returns_N).square())
            assert seen.decided_N is not None
            found["value_clipped"] = over.share(seen.decided_N)
    return {f"{part.name}/{name}": metric for name, metric in found.items()}


class Among:
    """Reductions over one set of tokens, bool [N]; its number is counted once."""

    def __init__(self, mask_N: Tensor) -> None:
        self.mask_N = mask_N
        self._number: Tensor | None = None
        self._flags: dict[torch.dtype, Tensor] = {}
        self._outside: dict[torch.dtype, Tensor] = {}

    @property
    def number(self) -> Tensor:
        """Tokens of the set, 0-d float64."""
        if self._number is None:
            self._number = self.mask_N.count_nonzero().double()
        return self._number

    def mean(self, value_N: Tensor) -> Metric:
        """Mean of ``value_N`` over the set; summed in float64."""
        return Metric("mean", self._picked(value_N).double().sum(), self.number)

    def share(self, flag_N: Tensor) -> Metric:
        """Share of the set where ``flag_N`` is true."""
        return Metric("mean", (flag_N & self.mask_N).count_nonzero().double(), self.number)

    def least(self, value_N: Tensor) -> Metric:
        """Smallest value of the set; plus infinity where it is empty."""
        return Metric("min", -self._most(-value_N))

    def most(self, value_N: Tensor) -> Metric:
        """Largest value of the set; minus infinity where it is empty."""
        return Metric("max", self._most(value_N))

    def _picked(self, value_N: Tensor) -> Tensor:
        dtype = value_N.dtype
        if dtype not in self._flags:
            self._flags[dtype] = flags(self.mask_N, dtype)
        return selected(self._flags[dtype], value_N.detach())

    def _most(self, value_N: Tensor) -> Tensor:
        if not value_N.numel():
            return value_N.new_full((), -torch.inf, dtype=torch.float64)
        picked_N = self._picked(value_N)
        if value_N.dtype not in self._outside:
            self._outside[value_N.dtype] = 1 - self._flags[value_N.dtype].reciprocal()  # 0 inside, -inf outside
        return (picked_N + self._outside[value_N.dtype]).amax().double()


def _faults(bad_N: Tensor, micro: MicroBatch) -> dict[str, Metric]:
    """How many tokens are broken, and the place of the first of them in the streams of this rank.

    The first one in the micro-batch is also the first in the streams: an arrangement keeps the order of tokens.
    """
    number, never = bad_N.count_nonzero().double(), bad_N.new_full((), torch.inf, dtype=torch.float64)
    if not bad_N.numel():
        return {"fault": Metric("sum", number), "fault_at": Metric("min", never)}
    place_N = micro.index_N.to(bad_N.device, non_blocking=True)
    first = place_N.take(bad_N.view(torch.uint8).argmax()).double()
    return {"fault": Metric("sum", number), "fault_at": Metric("min", torch.where(number > 0, first, never))}


def _policy(part: PolicyGradient, x: Streams, over: Among, seen: Seen) -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    if part.has_ratio:
        found |= _ratio(x, over)
        if part.ratio != "token":
            unit_N = x.ratio.double()
            found["unit_ratio"] = over.mean(unit_N)
            found["unit_ratio_min"], found["unit_ratio_max"] = over.least(unit_N), over.most(unit_N)
    if seen.clipped is not None:
        found["clip_low"] = over.share(seen.clipped.low_N)
        found["clip_high"] = over.share(seen.clipped.high_N)
        found["clip_dual"] = over.share(seen.clipped.dual_N)
    for base in ("rollout", "ref"):
        if x.has(base):
            found[f"k3_{base}"] = over.mean(k3(bounded(x.logp - getattr(x, base), x.bound)))
    if x.has_entropy:
        found["entropy"] = over.mean(x.entropy)
    return found


def _weights(part: Component, x: Streams, late: Late, micro: MicroBatch) -> dict[str, Metric]:
    """Importance weights of the plan and of the loss, over the members before any rejection."""
    made = micro.corrected(part.name)
    over = Among(x.members if made is None else made.before.reshape(-1))
    weight_N = torch.ones_like(x.logp, dtype=torch.float64) if made is None else made.weight.reshape(-1).double()
    cut_N = torch.zeros_like(x.members) if made is None else made.truncated.reshape(-1)
    if late.weight_N is not None:
        weight_N = weight_N * late.weight_N
    if late.truncated_N is not None:
        cut_N = cut_N | late.truncated_N
    return {"is_weight": over.mean(weight_N), "is_truncated": over.share(cut_N)}


def _ratio(x: Streams, over: Among) -> dict[str, Metric]:
    raw_N = x.raw_log_ratio
    ratio_N = raw_N.double().exp()  # in float32 it would overflow long before it is of no interest
    return {
        "ratio": over.mean(ratio_N),
        "ratio_sq": over.mean(ratio_N.square()),
        "ratio_min": over.least(ratio_N),
        "ratio_max": over.most(ratio_N),
        "bounded": over.share(raw_N.abs() > x.bound),
        "k1_old": over.mean(raw_N),
        "k3_old": over.mean(k3(bounded(raw_N, x.bound))),
    }
