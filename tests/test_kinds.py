"""One home for each kind: what a new one still lacks is said by its name. Levels and divisors: test_levels.py.

CONTRIBUTING.md, "How to add ...", sends the reader here: a piece that was forgotten turns one of these tests red.
"""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.maths.segments import UnitSums
from megatron_pgloss.metrics import METRICS
from megatron_pgloss.objective import auxiliary, decisions, surrogates
from megatron_pgloss.rules import corrections, gates, masks
from megatron_pgloss.spec import FAMILIES, Kind, kinds, latex
from megatron_pgloss.spec.functions import Function
from megatron_pgloss.spec.kinds import name_of
from megatron_pgloss.spec.levels import Unit
from megatron_pgloss.spec.rule import Rule
from megatron_pgloss.verify.oracle import gates as oracle_gates
from megatron_pgloss.verify.oracle import losses as oracle_losses
from megatron_pgloss.verify.oracle import rules as oracle_rules
from megatron_pgloss.verify.oracle import sets as oracle_sets
from megatron_pgloss.verify.oracle import step as oracle_data
from megatron_pgloss.verify.oracle import surrogates as oracle_surrogates
from support.oracle_cases import row
from support.steps import pictured, solve

ROOT = Path(__file__).resolve().parent.parent
ALL = [(family, kind) for family, base in FAMILIES.items() for kind in kinds(base)]
NAMES = [f"{family} {kind.__name__}" for family, kind in ALL]
each = pytest.mark.parametrize(("family", "kind"), ALL, ids=NAMES)
PAGE = {"masks": "conventions.md", "corrections": "conventions.md"}
"""Where a family has its table; the others have theirs in objectives.md."""
ARITHMETIC = {
    "components": (auxiliary.TERMS, "objective/auxiliary.py: TERMS"),
    "surrogates": (surrogates.SURROGATES, "objective/surrogates.py: SURROGATES"),
    "gates": (gates.PASSES | decisions.DECIDE, "rules/gates.py: PASSES, or objective/decisions.py: DECIDE"),
    "corrections": (corrections.APPLY, "rules/corrections.py: APPLY"),
    "masks": (masks.TAKEN, "rules/masks.py: TAKEN"),
}
ELSEWHERE = {"policy_gradient"}
"""A policy gradient is its ratio and surrogate."""
ORACLE = {
    "components": (oracle_losses.KINDS, "verify/oracle/losses.py"),
    "surrogates": (oracle_surrogates.KINDS, "verify/oracle/surrogates.py"),
    "gates": (oracle_gates.KINDS, "verify/oracle/gates.py"),
    "corrections": (oracle_rules.KINDS, "verify/oracle/rules.py"),
}
ENGLISH = """
alone and any at draw drawn drop each first geomean gradient in is its keep largest least mask most of on one or others
observations out outside outward over prompt reject seed seq sequence sequences sign step the them this times to token
tokens turn until versions ago more than sampled where with without truncated true members by
"""
PROSE = frozenset(ENGLISH.split())
"""English: what a formula may hold beside symbols, numbers, and the names of streams and functions."""
STREAMS = {"teacher_ids", "teacher_logprobs", "math:exp", "actions", "mine"}


def made(kind: type[Kind]) -> Any:
    """One of this kind; what its defaults leave open is in its ``example``."""
    try:
        return kind(**kind.example)
    except pg.SpecError as error:
        pytest.fail(f"{kind.__name__} has no example: {error}")


def asked(kind: type[Kind], what: str, ask: Any) -> Any:
    """A fact of a kind; fails by name where the class does not say it."""
    try:
        return ask()
    except NotImplementedError:
        pytest.fail(f"{kind.__name__} has no {what}")


def whole(kind: type[Kind]) -> pg.LossSpec:
    """A spec that holds one of this kind."""
    part, rl = made(kind), pg.PolicyGradient()
    if isinstance(part, pg.spec.Component):
        return pg.LossSpec(components=[part])
    for family, field in (("surrogates", "surrogate"), ("ratios", "ratio")):
        if kind in kinds(FAMILIES[family]):
            return pg.LossSpec(components=[rl.replace(**{field: part})])
    return pg.LossSpec(
        components=[rl], **{next(name for name, base in FAMILIES.items() if issubclass(kind, base)): [part]}
    )


