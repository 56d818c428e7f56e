"""The command ``verify``: choose layouts and specs, visit the layouts on the launched ranks, and report."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_pgloss.errors import LayoutError, SpecError, UnsupportedError
from megatron_pgloss.planning import Split
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.functions import Functions
from megatron_pgloss.verify.layouts.scenario import EXPERTS, Scenario
from megatron_pgloss.verify.layouts.table import every_layout
from megatron_pgloss.verify.run.findings import as_json, lines, show, versions
from megatron_pgloss.verify.run.judge import PRECISIONS, Judge
from megatron_pgloss.verify.run.launch import Launch
from megatron_pgloss.verify.run.outcome import Bounds, Outcome
from megatron_pgloss.verify.run.specs import SPECS, without_edges
from megatron_pgloss.verify.run.visit import visit
from megatron_pgloss.view.optional import require

_AXES = (
    "tp", "pp", "vpp", "cp", "ep", "sp", "per_token", "tied", "distributed_optimizer", "variable_lengths", "hybrid",
    "head", "experts", "packed", "sequences", "microbatches",
)  # fmt: skip


def settle_device(device: str) -> None:
    """Choose CPU or GPU for this process. It has to be called before anything asks for CUDA.

    Raises:
        UnsupportedError: ``device`` is ``cuda`` and there is no GPU.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron-Core takes a GPU wherever it sees one
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda needs a GPU", got="torch.cuda.is_available() is False")


def command(args: argparse.Namespace) -> int:
    """Visit the layouts and print the table. Every launched rank calls it.

    Returns:
        0, or 1 if a layout is off; the same on every rank that visited all layouts.

    Raises:
        PGLossError: a spec or layout that does not exist or cannot be built.
    """
    console = require("rich.console", "verify").Console(width=None if sys.stdout.isatty() else 220)
    name = args.precision or ("float32" if args.device == "cuda" else "float64")
    judge = Judge(chosen_specs(args.spec, half=PRECISIONS[name].half, functions=args.offered), PRECISIONS[name])
    launch = Launch(args.device, datetime.timedelta(seconds=args.timeout))
    wanted = chosen_layouts(args, launch.size, name)
    layouts = [layout for layout in wanted if (layout.world or 1) <= launch.size]
    layouts.sort(key=lambda layout: -(layout.world or launch.size))
    left_out = [layout for layout in wanted if layout not in layouts]
    if not layouts:
        raise LayoutError(
            "no layout fits the launched processes", expected=f"at least {min(one.world or 1 for one in wanted)}",
            got=launch.size, fix="torchrun --nproc-per-node N -m megatron_pgloss verify ...",
        )  # fmt: skip
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with _Progress(len(layouts), launch.rank) as report, launch.last_words() as ended:
        tour(launch, layouts, judge, report, outcomes)
    not_visited: list[Scenario] = []
    if ended.text:
        rest = [layout for layout in layouts if all(one.layout is not layout for one in outcomes)]
        broken, *not_visited = rest or layouts[-1:]
        none = Bounds(loss=0, gradient=0, norm=0, metric=0)
        outcomes.append(Outcome(layout=broken, spec="one of the specs", bounds=none, error=f"error: {ended.text}"))
    table = lines(outcomes)
    off = sum(not line.ok for line in table)
    if launch.rank == 0:
        took = time.monotonic() - started
        known = versions()
        stack = f"megatron-core {known['megatron-core']}, torch {known['torch']}, Python {known['python']}"
        show(console, table, title=f"{name} on {args.device}, {len(judge.specs)} specs each; {stack}")
        unseen = f", {len(not_visited)} not visited after the error" if ended.text else ""
        console.print(
            f"{len(table)} layouts, {off} off, {len(left_out)} left out for lack of ranks{unseen}, {took:.0f} s"
        )
        if args.json:
            found = as_json(
                table, left_out, not_visited, precision=name, device=args.device, processes=launch.size,
                seconds=round(took, 1),
            )  # fmt: skip
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    launch.part(broken=bool(ended.text))
    return int(bool(off))


