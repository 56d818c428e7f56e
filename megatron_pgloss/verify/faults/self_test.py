"""``verify --self-test``: would the harness see a mistake? Every fault is put in, on layouts that cover all faults.

The run is compared with the table of faults in both directions: a fault must be seen on each layout where it shows, and
the step must stay exact on each layout where it cannot show. A fault that no layout sees, or whose function never ran,
is a hole in the harness and fails the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_pgloss.errors import LayoutError, PGLossError, SpecError
from megatron_pgloss.verify.faults.bench import BENCHES, Bench, Opened, opened
from megatron_pgloss.verify.faults.fault import Fault, find, injected
from megatron_pgloss.verify.faults.plan_faults import PLAN_FAULTS
from megatron_pgloss.verify.faults.rank_faults import RANK_FAULTS
from megatron_pgloss.verify.faults.seen import Cell, SelfTest
from megatron_pgloss.verify.run.launch import Launch
from megatron_pgloss.verify.run.quiet import hush
from megatron_pgloss.view.optional import require

FAULTS: tuple[Fault, ...] = PLAN_FAULTS + RANK_FAULTS
WORLD = 4
"""Processes of the self-test's layouts."""
Progress = Callable[[str, int, int], None]


def self_test(args: argparse.Namespace) -> int:
    """Run the command. Every launched rank calls it; ranks after the fourth take no part.

    Args:
        args: the arguments of ``verify``. ``device`` and ``json`` are read; layouts, spec and precision must not be
            given, for the self-test has its own.

    Returns:
        0, or 1 where the run and the table of faults disagree.

    Raises:
        LayoutError: fewer than 4 processes.
        SpecError: a layout, spec or precision was named.
    """
    if args.layouts or args.spec or args.precision not in (None, "float64"):
        raise SpecError("--self-test has layouts, a spec and a precision of its own", expected="no other choice")
    launch = Launch(args.device, datetime.timedelta(seconds=args.timeout))
    if launch.size < WORLD:
        raise LayoutError(
            "the self-test needs more processes", expected=f">= {WORLD}", got=launch.size,
            fix="torchrun --nproc-per-node 4 -m megatron_pgloss verify --self-test",
        )  # fmt: skip
    hush()
    started, off = time.monotonic(), False
    with launch.world(WORLD) as inside:
        if inside:
            seen = put_in(progress=_told if launch.rank == 0 else None)
            off = not seen.ok
    if launch.rank == 0:
        console = require("rich.console", "verify").Console(width=None if sys.stdout.isatty() else 160)
        seen.show(console)
        console.print(f"{time.monotonic() - started:.0f} s")
        if args.json:
            args.json.write_text(json.dumps(seen.to_dict(), indent=1) + "\n", encoding="utf-8")
    launch.part()
    return int(off)


def put_in(
    faults: Sequence[Fault] = FAULTS,
    benches: Sequence[Bench] = BENCHES,
    progress: Progress | None = None,
    once: bool = False,
) -> SelfTest:
    """Visit every layout with every fault. A collective over the world.

    Args:
        faults: the faults to put in.
        benches: the layouts.
        progress: called after each layout, with (layout, layouts done, layouts in all).
        once: try each fault on the first layout where it must be seen and on the first where it cannot show only.

    Returns:
        What was seen on each layout, the same on every rank; ``ok`` says whether the run agrees with the table.

    Raises:
        LayoutError: the world is not one of 4 processes.
        SpecError: a fault's target no longer exists.
    """
    if dist.get_world_size() != WORLD:
        raise LayoutError(
            "the self-test's layouts do not fit the world", expected=f"{WORLD} processes", got=dist.get_world_size()
        )
    for fault in faults:
        find(fault.target)
    seen = SelfTest(layouts=[one.name for one in benches], faults=list(faults))
    for done, one in enumerate(benches, 1):
        with opened(one) as layout:
            seen.clean[one.name] = _agreed(layout.step(), "", 0)
            for fault in faults:
                must = fault.shows.holds(layout.place)
                done_so = {shown for (name, _), shown in seen.expected.items() if name == fault.name}
                if not fault.skip.holds(layout.place) and not (once and must in done_so):
                    seen.cells[fault.name, one.name] = _agreed(*_attempt(layout, fault))
                    seen.expected[fault.name, one.name] = must
        if progress is not None:
            progress(one.name, done, len(benches))
    return seen


def _attempt(layout: Opened, fault: Fault) -> tuple[dict[str, float], str, int]:
    """Errors of one step on this rank, the text of an error that it raised, and how often the wrong function ran."""
    with injected(fault, layout.place) as calls:
        try:
            return layout.step(), "", calls.count
        except (PGLossError, RuntimeError) as error:  # ours, or torch's through Megatron
            return {}, f"{type(error).__name__}: {error}", calls.count


def _agreed(errors: dict[str, float], raised: str, calls: int) -> Cell:
    """The worst errors of all ranks. A collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (errors, raised, calls))
    worst = {
        name: max((math.inf if math.isnan(of[name]) else of[name] for of, _, _ in everyone if of), default=0.0)
        for name in ("loss", "gradient", "metric")
    }
    first = next((raised for _, raised, _ in everyone if raised), "")
    return Cell(error=first, calls=sum(count for _, _, count in everyone), **worst)


def _told(name: str, done: int, of: int) -> None:
    print(f"[{done}/{of}] {name}", file=sys.stderr, flush=True)
