"""What the function of a surrogate or of another component returns. `N` positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clipped:
    """Which bound decided each token, bool [N]."""

    low_N: Tensor
    high_N: Tensor
    dual_N: Tensor

    @property
    def any_N(self) -> Tensor:
        """bool [N]: where one of the bounds decided."""
        return self.low_N | self.high_N | self.dual_N


@dataclass(frozen=True, slots=True)
class TokenTerm:
    """A term before gates and weights, and what decided it."""

    term_N: Tensor
    """float [N], differentiable."""
    clipped: Clipped | None = None
    """The bounds of a surrogate that has some."""
    held_N: Tensor | None = None
    """bool [N]: where ``log_ratio_bound`` took the gradient of the term, which without the bound would have one; None:
    nowhere."""
    decided_N: Tensor | None = None
    """bool [N]: where the clip of a value loss decided."""
