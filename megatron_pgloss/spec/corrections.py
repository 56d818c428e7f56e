"""Corrections: weights and rejections from the ratio of a log-prob stream to the sampler's.

The ratio is ``r = exp(log of - log mu)``.

``of="old"`` uses frozen log-probs and acts when the step is planned; ``of="policy"`` uses sg(pi) and acts inside the
loss. A rejection shrinks the members of a component; whether the rejected tokens stay in its denominators is the
component's ``rejected``. Statistics of a unit run over its action tokens as sampled.

With samples from mu, ``d = -log r`` gives the k-estimators of KL(mu || of): k1 = d, k2 = d^2/2, k3 = r - 1 - log r.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part

Scope = tuple[str, ...] | None
Ratio = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Of = Literal["old", "policy"]
Unit = Literal["sequence", "turn"]


class _Rule(Part):
    @model_validator(mode="after")
    def _ordered(self) -> Any:
        low, high = getattr(self, "low", None), getattr(self, "high", None)
        if low is not None and high is not None and low > high:
            raise SpecError(f"{type(self).__name__}: low lies above high", expected="low <= high", got=f"{low}, {high}")
        return self

    @property
    def weighs(self) -> bool:
        """Whether it multiplies the term by a weight."""
        return False

    @property
    def rejects(self) -> bool:
        """Whether it takes tokens out of the members."""
        return False

    @property
    def reason(self) -> str:
        """What a rejection is called in reports."""
        raise NotImplementedError

    @property
    def formula(self) -> str:
        """What it does, in one line with its numbers."""
        raise NotImplementedError

    @property
    def _r(self) -> str:
        return "old/mu" if getattr(self, "of", "old") == "old" else "sg(pi)/mu"


class TruncatedIS(_Rule):
    """Importance weight ``clip(r, low, high)``, a constant factor of the term (Ionides 2008).

    ``level``: the token's own ratio; the product over its sequence or turn; or the geometric mean over them. Products
    are taken in log space and bounded by ``log_ratio_bound`` before exp.
    """

    kind: Literal["truncated_is"] = "truncated_is"
    of: Of = "old"
    level: Literal["token", "sequence", "turn", "geometric", "turn_geometric"] = "token"
    low: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weights below are raised to it; 0 is off."""
    high: Ratio = 2.0
    normalize: bool = False
    """Divide by the mean weight of the global batch, over the trained tokens (level token) or over the units that have
    one (other levels)."""
    on: tuple[str, ...] = ("rl",)

    @property
    def weighs(self) -> bool:
        """Always."""
        return True

    @property
    def reason(self) -> str:
        """Its name."""
        return f"{self.level} IS"

    @property
    def formula(self) -> str:
        """In one line."""
        over = {"token": "{}", "sequence": "prod_seq {}", "turn": "prod_turn {}", "geometric": "geomean_seq {}"}
        r = over.get(self.level, "geomean_turn {}").format(self._r)
        weight = f"min({r}, {self.high:g})" if not self.low else f"clip({r}, {self.low:g}, {self.high:g})"
        return f"times {weight}" + (", over its mean in the batch" if self.normalize else "")


class IcePop(_Rule):
    """Tokens whose ratio lies outside ``[low, high]`` (inclusive, compared in log space) are rejected; inside, the
    term is multiplied by the ratio (IcePop, Ling team 2025). ``weight=False`` rejects alone.
    """

    kind: Literal["icepop"] = "icepop"
    of: Of = "old"
    low: Ratio = 0.5
    high: Ratio = 5.0
    weight: bool = True
    on: Scope = None
    """None: ``rl`` alone where it weighs, as other weights; all components over action tokens where it only rejects."""

    @property
    def weighs(self) -> bool:
        """As ``weight`` says."""
        return self.weight

    @property
    def rejects(self) -> bool:
        """Always."""
        return True

    @property
    def reason(self) -> str:
        """Its name."""
        return "icepop band"

    @property
    def formula(self) -> str:
        """In one line."""
        times = f"times {self._r}, " if self.weight else ""
        return f"{times}reject the token where {self._r} is outside [{self.low:g}, {self.high:g}]"


