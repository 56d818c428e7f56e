"""docs/cases.md names every public report that a loss plugin can meet, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "cases.md").read_text(encoding="utf-8")
HELD, LEFT = PAGE.split("## Left out")
NUMBERS = {
    "MLM": [1, 3, 4, 6, 7, 8, 9, 10, 11, 13, 16, 17, 22, 25, 27, 28, 29, 32],
    "VERL": [1, 2, 3, 5, 7, 9, 10, 12, 14, 17, 18, 21, 22, 24, 25, 27, 29, 30, 31],
    "SLIME": [2, 3, 4, 6, 7, 9, 12, 13, 14],
    "MILES": [1, 3],
    "NRL": [1, 3, 5, 6, 7, 10, 11, 12, 14, 16, 17, 18],
    "PRIME": [1, 3, 4, 5, 6, 9],
    "TRL": [2, 5, 7, 8, 9],
    "LIGER": [1, 3, 4],
    "TE": [1, 2, 3, 6],
    "OTHER": [1, 3, 5, 7, 8, 11],
}
ENTRIES = [f"{library}-{number:02}" for library, numbers in NUMBERS.items() for number in numbers]


def rows(part: str) -> dict[str, list[str]]:
    """Entry to the other cells of its line."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in lines if re.fullmatch(r"[A-Z]+-\d\d", cells[0])}


def test_every_entry_is_held_by_a_test_or_left_out_with_a_reason() -> None:
    held, left = rows(HELD), rows(LEFT)
    assert sorted([*held, *left]) == sorted(ENTRIES)
    assert all(len(reason) > 20 for (reason,) in left.values())


def test_every_named_test_exists() -> None:
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", PAGE)
    assert len(named) > len(ENTRIES) / 2
    for file, name in named:
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), (file, name)
    for entry, (_, tests) in rows(HELD).items():
        assert "::" in tests, entry
