"""The command ``verify`` as a user runs it: torchrun, table, JSON, and an exit code that is 1 when a layout is off."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.cli import main
from megatron_pgloss.verify.data.batches import rounded, rows_of_step
from megatron_pgloss.verify.layouts.scenario import Scenario
from megatron_pgloss.verify.layouts.table import every_layout
from megatron_pgloss.verify.run.command import chosen_layouts, chosen_specs, own_layout
from megatron_pgloss.verify.run.compare import distance, metric_gap, worst
from megatron_pgloss.verify.run.findings import as_json, lines
from megatron_pgloss.verify.run.outcome import Bounds, Outcome
from support.cover import EXHAUSTIVE
from support.programs import ROOT, Ended, launch, torchrun

OWN_TERM = """
def drift(x):
    return x.unit_mean(x.log_ratio, "sequence").square()

def local(x):
    return x.log_ratio - x.log_ratio.detach().sum()  # of this micro-batch's shard: another number on every layout
"""
BROKEN = """
import sys
from megatron_pgloss.megatron import factors
factors.wrapper_factor = lambda chunks, layout: 1.0  # as if nobody divided by the data-parallel size
from megatron_pgloss.cli import main
sys.exit(main(sys.argv[1:]))
"""
ALONE = """
import sys
from megatron_pgloss.verify.run import visit
run, seen = visit.run_schedule, []
def one_fails(step, *given, **more):
    seen.append(step)
    if len(seen) == 2 and step.layout.dp_rank == 1:  # on the second layout
        raise RuntimeError("out of memory, say")
    return run(step, *given, **more)
visit.run_schedule = one_fails
from megatron_pgloss.cli import main
sys.exit(main(sys.argv[1:]))
"""


def spec_file(folder: Path, fn: str) -> Path:
    """A spec of the user's own, with a term of the user's own."""
    (folder / "mine.py").write_text(OWN_TERM)
    file = folder / "mine.toml"
    file.write_text(f"""
