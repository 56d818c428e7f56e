"""One home for each level and divisor: what a new one still lacks is said by its name, as in test_kinds.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.planning.units import FIND
from megatron_pgloss.spec import LEVELS, UNITS, parse
from megatron_pgloss.spec.divisors import DIVISORS, Divisor
from megatron_pgloss.spec.levels import INSIDE
from megatron_pgloss.verify.oracle import step as oracle_data
from support.oracle_cases import row, weights
from support.steps import pictured

ROOT = Path(__file__).resolve().parent.parent
WORDS = [(kind, word) for kind in DIVISORS for word in kind.examples]


@pytest.mark.parametrize(("kind", "word"), WORDS, ids=[word for _, word in WORDS])
def test_a_divisor_reads_prints_and_divides(kind: type[Divisor], word: str) -> None:
    """Two sequences of 1 and 3 tokens: the package's weights are 1 / divisor, and the oracle's."""
    path = parse(f"sum(sequence) > sum(token)/{word}")
    divisor = path.steps[-1].divisor
    assert isinstance(divisor, kind) and str(path) == str(parse(str(path))), f"{kind.__name__} does not read {word}"
    assert divisor.plain("n") and divisor.latex("n", "token"), f"{kind.__name__} does not print itself"
    rows = [row("cA"), row("cAAA")]
    batch = pg.TokenBatch.from_packed(
        tokens=torch.zeros(6, dtype=torch.int64), lengths=[2, 4],
        action_mask=torch.tensor([False, True, False, True, True, True]), advantages=torch.ones(2),
    )  # fmt: skip
    rl = pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", normalizer=str(path))
    plan = pg.plan([batch], pg.LossSpec(components=[rl]), split=pg.Split(sequences=2))
    count = {"count": (1.0, 3.0), "average": (2.0, 2.0), "nothing": (1.0, 1.0)}[divisor.reads]
    mine = [float(w) for w in plan.components["rl"].weight_T if w]
    assert mine == pytest.approx([1 / divisor.of(count[0])] + [1 / divisor.of(count[1])] * 3, rel=1e-6)
    try:
        judged = [w for each in weights(rows, str(path)) for w in each]
    except pg.SpecError as error:
        pytest.fail(f"{kind.__name__} has no entry in the oracle, verify/oracle/average.py: {error}")
    assert mine == pytest.approx(judged, rel=1e-6), f"{kind.__name__}: the oracle divides by another number"


def test_every_kind_of_divisor_is_shown() -> None:
    text = (ROOT / "docs" / "normalization.md").read_text(encoding="utf-8")
    for kind in DIVISORS:
        assert kind.examples, f"{kind.__name__} has no examples"
        assert kind.forms, f"{kind.__name__} has no forms"
        for form, meaning in kind.forms:
            assert f"| {form} | {meaning} |" in text, f"{kind.__name__} has no row in docs/normalization.md"


def test_levels_are_those_of_the_oracle_and_of_the_docs() -> None:
    assert UNITS == oracle_data.LEVELS, "the oracle has other levels"
    assert len({level.letter for level in LEVELS}) == len(LEVELS), "two levels have one letter"
    text = (ROOT / "docs" / "normalization.md").read_text(encoding="utf-8")
    assert " | ".join(UNITS) in text, "docs/normalization.md has other levels"


PLACED = [
    row("cAAoAocA", prompt="a", episode=0, turn=[-1, 0, 0, 0, 0, 0, 0, 1]),
    row("cAoAA", prompt="a", episode=1, turn=[-1, 0, 0, 0, 1]),
    row("cA", prompt="b", episode=0, turn=[-1, 0]),
    row("coAAA", prompt="b", episode=0, turn=[-1, -1, 0, 0, 0]),
]
"""Rows of several units of each level, also where a turn is cut by observations, and two turns touch."""


@pytest.mark.parametrize("level", UNITS)
def test_a_level_is_found_and_averaged_over(level: str) -> None:
    """In the step and in a unit of each level above: the weights are those of the oracle."""
    assert level not in INSIDE or level in FIND, (
        f"{level} is not found in a batch: it has no row in FIND of planning/units.py"
    )
    batch = pictured(
        "cAAoAocA", "cAoAA", "cA", "coAAA", prompt_ids=list("aabb"), episode_ids=[0, 1, 0, 0],
        turn_ids=[turn for placed in PLACED for turn in placed["turn"]],
    )  # fmt: skip
    for above in (None, *UNITS[: UNITS.index(level)]):
        levels = dict.fromkeys([*([above] if above else []), level, "token"])
        path = " > ".join(f"mean({name})" for name in levels)
        rl = pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", normalizer=path)
        plan = pg.plan([batch], pg.LossSpec(components=[rl]), split=pg.Split(sequences=4))
        mine = [float(w) for w in plan.components["rl"].weight_T if w]
        try:
            judged = [w for each in weights(PLACED, path) for w in each]
        except (pg.SpecError, pg.DataError) as error:
            pytest.fail(f"{level} has no units in the oracle, verify/oracle/step.py: keys: {error}")
        assert mine == pytest.approx(judged, rel=1e-12), f"{level}: the oracle averages over other units under {path}"


@pytest.mark.parametrize("level", INSIDE)
def test_a_counted_token_in_no_unit_of_a_level_is_refused(level: str) -> None:
    """The observation before the first turn."""
    ce = pg.CrossEntropy(normalizer=f"mean({level}) > mean(token)")
    with pytest.raises(pg.DataError, match=f"1 tokens in no {level}"):
        pg.plan([pictured("coA")], pg.LossSpec(components=[ce]), split=pg.Split(sequences=1))
