"""Weights by role: how much each kind of environment-authored token counts as a target."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import field_serializer, field_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part
from megatron_pgloss.spec.numbers import Finite


class RoleTable(Part):
    """Weight per role for components on environment-authored tokens.

    ``ce=None``: every observation is a target of weight 1. A table replaces that default as a whole: it names the roles
    that are targets, with their weights, and other roles are no targets.
    """

    ce: Mapping[str, Finite] | None = None

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
