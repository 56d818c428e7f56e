"""The same policy gradient on every layout: real Megatron-Core models against the float64 oracle.

Every parameter, after Megatron's own schedule, wrapper and ``finalize_model_grads``, is held against the loss written
from its formulas on the whole step in one process. A world of one, two, four and eight processes each visit layouts of
`megatron_pgloss.verify.layouts.table` that take so many, under specs of `megatron_pgloss.verify.run.specs`: all of two
processes, those with three axes, and so many others as show every axis, flag, pair of axes, and every axis with every
spec. An exhaustive run visits all under all; the last full run of ``verify`` is in docs/verified.md.

Error of a parameter: max |g - g0| / max(max |g0|, 1e-3 of the largest over all parameters).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import megatron_pgloss as pg
from megatron_pgloss.verify.layouts.table import LAYOUTS, every_layout
from megatron_pgloss.verify.run.specs import SPECS
from support import jobs, layouts
from support.cover import EXHAUSTIVE
from support.worlds import world_fixture

TOLERANCE = 1e-10
NAMES = [layout.name for layout in every_layout()]
CASES = layouts.visits(LAYOUTS, SPECS)
SEEN: dict[str, list[str]] = {}
"""Layout to the specs that it is visited with."""
for _layout, _spec in CASES:
    SEEN.setdefault(_layout.name, []).append(_spec)


def marked(function: Any) -> Any:
    """A test that reads the worlds' visits."""
    for mark in (pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)):
        function = mark(function)
    return function


def visited(world: int) -> Any:
    """A fixture: the outcomes of this world's visits."""
    chosen = {layout.name: SEEN[layout.name] for layout in LAYOUTS[world] if layout.name in SEEN}
    return world_fixture(layouts.tour, world, chosen, timeout=1500)


by_1, by_2, by_4, by_8 = (visited(world) for world in LAYOUTS)


@pytest.fixture(scope="module")
def visits(by_1: Any, by_2: Any, by_4: Any, by_8: Any, table: list[str]) -> dict[str, dict[str, Any]]:
    """Layout to spec to its outcome."""
    found: dict[str, dict[str, Any]] = {}
    table.append("against the float64 oracle, the worst of all specs: loss, and gradient of a parameter")
    for world, (outcomes, *_) in zip(LAYOUTS, (by_1, by_2, by_4, by_8), strict=True):
        for one in outcomes:
            found.setdefault(one.layout.name, {})[one.spec] = one
        worst = max(outcomes, key=lambda one: one.gradient_error)
        table.append(
            f"  world of {world}: {len({one.layout.name for one in outcomes})} layouts, {len(outcomes)} steps, "
            f"loss {max(one.loss_error for one in outcomes):.1e}, gradient {worst.gradient_error:.1e} "
            f"({worst.parameter}, {worst.layout.name})"
        )
    return found


@marked
@pytest.mark.parametrize("name", list(SEEN))
def test_loss_and_every_gradient_equal_the_oracle_for_every_spec(name: str, visits: Any) -> None:
    for spec, seen in visits[name].items():
        assert not seen.error, (spec, seen.error)
        assert seen.loss_error < TOLERANCE, spec
        assert seen.gradient_error < TOLERANCE, (spec, seen.parameter)
        assert seen.facts["largest"] > 1e-4  # an error relative to nothing would mean nothing


@marked
@pytest.mark.parametrize("name", list(SEEN))
def test_metrics_are_the_oracles_and_the_same_on_all_ranks(name: str, visits: Any) -> None:
    for spec, seen in visits[name].items():
        assert seen.metric_error < 1e-12, (spec, seen.metric)
        assert seen.agreed, spec
        assert seen.ok


# ---- lower precision -----------------------------------------------------------------------------------------------

MIXED = [at for at in LAYOUTS[4] if len(at.model_axes) >= 2 and not at.own and at.kind == "gpt"]
SOME = {layout.name: list(SPECS) for layout in (LAYOUTS[4][0], *MIXED[:: 5 if EXHAUSTIVE else 9])}
LIMITS = {"float32": 1e-5, "bf16": 0.5}
"""Largest error of a parameter that can pass at all; in bf16 the bound itself is twice what one process gives."""