@each
def test_a_kind_says_what_it_is(family: str, kind: type[Kind]) -> None:
    part = made(kind)
    text = asked(kind, "formula", lambda: ", ".join((part.formula(), *part.definitions())))
    assert text.strip() and "None" not in text, f"{kind.__name__} has no formula"
    assert inspect.getdoc(kind) and kind.__doc__, f"{kind.__name__} has no docstring"
    if isinstance(part, Rule):
        assert asked(kind, "short name (reason)", lambda: part.reason), f"{kind.__name__} has no short name"
    assert part.statistic_unit in (None, *get_args(Unit)), f"{kind.__name__} takes a statistic of no known unit"


@each
def test_a_kind_reads_back_from_toml(family: str, kind: type[Kind]) -> None:
    spec = whole(kind)
    assert f'kind = "{name_of(kind)}"' in spec.to_toml() or kind is pg.spec.Ratio  # a ratio's short name stands for it
    assert pg.LossSpec.from_toml(spec.to_toml(), functions={"math:exp": math.exp}) == spec, (
        f"{kind.__name__} does not come back from TOML"
    )


@each
def test_a_kind_has_a_place_in_the_package(family: str, kind: type[Kind]) -> None:
    assert getattr(pg, kind.__name__, None) is kind, f"{kind.__name__} is not in __all__ of {kind.__module__}"
    assert getattr(pg.spec, kind.__name__, None) is kind and kind.__name__ in pg.__all__


@each
def test_a_kind_has_latex(family: str, kind: type[Kind]) -> None:
    """Words that are neither English nor a symbol would be set as text in the middle of a formula."""
    part = made(kind)
    for line in (part.formula(), *part.definitions()):
        symbols = {word: sign for piece in whole(kind).components[0].parts for word, sign in piece.symbols.items()}
        set_as_text = re.findall(r"\\text\{([^}]*)\}", latex.translate(line, {**symbols, **part.symbols}))
        words = {word.replace(r"\_", "_") for text in set_as_text for word in text.split()}
        unknown = words - PROSE - STREAMS
        assert not unknown, f"{kind.__name__} has no LaTeX for {sorted(unknown)}: give it symbols"


@each
def test_a_kind_has_a_row_in_the_docs(family: str, kind: type[Kind]) -> None:
    page = PAGE.get(family, "objectives.md")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    row = f"`pg.{kind.__name__}(" if family == "ratios" else f"| `{kind.__name__}` | `{name_of(kind)}` |"
    assert row in text, f"{kind.__name__} has no row in docs/{page}: run python tools/make_docs.py"


@each
def test_a_kind_has_arithmetic(family: str, kind: type[Kind]) -> None:
    if family in ARITHMETIC and name_of(kind) not in ELSEWHERE:
        table, where = ARITHMETIC[family]
        assert name_of(kind) in table, f"{kind.__name__} has no arithmetic in {where}"


LEAN = [
    (family, kind) for family, kind in ALL if not issubclass(kind, Function) and kind is not pg.TopKDistill
]  # fmt: skip
"""Kinds that can be tried on a batch of what they read. A user's own says it by ``needs=``
(tests/test_user_streams.py), and top-k log-probs of the policy come out of a model."""


@pytest.mark.parametrize(("family", "kind"), LEAN, ids=[f"{family} {kind.__name__}" for family, kind in LEAN])
def test_a_kind_reads_what_it_says(family: str, kind: type[Kind]) -> None:
    """On a batch of nothing but what the spec says that it reads; a rule acts on a loss that reads nothing itself."""
    spec, names = whole(kind), {name: f"{name}_logprobs" for name in ("old", "rollout", "ref")}
    if issubclass(kind, Rule):
        spec = spec.replace(components=[pg.PolicyGradient(surrogate=pg.NLL(), ratio="none")])
    fields = {"terminations": ["success"], "sample_ids": ["a"], "versions": torch.tensor([3] * 4)}
    given = {name: fields[name] for name in spec.field_readers} | {names.get(x, x): -1.5 for x in spec.readers}
    batch = pictured("cAAo", masks={"mine": [True] * 4}, prompt_ids=["a"], **given)
    read = {*spec.readers, *spec.field_readers}
    lean = replace(batch, streams={name: value for name, value in batch.streams.items() if name in read})
    try:
        solve(lean, spec, [-1.0, -2.0, -3.0, math.nan], [0.5] * 4, value=[0.5] * 4, version=3)
    except (KeyError, pg.DataError) as error:
        if isinstance(error, KeyError) and error.args[0] not in (*names, "advantages", "values", "returns"):
            raise  # not a stream
        pytest.fail(f"{kind.__name__} reads what its reads do not name: {error}")


