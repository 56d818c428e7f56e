"""The cost of a plan in worlds that no test can start: what one of 1,024 or 16,384 ranks sends, computes and keeps.

    python tools/scale.py                # measure all cases, rewrite docs/scale.md
    python tools/scale.py --case JSON    # one case in this process, as JSON

tools/scale_world.py makes one process a rank of such a world.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from scale_world import Case, measure

import megatron_pgloss as pg

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
CASES = {
    "1,024 ranks": Case(world=1_024),
    "1,024 ranks, prompts and episodes": Case(world=1_024, keyed=True),
    "16,384 ranks": Case(world=16_384),
    "16,384 ranks, prompts and episodes": Case(world=16_384, keyed=True),
}
"""Cases of one whole step: 10^5 sequences, 10^4 prompts, 10^9 tokens."""
FLAT = {
    f"{world:,} ranks": Case(world=world, sequences=world * 6, tokens=world * 60_000)
    for world in (1_024, 4_096, 16_384)
}
"""Cases in which one rank's share stays the same and only the world grows."""
UNITS = {
    f"{n:,} episodes": Case(world=4_096, sequences=n, tokens=250_000_000, keyed=True) for n in (25_000, 50_000, 100_000)
}
TOKENS = {
    f"{n:,} tokens a rank": Case(world=4_096, sequences=25_600, tokens=n * 256)
    for n in (1_000_000, 2_000_000, 4_000_000)
}
TABLES = {
    "The step": (CASES, "One step of 100,000 sequences, 10,000 prompts and about 10^9 tokens, on more and more ranks."),
    "The world alone": (
        FLAT,
        "This rank's share stays the same (96 sequences, about 960,000 tokens) in a growing world.",
    ),
    "Distinct units": (UNITS, "2.5 x 10^8 tokens in 4,096 ranks, cut into more and more episodes, ten to a prompt."),
    "Tokens": (TOKENS, "One rank's tokens grow, at 100 sequences per rank."),
}


def table(cases: dict[str, Case], found: dict[str, dict[str, Any]]) -> str:
    """One table in Markdown."""
    head = ("", "this rank", *(f"{what}: sent / received" for what in ("plan, world", "plan, dp", "finish, world")))
    lines = [f"| {' | '.join((*head, 'plan, CPU s', 'finish, CPU s', 'peak memory, MiB'))} |", "|" + " --- |" * 8]
    for name in cases:
        one = found[name]
        calls = {call["carries"]: f"{size(call['sent'])} / {size(call['received'])}" for call in one["calls"]}
        cells = [name, f"{one['rows']:,} sequences, {one['tokens']:,} tokens"]
        cells += [calls.get(kind, "-") for kind in ("counts", "keyed counts", "metrics")]
        cells += [f"{one['plan']:.2f}", f"{one['finish']:.2f}", f"{one['peak'] / 2**20:,.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def size(count: int) -> str:
    """A number of bytes with its unit."""
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def page(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The text of docs/scale.md."""
    parts = [f"## {title}\n\n{words}\n\n{table(cases, found[title])}" for title, (cases, words) in TABLES.items()]
    host = f"Python {platform.python_version()}, torch {torch.__version__}, megatron_pgloss {pg.__version__}"
    body = "\n\n".join(parts)
    today = datetime.date.today().isoformat()
    return f"{INTRODUCTION}\n\n{body}\n\nMeasured on {today}: {host}, one thread of a shared CPU.\n"


INTRODUCTION = "\n".join(
    (
        "# Scale",
        "",
        "This page says what one rank sends, receives, computes and keeps in memory to plan a step and to close "
        "it, in worlds that are too large for any test. `python tools/scale.py` makes the page; "
        "`tests/test_scale.py` checks bytes and shapes on fewer tokens.",
        "",
        "One process plans its real share of the step through torch's `fake` process-group backend, which takes a "
        "collective's arguments and moves no data. The rows that a collective would have gathered from the other "
        "ranks are computed from the lengths of all sequences of the step, with each rank's own counts and keys. "
        "The plan must then count exactly the tokens and units of the whole step. Times are CPU seconds of one "
        "thread, without the network; memory is the peak beyond the data. Groups of 16 ranks hold the same data "
        "(TP 4 x PP 4, for example).",
        "",
        "Between plan and finish nothing depends on the size of the world: a micro-batch of T tokens sends `[T, "
        "3]` numbers over its tensor-parallel ranks, and one number per sequence or turn over its "
        "context-parallel ranks where the spec has a statistic over such units.",
    )
)


def main() -> None:
    """Measure every case in a process of its own, so that peak memory is the case's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="the fields of one case as JSON")
    given = parser.parse_args()
    if given.case:
        torch.set_num_threads(1)
        print(json.dumps(measure(Case(**json.loads(given.case)))))
        return
    found: dict[str, dict[str, Any]] = {}
    for title, (cases, _) in TABLES.items():
        found[title] = {}
        for name, case in cases.items():
            command = [sys.executable, "-W", "ignore", __file__, "--case", json.dumps(asdict(case))]
            alone = dict(os.environ, OMP_NUM_THREADS="1")
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=alone)
            found[title][name] = json.loads(done.stdout)
            print(f"{title}, {name}: {found[title][name]}", flush=True)
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