class RatioMask(_Rule):
    """Whole units whose ratio lies outside ``[low, high]`` (inclusive, log space) are rejected.

    The unit's ratio is the geometric mean of its tokens' ratios, or their product.
    """

    kind: Literal["ratio_mask"] = "ratio_mask"
    of: Of = "old"
    unit: Unit = "sequence"
    mean: Literal["geometric", "product"] = "geometric"
    low: Ratio
    high: Ratio
    on: Scope = None

    @property
    def rejects(self) -> bool:
        """Always."""
        return True

    @property
    def reason(self) -> str:
        """Its name."""
        return f"{self.unit} {self.mean} mask"

    @property
    def formula(self) -> str:
        """In one line."""
        joined = "geomean" if self.mean == "geometric" else "prod"
        return f"reject the {self.unit} where {joined} of {self._r} is outside [{self.low:g}, {self.high:g}]"


class Reject(_Rule):
    """Units (or tokens) whose mean, largest or summed k-estimate of KL(mu || of) exceeds ``high`` are rejected.

    ``low``, for k1 alone: those below it are rejected too. The ratio inside k3 is bounded by ``log_ratio_bound``.
    """

    kind: Literal["reject"] = "reject"
    of: Of = "old"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    statistic: Literal["mean", "max", "sum"] = "mean"
    unit: Literal["token", "sequence", "turn"] = "sequence"
    low: Annotated[float, Field(allow_inf_nan=False)] | None = None
    high: Annotated[float, Field(allow_inf_nan=False)]
    on: Scope = None

    @model_validator(mode="after")
    def _signed(self) -> Reject:
        if self.estimator != "k1" and (self.low is not None or self.high < 0):
            raise SpecError(
                f"Reject: {self.estimator} is never negative", expected="high >= 0 and no low",
                got=f"low={self.low}, high={self.high}", fix="estimator='k1' has a sign",
            )  # fmt: skip
        return self

    @property
    def rejects(self) -> bool:
        """Always."""
        return True

    @property
    def reason(self) -> str:
        """Its name."""
        return f"{self.estimator} {self.statistic} over {self.unit}"

    @property
    def formula(self) -> str:
        """In one line."""
        value = f"{self.statistic} of {self.estimator}" if self.unit != "token" else self.estimator
        limits = f"> {self.high:g}" if self.low is None else f"outside [{self.low:g}, {self.high:g}]"
        return f"reject the {self.unit} where {value} (r = {self._r}) is {limits}"


class Veto(_Rule):
    """One token whose ratio lies below ``low`` (or above ``high``) rejects its whole unit."""

    kind: Literal["veto"] = "veto"
    of: Of = "old"
    unit: Unit = "sequence"
    low: Ratio = 1e-4
    high: Ratio | None = None
    on: Scope = None

    @property
    def rejects(self) -> bool:
        """Always."""
        return True

    @property
    def reason(self) -> str:
        """Its name."""
        return f"{self.unit} veto"

    @property
    def formula(self) -> str:
        """In one line."""
        above = "" if self.high is None else f" or > {self.high:g}"
        return f"reject the {self.unit} where any {self._r} is < {self.low:g}{above}"


class Staleness(_Rule):
    """Tokens sampled more than ``max_lag`` versions before the current one are rejected.

    Reads ``versions=`` of the batch and ``version=`` of `plan` or `begin`. ``level`` other than token: the oldest
    action token of the unit decides for all of it.
    """

    kind: Literal["staleness"] = "staleness"
    max_lag: Annotated[int, Field(ge=0)]
    level: Literal["token", "sequence", "turn"] = "token"
    on: Scope = None

    @property
    def rejects(self) -> bool:
        """Always."""
        return True

    @property
    def reason(self) -> str:
        """Its name."""
        return "stale"

    @property
    def formula(self) -> str:
        """In one line."""
        return f"reject the {self.level} sampled more than {self.max_lag} versions ago"


Correction = Annotated[TruncatedIS | IcePop | RatioMask | Reject | Veto | Staleness, Field(discriminator="kind")]
CORRECTION_KINDS = ["truncated_is", "icepop", "ratio_mask", "reject", "veto", "staleness"]
