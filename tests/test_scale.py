"""What a rank sends and receives in worlds of 1,024 and 16,384, held on a step of fewer tokens (tools/scale_world.py).

The rows of all other ranks are made up; that they are of the right form is checked where they are made: what is made
up for this rank is compared with what it sends, and the plan's counts with the whole step's.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WORLDS = (1_024, 16_384)
ROW = 1_024
"""Bytes of a rank's row in the plan's gather: 128 numbers of 8 bytes."""


def tool() -> ModuleType:
    if "scale_world" not in sys.modules:
        path = Path(__file__).resolve().parent.parent / "tools" / "scale_world.py"
        place = importlib.util.spec_from_file_location("scale_world", path)
        assert place is not None and place.loader is not None
        module = importlib.util.module_from_spec(place)
        sys.modules["scale_world"] = module
        place.loader.exec_module(module)
    return sys.modules["scale_world"]


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, bool], dict[str, Any]]:
    """By world and whether prompts and episodes are named: 20,480 sequences of about 20 tokens."""
    case = {(world, keyed): tool().Case(world=world, sequences=20_480, tokens=409_600, keyed=keyed)
            for world in WORLDS for keyed in (False, True)}  # fmt: skip
    return {key: tool().measure(one) for key, one in case.items()}


def call(seen: dict[str, Any], carries: str) -> dict[str, Any]:
    (one,) = [call for call in seen["calls"] if call["carries"] == carries]
    return one


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_a_plan_gathers_one_kibibyte_a_rank(world: int, keyed: bool, found: Any) -> None:
    assert call(found[world, keyed], "counts") == dict(carries="counts", over="world", sent=ROW, received=ROW * world)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_a_step_makes_two_gathers_and_a_third_where_prompts_are_named(world: int, keyed: bool, found: Any) -> None:
    kinds = [call["carries"] for call in found[world, keyed]["calls"]]
    assert kinds == ["counts", *(["keyed counts"] if keyed else []), "metrics"]


def test_keyed_counts_are_the_rows_of_distinct_units_whatever_the_world(found: Any) -> None:
    width = 8 * (5 + 4 * 2)  # a flag, two keys of 128 bits, and four counts for each of two components
    for world in WORLDS:
        data = world // 16
        seen = call(found[world, True], "keyed counts")
        assert seen == dict(carries="keyed counts", over="dp", sent=width * 20_480 // data, received=width * 20_480)


def test_the_end_of_a_step_sends_the_same_in_every_world(found: Any) -> None:
    sent = {call(seen, "metrics")["sent"] for seen in found.values()}
    assert len(sent) == 1 and sent.pop() < 2 * ROW
    for (world, _), seen in found.items():
        assert call(seen, "metrics")["received"] == call(seen, "metrics")["sent"] * world


def test_this_ranks_share_falls_with_the_world(found: Any) -> None:
    rows = {world: found[world, False]["rows"] for world in WORLDS}
    assert rows == {1_024: 320, 16_384: 20}
    assert all(found[world, False]["microbatches"] == rows[world] // 4 for world in WORLDS)


@pytest.mark.parametrize("fault", ["count", "key"])
def test_a_plan_that_misses_a_ranks_rows_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that the other tests stand on: one rank's count, or all its keys, taken away."""
    module = tool()
    kind = {"count": "_world", "key": "_keyed"}[fault]
    real = getattr(module.Wire, kind)

    def lossy(wire: Any, mine: Any) -> Any:
        rows = real(wire, mine)
        if fault == "count":
            rows[:16, module.HEAD :] = 0
        else:
            rows[0] = 0
        return rows

    monkeypatch.setattr(module.Wire, kind, lossy)
    with pytest.raises(SystemExit, match="the plan counted"):
        module.measure(module.Case(world=1_024, sequences=1_280, tokens=25_600, keyed=fault == "key"))
