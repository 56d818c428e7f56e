"""examples/train_rl.py on replayed rollouts: the oracle's loss and gradient norm at each step, on any layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_pgloss as pg
from support.cover import EXHAUSTIVE
from support.programs import launch
from support.replay_oracle import Recipe, trajectory
from support.worlds import run_world

ROOT = Path(__file__).parents[1]
STEPS = 20 if EXHAUSTIVE else 8
"""Four updates on each rollout batch."""
LAYOUTS = {
    "one process": (1, "--sequences 2"),
    "tp2 pp2": (4, "--tp 2 --pp 2 --sequences 4"),
    "cp2 dp2": (4, "--cp 2 --sequences 2"),
    "pp2 vpp2 dp2": (4, "--pp 2 --vpp 2 --sequences 2"),
    "dp4": (4, "--tp 1 --sequences 1"),
}
LAYERS = 4 if EXHAUSTIVE else 2
"""One for each virtual stage."""
VISITED = list(LAYOUTS) if EXHAUSTIVE else ["one process", "tp2 pp2", "cp2 dp2"]
COMMON = ["--layers", str(LAYERS), "--hidden", "32", "--updates", "4", "--eval-every", "1000", "--plain", "--seed", "5"]
COMMON += ["--init-std", "0.1"]
SPEC = pg.presets.grpo(kl=0.05, entropy=0.01)
FLAGS = ["--preset", "grpo", "--kl", "0.05", "--entropy", "0.01"]


def _run(processes: int, flags: list[str], out: Path) -> list[dict[str, Any]]:
    """One run of the example; its metrics lines."""
    program = [str(ROOT / "examples" / "train_rl.py"), *COMMON, *flags, "--out", str(out)]
    done = launch(processes, *program, folder=ROOT)
    assert done.returncode == 0, f"{' '.join(program)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "step"]


def _oracle(rank: int, world: int, *args: Any) -> list[tuple[float, float]]:
    return trajectory(*args)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of a real policy: 8 prompts, 6 rollouts each."""
    folder = tmp_path_factory.mktemp("record")
    flags = [
        "--record",
        str(folder / "rollouts.jsonl"),
        "--iterations",
        str(STEPS // 4),
        "--prompts",
        "8",
        "--group-size",
        "6",
    ]
    _run(1, [*flags, "--lr", "3e-3"], folder / "out")
    return folder / "rollouts.jsonl"


def _worst(steps: list[dict[str, Any]], truth: list[tuple[float, float]]) -> tuple[float, float]:
    """Largest relative error of loss and norm; a loss that crosses zero is held to a tenth of the largest."""
    size = max(abs(loss) for loss, _ in truth)
    losses = max(
        abs(step["loss"] - loss) / max(abs(loss), 0.1 * size) for step, (loss, _) in zip(steps, truth, strict=True)
    )
    norms = max(abs(step["grad_norm"] - norm) / norm for step, (_, norm) in zip(steps, truth, strict=True))
    return losses, norms


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_layout_follows_the_oracle_for_20_steps_in_float64(
    record: Path, tmp_path: Path, table: list[str]
) -> None:
    plain = ["--dtype", "float64", "--optimizer", "adam", "--lr", "3e-3", "--clip-grad", "0"]
    flags = [*FLAGS, *plain, "--replay", str(record), "--max-steps", str(STEPS)]
    runs = {}
    for name in VISITED:
        processes, layout = LAYOUTS[name]
        runs[name] = _steps(_run(processes, [*flags, *layout.split()], tmp_path / name))
    reference = runs["one process"]
    assert all([s["samples"] for s in steps] == [s["samples"] for s in reference] for steps in runs.values())
    recipe = Recipe(seed=5, layers=LAYERS, init_std=0.1, optimizer="adam", lr=3e-3)
    truth = run_world(_oracle, 1, record, reference, SPEC, recipe)[0]

    clipped = [sum(s[f"rl/clip_{side}"] for side in ("low", "high", "dual")) for s in reference if s["update"]]
    table.append(
        f"replay, float64: clipped after a batch's first update {min(clipped):.1%} to {max(clipped):.1%}, "
        f"gradient norms {min(n for _, n in truth):.3g} to {max(n for _, n in truth):.3g}"
    )
    for name, steps in runs.items():
        losses, norms = _worst(steps, truth)
        micros, empty = {s["microbatches"] for s in steps}, sum(s["empty_microbatches"] for s in steps)
        table.append(
            f"  {name:14} worst error over {STEPS} steps: loss {losses:.1e}, gradient norm {norms:.1e}; "
            f"micro-batches {sorted(micros)}, {empty} empty"
        )
        assert len(steps) == STEPS
        assert losses < 1e-9 and norms < 1e-9, name
    assert min(norm for _, norm in truth) > 1e-3
    assert 0.01 <= sum(clipped) / len(clipped) <= 0.5
    assert min(s["microbatches"] for steps in runs.values() for s in steps) >= 3
    # The last of several data-parallel ranks has fewer rows than micro-batches, and every prompt straddles ranks.
    assert all(s["empty_microbatches"] for name in runs if "dp" in name for s in runs[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_megatrons_distributed_optimizer_with_clipping_follows_the_oracle_in_float32(
    record: Path, tmp_path: Path, table: list[str]
) -> None:
    """Two choices keep float32's rounding from growing, so that the tolerance can stay small.

    The entropy term is large, so that the loss is no small difference of large terms (group-relative advantages sum to
    zero). Adam's epsilon is large: with 1e-8 the first update is nearly the sign of the gradient, and near zero
    rounding decides that.
    """
    spec = pg.presets.grpo(kl=0.05, entropy=0.1)
    flags = [*FLAGS, "--entropy", "0.1", "--dtype", "float32", "--optimizer", "megatron", "--distributed-optimizer"]
    flags += ["--lr", "1e-3"]
    flags += ["--adam-eps", "1e-3", "--clip-grad", "0.5", "--replay", str(record), "--max-steps", str(STEPS)]
    layouts = {"tp2 dp2": "--tp 2 --sequences 3"} | ({"cp2 dp2": "--cp 2 --sequences 3"} if EXHAUSTIVE else {})
    runs = {name: _steps(_run(4, [*flags, *layout.split()], tmp_path / name)) for name, layout in layouts.items()}
    steps = runs["tp2 dp2"]
    recipe = Recipe(seed=5, layers=LAYERS, init_std=0.1, optimizer="adam", lr=1e-3, clip=0.5, eps=1e-3)
    truth = run_world(_oracle, 1, record, steps, spec, recipe)[0]
    clipped = sum(norm > 0.5 for _, norm in truth)
    table.append(f"replay, float32, distributed optimizer: {clipped} of {len(truth)} gradients clipped by norm")
    assert clipped
    for name, each in runs.items():
        losses, norms = _worst(each, truth)
        table.append(f"  {name:14} worst error over {STEPS} steps: loss {losses:.1e}, gradient norm {norms:.1e}")
        assert losses < 1e-5 and norms < 1e-5, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_echo_leaves_the_rl_component_alone(record: Path, tmp_path: Path) -> None:
    """The same rows with and without cross entropy: rl's counts and per-token weights keep every bit."""
    found = run_world(_rl_weights, 1, record)[0]
    assert found["grpo"][0] == found["echo"][0]
    assert found["grpo"][1] == found["echo"][1]
    assert found["echo"][2] > 0


def _rl_weights(rank: int, world: int, record: Path) -> dict[str, Any]:
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    import replay
    from hunt import Hunt
    from rollouts import to_batches

    out: dict[str, Any] = {}
    for name, spec in {
        "grpo": pg.presets.ppo(normalizer="mean(sequence) > mean(token)"),
        "echo": pg.presets.echo(normalizer="mean(sequence) > mean(token)"),
    }.items():
        batches = [
            batch.with_stream("old", torch.zeros(batch.tokens_T.numel()))
            for batch in to_batches(replay.read(str(record))[0], Hunt(), spec)
        ]
        plan = pg.plan(batches, spec, split=pg.Split(sequences=4), group="local")
        extra = plan.counts["ce"]["members"] if name == "echo" else 0
        out[name] = (plan.counts["rl"], plan.components["rl"].weight_T.numpy().tobytes(), extra)
    return out