in_float32, in_bf16 = (world_fixture(layouts.tour, 4, SOME, precision) for precision in LIMITS)


@pytest.fixture(scope="module")
def lower(in_float32: Any, in_bf16: Any, table: list[str]) -> dict[str, list[Any]]:
    """Precision to every spec's outcome on some layouts that mix axes."""
    found = dict(zip(LIMITS, (in_float32[0], in_bf16[0]), strict=True))
    for precision in LIMITS:
        worst = max(found[precision], key=lambda one: one.gradient_error / one.bounds.gradient)
        table.append(
            f"  {precision}, {len(SOME)} layouts: loss {max(one.loss_error for one in found[precision]):.1e}, gradient "
            f"{worst.gradient_error:.1e} of {worst.bounds.gradient:.1e} ({worst.parameter}, {worst.spec}, "
            f"{worst.layout.name}), norm {max(one.norm_error for one in found[precision]):.1e}"
        )
    return found


@marked
@pytest.mark.parametrize("precision", LIMITS)
def test_lower_precision_stays_within_its_bound(precision: str, lower: Any) -> None:
    assert len(lower[precision]) == len(SOME) * len(SPECS)
    for seen in lower[precision]:
        assert seen.ok, (seen.layout.name, seen.spec, seen.gradient_error, seen.loss_error, seen.metric, seen.bounds)
        assert seen.bounds.gradient <= LIMITS[precision]
        assert seen.gradient_error > 1e-9  # or it did not run in this precision


@marked
def test_every_visit_that_was_chosen_was_made(visits: Any) -> None:
    assert {(layout.name, spec) for layout, spec in CASES if not layout.own} == {
        (name, spec) for name, by_spec in visits.items() for spec in by_spec if not by_spec[spec].layout.own
    }
    assert all(len(visits[layout.name]) == 1 for layout, _ in CASES if layout.own)


# ---- what the table must hold --------------------------------------------------------------------------------------


def test_the_table_has_sixty_layouts_over_four_sizes_of_world() -> None:
    assert list(LAYOUTS) == [1, 2, 4, 8]
    # Without what compares a loss of Megatron's own, and what an earlier megatron-core does not have.
    assert sum(not layout.own and layout.kind == "gpt" for layout in every_layout()) >= 60
    assert len(set(NAMES)) == len(NAMES)
    assert all(layout.world == world for world, group in LAYOUTS.items() for layout in group)
    for layout in every_layout():
        assert layout.world == layout.model_ranks * layout.dp, layout.name
        assert layout.dp * layout.cp % layout.ep == 0, layout.name


def test_what_is_visited_shows_all_that_the_table_shows() -> None:
    shown = set().union(*(layouts.features(layout) for layout, _ in CASES))
    assert shown == set().union(*map(layouts.features, every_layout()))
    assert len(SEEN) >= 35
    assert {spec for _, spec in CASES} >= set(SPECS)
    for spec in SPECS:  # every spec on every axis
        assert set().union(*(layouts.axes(layout) for layout, name in CASES if name == spec)) == {
            "tp", "pp", "vpp", "cp", "ep", "dp", "sp", "per_token", "distributed_optimizer", "packed",
        }  # fmt: skip


def test_thirty_layouts_of_ranks_are_distinct_and_twelve_mix_model_axes() -> None:
    assert len({layout.ranks_key for layout in every_layout()}) >= 30
    assert sum(len(layout.model_axes) >= 2 for layout in every_layout()) >= 12


AXES = {
    "tp": lambda at: at.tp > 1, "sp": lambda at: at.sp, "pp": lambda at: at.pp > 1, "vpp": lambda at: (at.vpp or 1) > 1,
    "cp": lambda at: at.cp > 1, "ep": lambda at: at.ep > 1, "dp": lambda at: at.dp > 1, "packed": lambda at: at.packed,
    "distributed optimizer": lambda at: at.distributed_optimizer, "per-token": lambda at: at.per_token,
    "not per-token": lambda at: not at.per_token, "empty rank": lambda at: at.empty_rank, "tied": lambda at: at.tied,
}  # fmt: skip


@pytest.mark.parametrize("axis", AXES)
def test_every_axis_is_above_one_on_five_layouts(axis: str) -> None:
    assert sum(AXES[axis](layout) for layout in every_layout()) >= 5


