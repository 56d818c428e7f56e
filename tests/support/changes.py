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


_MISSED = {
    "docstring": ("test_a_kind_says_what_it_is", "has no docstring"),
    "example": ("test_a_kind_says_what_it_is", "has no example"),
    "formula": ("test_a_kind_says_what_it_is", "has no formula"),
    "short_name": ("test_a_kind_says_what_it_is", "has no short name (reason)"),
    "LaTeX_of_a_letter": ("test_a_kind_has_latex", "has no LaTeX for {detail}: give it symbols"),
    "name_in_all": ("test_a_kind_has_a_place_in_the_package", "is not in __all__ of"),
    "reads": ("test_a_kind_reads_what_it_says", "reads what its reads do not name"),
    "row_of_arithmetic": ("test_a_kind_has_arithmetic", "has no arithmetic in {file}: {detail}"),
    "oracle": ("test_the_oracle_knows_a_kind", "has no entry in the oracle, {file}"),
}
"""Piece of a kind to the test of `KINDS` that misses it, and what that says behind the kind's name."""


def pieces_of_kind(name: str, family: str, file: str, **cuts: str | tuple[str, str]) -> tuple[Forgotten, ...]:
    """Forgotten pieces of a kind, all in one file: piece of `_MISSED` to what is cut, or to that and the detail that
    its test names.
    """
    found = []
    for piece, given in cuts.items():
        cut, detail = (given, "") if isinstance(given, str) else given
        test, says = _MISSED[piece]
        says = f"{name} {says.format(file=file.removeprefix(f'{PACKAGE}/'), detail=detail)}"
        test = f"{KINDS}::{test}[{family} {name}]"
        found.append(Forgotten(piece=piece.replace("_", " "), file=file, cut=cut, test=test, says=says))
    return tuple(found)


def public_name(name: str) -> Forgotten:
    """The name of a kind among the frozen public names."""
    return Forgotten(piece="public name of the test", file=API, cut=f"{name} ",
                     test=f"{API}::test_public_api_is_frozen", says=name)  # fmt: skip
