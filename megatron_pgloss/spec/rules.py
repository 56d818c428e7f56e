"""Rules on data that act before the loss: masks and weights by role. For corrections see
`megatron_pgloss.spec.corrections`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part
from megatron_pgloss.spec.components import Component
from megatron_pgloss.spec.corrections import Scope


class DropTruncated(Part):
    """Take the tokens of truncated sequences out of components (DAPO 2503.14476, overlong filtering)."""

    kind: Literal["drop_truncated"] = "drop_truncated"
    on: Scope = None
    """Names of the components it acts on; None: all that run over action tokens."""

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "truncated"

    @property
    def formula(self) -> str:
        """What it does, in one line."""
        return "drop tokens of truncated sequences"


class DropZeroAdvantage(Part):
    """Take tokens whose advantage is exactly 0 out of the numerator and the counts."""

    kind: Literal["drop_zero_advantage"] = "drop_zero_advantage"
    on: tuple[str, ...] = ("rl",)
    """Names of the components it acts on; by default ``rl`` alone, so that a failed rollout still feeds ``ce``."""

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "zero advantage"

    @property
    def formula(self) -> str:
        """What it does, in one line."""
        return "drop tokens where A = 0"


class KeepPositiveAdvantage(Part):
    """Take tokens whose advantage is not positive out of the numerator and the counts (the likelihood of successful
    answers, VAPO 2504.05118).
    """

    kind: Literal["keep_positive_advantage"] = "keep_positive_advantage"
    on: tuple[str, ...]
    """Names of the components it acts on."""

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "advantage not positive"


class UserMask(Part):
    """Keep only tokens where the user's mask of this name is true."""

    kind: Literal["user_mask"] = "user_mask"
    name: str
    """Key of ``TokenBatch``'s ``masks=``."""
    on: Scope = None

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return f"mask {self.name}"

    @property
    def formula(self) -> str:
        """What it does, in one line."""
        return f"keep tokens where mask {self.name} is true"


class RoleTable(Part):
    """Weight per role for components on environment-authored tokens.

    ``ce=None``: every observation has weight 1. A table names the roles that are targets, with their weights;
    naming one replaces the default whole.
    """

    ce: Mapping[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None

    @field_validator("ce")
    @classmethod
    def _closed(cls, table: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if table is not None and not table:
            raise SpecError("roles.ce is an empty table", fix="leave it out, or name at least one role")
        return None if table is None else MappingProxyType(dict(table))

    @field_serializer("ce")
    def _plain(self, table: Mapping[str, float] | None) -> dict[str, float] | None:
        return None if table is None else dict(table)

    def __hash__(self) -> int:
        return hash(None if self.ce is None else frozenset(self.ce.items()))


Mask = Annotated[DropTruncated | DropZeroAdvantage | KeepPositiveAdvantage | UserMask, Field(discriminator="kind")]


def acts_on(rule: Any, component: Component) -> bool:
    """Whether a mask or correction acts on ``component``: by its ``on``, or by default.

    Defaults (``on=None``): a user mask acts on all components; truncation and rejection on those over action tokens; a
    weight on ``rl``.
    """
    if rule.on is not None:
        return component.name in rule.on
    if getattr(rule, "weighs", False):
        return component.name == "rl"
    return isinstance(rule, UserMask) or component.over == "action"
