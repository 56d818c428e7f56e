"""A change of the package as text, and the pieces of it that can be forgotten: see ``tests/support/recipes.py``."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "megatron_pgloss"


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """One piece that is left out."""

    piece: str
    file: str
    cut: str
    test: str
    says: str
    put: str = ""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One recipe."""

    goal: int
    """Files to touch at most, beside tests, generated docs and the oracle's own copy."""
    edits: tuple[tuple[str, str, str], ...]
    """(file, anchor, what goes in front of it)."""
    pages: tuple[str, ...]
    """Generated pages that show it."""
    forgotten: tuple[Forgotten, ...]

    @property
    def files(self) -> set[str]:
        """Files of the package that are counted."""
        return {file for file, _, _ in self.edits if file.startswith(PACKAGE) and "/oracle/" not in file}
