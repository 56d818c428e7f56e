"""Surrogates that hold a weight made of the ratio fixed: the gradient is that of log pi under a constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.letters import shown
from megatron_pgloss.spec.numbers import Bound, Distance
from megatron_pgloss.spec.surrogates.surrogate import SurrogateKind

__all__ = ["CISPO", "TOPR", "VESPO"]


class CISPO(SurrogateKind):
    """Clipped importance weight as a constant: ``l = -sg(clip(r, lower, upper)) A log pi`` (MiniMax-M1 2506.13585 eq. 4
    and 5). No token loses its gradient. AIPO (2505.24034) is ``low=None`` with an absolute ``high``.

    ``bound="relative"``: lower = 1 - low, upper = 1 + high (the paper; verl, slime, NeMo-RL, ROLL).
    ``bound="absolute"``: lower = low, upper = high (TRL, ms-swift, Liger).
    """

    kind: Literal["cispo"] = "cispo"
    low: Bound | None = None
    """None: no lower bound."""
    high: Bound
    bound: Literal["relative", "absolute"] = "relative"
    bounds: ClassVar[bool] = True
    example: ClassVar[Mapping[str, Any]] = {"high": 4.0}

    @model_validator(mode="after")
    def _ordered(self) -> CISPO:
        numbers = isinstance(self.low, float) and isinstance(self.high, float)
        if numbers and self.bound == "absolute" and self.low > self.high:  # type: ignore[operator]
            raise SpecError("CISPO: low lies above high", got=f"{self.low}, {self.high}")
        return self

    def _side(self, bound: float | str, sign: int) -> str:
        if self.bound == "absolute":
            return shown(bound)
        return f"1 {'+' if sign > 0 else '-'} {bound}" if isinstance(bound, str) else f"{1 + sign * bound:g}"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        high = self._side(self.high, 1)
        weight = f"min(r, {high})" if self.low is None else f"clip(r, {self._side(self.low, -1)}, {high})"
        return f"-sg({weight}) A log pi"


class TOPR(SurrogateKind):
    """Tapered off-policy REINFORCE: ``l = -sg(clip(r, a, b)) A log pi`` with bounds of its own for each sign of A
    (2503.14286, its update rule: 1 where the reward is not negative, else pi/mu of the whole answer held to [0, 1]). By
    default positives weigh 1, negatives ``min(r, 1)``.
    """

    kind: Literal["topr"] = "topr"
    positive: tuple[Distance, Distance] = (1.0, 1.0)
    """(a, b) where A > 0."""
    negative: tuple[Distance, Distance] = (0.0, 1.0)
    """(a, b) where A <= 0."""
    bounds: ClassVar[bool] = True

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "-sg(w) A log pi"

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """What w is."""
        (a, b), (c, e) = self.positive, self.negative
        return (f"w = clip(r, {a:g}, {b:g}) where A > 0, clip(r, {c:g}, {e:g}) where A <= 0",)


class VESPO(SurrogateKind):
    """Gamma-shaped weight as a constant: ``l = -sg(phi(r)) A log pi``, ``phi(w) = w^k exp(lam (1 - w))`` (2602.10693),
    1 at w = 1. It is meant for the ratio of a whole sequence (``ratio="sequence_sum"``).
    """

    kind: Literal["vespo"] = "vespo"
    k_positive: Distance = 2.0
    lam_positive: Distance = 3.0
    """Both where A >= 0."""
    k_negative: Distance = 3.0
    lam_negative: Distance = 2.0
    symbols: ClassVar[Mapping[str, str]] = {"lam": r"\lambda"}

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "-sg(r^k exp(lam (1 - r))) A log pi"

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """What k and lam are."""
        return (
            f"k = {self.k_positive:g}, lam = {self.lam_positive:g} where A >= 0",
            f"k = {self.k_negative:g}, lam = {self.lam_negative:g} where A < 0",
        )
