"""The findings of a verification, one line for each layout, for the terminal and as JSON."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from megatron_pgloss._version import __version__
from megatron_pgloss.verify.layouts.scenario import Scenario
from megatron_pgloss.verify.run.outcome import Outcome
from megatron_pgloss.view.optional import require


@dataclass(frozen=True, kw_only=True)
class Line:
    """One layout's line of the table; it shows the worst of the layout's outcomes."""

    layout: Scenario
    outcomes: Sequence[Outcome]

    @property
    def worst(self) -> Outcome:
        """The outcome that is off; if none is, the one nearest to its bound."""
        return max(self.outcomes, key=lambda one: (not one.ok, bool(one.error), _strain(one)))

    @property
    def loss_error(self) -> float:
        """The largest error of the loss over the specs."""
        return max(one.loss_error for one in self.outcomes)

    @property
    def ok(self) -> bool:
        """Whether no spec is off."""
        return all(one.ok for one in self.outcomes)

    @property
    def verdict(self) -> str:
        """``ok``, or what is off and under which spec."""
        if self.ok:
            upstream = self.worst.facts.get("upstream", 1.0)
            return "ok" if upstream == 1 else f"ok; megatron-core itself is {1 / upstream:g} times too weak here"
        one = self.worst
        if one.error:
            return f"OFF, {one.spec}: {one.error}"
        if not one.agreed:
            return f"OFF, {one.spec}: ranks were told different metrics"
        # Written so that NaN counts as off.
        if not (one.gradient_error <= one.bounds.gradient and one.norm_error <= one.bounds.norm):
            return f"OFF, {one.spec}: gradient"
        return f"OFF, {one.spec}: {one.metric if one.loss_error <= one.bounds.loss else 'loss'}"


def _strain(one: Outcome) -> float:
    return one.gradient_error / one.bounds.gradient if one.bounds.gradient else one.gradient_error


def lines(outcomes: Iterable[Outcome]) -> list[Line]:
    """Group the outcomes by layout, in their order."""
    found: dict[str, list[Outcome]] = {}
    for one in outcomes:
        found.setdefault(one.layout.name, []).append(one)
    return [Line(layout=group[0].layout, outcomes=group) for group in found.values()]


def show(console: Any, table: Sequence[Line], *, title: str) -> None:
    """Print the table with rich."""
    text = require("rich.text", "verify").Text
    grid = require("rich.table", "verify").Table(title=title, title_justify="left", box=None, header_style="dim")
    for heading in ("processes", "layout", "loss", "gradient", "bound", "worst parameter", "verdict"):
        number = heading in ("processes", "loss", "gradient", "bound")
        grid.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for line in table:
        one = line.worst
        cells = (
            str(line.layout.world), line.layout.name, _figure(line.loss_error), _figure(one.gradient_error),
            _figure(one.bounds.gradient), one.parameter, line.verdict,
        )  # fmt: skip
        # Text objects, since rich would read markup in an error's text.
        grid.add_row(*(text(cell, style="green" if line.ok else "bold red") if i == 6 else text(cell)
                       for i, cell in enumerate(cells)))  # fmt: skip
    console.print(grid)


def _figure(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "-"


def versions() -> dict[str, str]:
    """Versions of everything that the figures depend on, and the date."""
    found = {"megatron_pgloss": __version__, "python": platform.python_version()}
    import megatron.core  # what is imported: pip may know another version, or none
    import torch

    # In a git checkout Megatron-Core appends the commit of the working directory, whosever repository that is.
    core = Version(megatron.core.__version__).public
    found |= {"torch": str(torch.__version__), "megatron-core": core}
    return found | {"date": datetime.date.today().isoformat()}


def as_json(
    table: Sequence[Line], left_out: Sequence[Scenario], not_visited: Sequence[Scenario] = (), **more: Any
) -> dict[str, Any]:
    """All findings as plain data. Errors that are not finite (nothing was measured) are None.

    Args:
        table: the lines of the visited layouts.
        left_out: layouts that take more processes than were launched.
        not_visited: layouts after the one on which an error ended the run.
        more: further entries of the result.
    """
    return {
        "versions": versions(),
        **more,
        "ok": bool(table) and all(line.ok for line in table),
        "left_out": [{"layout": layout.name, "processes": layout.world} for layout in left_out],
        "not_visited": [{"layout": layout.name, "processes": layout.world} for layout in not_visited],
        "layouts": [
            {
                "layout": line.layout.name,
                "processes": line.layout.world,
                "ok": line.ok,
                "verdict": line.verdict,
                "specs": {one.spec: _plain(one) for one in line.outcomes},
            }
            for line in table
        ],
    }


def _plain(one: Outcome) -> dict[str, Any]:
    figures: Mapping[str, float] = {
        "loss": one.loss_error, "gradient": one.gradient_error, "norm": one.norm_error, "metric": one.metric_error,
    }  # fmt: skip
    return {
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        "bound": one.bounds.gradient,
        "parameter": one.parameter,
        "worst_metric": one.metric,
        "microbatches": one.facts.get("microbatches"),
        "ok": one.ok,
        "error": one.error,
    }
