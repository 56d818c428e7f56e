"""The output of a run: metrics as JSON lines, TensorBoard, a learning curve, a token page, and progress on the way."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

from hunt import Hunt
from rollouts import Rollout

from megatron_pgloss import Plan
from megatron_pgloss.view import learning_curve, rows_of_plan, token_page

SHOWN = {
    "success": "success",
    "greedy": "greedy",
    "ratio": "ratio",
    "clipped": "clipped",
    "entropy": "entropy",
    "grad_norm": "grad norm",
    "observation_nll": "answers nll",
    "environment_entropy": "of at least",
    "seconds": "s",
}
"""Figures of an iteration that the progress shows, with their labels."""


def installed(*modules: str) -> bool:
    """Whether all of these can be imported."""
    return all(importlib.util.find_spec(module) is not None for module in modules)


class Logbook:
    """Rank 0's files under ``folder``; on other ranks every method does nothing.

    ``metrics.jsonl`` holds one object per line: ``"kind": "step"`` for an optimizer step, ``"iteration"`` for a rollout
    batch.
    """

    def __init__(self, folder: str, *, active: bool, append: bool, total: int, plain: bool) -> None:
        self.folder, self.active, self.total = Path(folder), active, total
        self.metrics = self.folder / "metrics.jsonl"
        self.plain = plain or not sys.stdout.isatty() or not installed("rich")
        self.board, self.bar = None, None
        if not active:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not append:
            self.metrics.write_text("")
        if installed("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.folder / "tensorboard"))

    def start(self) -> None:
        """Show the progress bar, where there is a terminal for it."""
        if self.active and not self.plain:
            self.bar = _bar(self.total)

    def say(self, text: str) -> None:
        """Print a line, on rank 0 alone."""
        if self.active:
            print(text, flush=True)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics file; NaN, which JSON does not know, becomes null."""
        if not self.active:
            return
        clean = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in line.items()}
        with self.metrics.open("a") as file:
            file.write(json.dumps(clean) + "\n")
        if self.board is not None and line["kind"] == "iteration":
            for key, value in clean.items():
                if isinstance(value, float):
                    self.board.add_scalar(key, value, line["iteration"])

    def progress(self, line: dict[str, Any], *, every: int) -> None:
        """Show an iteration's figures: in the bar, or as a plain line every so often."""
        if not self.active:
            return
        shown = {label: line[key] for key, label in SHOWN.items() if isinstance(line.get(key), float)}
        figures = "  ".join(f"{label} {value:.3g}" for label, value in shown.items() if not math.isnan(value))
        number = line["iteration"] + 1
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=number, figures=figures)
        elif number % every == 0 or number == self.total:
            print(f"iteration {number}/{self.total}  {figures}", flush=True)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind that have been written."""
        found = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return [line for line in found if line["kind"] == kind]

    def curve(self, levels: dict[str, float]) -> str:
        """Draw greedy and sampled success over iterations against the reference levels; return where the file lies."""
        if not installed("matplotlib"):
            return "no curve (pip install matplotlib)"
        lines = self.lines("iteration")
        greedy = [(line["iteration"], line["greedy"]) for line in lines if line.get("greedy") is not None]
        sampled = [(line["iteration"], line["success"]) for line in lines if line.get("success") is not None]
        series = {
            name: tuple(zip(*points, strict=True))
            for name, points in (("greedy", greedy), ("sampled", sampled))
            if points
        }
        path = learning_curve(
            self.folder / "curve.png", series, title="Number hunt: success while training",
            x_label="rollout batches", y_label="share of hidden numbers found", hlines=levels, y_range=(0, 1.03),
        )  # fmt: skip
        return str(path)

    def page(self, plan: Plan, rollouts: list[Rollout], which: str, hunt: Hunt, *, title: str) -> str:
        """Write this rank's rows of one optimizer step as a coloured page; return where the file lies. ``which`` names
        that step.
        """
        if not installed("jinja2"):
            return "no token page (pip install jinja2)"
        assert plan.batch is not None and plan.batch.sample_ids is not None
        by_name = {rollout.name: rollout for rollout in rollouts}
        mine = [by_name[str(name)] for name in plan.batch.sample_ids]
        facts = {"number": [one.hidden for one in mine], "reward": [f"{one.reward:.2f}" for one in mine]}
        rows = rows_of_plan(plan, decode=hunt.decode, facts=facts)
        said = f"rows of the last step with an advantage other than 0 on this rank: {which}"
        return str(token_page(rows, self.folder / "tokens.html", title=title, subtitle=said))

    def close(self) -> None:
        """Close the progress bar and TensorBoard."""
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()


def _bar(total: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("train"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    bar.add_task("train", total=total, figures="")
    bar.start()
    return bar
