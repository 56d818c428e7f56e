"""What a run leaves behind and shows while it runs: metrics as JSON lines, TensorBoard, curve, token page, progress."""

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
from megatron_pgloss.view import TokenCell, TokenRow, learning_curve, token_page

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
"""Figures of an iteration that the progress shows, and how it calls them."""


def installed(*modules: str) -> bool:
    """Whether all of these can be imported."""
    return all(importlib.util.find_spec(module) is not None for module in modules)


class Logbook:
    """Rank 0's files under ``folder``; on other ranks every method does nothing.

    ``metrics.jsonl`` holds one object a line: ``"kind": "step"`` per optimizer step, ``"iteration"`` per rollout batch.
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
        """What has been written of one kind."""
        found = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return [line for line in found if line["kind"] == kind]

    def curve(self, levels: dict[str, float]) -> str:
        """Draw greedy and sampled success over iterations against the reference levels; say where it lies."""
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

    def page(self, plan: Plan, rollouts: list[Rollout], hunt: Hunt, title: str) -> str:
        """Write the rows of the last optimizer step that this rank holds as one coloured page; say where it lies."""
        if not installed("jinja2"):
            return "no token page (pip install jinja2)"
        rows = token_rows(plan, rollouts, hunt)
        return str(
            token_page(rows, self.folder / "tokens.html", title=title, subtitle="rows of the last optimizer step")
        )

    def close(self) -> None:
        """End bar and TensorBoard."""
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


def token_rows(plan: Plan, rollouts: list[Rollout], hunt: Hunt) -> list[TokenRow]:
    """The plan's rows with role, membership, weight and advantage of every token."""
    batch, by_name = plan.batch, {rollout.name: rollout for rollout in rollouts}
    assert batch is not None and batch.sample_ids is not None
    rows = []
    for row, name in enumerate(batch.sample_ids):
        start, end = int(batch.cu_S1[row]), int(batch.cu_S1[row + 1])
        rollout = by_name[str(name)]
        # Position t is about the token after it, so a row's first token is described by none.
        cells = [TokenCell(hunt.decode(rollout.tokens[0]), "system", "harness", {})]
        for at in range(start, end - 1):
            role, author = (batch.words[int(batch.labels[label][at])] for label in ("role", "author"))
            parts = {
                part: (bool(plan.components[part].member_T[at]), float(plan.components[part].weight_T[at]))
                for part in plan.coef
            }
            action = bool(batch.action_T[at])
            cells.append(
                TokenCell(
                    hunt.decode(int(batch.targets_T[at])), role, author, parts,
                    advantage=float(batch.streams["advantages"][at]) if action else None,
                    logprob=float(batch.streams["old"][at]) if "old" in batch.streams else None,
                )
            )  # fmt: skip
        facts = {"reward": f"{rollout.reward:.2f}", "end": "success" if rollout.success else "failure"}
        rows.append(TokenRow(str(name), f"number {rollout.hidden}", str(rollout.index), facts, tuple(cells)))
    return rows
