"""The base classes of corrections: what all of them share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.rule import Rule


class CorrectionKind(Rule):
    """The family of corrections."""

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
        return not self.weighs

    @property
    def normalizes(self) -> bool:
        """Whether its weight is divided by its mean over the global batch."""
        return False

    @property
    def joined_by(self) -> Literal["mean", "sum", "max"]:
        """How the numbers of the tokens of its `statistic_unit` are put together."""
        return "sum"

    @property
    def home(self) -> Literal["policy gradients", "actions"]:
        """The policy gradients where it weighs, all components over actions where it only rejects."""
        return "policy gradients" if self.weighs else "actions"

    @property
    def ratio_of(self) -> Literal["old", "policy"] | None:
        """Whose ratio to the sampler's it reads; None: no log-prob."""
        return None


class RatioCorrection(CorrectionKind):
    """A correction by the ratio of old or of the policy to the sampler."""

    of: Literal["old", "policy"] = "old"

    @property
    def ratio_of(self) -> Literal["old", "policy"]:
        """The value of ``of``."""
        return self.of

    @property
    def reads(self) -> tuple[str, ...]:
        """The sampler's log-probs, and old where it is not the policy's own ratio."""
        return ("old", "rollout") if self.of == "old" else ("rollout",)

    @property
    def _r(self) -> str:
        return "old/mu" if self.of == "old" else "sg(pi)/mu"
