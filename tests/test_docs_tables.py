"""Tables and printed outputs in docs/ are what the code gives now (tools/make_docs.py)."""

from __future__ import annotations

import importlib.util
import re
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


def test_numbers_in_the_readme_are_those_of_the_code_and_of_the_last_full_run() -> None:
    """No tool writes the README: its number of faults is that of the table, the rest that of docs/verified.md."""
    from megatron_pgloss.verify.faults import FAULTS
    from megatron_pgloss.verify.run.specs import SPECS

    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    runs = re.findall(
        r"^\*\*Run \d+\*\*: .* (\d+) layouts, .* (\d+) off, .* worst gradient ([\de-]+)\.",
        (ROOT / "docs" / "verified.md").read_text(encoding="utf-8"), re.MULTILINE,
    )  # fmt: skip
    assert runs and not any(int(off) for _, off, _ in runs)
    layouts, worst = max(int(count) for count, _, _ in runs), max((error for _, _, error in runs), key=float)
    words = ("six", "seven", "eight", "nine", "ten")
    assert f"{len(FAULTS)} are put in" in readme
    assert f"on {layouts} layouts" in readme and f"at most {worst} in float64" in readme
    assert f"with {words[len(SPECS) - 6]} losses on each" in readme


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file that is there, and a heading of it where it names one."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not link.startswith(("http:", "https:")):
            path, _, heading = link.partition("#")
            target = page if not path else page.parent / path
            assert target.exists(), f"{link}: no such file"
            assert not heading or heading in slugs(target), f"{link}: no such heading"


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub makes of the page's headings."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
