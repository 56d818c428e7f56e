"""CONTRIBUTING.md, "How to add ...": each recipe is done in a copied tree, then with each piece left out in turn, and
what was forgotten is named by a test. The changes stand in ``support/recipes``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from support.changes import API, DOCS, KINDS, LEVELS, Change
from support.recipes import CHANGES

ROOT = Path(__file__).resolve().parent.parent
PIECES = [(name, piece) for name, change in CHANGES.items() for piece in change.forgotten]
QUICK = (KINDS, LEVELS, API, "tests/test_stream_table.py")
SHOWN = f"{LEVELS}::test_every_kind_of_divisor_is_shown"
"""It reads pages that only ``make_docs.py`` brings up to date."""
TURNS = [[piece for piece in turn if piece] for turn in zip_longest(*(c.forgotten for c in CHANGES.values()))]
each = pytest.mark.parametrize("name", CHANGES)


def copied(folder: Path, *changes: Change) -> Path:
    """The package, its tests, docs and tools, with the changes made."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for part in ("megatron_pgloss", "tests", "docs", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for change in changes:
        for file, anchor, text in change.edits:
            replaced(folder / file, anchor, text + anchor)
    return folder


def replaced(file: Path, old: str, new: str) -> None:
    """Replace what occurs once."""
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file.name} has {text.count(old)} times: {old}"
    file.write_text(text.replace(old, new), encoding="utf-8")


def ran(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests")])}
    command = [sys.executable, "-B", *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=250)


def verdicts(tree: Path, *tests: str) -> tuple[set[str], set[str], str]:
    """Tests that failed and that passed, by name, and all that was said."""
    done = ran(tree, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-q", *tests)
    failed, passed = (
        set(re.findall(rf"^{word} (\S+::.+?)(?: - .*)?$", done.stdout, re.M)) for word in ("FAILED", "PASSED")
    )
    return failed, passed, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All changes, made whole, but for the pages that ``make_docs.py`` writes."""
    return copied(tmp_path_factory.mktemp("tree"), *CHANGES.values())


@each
def test_a_recipe_touches_no_more_files_than_it_may(name: str) -> None:
    """Beside tests, generated docs and the oracle's own copy."""
    assert len(CHANGES[name].files) <= CHANGES[name].goal


@each
def test_the_page_names_the_tests_of_its_recipes(name: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for piece in CHANGES[name].forgotten:
        test = piece.test.split("::")[1].split("[")[0]
        assert f"`{test}`" in page, f"CONTRIBUTING.md does not name {test}, which misses the {piece.piece}"


def test_all_recipes_fit_into_one_tree_and_what_is_whole_is_green(tree: Path) -> None:
    """Of what names a missing piece, the quick tests; an exhaustive run has all of them."""
    tests = {piece.test for _, piece in PIECES if piece.test.split("::")[0] in QUICK} - {SHOWN}
    failed, passed, said = verdicts(tree, *sorted(tests))
    assert len(tests) > 10 and not failed and passed == tests, said[-3000:]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_pages_are_asked_for_and_then_everything_is_green(tree: Path, tmp_path: Path) -> None:
    """Before ``make_docs.py`` runs the pages are red, behind it everything is green."""
    whole = tmp_path / "whole"
    shutil.copytree(tree, whole)
    pages = {f"{DOCS}::test_page_is_up_to_date[{page}]" for change in CHANGES.values() for page in change.pages}
    failed, _, said = verdicts(whole, *sorted(pages))
    assert failed == pages and "run python tools/make_docs.py" in said, said[-3000:]
    done = ran(whole, "tools/make_docs.py")
    assert done.returncode == 0, done.stderr
    tests = {piece.test for _, piece in PIECES} | pages
    failed, passed, said = verdicts(whole, *sorted(tests))
    assert not failed and passed == tests, said[-3000:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("turn", range(len(TURNS)))
def test_each_piece_that_was_left_out_is_named(turn: int, tree: Path, tmp_path: Path) -> None:
    """One piece of each change at a time: the changes do not know of each other."""
    lacking = tmp_path / "lacking"
    shutil.copytree(tree, lacking)
    for piece in TURNS[turn]:
        replaced(lacking / piece.file, piece.cut, piece.put)
    tests = {piece.test for piece in TURNS[turn]}
    failed, _, said = verdicts(lacking, *sorted(tests))
    assert failed == tests, said[-3000:]
    for piece in TURNS[turn]:
        assert piece.says in said, f"{piece.piece}: {piece.says!r} is not in {said[-3000:]}"
