"""The outcome of one spec on one layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_pgloss.verify.layouts.scenario import Scenario

INFINITE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Largest errors that are accepted."""

    loss: float
    gradient: float
    norm: float
    metric: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One spec on one layout, held against the oracle; the same on every rank."""

    layout: Scenario
    spec: str
    bounds: Bounds
    loss_error: float = INFINITE
    """Error of the loss relative to the oracle's loss; in half precision relative to the sum of absolute token losses.
    """
    gradient_error: float = INFINITE
    """Error of the worst parameter: ``max |g - g0| / max(max |g0|, 1e-3 of the largest over all parameters)``."""
    parameter: str = ""
    """Name of the worst parameter."""
    norm_error: float = INFINITE
    """Relative error of the whole gradient in the Euclidean norm."""
    metric_error: float = INFINITE
    """Relative error of the worst metric that the oracle knows; 0 in half precision, where none is compared."""
    metric: str = ""
    """Name of the worst metric."""
    error: str = ""
    """The error that the package raised on all ranks alike; empty if it raised none."""
    agreed: bool = True
    """Whether all ranks got the same metrics."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the step: numbers of micro-batches and of empty ones, the largest gradient, metrics."""

    @property
    def ok(self) -> bool:
        """Whether there was no error and every figure is within its bound."""
        limits = self.bounds
        return (
            not self.error
            and self.agreed
            and self.loss_error <= limits.loss
            and self.gradient_error <= limits.gradient
            and self.norm_error <= limits.norm
            and self.metric_error <= limits.metric
        )