[[components]]
kind = "policy_gradient"
normalizer = "mean(prompt) > mean(token)"
[[components]]
kind = "term"
name = "mine"
fn = "mine:{fn}"
coef = 0.1
needs = ["old"]
[[corrections]]
kind = "truncated_is"
of = "policy"
high = 1.2
normalize = "sequence"
""")
    return file


def verify(folder: Path, processes: int, *args: str, program: tuple[str, ...] = ("-m", "megatron_pgloss")) -> Ended:
    """Run ``verify``; what it printed, and its exit code."""
    return launch(processes, *program, "verify", *args, folder=folder)


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """``--layouts`` with three processes: worlds of two and one, in which one and two ranks sit out."""
    folder = tmp_path_factory.mktemp("verify")
    done = verify(folder, 3, "--layouts", "packed,per-token", "--spec", "rich", "--json", "found.json")
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    return done, json.loads((folder / "found.json").read_text())


def test_layouts_that_fit_are_visited_and_the_others_counted(fitting: Any) -> None:
    done, found = fitting
    named = [layout for layout in every_layout() if "packed" in layout.name and layout.per_token]
    fit = [layout for layout in named if layout.world <= 3]
    assert {layout.world for layout in fit} == {1, 2}
    assert [one["layout"] for one in found["layouts"]] == [layout.name for layout in fit]
    assert [one["layout"] for one in found["left_out"]] == [layout.name for layout in named if layout.world > 3]
    assert f"{len(fit)} layouts, 0 off, {len(named) - len(fit)} left out for lack of ranks" in done.stdout


def test_the_table_names_layouts_errors_worst_parameters_and_verdicts(fitting: Any) -> None:
    done, found = fitting
    for one in found["layouts"]:
        (row,) = [line for line in done.stdout.splitlines() if f" {one['layout']}  " in line]
        assert row.rstrip().endswith("ok")
        assert one["specs"]["rich"]["parameter"].split(".")[-1] in done.stdout
    for heading in ("layout", "loss", "gradient", "worst parameter", "verdict"):
        assert heading in done.stdout
    assert "[1/" in done.stderr and ": ok" in done.stderr  # progress, where there is no terminal


def test_the_json_holds_every_figure_and_the_versions(fitting: Any) -> None:
    _, found = fitting
    assert found["ok"] is True
    assert found["precision"] == "float64"
    assert set(found["versions"]) == {"megatron_pgloss", "python", "torch", "megatron-core", "date"}
    for one in found["layouts"]:
        figures = one["specs"]["rich"]
        assert 0 < figures["gradient"] < 1e-10
        assert figures["loss"] < 1e-10 and figures["metric"] < 1e-10
        assert figures["bound"] == 1e-10


def test_a_spec_of_the_users_own_on_a_layout_of_the_users_own(tmp_path: Path) -> None:
    file = spec_file(tmp_path, "drift")
    own = ("--spec", str(file), "--functions", "mine")
    done = verify(tmp_path, 2, "--cp", "2", "--packed", *own, "--json", "found.json")
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    (one,) = json.loads((tmp_path / "found.json").read_text())["layouts"]
    assert one["layout"] == "cp2, dp1, packed 80"
    assert one["ok"]
    # What Megatron-Core and torch say of themselves does not stand before the table.
    assert "Warning" not in done.stderr + done.stdout and "CUDA runtime" not in done.stderr


def test_a_term_that_depends_on_the_layout_ends_with_exit_code_1(tmp_path: Path) -> None:
    file = spec_file(tmp_path, "local")
    done = verify(tmp_path, 1, "--sequences", "3", "--spec", str(file), "--functions", "mine", "--json", "found.json")
    assert done.returncode == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"] is False
    assert "OFF, " in found["layouts"][0]["verdict"]
    assert "1 layouts, 1 off" in done.stdout


def test_a_dropped_factor_in_the_product_ends_with_exit_code_1(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    done = verify(tmp_path, 2, "--spec", "dapo", "--sequences", "4", "--json", "found.json", program=(str(script),))
    assert done.returncode == 1, done.stderr[-3000:] + done.stdout
    (one,) = json.loads((tmp_path / "found.json").read_text())["layouts"]
    assert one["verdict"] == "OFF, dapo: gradient"
    assert one["specs"]["dapo"]["gradient"] == pytest.approx(0.5, rel=1e-6)  # divided by two ranks, multiplied by none
    assert one["specs"]["dapo"]["loss"] < 1e-10  # the metrics know nothing of it


@pytest.mark.slow
def test_an_error_on_one_rank_alone_is_a_row_and_the_rest_is_said_to_be_unvisited(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    asked = ("--layouts", "dp2", "--spec", "dapo", "--json", "found.json")
    done = (torchrun if EXHAUSTIVE else launch)(2, str(script), "verify", *asked, folder=tmp_path)
    assert done.returncode == 1, done.stderr[-3000:] + done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    first, second = found["layouts"]
    assert (found["ok"], first["ok"], second["ok"]) == (False, True, False)
    assert second["verdict"] == "OFF, one of the specs: error: rank 1: RuntimeError: out of memory, say"
    assert "2 layouts, 1 off" in done.stdout
    assert f"{len(found['not_visited'])} not visited after the error" in done.stdout


# ---- the parts, without a process ----------------------------------------------------------------------------------


def parsed(*argv: str) -> argparse.Namespace:
    from megatron_pgloss.cli import verify

    parser = argparse.ArgumentParser()
    verify.add(parser.add_subparsers(dest="command"))
    return parser.parse_args(["verify", *argv])


def test_a_layout_of_the_users_own_fills_up_the_processes_with_data_parallel_ranks() -> None:
    (layout,) = chosen_layouts(parsed("--tp", "2", "--pp", "2", "--sp", "--packed", "64", "--per-token"), 10)
    assert (layout.world, layout.dp, layout.tp, layout.pp, layout.sp) == (8, 2, 2, 2, True)
    assert layout.split == pg.Split(max_tokens=64)
    assert layout.per_token
    (fused,) = chosen_layouts(parsed("--head", "auto"), 1)
    assert fused.step_options == {"head": "auto"}
    assert own_layout({"ep": 2}, 4).experts == 4
    assert own_layout({"ep": 2, "cp": 2}, 5).world == 4
    assert own_layout({"tp": 4}, 2).world == 4  # too many for these processes: left out, not shrunk


def test_without_a_layout_the_whole_table_is_visited() -> None:
    assert chosen_layouts(parsed(), 8) == every_layout() == chosen_layouts(parsed("--layouts", "all"), 8)
    assert all("cp2" in one.name for one in chosen_layouts(parsed("--layouts", "cp2"), 8))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--layouts", "all", "--tp", "2"], "for the built-in table"),
        (["--layouts", "tp3"], "no layout of the table"),
        (["--ep", "3", "--cp", "2"], "do not divide each other"),
    ],
)
def test_layouts_that_cannot_be_are_refused(argv: list[str], words: str) -> None:
    with pytest.raises(pg.LayoutError, match=words):
        chosen_layouts(parsed(*argv), 8)


def test_specs_are_built_in_names_or_files(tmp_path: Path) -> None:
    file = tmp_path / "loss.toml"
    file.write_text(pg.presets.dapo().to_toml())
    assert list(chosen_specs(["dapo", str(file)])) == ["dapo", str(file)]
    with pytest.raises(pg.SpecError, match="no built-in spec"):
        chosen_specs(["dappo"])
    surrogate = chosen_specs(["dapo"], half=True)["dapo"].component("rl").surrogate
    assert surrogate.high > 5  # no clip holds


def test_the_command_line_says_what_is_wrong_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--spec", "dappo"]) == 2
    assert "no built-in spec 'dappo'" in capsys.readouterr().err


def outcome(**more: Any) -> Outcome:
    fields: dict[str, Any] = dict(loss_error=1e-15, gradient_error=1e-14, norm_error=1e-15, metric_error=0.0)
    limit = Bounds(loss=1e-10, gradient=1e-10, norm=1e-10, metric=1e-10)
    return Outcome(layout=Scenario(world=1), bounds=limit, **(fields | {"spec": "dapo"} | more))


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ({"gradient_error": 1e-9}, "gradient"),
        ({"norm_error": float("nan")}, "gradient"),
        ({"loss_error": 1e-9}, "loss"),
        ({"metric_error": 1e-9, "metric": "rl/ratio"}, "rl/ratio"),
        ({"agreed": False}, "ranks were told different metrics"),
        ({"error": "LayoutError: x"}, "LayoutError: x"),
        ({"loss_error": float("inf")}, "loss"),
    ],
)
def test_whatever_is_off_is_off(fault: dict[str, Any], verdict: str) -> None:
    assert outcome().ok
    (line,) = lines([outcome(), outcome(spec="other", **fault)])
    assert not line.ok
    assert line.verdict.startswith("OFF, other: ")
    assert verdict in line.verdict
    assert as_json([line], [])["ok"] is False
    json.dumps(as_json([line], []), allow_nan=False)


def test_nothing_visited_is_not_well() -> None:
    assert as_json([], [])["ok"] is False


def test_errors_of_gradients_by_hand() -> None:
    reference = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([1e-6, 0.0])}
    grads = {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([1e-6, 4e-3])}
    # a: 1 / 4. b: against 1e-3 of the largest, 4e-3 / 4e-3.
    assert worst(grads, reference) == (pytest.approx(1.0), "b")
    assert distance({"a": torch.tensor([3.0, 0.0])}, {"a": torch.tensor([0.0, 4.0])}) == pytest.approx(5 / 4)
    assert worst({"a": torch.tensor([float("nan")])}, {"a": torch.tensor([1.0])})[0] == float("inf")
    with pytest.raises(pg.LayoutError, match="in only one of the two models"):
        worst({}, reference)


def test_a_metric_that_is_missing_or_nan_is_infinitely_off() -> None:
    answer, spec = {"loss": 2.0, "components": {"rl": 2.0}, "ratio_stats": {}}, pg.presets.dapo()
    assert metric_gap({"loss": 2.0, "rl/loss": 2.0}, answer, spec)[0] == 0.0
    assert metric_gap({"loss": 2.0}, answer, spec) == (float("inf"), "rl/loss")
    assert metric_gap({"loss": 2.0, "rl/loss": float("nan")}, answer, spec) == (float("inf"), "rl/loss")


def test_rounded_rows_hold_what_float32_holds() -> None:
    rows = rounded(rows_of_step(0), torch.float32)
    value = rows[0]["old"][3]
    assert value == torch.tensor(value, dtype=torch.float32).item()
    assert value != rows_of_step(0)[0]["old"][3]
    assert rows[0]["tokens"] == rows_of_step(0)[0]["tokens"]


def test_the_lint_rule_covers_every_part_of_the_oracle() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rule,) = [one for one in contracts if one["id"] == "oracle"]
    assert rule["source_modules"] == ["megatron_pgloss.verify.oracle"]  # a folder: every file in it
    assert rule["forbidden_modules"] == ["megatron_pgloss.*", "megatron_pgloss.verify.*", "megatron"]
    allowed = {line.split(" -> ")[1] for line in rule["ignore_imports"]}
    assert allowed == {"megatron_pgloss.errors", "megatron_pgloss.verify.oracle.*"}
