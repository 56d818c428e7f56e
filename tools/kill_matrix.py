#!/usr/bin/env python3
"""What the other rank prints, and after how long, when a rank fails, is killed, stops, is late or loses its network.

    python tools/kill_matrix.py [--only WORDS] [--limit SECONDS] [--json docs/kill_matrix.json]

Cells: fault x layout x rank x phase, each a job of two gloo processes of its own, all groups with the same timeout. The
JSON is read first and written after every cell, so that a run that was ended goes on where it was; cells that are not
as they must be are run again. `markdown` makes the tables of docs/reliability.md of it (``python tools/make_docs.py``).
A cell whose timeout was over before its fault, on a busy machine, is not run. Exit code 1 where a cell is not as it
must be, or was not run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS), str(TOOLS.parent)]  # runs from a checkout that is not installed

from kill_cell import LAYOUTS, SLACK, Cell, TooSlowError, run_cell  # noqa: E402  found by the line above

WARM = (
    "megatron.core.distributed", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.pipeline_parallel",
    "megatron_pgloss.cli.verify", "megatron_pgloss.megatron", "megatron_pgloss.verify.run.command",
)  # fmt: skip
"""What every rank needs."""
JSON = TOOLS.parent / "docs" / "kill_matrix.json"
FAULTS = ("raise", "kill", "stop", "late")
PHASES = ("begin", "forward", "backward", "finish", "score", "verify")
CUT = ("dp2", "pp2")
"""Layouts on which a link is cut: their ranks would lie on different machines first."""


def cells() -> Iterator[Cell]:
    """All of them: with the store at the launcher, and once more with it in the rank that is killed or stops."""
    for fault, layout, guilty, phase in itertools.product(FAULTS, LAYOUTS, (0, 1), PHASES):
        yield Cell(fault=fault, layout=layout, guilty=guilty, phase=phase)
    for layout, guilty, phase in itertools.product(CUT, (0, 1), PHASES):
        yield Cell(fault="cut", layout=layout, guilty=guilty, phase=phase)
    for fault, phase in itertools.product(("kill", "stop"), PHASES):
        yield Cell(fault=fault, layout="tp2", guilty=0, phase=phase, store="rank 0")


def timeout(cell: Cell, limit: float) -> float:
    """Seconds: in ``verify`` rank 0 first computes the oracle's answer, and the others wait: three times as long."""
    return 3 * limit if cell.phase == "verify" else limit


def markdown(run: dict[str, Any]) -> str:
    """The tables of docs/reliability.md: how long the other rank took in each cell, and all that was said."""
    known, found = run["versions"], {cell.name: cell for cell in cells()}
    missing = [name for name in found if name not in run["cells"]]
    verify = next(cell for cell in found.values() if cell.phase == "verify")
    off = [name for name, one in run["cells"].items() if not one["ok"]]
    text = [
        f"{len(run['cells'])} cells, {len(off)} not as they must be, {len(missing)} not run; `{run['command']}`, "
        f"{known['date']}, megatron-core {known['megatron-core']}, torch {known['torch']}, Python {known['python']}, "
        f"gloo on CPU. Timeout of every group: {run['limit']:g} s, so that {run['limit'] + SLACK:g} s are allowed; "
        f"in `verify`, where rank 0 computes an answer first, {timeout(verify, run['limit']):g} s and 10 more.",
        "",
        f"| fault | layout | failing rank | {' | '.join(PHASES)} |",
        f"|---|---|---|{'---:|' * len(PHASES)}",
    ]
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    said: dict[tuple[str, str], list[str]] = {}
    for name, cell in found.items():
        one = run["cells"].get(name)
        holds = f"{cell.guilty}" if cell.store == "launcher" else f"{cell.guilty}, with the store"
        rows.setdefault((cell.fault, cell.layout, holds), {})[cell.phase] = _seconds(one)
        if one is not None:
            said.setdefault((cell.fault, _said(cell, one)), []).append(name)
    text += [f"| {' | '.join(key)} | {' | '.join(row[phase] for phase in PHASES)} |" for key, row in rows.items()]
    text += ["", "| fault | what the other rank said, numbers as N | cells |", "|---|---|---:|"]
    text += [f"| {fault} | `{line}` | {len(names)} |" for (fault, line), names in sorted(said.items())]
    return "\n".join([*text, ""])


def _seconds(one: dict[str, Any] | None) -> str:
    """Seconds from the fault to the other rank's end."""
    if one is None:
        return "not run"
    taken = "no end" if one["seconds"] is None else f"{one['seconds']:.1f}"
    return taken if one["ok"] else f"**{taken}**"


def _said(cell: Cell, one: dict[str, Any]) -> str:
    """The line that names the failing rank, or the last one, without what differs from cell to cell."""
    from kill_cell import WORDS

    every = [*one["lines"], one["error"]]
    line = next((line for line in every if WORDS[cell.fault](cell, line)), every[-1] or "nothing")
    short = re.search(r"rank \d+ (failed|gives no|is behind).*|the job's store.*|\w+Error: put in by.*", line)
    line = re.sub(r", at [\w.]+:\d+", "", short[0] if short else line)
    return re.sub(r"\d+", "N", line.replace("|", "/"))[:200]


def main() -> int:
    """Run what is wanted and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words separated by commas: cells whose name holds all of them")
    parser.add_argument("--limit", type=float, default=5.0, help="timeout of every group, seconds")
    parser.add_argument("--json", type=Path, default=JSON)
    parser.add_argument("--again", action="store_true", help="run cells that are in the JSON, too")
    parser.add_argument("--show", action="store_true", help="print all that the ranks of a cell said")
    given = parser.parse_args()
    run = json.loads(given.json.read_text()) if given.json.exists() else {"cells": {}}
    if run["cells"] and run["limit"] != given.limit:
        raise SystemExit(f"{given.json} was made with --limit {run['limit']:g}: give the same, or another --json")
    names = ("megatron-core", "torch")
    known = {"date": f"{datetime.date.today()}", "python": platform.python_version()}
    run |= {
        "command": f"python tools/kill_matrix.py --limit {given.limit:g}", "limit": given.limit,
        "versions": known | {name: version(name) for name in names},
    }  # fmt: skip
    _warm()
    left = False
    for cell in cells():
        there = run["cells"].get(cell.name)
        if not all(word.strip() in cell.name for word in given.only.split(",")):
            continue
        if there is not None and there["ok"] and not given.again:
            continue
        try:
            one = run_cell(cell, timeout(cell, given.limit), show=given.show)
        except TooSlowError as slow:
            left = True
            print(f"--- {slow}", flush=True)
            continue
        run["cells"][cell.name] = one
        _write(given.json, run)
        print(f"{'ok ' if one['ok'] else 'NOT'} {cell.name}: {one['seconds']} s, {one['lines'][-1:]}", flush=True)
    return int(left or not all(one["ok"] for one in run["cells"].values()))


def _warm() -> None:
    """Import once: ranks are forks."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    for name in WARM:
        importlib.import_module(name)


def _write(file: Path, run: dict[str, Any]) -> None:
    """One cell a line, in the order of `cells`."""
    order = [cell.name for cell in cells() if cell.name in run["cells"]]
    head = json.dumps({key: value for key, value in run.items() if key != "cells"})[:-1]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run['cells'][name])}" for name in order)
    part = file.with_suffix(".part")
    part.write_text(f'{head}, "cells": {{\n{lines}\n}}}}\n')
    part.rename(file)


if __name__ == "__main__":
    sys.exit(main())
