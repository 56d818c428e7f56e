"""A change of the package as text, and the pieces of it that can be forgotten: see ``tests/support/recipes``."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "megatron_pgloss"
KINDS, DOCS, ORACLE = "tests/test_kinds.py", "tests/test_docs_tables.py", "tests/test_objectives_oracle.py"
LEVELS, API = "tests/test_levels.py", "tests/test_api.py"


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


def pieces_of_kind(name: str, family: str, file: str, **cuts: tuple[str, str, str, str]) -> tuple[Forgotten, ...]:
    """Forgotten pieces of the class of a kind: (what is cut, what stays instead, test of `KINDS`, what it says)."""
    return tuple(
        Forgotten(piece=piece.replace("_", " "), file=file, cut=cut, put=put, says=says,
                  test=f"{KINDS}::{test}[{family} {name}]")
        for piece, (cut, put, test, says) in cuts.items()
    )  # fmt: skip


def public_name(name: str) -> Forgotten:
    """The name of a kind among the frozen public names."""
    return Forgotten(piece="public name of the test", file=API, cut=f"{name} ",
                     test=f"{API}::test_public_api_is_frozen", says=name)  # fmt: skip
