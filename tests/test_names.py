"""A name means one thing: no two files of the package are called alike, and no two classes.

Two exceptions. The oracle is written a second time on purpose, and calls its parts as what they judge is called. And
what `spec` declares in a file, `rules` applies in the file of the same name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "megatron_pgloss"
ORACLE = PACKAGE / "verify" / "oracle"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if ORACLE not in path.parents)

SAME_FILES = {
    "build": {"presets", "rollouts"},
    "inputs": {"advantages", "logprobs"},
    "ratios": {"objective", "spec"},
    "streams": {"objective", "rollouts"},
}
"""Names that are still shared, and by which rooms. The table holds exactly, so that it can only shrink."""

SAME_CLASSES = {"Local": {"advantages/gae_rows", "planning/counts"}}


def places(named: dict[str, set[str]]) -> dict[str, set[str]]:
    return {name: where for name, where in named.items() if len(where) > 1}


def below(path: Path) -> str:
    """Where it lies in the package, without the ending."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def test_no_two_files_have_one_name() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if not path.name.startswith("__"):
            found[path.stem].add(path.parent.relative_to(PACKAGE).as_posix())
    assert {name: where for name, where in places(found).items() if where != {"rules", "spec"}} == SAME_FILES


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].add(below(path))
    assert places(found) == SAME_CLASSES
