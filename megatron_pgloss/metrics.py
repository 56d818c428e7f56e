"""Metrics as typed reductions: a sum with its own count, an extreme; each adds exactly over micro-batches and ranks.

A mean is never averaged again: what travels is ``(sum, count)`` in float64, and the division happens once, on
the reduced pair. The table `METRICS` says what every metric is divided by and what it should be on the first
on-policy step; docs/metrics.md is made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["mean", "sum", "min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One line of the metric table."""

    suffix: str
    """Name below the component's own, as in ``rl/ratio``."""
    kind: Kind
    divided_by: str
    """What a mean is divided by; empty for sums and extremes."""
    first_step: str
    """What it should be on the first on-policy step."""
    meaning: str


_MEMBERS = "member tokens"


def _mean(suffix: str, first_step: str, meaning: str) -> MetricRow:
    return MetricRow(suffix=suffix, kind="mean", divided_by=_MEMBERS, first_step=first_step, meaning=meaning)


def _whole(kind: Kind, suffix: str, first_step: str, meaning: str) -> MetricRow:
    return MetricRow(suffix=suffix, kind=kind, divided_by="", first_step=first_step, meaning=meaning)


METRICS: tuple[MetricRow, ...] = (
    _whole("sum", "fault", "0", "tokens whose log-prob or term was not finite: selected out of value and gradient"),
    _whole("min", "fault_at", "none", "position of the first such token in its rank's streams"),
    _whole(
        "sum",
        "loss",
        "rl: about minus the weighted mean advantage",
        "the component's own value, sum of weight times term, before its coefficient",
    ),
    _mean("ratio", "1 exactly", "pi/old of the sampled token, raw (before clip and bound)"),
    _mean("ratio_sq", "1 exactly", "squared raw ratio, for the effective sample size"),
    _whole("min", "ratio_min", "1 exactly", "smallest raw ratio"),
    _whole("max", "ratio_max", "1 exactly", "largest raw ratio"),
    _mean("unit_ratio", "1 exactly", "the component's own ratio, by its ratio axis, where that is not the token's"),
    _whole("min", "unit_ratio_min", "1 exactly", "smallest of these ratios"),
    _whole("max", "unit_ratio_max", "1 exactly", "largest of these ratios"),
    _mean(
        "clip_low",
        "0",
        "share of tokens that the lower bound decided (a clip: A < 0, gradient 0; a weight: held there)",
    ),
    _mean(
        "clip_high",
        "0",
        "share of tokens that the upper bound decided (a clip: A > 0, gradient 0; a weight: held there)",
    ),
    _mean("clip_dual", "0", "share of tokens with A < 0 and ratio above the dual bound or delta (gradient 0)"),
    _mean(
        "bounded",
        "0",
        "share of tokens whose term log_ratio_bound holds: gradient 0, where without the bound there would be one",
    ),
    _mean("k1_old", "0", "log pi - log old, signed"),
    _mean("k3_old_pi", "0", "k3 estimate of KL(old || pi), r - 1 - log r from tokens that old drew"),
    _mean(
        "k3_rollout_old",
        "engine mismatch alone",
        "k3 estimate of KL(rollout || old) from the sampler's tokens, where rollout log-probs are given",
    ),
    _mean(
        "k3_rollout_pi",
        "engine mismatch alone",
        "k3 estimate of KL(rollout || pi) from the sampler's tokens, where rollout log-probs are given",
    ),
    _mean("k3_pi_ref", "0 while pi is the reference", "k3 estimate of KL(pi || ref), as if pi had drawn the tokens"),
    _mean("entropy", "the sampler's own", "exact entropy of pi at the position, where it is computed"),
    _mean("kept_fraction", "the sampler's own", "size of the kept set over that of the vocabulary"),
    _mean(
        "outside",
        "0 where the trainer's sets are the sampler's",
        "share of tokens outside their kept set, dropped inside the loss or joined to it",
    ),
    _mean("nll", "the data's own", "-log pi of the target token"),
    _mean("is_weight", "1 where engines agree", "importance weight of a correction, as applied"),
    _mean("is_truncated", "0 where engines agree", "share of tokens whose raw importance weight was truncated"),
    _mean("gate_tv", "engine mismatch alone", "share of tokens that a total-variation gate took out of the numerator"),
    _mean("gate_binary_kl", "engine mismatch alone", "share of tokens that a binary-KL gate took out of the numerator"),
    _mean("gate_ratio_band", "engine mismatch alone", "share of tokens that a ratio band took out of the numerator"),
    _mean("gate_opsm", "engine mismatch alone", "share of tokens that a sequence gate took out of the numerator"),
    _mean("gate_entropy_quantile", "its share", "share of tokens that an entropy gate took out of the numerator"),
    _mean("gate_second_moment", "0", "share of tokens that a second-moment gate took out of the numerator"),
    _mean("gate_covariance", "its share", "share of tokens that a covariance gate took out of the numerator"),
    _mean(
        "gate_custom",
        "its own",
        "share of tokens that a user's gate took out of the numerator (a soft one: 1 minus its factor)",
    ),
    _mean("rejected", "0 where engines agree", "share of tokens that a correction of the current policy rejected"),
    _mean("kl", "0 while pi is the base", "the KL term itself, unweighted by the normaliser"),
    _mean("value", "the critic's own", "V"),
    _mean("returns", "the data's own", "target of V"),
    _mean("value_error", "the critic's own", "(V - returns)^2"),
    _mean("divergence", "0 where pi is the teacher", "the top-k divergence itself, over tokens with teacher ids"),
    _mean("teacher_mass", "any", "probability that the teacher has on its ids, over tokens with some"),
    _mean("policy_mass", "any", "probability that the policy has on the teacher's ids, over tokens with some"),
    _mean("value_clipped", "0", "share of tokens whose clipped value gave the larger error"),
)
_BY_SUFFIX = {row.suffix: row for row in METRICS}


