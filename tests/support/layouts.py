"""Worlds of processes that visit layouts, and the choice of layouts and specs to visit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from megatron_pgloss.verify.layouts.scenario import Scenario
from megatron_pgloss.verify.run.drive import leave
from megatron_pgloss.verify.run.specs import rich, shaping
from support.cover import pairs, visited
from support.shelf import judge_of

__all__ = [
    "DISTOPT",
    "OVERLAP",
    "SP",
    "TIED",
    "axes",
    "features",
    "leave",
    "quiet",
    "rich",
    "shaping",
    "tour",
    "visits",
]

SP = dict(sequence_parallel=True)
DISTOPT = dict(distributed_optimizer=True)
OVERLAP = dict(overlap_grad_reduce=True, bucket_size=2000)
TIED = dict(tied=True)
TRIPLES = [("tp", "pp", "cp")]
OVER_UNITS = ("rich", "sequence", "turn")
"""Specs with a statistic over a unit whose tokens may lie on several ranks."""


def quiet() -> None:
    """Silence libraries' warnings, which in a world's process are not the test's concern."""
    warnings.simplefilter("ignore")


def axes(layout: Scenario) -> set[str]:
    """The parallel dimensions above 1, and the modes of a layout."""
    found = {axis for axis in ("tp", "pp", "vpp", "cp", "ep", "dp") if (getattr(layout, axis) or 1) > 1}
    return found | {mode for mode in ("sp", "per_token", "distributed_optimizer", "packed") if getattr(layout, mode)}


def features(layout: Scenario) -> set[Any]:
    """The features of a layout: sizes, flags, every pair of its axes, and tp x pp x cp if it has all three."""
    flags = ("overlap", "average", "variable_lengths", "collection", "tied", "temperature", "tail", "empty_rank")
    kinds = (
        "tp",
        "pp",
        "cp",
        "ep",
        "dp",
        "world",
        "own",
        "kind",
        "head",
        "recompute",
        "vocab",
        "loss_scale",
        "experts",
    )
    shown: set[Any] = {f"{name} {getattr(layout, name)}" for name in kinds}
    shown |= {flag for flag in (*flags, "shuffle") if getattr(layout, flag)}
    return shown | pairs(axes(layout), TRIPLES)


def visits(table: dict[int, tuple[Scenario, ...]], specs: Iterable[str]) -> list[tuple[Scenario, str]]:
    """The pairs of layout and spec to visit. Together they have every feature of every layout, every axis with every
    spec, and packed rows under context parallelism with every spec that has a statistic over a unit.
    """
    cases = [(at, spec) for world in table for at in table[world] for spec in ([""] if at.own else specs)]

    def shows(case: tuple[Scenario, str]) -> set[Any]:
        at, spec = case
        triples = [("cp", "packed", f"spec {name}") for name in OVER_UNITS]
        return features(at) | pairs({*axes(at), f"spec {spec}"}, triples)

    def cost(case: tuple[Scenario, str]) -> float:
        return 1.0 + (case[0].world or 1)

    # Always visited: layouts of two processes, layouts with three axes, and those that tests of the harness read.
    always = [case for case in cases if case[1] == "rich" and (case[0].world == 2 or len(case[0].model_axes) == 3)]
    always += [case for case in cases if case[1] == "rich" and case[0].name in ("dp1, 1 micro-batches",)]
    return visited("layouts x specs", cases, shows, cost=cost, always=always)


def tour(rank: int, world: int, chosen: dict[str, list[str]], precision: str = "float64") -> list[Any]:
    """Visit layouts of this world by name, each under the named specs, and return all outcomes (for `run_world`)."""
    from megatron_pgloss.verify.layouts.table import LAYOUTS
    from megatron_pgloss.verify.run.judge import PRECISIONS
    from megatron_pgloss.verify.run.specs import SPECS, without_edges
    from megatron_pgloss.verify.run.visit import visit

    quiet()
    kind = PRECISIONS[precision]
    judge = judge_of({name: without_edges(make()) if kind.half else make() for name, make in SPECS.items()}, kind)
    there = {layout.name: layout for layout in LAYOUTS[world]}
    return [outcome for name, specs in chosen.items() for outcome in visit(there[name], judge, specs)]
