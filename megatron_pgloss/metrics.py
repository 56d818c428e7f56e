"""Metrics as typed reductions: a sum with its own count, an extreme; each adds exactly over micro-batches and ranks.

A mean is never averaged again: what travels is ``(sum, count)`` in float64, and the division happens once, on
the reduced pair. The table `METRICS` says what every metric is divided by and what it should be on the first
on-policy step; docs/metrics.md is made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["mean", "sum", "min", "max"]

_IDENTITY = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}


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


METRICS: tuple[MetricRow, ...] = (
    MetricRow(
        suffix="fault",
        kind="sum",
        divided_by="",
        first_step="0",
        meaning="tokens whose log-prob or term was not finite: selected out of value and gradient",
    ),
    MetricRow(
        suffix="fault_at",
        kind="min",
        divided_by="",
        first_step="none",
        meaning="position of the first such token in its rank's streams",
    ),
    MetricRow(
        suffix="loss",
        kind="sum",
        divided_by="",
        first_step="rl: about minus the weighted mean advantage",
        meaning="the component's own value, sum of weight times term, before its coefficient",
    ),
    MetricRow(
        suffix="ratio",
        kind="mean",
        divided_by="member tokens",
        first_step="1 exactly",
        meaning="pi/old of the sampled token, raw (before clip and bound)",
    ),
    MetricRow(
        suffix="ratio_sq",
        kind="mean",
        divided_by="member tokens",
        first_step="1 exactly",
        meaning="squared raw ratio, for the effective sample size",
    ),
    MetricRow(suffix="ratio_min", kind="min", divided_by="", first_step="1 exactly", meaning="smallest raw ratio"),
    MetricRow(suffix="ratio_max", kind="max", divided_by="", first_step="1 exactly", meaning="largest raw ratio"),
    MetricRow(
        suffix="clip_low",
        kind="mean",
        divided_by="member tokens",
        first_step="0",
        meaning="share of tokens with A < 0 and ratio below 1 - low (gradient 0)",
    ),
    MetricRow(
        suffix="clip_high",
        kind="mean",
        divided_by="member tokens",
        first_step="0",
        meaning="share of tokens with A > 0 and ratio above 1 + high (gradient 0)",
    ),
    MetricRow(
        suffix="clip_dual",
        kind="mean",
        divided_by="member tokens",
        first_step="0",
        meaning="share of tokens with A < 0 and ratio above the dual bound (gradient 0)",
    ),
    MetricRow(
        suffix="bounded",
        kind="mean",
        divided_by="member tokens",
        first_step="0",
        meaning="share of tokens whose log-ratio lies beyond log_ratio_bound (gradient 0)",
    ),
    MetricRow(
        suffix="k1_old",
        kind="mean",
        divided_by="member tokens",
        first_step="0",
        meaning="log pi - log old, signed",
    ),
    MetricRow(
        suffix="k3_old",
        kind="mean",
        divided_by="member tokens",
        first_step="0",
        meaning="k3 estimate of KL(pi || old)",
    ),
    MetricRow(
        suffix="k3_rollout",
        kind="mean",
        divided_by="member tokens",
        first_step="engine mismatch alone",
        meaning="k3 estimate of KL(pi || rollout), where rollout log-probs are given",
    ),
    MetricRow(
        suffix="k3_ref",
        kind="mean",
        divided_by="member tokens",
        first_step="0 while pi is the reference",
        meaning="k3 estimate of KL(pi || ref), where ref log-probs are given",
    ),
    MetricRow(
        suffix="entropy",
        kind="mean",
        divided_by="member tokens",
        first_step="the sampler's own",
        meaning="exact entropy of pi at the position, where it is computed",
    ),
    MetricRow(
        suffix="nll",
        kind="mean",
        divided_by="member tokens",
        first_step="the data's own",
        meaning="-log pi of the target token",
    ),
    MetricRow(
        suffix="is_weight",
        kind="mean",
        divided_by="member tokens",
        first_step="1 where engines agree",
        meaning="importance weight of a correction, as applied",
    ),
    MetricRow(
        suffix="is_truncated",
        kind="mean",
        divided_by="member tokens",
        first_step="0 where engines agree",
        meaning="share of tokens whose raw importance weight was truncated",
    ),
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
    def mean(values_T: Tensor, members_T: Tensor) -> Metric:
        """Sum of ``values_T`` where ``members_T`` and the number of members. ``[T]`` -> pair of 0-d float64."""
        picked = torch.where(members_T, values_T.detach(), 0).to(torch.float64)
        return Metric("mean", picked.sum(), members_T.sum().to(torch.float64))

    @staticmethod
    def sum(value: Tensor) -> Metric:
        """A plain sum that adds over micro-batches and ranks."""
        return Metric("sum", value.detach().to(torch.float64))

    @staticmethod
    def extreme(kind: Literal["min", "max"], values_T: Tensor, members_T: Tensor) -> Metric:
        """Smallest or largest member; the identity (plus or minus infinity) where there is none."""
        identity = torch.full((1,), _IDENTITY[kind], dtype=torch.float64, device=values_T.device)
        picked = torch.where(members_T, values_T.detach().to(torch.float64), identity)
        whole = torch.cat([picked.reshape(-1), identity])
        return Metric(kind, whole.amin() if kind == "min" else whole.amax())

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
