"""The harness sees mistakes: ``verify --self-test`` puts every fault in, and itself goes red where one is not seen."""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.verify.faults.fault import CP, EVERYWHERE, NOWHERE, PP, TP, Fault, Place, find, injected
from megatron_pgloss.verify.faults.seen import Cell, SelfTest
from support.cover import EXHAUSTIVE
from support.programs import program_fixture
from support.worlds import world_fixture

PLACE = Place(
    tp=1, cp=2, pp=1, vpp=1, dp=2, tp_rank=0, cp_rank=0, dp_rank=0, workers=2, per_token=False, packed=True,
    averaging=False, experts=False, auxiliary=False, learned_positions=False, temperature=False,
    padded_vocabulary=False,
)  # fmt: skip


# ---- the whole of it, as a user runs it ----------------------------------------------------------------------------


def every_fault_once(rank: int, world: int) -> tuple[dict[str, Any], str]:
    """Each fault on a layout where it must be seen, and on one where it cannot show."""
    warnings.simplefilter("ignore")
    from megatron_pgloss.verify.faults.self_test import put_in

    seen = put_in(once=True)
    return seen.to_dict(), seen.summary


if EXHAUSTIVE:  # as a user runs it: every fault on every layout
    command = program_fixture(
        4, "-m", "megatron_pgloss", "verify", "--self-test", "--json", "found.json", files=["found.json"], timeout=900
    )
else:
    command = world_fixture(every_fault_once, 4, timeout=600, early=True)


@pytest.fixture(scope="module")
def found(command: Any, table: list[str]) -> dict[str, Any]:
    if not EXHAUSTIVE:
        seen, summary = command[0]
        assert all(other == command[0] for other in command[1:])
        table.append(f"verify --self-test, each fault once: {summary}")
        return seen
    assert "found.json" in command.files, command.stderr[-3000:] + command.stdout
    table += ["verify --self-test", *(f"  {line}" for line in command.stdout.splitlines())]
    assert command.returncode == 0, command.stdout
    return json.loads(command.files["found.json"])


@pytest.mark.multiproc
@pytest.mark.slow
def test_every_fault_is_seen_exactly_where_the_table_says(found: Any) -> None:
    assert found["problems"] == []
    assert found["ok"] is True
    cells = [cell for fault in found["faults"] for cell in fault["layouts"].values()]
    must = [cell["must_be_seen"] for cell in cells]
    assert (len(found["faults"]), must.count(True), must.count(False)) == (
        (44, 168, 95) if EXHAUSTIVE else (44, 44, 26)
    )


@pytest.mark.multiproc
def test_faults_patch_at_least_twenty_different_functions_and_each_is_seen_somewhere(found: Any) -> None:
    seen = found
    assert len({fault["target"] for fault in seen["faults"]}) == len(seen["faults"]) >= 40
    for fault in seen["faults"]:
        cells = fault["layouts"].values()
        assert any(cell["must_be_seen"] and cell["calls"] for cell in cells), fault["name"]
    assert all(cell["gradient"] < 1e-10 for cell in seen["without_fault"].values())


@pytest.mark.multiproc
def test_a_dropped_cp_factor_is_seen_at_cp_2_and_cannot_be_at_cp_1(found: Any) -> None:
    (fault,) = [fault for fault in found["faults"] if fault["name"] == "cp factor dropped"]
    cells = fault["layouts"]
    assert cells["dp2 cp2 packed"]["gradient"] == pytest.approx(1.0, rel=1e-9)  # twice the right gradient
    # The schedule leaves a per-token loss alone, and there is nothing to undo without context parallelism.
    neutral = ["cp4 per-token", "dp2 tp2 temperature"] if EXHAUSTIVE else ["cp4 per-token"]
    assert all(cells[name]["gradient"] < 1e-10 for name in neutral)


# ---- it goes red --------------------------------------------------------------------------------------------------


def fault(**changes: Any) -> Fault:
    given = dict(
        name="old is the policy", target="megatron_pgloss.objective.streams:Streams.token_log_ratio",
        imitates="", make=lambda right, at: lambda self: self.logp - self.logp.detach(), shows=EVERYWHERE,
    )  # fmt: skip
    return Fault(**(given | changes))


BAD_TABLES = {
    "seen": fault(),
    "neutral": fault(make=lambda right, at: right),
    "said to be invisible": fault(shows=NOWHERE),
    "never run": fault(
        target="megatron_pgloss.megatron.sharing:broadcast", make=lambda right, at: right, shows=NOWHERE
    ),
    "refused": fault(
        target="megatron_pgloss.megatron.factors:_drive", make=lambda right, at: lambda *args, **more: more["explicit"]
    ),
}


