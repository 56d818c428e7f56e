"""Corrections: weights and rejections from the ratio of a log-prob stream to the sampler's.

The ratio is ``r = exp(log of - log mu)``.

``of="old"`` uses frozen log-probs and acts when the step is planned; ``of="policy"`` uses sg(pi) and acts inside the
loss. A rejection shrinks the members of a component; whether the rejected tokens stay counted in its denominators is
the component's ``count_rejected``. Statistics of a unit run over its action tokens as sampled; those of an episode or a
prompt over the rows that are there (no fault ended them), in whatever micro-batch and on whatever rank they lie.

With samples from mu, ``d = -log r`` gives the k-estimators of KL(mu || of): k1 = d, k2 = d^2/2, k3 = r - 1 - log r.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.correction import CorrectionKind, RatioCorrection
from megatron_pgloss.spec.kinds import one_of
from megatron_pgloss.spec.letters import SHORT_UNIT
from megatron_pgloss.spec.levels import Unit
from megatron_pgloss.spec.numbers import Distance, Finite, Flag, Positive

__all__ = ["IcePop", "RatioMask", "Reject", "Staleness", "TruncatedIS", "Veto"]


class TruncatedIS(RatioCorrection):
    """Importance weight ``clip(r, low, high)``, a constant factor of the term (Ionides 2008).

    ``level``: the token's own ratio; the product over its sequence, turn, episode or prompt; or the geometric mean over
    one of them. Products are taken in log space and bounded by ``log_ratio_bound`` before exp.
    """

    kind: Literal["truncated_is"] = "truncated_is"
    level: Literal[
        "token", "sequence", "turn", "episode", "prompt",
        "geometric", "turn_geometric", "episode_geometric", "prompt_geometric",
    ] = "token"  # fmt: skip
    """The ratio that the weight is made of; ``geometric`` is the geometric mean over the sequence."""
    low: Distance = 0.0
    """Weights below it are raised to it; with 0 none is."""
    high: Positive = 2.0
    normalize: Flag | Literal["sequence"] = False
    """Divide by the mean weight of the global batch, over the trained tokens (level token) or over the units that have
    one (other levels). ``sequence`` (level token): by the mean weight of the sequence, over its action tokens as
    sampled (self-normalised importance sampling): the weights of a sequence are 1 on average."""

    @property
    def weighs(self) -> bool:
        """Always true."""
        return True

    @model_validator(mode="after")
    def _of_tokens(self) -> TruncatedIS:
        if self.normalize == "sequence" and self.level != "token":
            what = "TruncatedIS(normalize='sequence') divides the weights of tokens by their mean"
            raise SpecError(what, expected="level='token'", got=f"level={self.level!r}")
        return self

    @property
    def normalizes(self) -> bool:
        """Whether the mean is over the global batch; the mean within a sequence (``normalize="sequence"``) is not."""
        return self.normalize is True

    @property
    def statistic_unit(self) -> str | None:
        """The unit of the ratio, or of the mean that weights of tokens are divided by; None where there is neither."""
        if self.normalize == "sequence":
            return "sequence"
        unit = self.level.removesuffix("_geometric")
        return {"token": None, "geometric": "sequence"}.get(unit, unit)

    @property
    def joined_by(self) -> Literal["sum", "mean"]:
        """How the log-ratios of the unit are put together, or its weights."""
        return "mean" if self.normalize == "sequence" or self.level.endswith("geometric") else "sum"

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return f"{self.level} IS"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        over = ""
        if self.level != "token":
            unit = self.level.removesuffix("_geometric")
            joined = "geomean" if self.level.endswith("geometric") else "prod"
            over = f"{joined}_{SHORT_UNIT['sequence' if unit == 'geometric' else unit]} "
        r = over + self._r
        weight = f"min({r}, {self.high:g})" if not self.low else f"clip({r}, {self.low:g}, {self.high:g})"
        over_mean = {True: ", over its mean in the batch", "sequence": ", over its mean in the sequence"}
        return f"times {weight}{over_mean.get(self.normalize, '')}"


class IcePop(RatioCorrection):
    """Tokens whose ratio lies outside ``[low, high]`` (inclusive, compared in log space) are rejected; inside, the
    term is multiplied by the ratio (IcePop, Ling team 2025). ``weight=False`` rejects alone.
    """

    kind: Literal["icepop"] = "icepop"
    low: Positive = 0.5
    high: Positive = 5.0
    weight: Flag = True

    @property
    def weighs(self) -> bool:
        """The value of ``weight``."""
        return self.weight

    @property
    def rejects(self) -> bool:
        """Always true."""
        return True

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "icepop band"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        times = f"times {self._r}, " if self.weight else ""
        return f"{times}reject the token where {self._r} is outside [{self.low:g}, {self.high:g}]"


class RatioMask(RatioCorrection):
    """Whole units whose ratio lies outside ``[low, high]`` (inclusive, log space) are rejected.

    The unit's ratio is the geometric mean of its tokens' ratios, or their product.
    """

    kind: Literal["ratio_mask"] = "ratio_mask"
    unit: Unit = "sequence"
    mean: Literal["geometric", "product"] = "geometric"
    low: Positive
    high: Positive
    example: ClassVar[Mapping[str, Any]] = {"low": 0.5, "high": 2.0}

    @property
    def statistic_unit(self) -> str:
        """The unit that stands or falls as a whole."""
        return self.unit

    @property
    def joined_by(self) -> Literal["sum", "mean"]:
        """``sum`` of the logarithms for a product of ratios, ``mean`` for their geometric mean."""
        return "mean" if self.mean == "geometric" else "sum"

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return f"{self.unit} {self.mean} mask"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        joined = "geomean" if self.mean == "geometric" else "prod"
        return f"reject the {self.unit} where {joined} of {self._r} is outside [{self.low:g}, {self.high:g}]"


class Reject(RatioCorrection):
    """Units (or tokens) whose mean, largest or summed k-estimate of KL(mu || of) exceeds ``high`` are rejected.

    ``low``, for k1 alone: those below it are rejected too. The ratio inside k3 is bounded by ``log_ratio_bound``.
    """

    kind: Literal["reject"] = "reject"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    statistic: Literal["mean", "max", "sum"] = "mean"
    unit: Literal["token", Unit] = "sequence"
    low: Finite | None = None
    high: Finite
    example: ClassVar[Mapping[str, Any]] = {"high": 0.05}
    symbols: ClassVar[Mapping[str, str]] = {"k1": "k_1", "k2": "k_2", "k3": "k_3"}

    @model_validator(mode="after")
    def _signed(self) -> Reject:
        if self.estimator != "k1" and (self.low is not None or self.high < 0):
            raise SpecError(
                f"Reject: {self.estimator} is never negative", expected="high >= 0 and no low",
                got=f"low={self.low}, high={self.high}", fix="estimator='k1' has a sign",
            )  # fmt: skip
        return self

    @property
    def statistic_unit(self) -> str | None:
        """The unit that stands or falls as a whole; None where that is the token."""
        return None if self.unit == "token" else self.unit

    @property
    def joined_by(self) -> Literal["mean", "sum", "max"]:
        """The value of ``statistic``."""
        return self.statistic

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return f"{self.estimator} {self.statistic} over {self.unit}"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        value = f"{self.statistic} of {self.estimator}" if self.unit != "token" else self.estimator
        limits = f"> {self.high:g}" if self.low is None else f"outside [{self.low:g}, {self.high:g}]"
        return f"reject the {self.unit} where {value} (r = {self._r}) is {limits}"


class Veto(RatioCorrection):
    """One token whose ratio lies below ``low`` (or above ``high``) rejects its whole unit."""

    kind: Literal["veto"] = "veto"
    unit: Unit = "sequence"
    low: Positive = 1e-4
    high: Positive | None = None

    @property
    def statistic_unit(self) -> str:
        """The unit that stands or falls as a whole."""
        return self.unit

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return f"{self.unit} veto"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        above = "" if self.high is None else f" or > {self.high:g}"
        return f"reject the {self.unit} where any {self._r} is < {self.low:g}{above}"


class Staleness(CorrectionKind):
    """Tokens sampled more than ``max_lag`` versions before the current one are rejected.

    Reads ``versions=`` of the batch and ``version=`` of `plan` or `begin`. ``level`` other than token: the oldest
    action token of the unit decides for all of it.
    """

    kind: Literal["staleness"] = "staleness"
    max_lag: Annotated[int, Field(strict=True, ge=0)]
    level: Literal["token", Unit] = "token"
    example: ClassVar[Mapping[str, Any]] = {"max_lag": 4}

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """The version that sampled each token."""
        return ("versions",)

    @property
    def statistic_unit(self) -> str | None:
        """The unit whose oldest token decides; None where each token decides for itself."""
        return None if self.level == "token" else self.level

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "stale"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return f"reject the {self.level} sampled more than {self.max_lag} versions ago"


if TYPE_CHECKING:
    Correction = CorrectionKind
else:
    Correction = one_of(CorrectionKind)
