"""Write docs/verified.md, the full table of layouts, from the JSON of ``verify --json`` on each pair of versions.

torchrun --nproc-per-node 8 -m megatron_pgloss verify --json py312.json      # and the same on Python 3.11
python tools/make_verified.py py312.json py311.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "verified.md"
HEAD = """# Verified layouts

Made by `tools/make_verified.py` from the JSON of `torchrun --nproc-per-node 8 -m megatron_pgloss verify`; how to read it is in [verify](verify.md). Errors of loss and of the worst parameter's gradient against the float64 oracle, the worst of all specs.
"""  # noqa: E501  a paragraph of Markdown is one line


def page(runs: list[dict[str, Any]]) -> str:
    """The page's text."""
    text = [HEAD]
    for number, run in enumerate(runs, 1):
        known, table = run["versions"], run["layouts"]
        off = sum(not one["ok"] for one in table)
        specs = sorted({spec for one in table for spec in one["specs"]})
        figures = [spec for one in table for spec in one["specs"].values()]
        text.append(
            f"**Run {number}**: {known['date']}, megatron-core {known['megatron-core']}, torch {known['torch']}, "
            f"Python {known['python']}, megatron_pgloss {known['megatron_pgloss']}; {run['precision']} on "
            f"{run['device']}, {run['processes']} processes. {len(table)} layouts, {len(figures)} steps, {off} off, "
            f"{len(run['left_out'])} left out; worst loss {worst(figures, 'loss')}, worst gradient "
            f"{worst(figures, 'gradient')}. Specs: {', '.join(specs)}.\n"
        )
    names = list(dict.fromkeys(one["layout"] for run in runs for one in run["layouts"]))
    heads = "".join(f" run {n}: loss | gradient | worst parameter | verdict |" for n in range(1, len(runs) + 1))
    text.append(f"| processes | layout |{heads}\n|---:|---|" + "---:|---:|---|---|" * len(runs))
    for name in names:
        rows = [next((one for one in run["layouts"] if one["layout"] == name), None) for run in runs]
        processes = next(row["processes"] for row in rows if row)
        text.append(f"| {processes} | {name} |" + "".join(cells(row) for row in rows))
    return "\n".join(text) + "\n"


def cells(row: dict[str, Any] | None) -> str:
    """The cells of one run in a layout's line."""
    if row is None:
        return " | | | not in this megatron-core |"
    figures = list(row["specs"].values())
    one = max(figures, key=lambda spec: spec["gradient"] if spec["gradient"] is not None else float("inf"))
    short = one["parameter"].replace("decoder.", "").replace("self_attention.", "").replace("local_experts.", "")
    return f" {worst(figures, 'loss')} | {worst(figures, 'gradient')} | `{short}` | {row['verdict']} |"


def worst(figures: list[dict[str, Any]], name: str) -> str:
    """The largest figure, or a dash if one could not be measured."""
    values = [spec[name] for spec in figures]
    return "-" if None in values else f"{max(values):.0e}"


if __name__ == "__main__":
    PAGE.write_text(page([json.loads(Path(name).read_text()) for name in sys.argv[1:]]), encoding="utf-8")
    print(f"wrote {PAGE.name}")
