"""Every ``python`` block of the Markdown pages runs, top to bottom, one namespace a page.

What a page needs but a reader does not (data for the names in capitals) goes into an invisible
block of that page: ``<!--- invisible-code-block: python`` ... ``-->``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).resolve().parent.parent
SYBIL = Sybil(parsers=[PythonCodeBlockParser()], path=str(ROOT), pattern="*.md")
PAGES = [
    path
    for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    if any(True for _ in SYBIL.parse(path).examples())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a snippet may write files
    for example in SYBIL.parse(page).examples():
        example.evaluate()
