"""Write the measured table of docs/self-test.md from the JSON of ``verify --self-test --json`` on each pair of
versions.

torchrun --nproc-per-node 4 -m megatron_pgloss verify --self-test --json py312.json      # and the same on Python 3.11
python tools/make_selftest.py py312.json py311.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "self-test.md"
MEASURED = re.compile(r"(<!-- measured -->\n).*?(<!-- end of measured -->)", re.DOTALL)


def measured(runs: list[dict[str, Any]]) -> str:
    """The text between the marks: date and versions of each run, the layouts, and one row for each fault."""
    layouts = list(runs[0]["without_fault"])
    lines = []
    for number, run in enumerate(runs, 1):
        known, cells = run["versions"], [cell for fault in run["faults"] for cell in fault["layouts"].values()]
        must = sum(cell["must_be_seen"] for cell in cells)
        clean = max(cell[name] for cell in run["without_fault"].values() for name in ("loss", "gradient", "metric"))
        lines.append(
            f"**Run {number}**: {known['date']}, megatron-core {known['megatron-core']}, torch {known['torch']}, "
            f"Python {known['python']}, megatron_pgloss {known['megatron_pgloss']}: {len(run['faults'])} faults, "
            f"{must} cells where one must be seen, {len(cells) - must} where none can show, {len(run['problems'])} "
            f"off. Without a fault the largest error is {clean:.0e}.\n"
        )
    lines.append("Layouts: " + ", ".join(f"{number} {name}" for number, name in enumerate(layouts, 1)) + ".\n")
    lines.append("| fault | " + " | ".join(map(str, range(1, len(layouts) + 1))) + " |")
    lines.append("|---|" + "---:|" * len(layouts))
    for fault in runs[0]["faults"]:
        others = [next((one for one in run["faults"] if one["name"] == fault["name"]), fault) for run in runs]
        cells = [" / ".join(dict.fromkeys(word(one["layouts"].get(name)) for one in others)) for name in layouts]
        lines.append(f"| {fault['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def word(cell: dict[str, Any] | None) -> str:
    """A cell's text: the worst error, ``·`` where nothing was seen, or why there is no figure."""
    if cell is None:
        return "not run"
    if cell["error"]:
        return "refused"
    figures = [cell[name] for name in ("loss", "gradient", "metric")]
    if None in figures:
        return "not finite"
    return f"{max(figures):.0e}" if max(figures) > 1e-10 else "·"


if __name__ == "__main__":
    table = measured([json.loads(Path(name).read_text()) for name in sys.argv[1:]])
    text, found = MEASURED.subn(lambda mark: mark[1] + table + mark[2], PAGE.read_text(encoding="utf-8"))
    if not found:
        raise SystemExit(f"{PAGE.name} has no place for the table")
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.name}")
