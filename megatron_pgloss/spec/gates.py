"""Gates: rules on the current policy, inside the loss. They take tokens out of the numerator alone.

A gate names the components it acts on (``on=``). Whether what it drops stays in the denominators is the component's
``rejected``: ``original`` by default; ``kept`` needs the statistics pass. pi, old and mu are probabilities of the
sampled token; ``base`` says which of old and mu (``rollout``) a gate compares pi with. Gates are held fixed: nothing is
differentiated through them. A token exactly on a bound is kept.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part
from megatron_pgloss.spec.functions import Function

Probability = Annotated[float, Field(ge=0, le=1)]
Distance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Base = Literal["old", "rollout"]


class _Gate(Part):
    on: tuple[str, ...] = ("rl",)
    """Names of the components it acts on."""

    @property
    def reads(self) -> tuple[str, ...]:
        """``old`` (the base of the ratio), ``rollout``, ``advantages``, ``entropy``."""
        return ()

    @property
    def needs_statistics(self) -> bool:
        """Whether it is decided over the whole step, by a statistics pass."""
        return False

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return str(getattr(self, "kind", "gate")).replace("_", " ")


class TVGate(_Gate):
    """Total-variation trust region on the sampled token (DPPO-TV 2602.04879).

    ``sides="advantage"``: dropped where ``A > 0 and pi - base > high`` or ``A < 0 and pi - base < -low``: what would
    leave the region further. ``sides="both"``: whatever the sign of A (prime-rl's IPO); a side of None is open.
    """

    kind: Literal["tv"] = "tv"
    low: Probability | None = None
    high: Probability | None = None
    base: Base = "rollout"
    sides: Literal["advantage", "both"] = "advantage"
    zero: Literal["kept", "low"] = "kept"
    """What A = 0 is tested against: nothing, or the lower bound as in verl and prime-rl. Its term is 0 either way; the
    metric is not."""

    @model_validator(mode="after")
    def _some_bound(self) -> TVGate:
        if self.low is None and self.high is None:
            raise SpecError("TVGate has no bound", expected="low=, high= or both", fix="for example low=0.2, high=0.2")
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        """The base; advantages unless both sides are closed to all."""
        return (self.base, *(("advantages",) if self.sides == "advantage" else ()))


class KLGate(_Gate):
    """Binary-KL trust region on the sampled token (DPPO-KL 2602.04879): with ``D = b log(b/pi) + (1-b) log((1-b)/(1-
    pi))``, b = base, dropped where ``D > threshold`` and ``(A > 0 and pi > b) or (A < 0 and pi < b)``.
    """

    kind: Literal["binary_kl"] = "binary_kl"
    threshold: Positive = 0.05
    base: Base = "rollout"

    @property
    def reads(self) -> tuple[str, ...]:
        """The base and the advantages."""
        return (self.base, "advantages")


class RatioGate(_Gate):
    """Tokens whose ratio pi/base lies outside ``[low, high]`` are dropped; compared in log space (IcePop on the current
    policy, as prime-rl has it).
    """

    kind: Literal["ratio_band"] = "ratio_band"
    low: Positive = 0.2
    high: Positive = 5.0
    base: Base = "rollout"

    @model_validator(mode="after")
    def _ordered(self) -> RatioGate:
        if self.low > self.high:
            raise SpecError("RatioGate: low lies above high", got=f"{self.low}, {self.high}")
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        """The base."""
        return (self.base,)


class SequenceGate(_Gate):
    """Off-policy sequence masking (DeepSeek-V3.2 2512.02556): tokens with A < 0 are dropped where the mean of
    ``log base - log pi`` over their unit exceeds ``threshold``.
    """

    kind: Literal["opsm"] = "opsm"
    threshold: Distance
    base: Base = "rollout"
    unit: Literal["sequence", "turn"] = "sequence"

    @property
    def reads(self) -> tuple[str, ...]:
        """The base and the advantages."""
        return (self.base, "advantages")


class EntropyGate(_Gate):
    """Keep the ``share`` of tokens with the highest entropy (2506.01939): those at or above the quantile ``1 - share``
    of the entropies of all member tokens of the step. Needs the statistics pass.
    """

    kind: Literal["entropy_quantile"] = "entropy_quantile"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2

    @property
    def reads(self) -> tuple[str, ...]:
        """The entropy."""
        return ("entropy",)

    @property
    def needs_statistics(self) -> bool:
        """Always."""
        return True


class SecondMomentGate(_Gate):
    """M2PO (2510.01161): tokens are dropped, largest ``(log pi - log base)^2`` first, until the mean of it over the
    rest of the step is at most ``threshold``; only those that the loss would pull outwards (``A > 0 and pi > base``,
    ``A < 0 and pi < base``) count and can be dropped. Needs the statistics pass.
    """

    kind: Literal["second_moment"] = "second_moment"
    threshold: Positive = 0.04
    base: Base = "old"

    @property
    def reads(self) -> tuple[str, ...]:
        """The base and the advantages."""
        return (self.base, "advantages")

    @property
    def needs_statistics(self) -> bool:
        """Always."""
        return True


class CovarianceGate(_Gate):
    """Tokens by their covariance ``(A - mean A)(log pi - mean log pi)`` over the member tokens of the step
    (2505.22617). Needs the statistics pass.

    ``select="band"``: of the tokens with covariance in ``[low, high]``, a number of ``share`` times all members, drawn
    at random by sample id and position (Clip-Cov). ``select="top"``: the ``share`` of largest covariance (KL-Cov).
    ``effect="drop"``: the selected ones are dropped; ``"keep"``: all others are (a KL term on the selected ones alone).
    """

    kind: Literal["covariance"] = "covariance"
    select: Literal["band", "top"] = "band"
    share: Annotated[float, Field(gt=0, le=1)] = 2e-4
    low: float = 1.0
    high: float = 5.0
    effect: Literal["drop", "keep"] = "drop"
    seed: int = 0
    """Of the draw; the same seed selects the same tokens on every layout."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The advantages."""
        return ("advantages",)

    @property
    def needs_statistics(self) -> bool:
        """Always."""
        return True


class Gate(Function, _Gate):
    """A gate of the user's own: ``fn(x) -> [T]``: bool, true keeps; or float, a constant factor of the term (a soft
    gate). Held fixed either way.

    Args (positional allowed):
        fn: the function, or ``"pkg.mod:name"``.
    """

    kind: Literal["custom"] = "custom"

    def __init__(self, fn: Any = None, /, **data: Any) -> None:
        super().__init__(**({} if fn is None else {"fn": fn}), **data)

    @property
    def reads(self) -> tuple[str, ...]:
        """What it says that it needs."""
        return tuple("advantages" if name == "advantage" else name for name in self.needs)

    @property
    def reason(self) -> str:
        """The function's name."""
        return self.to_import_path().rpartition(":")[2]


AnyGate = Annotated[
    TVGate | KLGate | RatioGate | SequenceGate | EntropyGate | SecondMomentGate | CovarianceGate | Gate,
    Field(discriminator="kind"),
]
GATE_KINDS = [
    "tv", "binary_kl", "ratio_band", "opsm", "entropy_quantile", "second_moment", "covariance", "custom",
]  # fmt: skip
