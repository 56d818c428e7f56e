"""What came out of one spec on one layout."""

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
    """Relative to the oracle's loss; in half precision to what that would be if no two tokens cancelled."""
    gradient_error: float = INFINITE
    """Of the worst parameter: ``max |g - g0| / max(max |g0|, 1e-3 of the largest over all parameters)``."""
    parameter: str = ""
    """The worst one."""
    norm_error: float = INFINITE
    """Of the whole gradient, relative, in the Euclidean norm."""
    metric_error: float = INFINITE
    """Of the worst metric that the oracle knows, relative; 0 in half precision, where none is compared."""
    metric: str = ""
    """The worst one."""
    error: str = ""
    """What the package raised on all ranks alike, if it did."""
    agreed: bool = True
    """All ranks were told the same metrics."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the data looked like: micro-batches, empty ones, the largest gradient, metrics."""

    @property
    def ok(self) -> bool:
        """Whether nothing is off."""
        limits = self.bounds
        return (
            not self.error
            and self.agreed
            and self.loss_error <= limits.loss
            and self.gradient_error <= limits.gradient
            and self.norm_error <= limits.norm
            and self.metric_error <= limits.metric
        )
