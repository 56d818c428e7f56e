"""Gates: rules on the current policy, inside the loss. They take tokens out of the numerator alone.

A gate names the components it acts on (``on=``). Whether what it drops stays in the denominators is the component's
``count_rejected``: it does by default; ``False`` needs the statistics pass. pi, old and mu are probabilities of the
sampled token; ``base`` says which of old and mu (``rollout``) a gate compares pi with. Gates are held fixed: nothing is
differentiated through them. A token exactly on a bound passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.functions import Function
from megatron_pgloss.spec.kinds import one_of
from megatron_pgloss.spec.letters import SHORT_UNIT, letter
from megatron_pgloss.spec.levels import Unit
from megatron_pgloss.spec.numbers import Distance, Finite, Positive, Probability, Share, Whole
from megatron_pgloss.spec.rule import Rule

__all__ = ["CovarianceGate", "EntropyGate", "Gate", "KLGate", "RatioGate", "SecondMomentGate", "SequenceGate", "TVGate"]

Base = Literal["old", "rollout"]


class GateKind(Rule):
    """The family of gates."""

    @property
    def home(self) -> Literal["policy gradients"]:
        """The policy gradients."""
        return "policy gradients"

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return self.kind.replace("_", " ")


class TVGate(GateKind):
    """Total-variation trust region on the sampled token (DPPO-TV 2602.04879).

    ``sides="advantage"`` drops a token where ``A > 0 and pi - base > high`` or ``A < 0 and pi - base < -low``: the
    update would carry it further out of the region. ``sides="both"`` drops it beyond either bound, whatever the sign of
    A (prime-rl's IPO). A bound of None is no bound.
    """

    kind: Literal["tv"] = "tv"
    low: Probability | None = None
    high: Probability | None = None
    base: Base = "rollout"
    sides: Literal["advantage", "both"] = "advantage"
    zero: Literal["passes", "low"] = "passes"
    """Whether a token of A = 0 passes untested, or is tested against the lower bound, as in verl and prime-rl. Its term
    is 0 either way; the metric is not."""
    example: ClassVar[Mapping[str, Any]] = {"low": 0.2, "high": 0.2}

    @model_validator(mode="after")
    def _some_bound(self) -> TVGate:
        if self.low is None and self.high is None:
            raise SpecError("TVGate has no bound", expected="low=, high= or both", fix="for example low=0.2, high=0.2")
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        """The base; advantages unless both sides are closed to all."""
        return (self.base, *(("advantages",) if self.sides == "advantage" else ()))

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        b = letter(self.base, base)
        if self.sides == "both":
            low = "-inf" if self.low is None else f"-{self.low:g}"
            high = "inf" if self.high is None else f"{self.high:g}"
            return f"drop the token where pi - {b} is outside [{low}, {high}]"
        negative = "A <= 0" if self.zero == "low" else "A < 0"
        sides = [] if self.high is None else [f"A > 0 and pi - {b} > {self.high:g}"]
        sides += [] if self.low is None else [f"{negative} and pi - {b} < -{self.low:g}"]
        return "drop the token where " + ", or ".join(sides)


class KLGate(GateKind):
    """Binary-KL trust region on the sampled token (DPPO-KL 2602.04879): a token is dropped where ``D > threshold`` and
    ``(A > 0 and pi > b) or (A < 0 and pi < b)``, with ``D = b log(b/pi) + (1-b) log((1-b)/(1-pi))`` and b = base.
    """

    kind: Literal["binary_kl"] = "binary_kl"
    threshold: Positive = 0.05
    base: Base = "rollout"
    symbols: ClassVar[Mapping[str, str]] = {"KL": r"\operatorname{KL}"}

    @property
    def reads(self) -> tuple[str, ...]:
        """The base and the advantages."""
        return (self.base, "advantages")

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        b = letter(self.base, base)
        binary = f"KL of ({b}, 1 - {b}) to (pi, 1 - pi) > {self.threshold:g}"
        return f"drop the token where {binary} and (A > 0 and pi > {b}, or A < 0 and pi < {b})"


class RatioGate(GateKind):
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

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return f"drop the token where pi/{letter(self.base, base)} is outside [{self.low:g}, {self.high:g}]"


class SequenceGate(GateKind):
    """Off-policy sequence masking (DeepSeek-V3.2 2512.02556): tokens with A < 0 are dropped where the mean of
    ``log base - log pi`` over their unit exceeds ``threshold``.
    """

    kind: Literal["opsm"] = "opsm"
    threshold: Distance
    base: Base = "rollout"
    unit: Unit = "sequence"
    """``episode`` and ``prompt`` need the statistics pass: their rows may lie in any micro-batch and on any rank."""
    example: ClassVar[Mapping[str, Any]] = {"threshold": 0.1}

    @property
    def reads(self) -> tuple[str, ...]:
        """The base and the advantages."""
        return (self.base, "advantages")

    @property
    def statistic_unit(self) -> str:
        """The unit of its mean."""
        return self.unit

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        gap = f"mean_{SHORT_UNIT[self.unit]} (log {letter(self.base, base)} - log pi)"
        return f"drop the token where A < 0 and {gap} > {self.threshold:g}"


class EntropyGate(GateKind):
    """Keep the ``share`` of tokens with the highest entropy (2506.01939): those at or above the quantile ``1 - share``
    of the entropies of all member tokens of the step. Needs the statistics pass.
    """

    kind: Literal["entropy_quantile"] = "entropy_quantile"
    share: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.2

    @property
    def reads(self) -> tuple[str, ...]:
        """The entropy."""
        return ("entropy",)

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return f"keep the {self.share:g} of tokens with the largest H(pi) of the step"

    @property
    def needs_statistics_pass(self) -> bool:
        """Always true."""
        return True


class SecondMomentGate(GateKind):
    """M2PO (2510.01161): of the tokens that the loss pulls outwards (``A > 0 and pi > base``, ``A < 0 and pi < base``),
    those of largest ``(log pi - log base)^2`` are dropped first, until its mean over the outward tokens left in the
    step is at most ``threshold``. Other tokens neither count nor can be dropped. Needs the statistics pass.
    """

    kind: Literal["second_moment"] = "second_moment"
    threshold: Positive = 0.04
    base: Base = "old"

    @property
    def reads(self) -> tuple[str, ...]:
        """The base and the advantages."""
        return (self.base, "advantages")

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        largest = f"largest (log pi - log {letter(self.base, base)})^2 first"
        return f"drop outward tokens, {largest}, until its mean over the others is at most {self.threshold:g}"

    @property
    def needs_statistics_pass(self) -> bool:
        """Always true."""
        return True


class CovarianceGate(GateKind):
    """Tokens are selected by their covariance ``(A - mean A)(log pi - mean log pi)`` over the member tokens of the step
    (2505.22617). Needs the statistics pass.

    ``select="band"`` draws ``share`` times the number of members from the tokens with covariance in ``[low, high]``, at
    random by sample id and position (Clip-Cov); ``select="top"`` takes the ``share`` of largest covariance (KL-Cov).
    ``effect="drop"`` drops the selected tokens, ``"keep"`` drops all others (for a KL term on the selected ones alone).
    """

    kind: Literal["covariance"] = "covariance"
    select: Literal["band", "top"] = "band"
    share: Share = 2e-4
    low: Finite = 1.0
    high: Finite = 5.0
    effect: Literal["drop", "keep"] = "drop"
    seed: Whole = 0
    """Seed of the draw; the same seed selects the same tokens on every layout."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The advantages."""
        return ("advantages",)

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """The sample ids that seed its draws, where it draws."""
        return ("sample_ids",) if self.select == "band" else ()

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        of = "c = (A - mean A) (log pi - mean log pi)"
        band = f"{of} in [{self.low:g}, {self.high:g}], drawn with seed {self.seed}"
        share = f"{self.share:g} of the tokens, {f'largest {of}' if self.select == 'top' else band}"
        return f"drop {share}" if self.effect == "drop" else f"keep alone {share}"

    @property
    def needs_statistics_pass(self) -> bool:
        """Always true."""
        return True


class Gate(Function, GateKind):
    """A gate of the user's own, ``fn(x) -> [T]``: a bool, true where the token stays; or a float, a constant factor of
    the term (a soft gate). No gradient passes through either.

    Args (positional allowed):
        fn: the function.
    """

    kind: Literal["custom"] = "custom"
    example: ClassVar[Mapping[str, Any]] = {"fn": math.exp}

    @property
    def reads(self) -> tuple[str, ...]:
        """The streams that ``needs`` names."""
        return self.needed

    @property
    def reason(self) -> str:
        """The function's name."""
        return self.to_import_path().rpartition(":")[2]

    def formula(self, base: str = "old") -> str:
        """The function's name."""
        return f"times sg({self.to_import_path()})"


if TYPE_CHECKING:
    AnyGate = GateKind
else:
    AnyGate = one_of(GateKind)
