"""The findings of a self-test, compared with the table of faults; shown as a table and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from megatron_pgloss.verify.faults.fault import Fault
from megatron_pgloss.verify.run.findings import versions
from megatron_pgloss.view.optional import require

CLEAN, SEEN = 1e-10, 1e-6
"""The largest error of a right step in float64, and the error above which a fault counts as seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fault on one layout: the worst errors of all ranks."""

    loss: float = 0.0
    gradient: float = 0.0
    metric: float = 0.0
    """Largest relative error of the loss, of a parameter's gradient, of a metric."""
    error: str = ""
    """The error that our checks or Megatron raised; empty if there was none."""
    calls: int = 0
    """How often the replaced function ran, on all ranks."""

    @property
    def worst(self) -> float:
        """The largest of the three errors; infinite where a number is not finite or something was raised."""
        errors = (self.loss, self.gradient, self.metric)
        return max(errors) if not self.error and all(map(math.isfinite, errors)) else math.inf

    @property
    def words(self) -> str:
        """The cell in the table: the worst error, ``refused``, or ``·`` where nothing is seen."""
        if self.error:
            return "refused"
        return f"{self.worst:.0e}" if self.worst > CLEAN else "·"


@dataclass(slots=True, kw_only=True)
class SelfTest:
    """Every fault on every layout, as it was seen; the same on every rank."""

    layouts: list[str]
    faults: list[Fault]
    clean: dict[str, Cell] = field(default_factory=dict)
    """Layout to the errors of the step without a fault."""
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    """(fault, layout) to what was seen; layouts that a fault skips are missing."""
    expected: dict[tuple[str, str], bool] = field(default_factory=dict)
    """(fault, layout) to whether the fault must be seen there."""

    @property
    def problems(self) -> list[str]:
        """One line for each disagreement between the run and the table of faults; empty where all is well."""
        found = [
            f"without a fault, {name!r} is off by {cell.worst:.1e} {cell.error}".rstrip()
            for name, cell in self.clean.items()
            if cell.worst > CLEAN
        ]
        for fault in self.faults:
            here = {name: cell for (of, name), cell in self.cells.items() if of == fault.name}
            if not any(cell.calls for cell in here.values()):
                found.append(f"{fault.name!r}: patch not reached, {fault.target} never ran")
            if not any(self.expected[fault.name, name] for name in here):
                found.append(f"{fault.name!r}: no layout can see it: it shows where {fault.shows.words}")
            found += [line for name, cell in here.items() if (line := self._held(fault, name, cell))]
        return found

    def _held(self, fault: Fault, name: str, cell: Cell) -> str:
        if self.expected[fault.name, name]:
            off = cell.worst <= SEEN
            what = "must be seen"
        else:
            off = cell.worst > CLEAN
            what = "cannot show"
        return f"{fault.name!r} {what} on {name!r}, but the error is {cell.worst:.1e} {cell.error}".rstrip() * off

    @property
    def ok(self) -> bool:
        """Whether every fault was seen exactly where it must be."""
        return not self.problems

    def rows(self) -> list[list[str]]:
        """A heading, then one row for each fault: its name, where it shows, and what was seen on each layout."""
        lines = [["none", "nowhere", *(self.clean[name].words for name in self.layouts)]]
        for fault in self.faults:
            cells = [self.cells.get((fault.name, name)) for name in self.layouts]
            lines.append([fault.name, fault.shows.words, *("not run" if c is None else c.words for c in cells)])
        return [["fault", "shows where", *map(str, range(1, len(self.layouts) + 1))], *lines]

    @property
    def legend(self) -> list[str]:
        """The numbered layouts, and why some cells were not run."""
        layouts = [f"{number} {name}" for number, name in enumerate(self.layouts, 1)]
        some = [fault for fault in self.faults if fault.why]
        return layouts + [f"{fault.name!r} is not run where {fault.skip.words}: {fault.why}" for fault in some]

    def show(self, console: Any) -> None:
        """Print the table with rich, and the disagreements below it."""
        grid = require("rich.table", "verify").Table(box=None, header_style="dim")
        text = require("rich.text", "verify").Text
        head, *lines = self.rows()
        for number, heading in enumerate(head):
            grid.add_column(heading, justify="right" if number > 1 else "left", no_wrap=number != 1)
        for line in lines:
            grid.add_row(*map(text, line))
        console.print(grid)
        for note in self.legend:
            console.print(text(note, style="dim"))
        for problem in self.problems:
            console.print(text(problem, style="bold red"))
        console.print(text(self.summary))

    @property
    def summary(self) -> str:
        """The counts of the run, in one line."""
        expected, refused = sum(self.expected.values()), sum(bool(cell.error) for cell in self.cells.values())
        return (
            f"{len(self.faults)} faults on {len(self.layouts)} layouts: {expected} cells where one must be seen "
            f"({refused} of them refused), {len(self.cells) - expected} where none can show, {len(self.problems)} off"
        )

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain data for JSON; an error that is not finite (nothing was measured) is None."""
        faults = []
        for fault in self.faults:
            cells = {
                name: _plain(cell) | {"must_be_seen": self.expected[of, name]}
                for (of, name), cell in self.cells.items()
                if of == fault.name
            }
            told = {key: getattr(fault, key) for key in ("name", "target", "imitates")}
            faults.append(told | {"shows_where": fault.shows.words, "layouts": cells})
        clean = {name: _plain(cell) for name, cell in self.clean.items()}
        return {
            "versions": versions(), "ok": self.ok, "problems": self.problems, "without_fault": clean, "faults": faults,
        }  # fmt: skip


def _plain(cell: Cell) -> dict[str, Any]:
    figures = {"loss": cell.loss, "gradient": cell.gradient, "metric": cell.metric}
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return finite | {"error": cell.error, "calls": cell.calls}
