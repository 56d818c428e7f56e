"""Metrics as typed reductions: a sum with its own count, or an extreme; both merge exactly over micro-batches and
ranks.

A mean is never averaged again: what travels is ``(sum, count)`` in float64, and the division happens once, on
the reduced pair. A row of the table `METRICS` holds everything about one metric: which components have it, its value,
what it is divided by, and what it should be on the first on-policy step. The names that ranks agree on and
docs/metrics.md are made from the table.
"""

from megatron_pgloss.metrics.metric_table import METRICS, Kind, MetricRow, kind_of
from megatron_pgloss.metrics.reduction import Metric, fold, merge_all, unpack

__all__ = ["METRICS", "Kind", "Metric", "MetricRow", "fold", "kind_of", "merge_all", "unpack"]
