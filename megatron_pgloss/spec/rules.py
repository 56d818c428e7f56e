"""Rules that act before the loss: masks on data, corrections from frozen log-probs, weights by role."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, field_serializer, field_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part

Scope = tuple[str, ...] | None


class DropTruncated(Part):
    """Take the tokens of truncated sequences out of components (DAPO 2503.14476, overlong filtering)."""

    kind: Literal["drop_truncated"] = "drop_truncated"
    on: Scope = None
    """Names of the components it acts on; None: all that run over action tokens."""

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "truncated"


class DropZeroAdvantage(Part):
    """Take tokens whose advantage is exactly 0 out of the numerator and the counts."""

    kind: Literal["drop_zero_advantage"] = "drop_zero_advantage"
    on: tuple[str, ...] = ("rl",)
    """Names of the components it acts on; by default ``rl`` alone, so that a failed rollout still feeds ``ce``."""

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "zero advantage"


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


class TruncatedIS(Part):
    """Truncated importance weight ``min(old/mu, high)``, a constant factor of the term (Ionides 2008).

    ``mu`` is the rollout stream: the sampler's own log-probs.
    """

    kind: Literal["truncated_is"] = "truncated_is"
    of: Literal["old"] = "old"
    level: Literal["token"] = "token"
    high: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    on: tuple[str, ...] = ("rl",)


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


Mask = Annotated[DropTruncated | DropZeroAdvantage | UserMask, Field(discriminator="kind")]
Correction = TruncatedIS
