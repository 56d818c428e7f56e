"""tools/circles.py: a circle of imports inside a room is found, whatever kind of import closes it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
PLANTED = {
    "none": {"one": "", "two": "from planted import one"},
    "two modules": {"one": "from planted.two import f", "two": "from planted import one"},
    "for types alone": {
        "one": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.two import F",
        "two": "import planted.one",
    },
    "inside a function": {"one": "def f():\n    import planted.two", "two": "import planted.one"},
    "by way of a third": {"one": "import planted.two", "two": "import planted.three", "three": "import planted.one"},
    # No two of these modules import each other, but neither of the two folders can be read before the other.
    "of two folders": {
        "a/one": "import planted.b.one", "a/two": "", "b/one": "", "b/two": "import planted.a.two",
    },
    "inside a folder": {"a/one": "from planted.a.two import f", "a/two": "from planted.a.one import g"},
    "through the face": {"__init__": "from planted.one import f", "one": "from planted import g"},
}  # fmt: skip
SEEN = {
    "none": {},
    "two modules": {"planted": ("one two",)},
    "for types alone": {"planted": ("one two",)},
    "inside a function": {"planted": ("one two",)},
    "by way of a third": {"planted": ("one three two",)},
    "of two folders": {"planted": ("a b",)},
    "inside a folder": {"planted.a": ("one two",)},
    "through the face": {"planted": ("__init__ one",)},
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    place = importlib.util.spec_from_file_location("circles", TOOLS / "circles.py")
    assert place is not None and place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_circle_is_seen(name: str, tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in {"__init__": "", **PLANTED[name]}.items():
        file = tmp_path / "planted" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert tool.all_circles("planted") == SEEN[name]


def test_the_table_holds_in_both_directions(tool: ModuleType) -> None:
    known = {"room": ("a b", "c d")}
    assert list(tool.differences(known, known)) == []
    assert list(tool.differences({"room": ("a b",)}, known)) == [
        "room: no circle any more, take it out of KNOWN: c d",
    ]
    assert list(tool.differences({"room": ("a b", "c d", "e f"), "other": ("g h",)}, known)) == [
        "other: a circle of imports: g h",
        "room: a circle of imports: e f",
    ]
    assert list(tool.differences({"room": ("a b c", "c d")}, known)) == [  # a known one that grew
        "room: a circle of imports: a b c",
        "room: no circle any more, take it out of KNOWN: a b",
    ]
