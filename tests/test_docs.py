"""Every ``python`` block of the Markdown pages runs, top to bottom, one namespace a page.

What a page needs but a reader does not (data for the names in capitals) goes into an invisible
block of that page: ``<!--- invisible-code-block: python`` ... ``-->``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from support.worlds import World

ROOT = Path(__file__).resolve().parent.parent
SYBIL = Sybil(parsers=[PythonCodeBlockParser()], path=str(ROOT), pattern="*.md")
PAGES = [
    path
    for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    if any(True for _ in SYBIL.parse(path).examples())
]


def read(rank: int, world: int, page: Path, folder: Path) -> None:
    os.chdir(folder)  # a snippet may write files
    for example in SYBIL.parse(page).examples():
        example.evaluate()


@pytest.mark.multiproc
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """In a process of its own, without a process group: some pages make one, and run Megatron-Core on CPU."""
    World(read, 1, (page, tmp_path), grouped=False).results()
