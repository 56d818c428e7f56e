"""A few hundred of the cases of tools/fuzz.py: random specs, rows and cuts against the oracle."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_pgloss.planning import split
from support.cover import EXHAUSTIVE
from support.fuzz import outcome

CASES = 2000 if EXHAUSTIVE else 200


def test_random_specs_rows_and_cuts_agree_with_the_oracle() -> None:
    found = [outcome(11, number) for number in range(CASES)]
    kinds = Counter(one.kind for one in found)
    wrong = [one for one in found if one.kind not in ("equal", "refused")]
    assert not wrong, "\n".join(f"{one.kind} {one.what}: {one.case}" for one in wrong[:5])
    assert kinds["equal"] >= CASES // 2
    moved = sum(one.kind == "equal" and float(one.what) > 1e-6 for one in found)
    assert moved >= CASES // 3


def test_a_row_that_is_left_out_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = split.refine
    monkeypatch.setattr(split, "refine", lambda *args, **more: whole(*args, **more)[:-1])
    assert {outcome(11, number).kind for number in range(12)} & {"off", "raised"}
