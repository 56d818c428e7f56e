"""Partial results: each adds exactly over micro-batches and ranks, and the division happens once, at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.metrics.metric_table import Kind, kind_of


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
        packed: float64 ``[parts, names, 2]``, by `Metric.pack`; without parts the result is empty.
    """
    if packed.shape[0] == 0:
        return {}
    # cumsum adds the parts one after the other; sum may add them in another order on another machine.
    whole, low, high = packed.cumsum(0)[-1], packed[..., 0].amin(0), packed[..., 0].amax(0)
    kinds = {name: kind_of(name) for name in names}
    extremes = {"min": low, "max": high}
    return {
        name: Metric(kind, extremes[kind][i]) if kind in extremes else unpack(name, whole[i])
        for i, (name, kind) in enumerate(kinds.items())
    }