def tour(
    launch: Launch, layouts: Sequence[Scenario], judge: Judge, report: Callable[[Scenario, list[Outcome]], None],
    outcomes: list[Outcome],
) -> None:  # fmt: skip
    """Visit the layouts, larger worlds first, so that every rank of a smaller world already has the oracle's answers.

    Args:
        launch: the launched processes.
        layouts: the layouts to visit.
        judge: the oracle's answers.
        report: called after each layout, with the layout and its outcomes.
        outcomes: a list that every outcome is added to; a rank adds those of the layouts that it took part in.
    """
    for size in sorted({layout.world or launch.size for layout in layouts}, reverse=True):
        with launch.world(size) as inside:
            for layout in layouts:
                if inside and (layout.world or launch.size) == size:
                    found = visit(layout, judge)
                    outcomes += found
                    report(layout, found)


def chosen_specs(
    names: Sequence[str], *, half: bool = False, functions: Functions | None = None
) -> dict[str, LossSpec]:
    """The specs of ``--spec``: built-in names, or TOML files; all built-in ones where none is named.

    Args:
        names: the arguments of ``--spec``.
        functions: the functions that a file may name.
        half: widen the clips of built-in specs, for half precision (`megatron_pgloss.verify.run.specs.without_edges`).
    """
    found: dict[str, LossSpec] = {}
    for name in names or SPECS:
        if name in SPECS:
            found[name] = without_edges(SPECS[name]()) if half else SPECS[name]()
        elif name.endswith(".toml"):
            found[name] = LossSpec.from_toml(name, functions=functions)
        else:
            raise SpecError(f"no built-in spec {name!r}", expected=f"{', '.join(SPECS)}, or a .toml file")
    return found


def chosen_layouts(args: argparse.Namespace, processes: int, precision: str = "float64") -> list[Scenario]:
    """The one layout that ``--tp`` and the other sizes describe, or layouts of the table.

    Raises:
        LayoutError: no layout of the table has the words in its name, or the sizes do not fit together.
    """
    own = {axis: getattr(args, axis) for axis in _AXES if getattr(args, axis) is not None}
    if own and args.layouts:
        raise LayoutError("--layouts is for the built-in table", got=f"--layouts beside {', '.join(own)}")
    if own:
        return [own_layout(own, processes)]
    words = [] if args.layouts in (None, "all") else [word.strip() for word in args.layouts.split(",")]
    found = [layout for layout in every_layout() if all(word in layout.name for word in words)]
    if precision != "float64":  # Megatron's own losses are measured by a difference of gradients
        found = [layout for layout in found if not layout.own]
    if not found:
        raise LayoutError(f"no layout of the table has {args.layouts!r} in its name")
    return found


def own_layout(given: dict[str, Any], processes: int) -> Scenario:
    """The user's own layout, with the largest data-parallel size that the launched processes allow."""
    fields = dict(given)
    split = Split(sequences=fields.pop("sequences", 2))
    if "packed" in fields:
        split = Split(max_tokens=fields.pop("packed"))
    if "microbatches" in fields:
        split = Split(microbatches=fields.pop("microbatches"))
    kind = "hybrid" if fields.pop("hybrid", False) else "gpt"
    if fields.get("ep", 1) > 1:
        fields.setdefault("experts", EXPERTS)
    fields |= dict(split=split, kind=kind)
    layout = Scenario(**fields)
    # Experts are spread over data- and context-parallel ranks.
    unit = layout.tp * layout.pp * max(layout.cp, layout.ep)
    if max(layout.cp, layout.ep) % min(layout.cp, layout.ep):
        raise LayoutError("cp and ep do not divide each other", got=f"cp {layout.cp}, ep {layout.ep}")
    return Scenario(world=max(1, processes // unit) * unit, **fields)


class _Progress:
    """Progress on the first rank: a bar on a terminal, else one line for each layout."""

    def __init__(self, total: int, rank: int) -> None:
        self.total, self.quiet, self.done = total, rank != 0, 0
        console = require("rich.console", "verify").Console(stderr=True)
        self.bar = require("rich.progress", "verify").Progress(console=console, transient=True)
        self.live = not self.quiet and console.is_terminal

    def __enter__(self) -> Callable[[Scenario, list[Outcome]], None]:
        if self.live:
            self.bar.start()
            self.task = self.bar.add_task("layouts", total=self.total)
        return self.report

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.bar.stop()

    def report(self, layout: Scenario, found: list[Outcome]) -> None:
        """Count one more visited layout."""
        self.done += 1
        if self.live:
            self.bar.update(self.task, advance=1, description=layout.name)
        elif not self.quiet:
            verdict = "ok" if all(one.ok for one in found) else "OFF"
            print(f"[{self.done}/{self.total}] {layout.name}: {verdict}", file=sys.stderr, flush=True)