def tour(rank: int, world: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    from megatron_pgloss.verify.faults.bench import BENCHES
    from megatron_pgloss.verify.faults.self_test import put_in

    return {name: put_in([one], BENCHES[2:3]).problems for name, one in BAD_TABLES.items()}


everyone = world_fixture(tour, 4)


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_neutral_fault_a_wrong_table_and_a_patch_that_never_ran_go_red(everyone: Any) -> None:
    assert everyone == everyone[:1] * 4
    problems = everyone[0]
    assert problems["seen"] == problems["refused"] == []
    (neutral,) = problems["neutral"]
    assert "must be seen on 'dp2 tp2 temperature', but the error is" in neutral
    nowhere, visible = problems["said to be invisible"]
    assert "no layout can see it" in nowhere
    assert "cannot show on 'dp2 tp2 temperature', but the error is" in visible
    never, _ = problems["never run"]
    assert "patch not reached, megatron_pgloss.megatron.sharing:broadcast never ran" in never


@pytest.mark.parametrize(
    ("cell", "must", "red"),
    [
        (Cell(gradient=0.5, calls=1), True, False),
        (Cell(metric=0.5, calls=1), True, False),
        (Cell(loss=float("inf"), calls=1), True, False),
        (Cell(error="LayoutError: no", calls=1), True, False),
        (Cell(gradient=1e-7, calls=1), True, True),  # between right and wrong: neither
        (Cell(gradient=1e-7, calls=1), False, True),
        (Cell(calls=1), True, True),
        (Cell(error="LayoutError: no", calls=1), False, True),
        (Cell(gradient=1e-12), False, False),
    ],
)
def test_a_run_is_held_to_the_table_in_both_directions(cell: Cell, must: bool, red: bool) -> None:
    one, other = fault(), {"here": Cell(gradient=1.0, calls=1)}
    seen = SelfTest(layouts=["here", "there"], faults=[one], clean=dict.fromkeys(("here", "there"), Cell()))
    seen.cells = {(one.name, "here"): other["here"], (one.name, "there"): cell}
    seen.expected = {(one.name, "here"): True, (one.name, "there"): must}
    assert seen.ok is not red
    assert json.loads(json.dumps(seen.to_dict()))["ok"] is not red
    assert [one.name, "everywhere"] in [row[:2] for row in seen.rows()]


def test_a_right_step_that_is_off_makes_the_run_red() -> None:
    seen = SelfTest(layouts=["here"], faults=[], clean={"here": Cell(metric=1e-9)})
    assert seen.problems == ["without a fault, 'here' is off by 1.0e-09"]


# ---- patching -----------------------------------------------------------------------------------------------------


def test_a_function_is_replaced_wherever_the_package_looks_it_up_and_put_back() -> None:
    from megatron_pgloss.planning import split, wire

    one = fault(target="megatron_pgloss.planning.split:round_up", make=lambda right, at: lambda value, multiple: -1)
    right = split.round_up
    with injected(one, PLACE) as calls:
        assert (split.round_up(5, 4), wire.round_up(5, 4), right(5, 4)) == (-1, -1, 8)
    assert calls.count == 2
    assert split.round_up is wire.round_up is right


def test_properties_static_methods_and_methods_stay_what_they_are() -> None:
    micro = "megatron_pgloss.planning.microbatch:MicroBatch"
    targets = (f"{micro}.targets", "megatron_pgloss.metrics:Metric.sum", f"{micro}.weight")
    for target in targets:
        owner, name, original = find(target)
        with injected(fault(target=target, make=lambda right, at: right), PLACE):
            assert type(vars(owner)[name]) is type(original)
            assert vars(owner)[name] is not original
        assert vars(owner)[name] is original
    with injected(fault(target=targets[1], make=lambda right, at: lambda value: right(2 * value)), PLACE):
        assert float(pg.metrics.Metric.sum(torch.ones(())).value) == 2


def test_an_exception_inside_leaves_the_product_whole() -> None:
    _, name, original = find("megatron_pgloss.planning.split:refine")
    with pytest.raises(KeyError), injected(fault(target="megatron_pgloss.planning.split:refine"), PLACE):
        raise KeyError(name)
    assert find("megatron_pgloss.planning.split:refine")[2] is original


@pytest.mark.parametrize(
    "target", ["planning.split:gone", "planning.gone:refine", "planning.split:Split", "metrics:_IDENTITY"]
)
def test_a_target_that_is_gone_or_no_function_is_refused(target: str) -> None:
    with pytest.raises(pg.SpecError, match="target"):
        find(f"megatron_pgloss.{target}")


def test_conditions_combine_in_words_and_in_truth() -> None:
    both = CP & ~TP
    assert both.words == "cp > 1, not tp > 1"
    assert both.holds(PLACE) and not both.holds(replace(PLACE, tp=2))
    assert (PP | CP).holds(PLACE) and not (PP | TP).holds(PLACE)


def test_the_self_test_takes_no_other_layouts_specs_or_precision(tmp_path: Path) -> None:
    from megatron_pgloss.verify.faults.self_test import self_test

    given = dict(layouts=None, spec=[], precision=None, device="cpu", json=None, timeout=600)
    for wrong in (dict(layouts="all"), dict(spec=["dapo"]), dict(precision="bf16")):
        with pytest.raises(pg.SpecError, match="of its own"):
            self_test(argparse.Namespace(**(given | wrong)))
    with pytest.raises(pg.LayoutError, match="more processes"):
        self_test(argparse.Namespace(**given))
