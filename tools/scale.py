"""The cost of a plan in worlds that no test can start: what one rank of 1,024 or 16,384 sends, computes and holds.

    python tools/scale.py                # measure all cases, rewrite docs/scale.md
    python tools/scale.py --case JSON    # one case in this process, as JSON

How a rank stands alone in such a world: tools/scale_world.py.
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
"""The whole step is the same in all: 10^5 sequences, 10^4 prompts, 10^9 tokens."""
FLAT = {
    f"{world:,} ranks": Case(world=world, sequences=world * 6, tokens=world * 60_000)
    for world in (1_024, 4_096, 16_384)
}
"""One rank's share is the same in all: only the world grows."""
UNITS = {
    f"{n:,} episodes": Case(world=4_096, sequences=n, tokens=250_000_000, keyed=True) for n in (25_000, 50_000, 100_000)
}
TOKENS = {
    f"{n:,} tokens a rank": Case(world=4_096, sequences=25_600, tokens=n * 256)
    for n in (1_000_000, 2_000_000, 4_000_000)
}
TABLES = {
    "The step": (CASES, "One step of 100,000 sequences, 10,000 prompts and about 10^9 tokens, on more and more ranks."),
    "The world alone": (FLAT, "The same share for this rank (96 sequences, about 960,000 tokens) in a growing world."),
    "Distinct units": (UNITS, "2.5 x 10^8 tokens in 4,096 ranks, cut into more and more episodes, ten to a prompt."),
    "Tokens": (TOKENS, "One rank's tokens grow; 100 sequences a rank."),
}


def table(cases: dict[str, Case], found: dict[str, dict[str, Any]]) -> str:
    """Rows of one table in Markdown."""
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
    """Bytes in words."""
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def page(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """docs/scale.md."""
    parts = [f"## {title}\n\n{words}\n\n{table(cases, found[title])}" for title, (cases, words) in TABLES.items()]
    host = f"Python {platform.python_version()}, torch {torch.__version__}, megatron_pgloss {pg.__version__}"
    body = "\n\n".join(parts)
    today = datetime.date.today().isoformat()
    return f"{INTRODUCTION}\n\n{body}\n\nMeasured on {today}: {host}, one thread of a shared CPU.\n"


INTRODUCTION = "\n".join(
    (
        "# Scale",
        "",
        "What one rank sends, receives, computes and holds to plan a step and to close it, in worlds that no test can "
        "start. Made by `python tools/scale.py`; `tests/test_scale.py` holds bytes and shapes on fewer tokens.",
        "",
        "One process plans its real share of the step through torch's `fake` process-group backend, which takes a "
        "collective's arguments and moves nothing. In place of what would have come back stand rows of every other "
        "rank, each with its own counts and keys, made from the lengths of all sequences of the step. The plan must "
        "then count exactly what the whole step has. Times are CPU seconds of one thread, without the network; "
        "memory is beyond that of the data. 16 ranks hold the same data (TP 4 x PP 4, say).",
        "",
        "Between plan and finish nothing depends on the world: a micro-batch of T tokens sends `[T, 3]` numbers over "
        "its tensor-parallel ranks, and one number a sequence or turn over its context-parallel ranks where the spec "
        "asks for such a statistic.",
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
