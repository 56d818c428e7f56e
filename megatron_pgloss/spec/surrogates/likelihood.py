"""Surrogates on log pi itself, and those whose advantage is a reference's or none."""

from __future__ import annotations

from typing import ClassVar, Literal

from megatron_pgloss.spec.letters import letter
from megatron_pgloss.spec.references import Reference
from megatron_pgloss.spec.surrogates.surrogate import SurrogateKind

__all__ = ["NLL", "Distill", "Reinforce"]


class Reinforce(SurrogateKind):
    """Plain policy gradient: ``l = -A log pi`` (Williams 1992, eq. 4)."""

    kind: Literal["reinforce"] = "reinforce"
    letters: ClassVar[tuple[str, ...]] = ()

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "-A log pi"


class Distill(SurrogateKind):
    """On-policy distillation by policy gradient, ``l = -sg(log ref - log pi) r``: the advantage of a token is the
    log-prob of the reference (the teacher) minus that of the policy. Reads no advantages. ``to`` names the teacher's
    stream of log-probs if that is not ``ref``.

    prime-rl's ``ref_kl`` is this with ``old="rollout"``, a gate that drops tokens with pi - mu < -0.2, and a k2 drift
    term (`megatron_pgloss.presets.distill`).
    """

    kind: Literal["distill"] = "distill"
    to: Reference = "ref"
    """The teacher: ``ref``, or the stream of another reference by its name."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The ratio and the teacher."""
        return ("ratio", self.to)

    @property
    def references(self) -> tuple[str, ...]:
        """The teacher's stream."""
        return (self.to,)

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return f"-sg(log {letter(self.to, base)} - log pi) r"


class NLL(SurrogateKind):
    """Negative log-likelihood of the policy's own tokens: ``l = -log pi`` (VAPO 2504.05118 on successful ones, by
    `megatron_pgloss.KeepPositiveAdvantage`). Reads no advantages.
    """

    kind: Literal["nll"] = "nll"
    letters: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "-log pi"
