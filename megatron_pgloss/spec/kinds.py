"""Kinds: parts of a spec that come in several forms, told apart by their field ``kind``.

The class of a kind holds everything that is known about it. A family (`megatron_pgloss.spec.families`) is a class
derived from `Kind`, and its kinds are the classes derived from the family. The types of a spec's fields, TOML,
suggestions, equations, the tables of the docs and the tests are all made from these classes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from megatron_pgloss.spec.base import Part
from megatron_pgloss.spec.levels import KEYED

COMPUTED = ("entropy", "kl", "chosen", "value")
"""Names in `reads` that are outputs of the model, not streams of the batch."""


class Kind(Part):
    """The interface of a kind, whatever its family. A default is what holds for most kinds; others override it."""

    kind: str
    """Its name in TOML, metrics and errors."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Arguments beside the defaults with which docs and tests build one."""
    symbols: ClassVar[Mapping[str, str]] = {}
    """LaTeX of the words in its formula that `megatron_pgloss.spec.latex` does not know."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Streams that it reads: ``old`` (the base of the ratio), ``rollout``, ``ref``, ``advantages``, ``values``,
        ``returns``, one of the user's own; or an output of the model (`COMPUTED`).
        """
        return ()

    @property
    def references(self) -> tuple[str, ...]:
        """The streams among `reads` that hold another policy's log-probs, under any name."""
        return ()

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """Fields of the batch that it reads beside streams: ``terminations``, ``sample_ids``, ``versions``."""
        return ()

    @property
    def statistic_unit(self) -> str | None:
        """The unit over whose tokens it takes a statistic (`megatron_pgloss.spec.levels.Unit`); None: it takes none."""
        return None

    @property
    def statistic_reads(self) -> tuple[str, ...]:
        """The part of `reads` that its statistic takes from every token of the unit; by default the log-probs."""
        return tuple(name for name in self.reads if name in ("ratio", "old", "rollout", "ref"))

    @property
    def asks_units(self) -> bool:
        """Whether it may ask for a statistic over units; a user's own function may always."""
        return self.statistic_unit is not None

    @property
    def straddles(self) -> bool:
        """Whether the rows of its unit may lie in any micro-batch and on any rank."""
        return self.statistic_unit in KEYED

    @property
    def needs_statistics_pass(self) -> bool:
        """Whether it is decided over the whole step, by a statistics pass."""
        return False

    def formula(self, base: str = "old") -> str:
        """The formula as one line of plain text with its numbers; LaTeX is made from it.

        Args:
            base: the letter of the base of the ratio.
        """
        raise NotImplementedError(f"no formula for {type(self).__name__}")

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """What the letters of the formula mean, as further lines."""
        return ()


def kinds(family: type[Kind]) -> tuple[type[Kind], ...]:
    """The kinds of a family, in the order in which they are written: classes that give ``kind`` a value."""
    found: list[type[Kind]] = []
    for child in family.__subclasses__():
        found += [child, *kinds(child)] if name_of(child) else kinds(child)
    return tuple(found)


def name_of(kind: type[Kind]) -> str:
    """The value of ``kind`` of a class; empty where it has none, so that the class is a family."""
    default = kind.model_fields["kind"].default
    return default if isinstance(default, str) else ""


def one_of(family: type[Kind]) -> Any:
    """The type of a field that holds any kind of the family; call it after the last of its classes is defined."""
    return Annotated[functools.reduce(operator.or_, kinds(family)), Field(discriminator="kind")]
