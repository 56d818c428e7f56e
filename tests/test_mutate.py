"""tools/mutate.py: which mutants a file has, and that a living module takes one on wherever its functions are held."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
SOURCE = '''
from __future__ import annotations
from dataclasses import dataclass

LIMIT = 2


@dataclass(frozen=True, slots=True)
class Box:
    """1 + 1 in a text."""

    width: int = 3

    @property
    def double(self) -> int:
        return self.width * 2

    @staticmethod
    def even(n: int) -> bool:
        return n % 2 == 0 and not n < 0


def few(n: int, low: int = 0) -> bool:
    if n < 0:
        raise ValueError(f"{n - 1} is negative", 7)
    assert n + 1
    return low < n <= LIMIT
'''


@pytest.fixture(scope="module")
def tool() -> Any:
    place = importlib.util.spec_from_file_location("mutants", TOOLS / "mutants.py")
    module = importlib.util.module_from_spec(place)
    sys.modules["mutants"] = module  # its dataclasses look it up
    place.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


@pytest.fixture
def living(tmp_path: Path) -> Any:
    file = tmp_path / "living_module.py"
    file.write_text(SOURCE)
    place = importlib.util.spec_from_file_location("living_module", file)
    module = importlib.util.module_from_spec(place)
    sys.modules["living_module"] = module
    place.loader.exec_module(module)
    yield module
    del sys.modules["living_module"]


def test_every_operator_and_number_once_and_nothing_that_only_a_reader_sees(tool: Any) -> None:
    found = [str(one) for one in tool.mutants(SOURCE)]
    assert found == [
        "line 5: 2  ->  3",
        "line 12: 3  ->  4",
        "line 16: self.width * 2  ->  self.width / 2",
        "line 16: 2  ->  3",
        "line 20: n % 2 == 0 and (not n < 0)  ->  n % 2 == 0 or not n < 0",
        "line 20: n % 2 == 0  ->  n % 2 != 0",
        "line 20: not n < 0  ->  n < 0",
        "line 20: n % 2  ->  n // 2",
        "line 20: 0  ->  1",
        "line 20: n < 0  ->  n <= 0",
        "line 20: 2  ->  3",
        "line 20: 0  ->  1",
        "line 23: 0  ->  1",
        "line 24: n < 0  ->  n <= 0",
        "line 24: 0  ->  1",
        "line 27: low < n <= LIMIT  ->  low <= n <= LIMIT",
        "line 27: low < n <= LIMIT  ->  low < n < LIMIT",
    ]


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ("self.width * 2  ->  self.width / 2", lambda living, held: living.Box(4).double == 2),
        ("n % 2 == 0  ->  n % 2 != 0", lambda living, held: living.Box.even(3)),
        ("3  ->  4", lambda living, held: living.Box().width == 4),
        ("2  ->  3", lambda living, held: held(3)),
        ("low < n <= LIMIT  ->  low <= n <= LIMIT", lambda living, held: held(0)),
    ],
)
def test_a_living_module_takes_a_mutant_on(change: str, asked: Any, tool: Any, living: ModuleType) -> None:
    held = living.few  # as another module holds it that imported it before
    assert not asked(living, held)
    one = next(one for one in tool.mutants(SOURCE) if one.change == change)
    tool.put_into(living, one)
    assert asked(living, held)
