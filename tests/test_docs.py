"""Every ``python`` block of the Markdown pages runs, top to bottom, one namespace per page; links and numbers hold.

What a page needs but a reader does not (data for the names in capitals) goes into an invisible
block of that page: ``<!--- invisible-code-block: python`` ... ``-->``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from megatron_pgloss.verify.run.specs import SPECS
from support.worlds import World

ROOT = Path(__file__).resolve().parent.parent
SYBIL = Sybil(parsers=[PythonCodeBlockParser()], path=str(ROOT), pattern="*.md")
ALL_PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = [path for path in ALL_PAGES if any(True for _ in SYBIL.parse(path).examples())]


def read(rank: int, world: int, page: Path, folder: Path) -> None:
    os.chdir(folder)  # a snippet may write files
    for example in SYBIL.parse(page).examples():
        example.evaluate()


@pytest.mark.multiproc
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """In a process of its own, without a process group: some pages make one, and run Megatron-Core on CPU."""
    World(read, 1, (page, tmp_path), grouped=False).results()


def test_numbers_in_the_readme_are_those_of_the_code_and_of_the_last_full_run() -> None:
    """No tool writes the README. Its number of faults is that of the generated table in docs/self-test.md."""
    table = re.search(
        r"<!-- table: faults -->\n(.*?)<!-- end -->", (ROOT / "docs" / "self-test.md").read_text(), re.DOTALL
    )
    faults = len(table[1].splitlines()) - 2  # without the two lines of the header
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    runs = re.findall(
        r"^\*\*Run \d+\*\*: .* (\d+) layouts, .* (\d+) off, .* worst gradient ([\de-]+)\.",
        (ROOT / "docs" / "verified.md").read_text(encoding="utf-8"), re.MULTILINE,
    )  # fmt: skip
    assert runs and not any(int(off) for _, off, _ in runs)
    layouts, worst = max(int(count) for count, _, _ in runs), max((error for _, _, error in runs), key=float)
    words = ("six", "seven", "eight", "nine", "ten")
    assert f"{faults} are put in" in readme
    assert f"on {layouts} layouts" in readme and f"at most {worst} in float64" in readme
    assert f"with {words[len(SPECS) - 6]} losses on each" in readme


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
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
