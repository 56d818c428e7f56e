"""Surrogates whose gradient passes through the ratio."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.functions import StreamName
from megatron_pgloss.spec.letters import interval
from megatron_pgloss.spec.numbers import AboveOne, BelowOne, Bound, Distance, Positive
from megatron_pgloss.spec.surrogates.surrogate import SurrogateKind

__all__ = ["DRO", "SAPO", "Clip", "Unclipped"]


def clipped(low: Any, high: Any, dual: float | None, delta: float | None) -> str:
    """The clipped surrogate as text."""
    first = "r" if delta is None else f"min(r, {delta:g})"
    inner = f"min({first} A, clip(r, {interval(low, high)}) A)"
    return f"-{inner}" if dual is None else f"-({inner}, at least {dual:g} A where A < 0)"


class Unclipped(SurrogateKind):
    """The ratio as it is: ``l = -r A`` (PPO 1707.06347 eq. 6); gates make it a trust region (DPPO, IPO)."""

    kind: Literal["unclipped"] = "unclipped"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "-r A"


class Clip(SurrogateKind):
    """Clipped surrogate ``l = -min(r A, clip(r, 1-low, 1+high) A)`` (PPO 1707.06347 eq. 7; two bounds: DAPO 2503.14476
    eq. 10).

    With ``dual=c`` and A < 0 the term is ``-max(min(...), c A)`` (1912.09729 eq. 5). With ``delta`` it is ``-min(min(r,
    delta) A, clip(r, ...) A)`` (INTELLECT-2 2505.07291), which differs for A < 0 alone, as ``delta`` must be above 1 +
    high.
    """

    kind: Literal["clip"] = "clip"
    low: BelowOne | StreamName = 0.2
    """Distance of the lower ratio bound from 1."""
    high: Bound = 0.2
    """Distance of the upper ratio bound from 1."""
    dual: AboveOne | None = None
    """Upper ratio bound for A < 0; off unless asked for."""
    delta: AboveOne | None = None
    """Cap of the ratio before the minimum; off unless asked for."""
    bounds: ClassVar[bool] = True

    @model_validator(mode="after")
    def _one_cap(self) -> Clip:
        if self.dual is not None and self.delta is not None:
            raise SpecError("Clip: dual and delta are two names of one cap", fix="give one of them")
        if self.delta is not None and isinstance(self.high, float) and self.delta <= 1 + self.high:
            raise SpecError("Clip: delta lies inside the clip", expected=f"> {1 + self.high:g}", got=self.delta)
        return self

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return clipped(self.low, self.high, self.dual, self.delta)


class SAPO(SurrogateKind):
    """Soft gate in place of a clip: ``l = -(4/tau) sigmoid(tau (r - 1)) A`` (2511.20347): value 2/tau at r = 1,
    slope 1 there, fading on both sides. tau is ``tau_positive`` where A > 0, else ``tau_negative``.
    """

    kind: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "-(4/tau) sigmoid(tau (r - 1)) A"

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """What tau is."""
        return (f"tau = {self.tau_positive:g} where A > 0, {self.tau_negative:g} where A <= 0",)


class DRO(SurrogateKind):
    """Quadratic penalty on the log-ratio: ``l = -A d + beta/2 d^2`` (DRO 2405.19107, expanded; token level).

    Kimi k1.5 (2501.12599) is the same over a whole sequence, ``Ratio(statistic="sum")`` under a sequence mean.
    The gradient of d is that of log pi: ``-A log pi`` in place of ``-A d`` is another value and the same gradient.
    """

    kind: Literal["dro"] = "dro"
    beta: Distance = 0.1
    letters: ClassVar[tuple[str, ...]] = ("d",)

    @property
    def moves_at_zero_advantage(self) -> bool:
        """The penalty pulls whatever the advantage is."""
        return True

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return f"-A d + {self.beta / 2:g} d^2"
