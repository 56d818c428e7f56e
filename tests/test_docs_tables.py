"""Tables and printed outputs in docs/ are what the code gives now (tools/make_docs.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_page_is_up_to_date(page: Path) -> None:
    place = importlib.util.spec_from_file_location("make_docs", ROOT / "tools" / "make_docs.py")
    make_docs = importlib.util.module_from_spec(place)
    place.loader.exec_module(make_docs)
    assert make_docs.render(page) == page.read_text(encoding="utf-8"), "run python tools/make_docs.py"