def kind_of(name: str) -> Kind:
    """How the metric ``component/suffix`` reduces; unknown suffixes are sums (a user's own)."""
    row = _BY_SUFFIX.get(name.rsplit("/", 1)[-1])
    return row.kind if row else "sum"


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial result: ``value`` and, for a mean, its ``count``; 0-d tensors, float64 where sums."""

    kind: Kind
    value: Tensor
    count: Tensor | None = None

    @staticmethod
    def sum(value: Tensor) -> Metric:
        """A plain sum that adds over micro-batches and ranks."""
        return Metric("sum", value.detach().to(torch.float64))

    def merge(self, other: Metric) -> Metric:
        """The metric over both parts; exact for every kind."""
        if self.kind == "min":
            return Metric("min", torch.minimum(self.value, other.value))
        if self.kind == "max":
            return Metric("max", torch.maximum(self.value, other.value))
        count = None if self.count is None or other.count is None else self.count + other.count
        return Metric(self.kind, self.value + other.value, count)

    def pack(self) -> Tensor:
        """Two float64 numbers ``[value, count]`` (count 0 where it has none): numel 2 adds up in Megatron's trainer."""
        count = torch.zeros_like(self.value) if self.count is None else self.count
        return torch.stack([self.value.to(torch.float64), count.to(torch.float64)])

    def result(self) -> float:
        """The final number: a mean divides here, once; a mean or an extreme over no token is NaN."""
        value = float(self.value)
        if self.kind == "mean":
            count = float(self.count) if self.count is not None else 0.0
            return value / count if count else float("nan")
        return value if value not in (float("inf"), float("-inf")) else float("nan")


def unpack(name: str, pair: Tensor) -> Metric:
    """Inverse of `Metric.pack` for the metric called ``name``; ``pair`` float64 ``[2]``."""
    kind = kind_of(name)
    return Metric(kind, pair[0], pair[1] if kind == "mean" else None)


def merge_all(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Fold dictionaries of metrics from micro-batches or ranks into one."""
    total: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = total[name].merge(metric) if name in total else metric
    return total


def fold(names: Sequence[str], packed: Tensor) -> dict[str, Metric]:
    """`merge_all` of many packed parts at once: the parts in order, so that every rank gets the same bits.

    Args:
        packed: float64 ``[parts, names, 2]``, by `Metric.pack`; without parts there is nothing.
    """
    if packed.shape[0] == 0:
        return {}
    # One after the other; a plain sum may add in another order on another machine.
    whole, low, high = packed.cumsum(0)[-1], packed[..., 0].amin(0), packed[..., 0].amax(0)
    kinds = {name: kind_of(name) for name in names}
    extremes = {"min": low, "max": high}
    return {
        name: Metric(kind, extremes[kind][i]) if kind in extremes else unpack(name, whole[i])
        for i, (name, kind) in enumerate(kinds.items())
    }