def test_every_value_of_an_axis_is_there() -> None:
    sizes = {axis: {getattr(layout, axis) for layout in every_layout()} for axis in ("tp", "pp", "cp", "ep", "dp")}
    assert sizes["tp"] >= {1, 2, 4} and sizes["pp"] >= {1, 2, 4} and sizes["cp"] >= {1, 2, 4}
    assert sizes["ep"] >= {1, 2} and sizes["dp"] >= {1, 2, 4, 8}
    flags = Counter(flag for layout in every_layout() for flag in ("overlap", "average", "variable_lengths", "shuffle",
                    "collection", "temperature", "tail", "recompute") if getattr(layout, flag))  # fmt: skip
    assert min(flags.values()) >= 1 and len(flags) == 8
    assert any(layout.loss_scale != 1 for layout in every_layout())


# ---- what the specs must hold --------------------------------------------------------------------------------------


def test_there_are_six_specs_or_more() -> None:
    assert len(SPECS) >= 6


def test_the_specs_hold_every_family_between_them() -> None:
    parts = [(spec, part) for spec in (make() for make in SPECS.values()) for part in spec.components]
    paths = " ".join(part.normalizer for _, part in parts)
    for unit in ("prompt", "episode", "sequence", "turn", "token"):
        assert f"mean({unit})" in paths, unit
    for family in ("sum(sequence) > sum(token)/4096", "/sqrt", "/pow(", "/avg"):
        assert family in paths, family
    assert {part.units for _, part in parts} == {"counted", "all"}
    assert {part.divide_by for _, part in parts} == {"tokens", "weights"}
    assert {part.count for _, part in parts} == {"members", "observations", "keep"}
    assert {part.count_rejected for _, part in parts} == {True, False}
    assert {part.ratio for _, part in parts if isinstance(part, pg.PolicyGradient)} >= {"token", "sequence", "turn"}
    assert any(isinstance(part, pg.KL) and part.gradient == "weighted" for _, part in parts)
    assert any(isinstance(part, pg.Entropy) and part.coef for _, part in parts)
    assert any(spec.corrections and not part.count_rejected for spec, part in parts)
    assert {type(mask).__name__ for spec, _ in parts for mask in spec.masks} >= {
        "DropTruncated", "DropZeroAdvantage", "UserMask",
    }  # fmt: skip


# ---- what the data must hold ---------------------------------------------------------------------------------------


def test_prompts_and_episodes_straddle_ranks() -> None:
    rows = jobs.rows_of_step()
    owners: dict[Any, set[int]] = {}
    for rank in range(2):
        for row in jobs.share(rows, rank, 2):
            for unit in (row["prompt"], (row["prompt"], row["episode"])):
                owners.setdefault(unit, set()).add(rank)
    assert any(len(at) == 2 for unit, at in owners.items() if isinstance(unit, str)), "no prompt straddles ranks"
    assert any(len(at) == 2 for unit, at in owners.items() if isinstance(unit, tuple)), "no episode straddles ranks"
    lengths = [len(row["tokens"]) for row in rows]
    assert max(lengths) >= 4 * min(lengths)
    advantages = [value for row in rows for value in row["advantages"]]
    assert min(advantages) < 0 < max(advantages)
    assert 0.0 in advantages


@marked
def test_data_can_tell_a_right_loss_from_a_wrong_one(visits: Any, table: list[str]) -> None:
    metrics = visits["dp2, 3 rows"]["rich"].facts["metrics"]
    shares = {side: metrics[f"rl/clip_{side}"] for side in ("low", "high", "dual")}
    table.append(f"tokens on a flat side of the clip: {', '.join(f'{k} {v:.1%}' for k, v in shares.items())}")
    assert all(shares.values())
    assert 0.05 < sum(shares.values()) < 0.4
    assert 0.05 < metrics["rl/is_truncated"] < 0.9
    ours = [seen["rich"] for seen in visits.values() if "rich" in seen]
    counts = {one.facts["microbatches"] for one in ours}
    assert min(counts) == 1 and max(counts) >= 8
    assert any(one.facts["empty"] for one in ours if one.layout.empty_rank)
