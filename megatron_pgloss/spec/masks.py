"""Masks: rules that take tokens out of the members of a component and out of its counts before the loss.

Which tokens each kind takes is written in `megatron_pgloss.rules.masks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_pgloss.spec.kinds import one_of
from megatron_pgloss.spec.rule import Rule

__all__ = ["DropTruncated", "DropZeroAdvantage", "KeepPositiveAdvantage", "UserMask"]


class MaskKind(Rule):
    """The family of masks."""

    @property
    def reads_mask(self) -> str | None:
        """The mask of the batch that it reads: a key of ``TokenBatch``'s ``masks=``."""
        return None


class DropTruncated(MaskKind):
    """Take the tokens of truncated sequences out of components (DAPO 2503.14476, overlong filtering)."""

    kind: Literal["drop_truncated"] = "drop_truncated"

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """How each row ended."""
        return ("terminations",)

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "truncated"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "drop tokens of truncated sequences"


class DropZeroAdvantage(MaskKind):
    """Take tokens whose advantage is exactly 0 out of the numerator and the counts."""

    kind: Literal["drop_zero_advantage"] = "drop_zero_advantage"

    @property
    def home(self) -> Literal["policy gradients"]:
        """The policy gradients alone, so that a failed rollout still feeds ``ce``."""
        return "policy gradients"

    @property
    def reads(self) -> tuple[str, ...]:
        """The advantages."""
        return ("advantages",)

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "zero advantage"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "drop tokens where A = 0"


class KeepPositiveAdvantage(MaskKind):
    """Take tokens whose advantage is not positive out of the numerator and the counts (the likelihood of successful
    answers, VAPO 2504.05118).
    """

    kind: Literal["keep_positive_advantage"] = "keep_positive_advantage"
    on: tuple[str, ...]
    """Names of the components it acts on."""
    example: ClassVar[Mapping[str, Any]] = {"on": ("rl",)}

    @property
    def reads(self) -> tuple[str, ...]:
        """The advantages."""
        return ("advantages",)

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "advantage not positive"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "keep tokens where A > 0"


class UserMask(MaskKind):
    """Keep only tokens where the user's mask of this name is true."""

    kind: Literal["user_mask"] = "user_mask"
    name: str
    """Key of ``TokenBatch``'s ``masks=``."""
    example: ClassVar[Mapping[str, Any]] = {"name": "mine"}

    @property
    def home(self) -> Literal["all"]:
        """All components."""
        return "all"

    @property
    def reads_mask(self) -> str:
        """The name of the user's mask."""
        return self.name

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return f"mask {self.name}"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return f"keep tokens where mask {self.name} is true"


if TYPE_CHECKING:
    Mask = MaskKind
else:
    Mask = one_of(MaskKind)
