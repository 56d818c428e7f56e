"""examples/train_rl.py, run short: what it leaves behind, resuming, and draws that no layout changes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_pgloss as pg
from support.cover import EXHAUSTIVE
from support.programs import Ended, launch, torchrun
from support.steps import pictured
from support.worlds import run_world, world_fixture

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--plain", "--hidden", "32", "--prompts", "4", "--group-size", "4", "--updates", "2", "--sequences", "4"]
SINGLE = ["--iterations", "1", "--layers", "4", "--dtype", "float64", "--optimizer", "sgd", "--lr", "0.1"]
LAYOUTS = {
    "tp2 sp": ["--tp", "2", "--sequence-parallel"],
    "cp2": ["--cp", "2"],
    "cp2 packed": ["--cp", "2", "--max-tokens", "64"],
    "pp2 vpp2": ["--pp", "2", "--vpp", "2", "--per-token-loss"],
    "dp2": ["--tp", "1"],
}
MORE = ("cp2", "dp2")
VISITED = {name: flags for name, flags in LAYOUTS.items() if EXHAUSTIVE or name not in MORE}
EXPERTS = ["--experts", "4"]


def _run(start: Callable[..., Ended], processes: int, *flags: str, folder: Path) -> str:
    """One run; what it printed."""
    program = [str(EXAMPLES / "train_rl.py"), *SMALL, *flags]
    done = start(processes, *program, folder=folder)
    assert done.returncode == 0, f"{' '.join(program)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def _lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def _visit(rank: int, world: int, folder: Path, layouts: dict[str, list[str]]) -> None:
    """Run each layout in this world, recording what was drawn."""
    sys.path.insert(0, str(EXAMPLES))
    import loop
    import options

    from megatron_pgloss.verify.layouts.models import destroy_parallel

    for name, flags in layouts.items():
        files = ["--out", str(folder / name), "--record", str(folder / f"{name}.jsonl")]
        loop.run(options.parse([*SMALL, *SINGLE, *flags, *files]))
        destroy_parallel()


def _helpers(rank: int, world: int) -> dict[str, Any]:
    """What the small functions of the example answer."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    from replay import deal
    from rollouts import Rollout, group_advantages, uniform

    reward_N = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3], dtype=torch.float64)
    group_N = torch.tensor([5, 5, 5, 5, 7, 7, 7])
    rows = [
        Rollout(iteration=0, index=i, hidden=i // 4, tokens=[4], logprobs=[], reward=0, success=False, advantage=0)
        for i in range(8)
    ]
    return {
        "scaled": group_advantages(reward_N, group_N, scale=True).tolist(),
        "centred": group_advantages(reward_N, group_N, scale=False).tolist(),
        "draws": [uniform(0, 1, i) for i in range(2000)],
        "again": uniform(0, 1, 17),
        "dealt": [[row.index for row in deal(rows, part, 3)] for part in range(3)],
    }


helped = world_fixture(_helpers, 1)


def test_advantages_draws_and_dealing(helped: Any) -> None:
    """Rewards 1 0 0 1: mean 0.5, standard deviation 0.5. Rewards 0.3 0.3 0.3: nothing to learn, exactly 0."""
    found = helped[0]
    assert found["scaled"] == [1, -1, -1, 1, 0, 0, 0]
    assert found["centred"] == [0.5, -0.5, -0.5, 0.5, 0, 0, 0]
    draws = found["draws"]
    assert draws[17] == found["again"] and len(set(draws)) == len(draws)
    assert min(draws) >= 0 and max(draws) < 1
    # The mean of 2000 uniforms has standard deviation 0.0065.
    assert abs(sum(draws) / len(draws) - 0.5) < 0.03
    assert found["dealt"] == [[1, 3, 5, 7], [2, 6], [0, 4]]


@pytest.mark.parametrize(("advantages", "shown"), [((1.0, 0.5, 0.0), 1), ((0.0, 0.0), 1), ((1.0, 0.0, 0.0), 0)])
def test_the_page_shows_the_last_step_that_teaches(
    advantages: tuple[float, ...], shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a solved task the last rollouts have advantage 0 everywhere: a page of them shows nothing in colour."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import loop

    spec, split = pg.presets.reinforce(), pg.Split(sequences=1)
    plans = [pg.plan([pictured("cAA", advantages=one)], spec, split=split) for one in advantages]

    class Played:
        args, figures, iteration = SimpleNamespace(iterations=len(plans), eval_every=99), dict[str, float](), 0

        @property
        def ended(self) -> bool:
            return self.iteration == len(plans)

        def iterate(self) -> Any:
            yield {"update": 0, "loss": 0.0}, plans[self.iteration], [self.iteration]
            self.iteration += 1

    log = SimpleNamespace(write=lambda line: None, progress=lambda line, every: None)
    plan, rollouts, which = loop.train(Played(), log)
    assert plan is plans[shown] and rollouts == [shown]
    assert which == f"iteration {shown + 1} of {len(plans)}, step 1"


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_short_run_on_tp2_pp2_leaves_its_files(tmp_path: Path) -> None:
    flags = ["--iterations", "2", "--eval-every", "1", "--preset", "echo", "--out", str(tmp_path)]
    printed = _run(torchrun if EXHAUSTIVE else launch, 4, *flags, folder=tmp_path)
    steps, iterations, (end,) = (_lines(tmp_path, kind) for kind in ("step", "iteration", "end"))
    assert "world size 4: tp 2 x pp 2 x vpp 1 x cp 1 x ep 1 x dp 1" in printed
    assert "0.05 ce" in printed
    assert [line["step"] for line in steps] == [0, 1, 2, 3] and len(iterations) == 2
    for line in (*steps, *iterations, end):
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float)), line
    assert all(line["grad_norm"] > 0 and line["microbatches"] == 2 and line["rows"] == 8 for line in steps)
    # The first update of a batch is on-policy; the second is not.
    assert all(abs(line["rl/ratio_max"] - 1) < 1e-5 for line in steps if line["update"] == 0)
    assert all(abs(line["rl/ratio_max"] - 1) > 1e-5 for line in steps if line["update"] == 1)
    # The sampler's log-probs are those of the scoring pass.
    assert all(line["rl/k3_rollout_pi"] < 1e-9 for line in steps if line["update"] == 0)
    assert all(0 <= line["success"] <= 1 and 0 <= line["greedy"] <= 1 for line in iterations)
    assert 0 < end["environment_entropy"] < end["observation_nll"]
    assert end["random policy"] < 0.05 and end["best strategy"] == 1
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "tokens.html").read_text(encoding="utf-8")
    assert "higher" in page and "the last step with an advantage other than 0 on this rank: iteration 2 of 2" in page
    assert list((tmp_path / "tensorboard").iterdir())
    for word in ("curve.png", "tokens.html", "metrics.jsonl", "after training", "best strategy", "training took"):
        assert word in printed, word


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_resumed_run_takes_the_same_steps(tmp_path: Path) -> None:
    flags = ["--tp", "2", "--iterations", "2"]
    parts = [*flags, "--out", str(tmp_path / "parts")]
    for run in (
        [*flags, "--out", str(tmp_path / "whole")],
        [*parts, "--max-steps", "2", "--save", str(tmp_path / "saved")],
        [*parts, "--load", str(tmp_path / "saved")],
    ):
        _run(launch, 2, *run, folder=tmp_path)
    whole, parts = _lines(tmp_path / "whole", "step"), _lines(tmp_path / "parts", "step")
    assert len(whole) == 4 and whole == parts


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_no_layout_changes_what_is_drawn_or_learnt(tmp_path: Path, kind: str) -> None:
    more, layouts = ([], VISITED) if kind == "dense" else (EXPERTS, {"ep2": ["--ep", "2"]})
    run_world(_visit, 1, tmp_path, {"one": more})
    run_world(_visit, 2, tmp_path, {name: [*more, *flags] for name, flags in layouts.items()})
    drawn = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    steps = _lines(tmp_path / "one", "step")
    assert len(drawn) == 16 and len(steps) == 2
    for name in layouts:
        other = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for ours, theirs in zip(drawn, other, strict=True):
            assert theirs.pop("logprobs") == pytest.approx(ours["logprobs"], rel=0, abs=1e-9), name
            assert theirs == {key: value for key, value in ours.items() if key != "logprobs"}, name
        for mine, its in zip(steps, _lines(tmp_path / name, "step"), strict=True):
            for key in ("loss", "grad_norm"):
                assert its[key] == pytest.approx(mine[key], rel=1e-9, abs=1e-12), (name, key)