@pytest.mark.parametrize("kind", kinds(FAMILIES["gates"]), ids=lambda kind: kind.__name__)
def test_a_gate_has_a_metric(kind: type[Kind]) -> None:
    name = f"gate_{name_of(kind)}"
    assert name in {row.suffix for row in METRICS}, f"{kind.__name__} has no row {name} in metrics/metric_table.py"


@each
def test_the_oracle_knows_a_kind(family: str, kind: type[Kind]) -> None:
    """It keeps its own copy of everything, and no user's function."""
    word = name_of(kind)
    if family == "masks":
        try:
            spec = {"masks": [made(kind).model_dump(mode="json")]}
            oracle_sets.members_of("rl", {"kind": "policy_gradient"}, spec, STEP)
        except pg.SpecError as error:
            pytest.fail(f"{kind.__name__} has no entry in the oracle, verify/oracle/sets.py: {error}")
    elif family in ORACLE and word not in ("term", "policy_gradient"):
        table, where = ORACLE[family]
        assert word in table, f"{kind.__name__} has no entry in the oracle, {where}"


STEP = oracle_data.Step.of([row("cA") | {"termination": "success", "masks": {"mine": [True, True]}}])


@pytest.mark.parametrize(("family", "asks"), [("surrogates", surrogates.ASKS), ("gates", gates.ASKS)])
def test_what_takes_a_statistic_over_a_unit_asks_for_it(family: str, asks: dict[str, Any]) -> None:
    """A gate of the statistics pass gets its unit's there; a user's function asks by ``statistics=``."""
    own = [kind for kind in kinds(FAMILIES[family]) if not issubclass(kind, Function)]
    said = {name_of(kind) for kind in own if made(kind).statistic_unit and not made(kind).needs_statistics_pass}
    assert said == set(asks), f"{sorted(said ^ set(asks))}: statistic_unit of the class and ASKS say different things"


@pytest.mark.parametrize("kind", kinds(FAMILIES["corrections"]), ids=lambda kind: kind.__name__)
def test_a_correction_weighs_and_rejects_as_it_says(kind: type[Kind]) -> None:
    """On two rows of two tokens, the second e^-10 times as likely as the sampler had them, and 9 versions old."""
    row_N = torch.tensor([0, 0, 1, 1])
    evidence = corrections.Evidence(
        units=dict.fromkeys(("sequence", "turn"), UnitSums(row_N, 2)), voters_N=row_N >= 0, bound=20.0,
        log_N=row_N * -10.0, lag_N=row_N * 9,
    )  # fmt: skip
    part = made(kind)
    said = corrections.apply(part, evidence)
    rejected = said.passes is not None and not bool(said.passes.all())
    assert part.weighs == (said.weight is not None), f"{kind.__name__}: weighs is not whether its verdict has a weight"
    assert part.rejects == rejected, f"{kind.__name__}: rejects is not whether some tokens do not pass"


def test_a_metric_of_one_kind_is_named_there() -> None:
    """Both ways: in ``reports`` of a component, and a row of the table."""
    rich, names = RichStep(), {name for kind in kinds(FAMILIES["components"]) for name in made(kind).reports}
    assert names <= {row.suffix for row in METRICS}, f"METRICS has no rows for {names - {m.suffix for m in METRICS}}"
    bare = [row.suffix for row in METRICS if not any(row.when(part, rich) for part in PARTS)]
    assert bare == [], f"no component has the metrics {bare}: name them in its kind's reports"


PARTS = [made(kind) for kind in kinds(FAMILIES["components"])] + [pg.PolicyGradient(ratio="sequence")]


class RichStep:
    """A step in which everything that is not asked of the component is so."""

    streams = frozenset({"rollout", "ref"})
    entropy = kept = samplers_old = True

    def weighs(self, part: Any) -> bool:
        return True

    def rejects(self, part: Any) -> bool:
        return True

    def gated(self, part: Any, kind: str) -> bool:
        return True


def test_no_entry_stands_for_nothing() -> None:
    for family, (table, where) in ARITHMETIC.items():
        left = set(table) - {name_of(kind) for kind in kinds(FAMILIES[family])}
        assert not left, f"{where} has {sorted(left)}, which are no kinds of {family}"


def test_a_kind_of_ones_own_that_says_nothing_is_told_so() -> None:
    """The guard itself, on a class that is no part of the package."""

    class Bare(Rule):
        kind: str = "bare"

    with pytest.raises(pytest.fail.Exception, match="Bare has no formula"):
        asked(Bare, "formula", Bare().formula)
    with pytest.raises(pytest.fail.Exception, match="Bare has no short name"):
        asked(Bare, "short name", lambda: Bare().reason)
