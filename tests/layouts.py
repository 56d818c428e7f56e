"""Worlds of processes that visit layouts, and what tests of one layout share."""

from __future__ import annotations

import warnings
from itertools import combinations
from typing import Any

from megatron_pgloss.verify.layouts.scenario import Scenario
from megatron_pgloss.verify.run.drive import leave
from megatron_pgloss.verify.run.specs import rich, shaping

__all__ = [
    "DISTOPT",
    "OVERLAP",
    "SP",
    "TIED",
    "features",
    "leave",
    "quiet",
    "representative",
    "rich",
    "shaping",
    "tour",
]

SP = dict(sequence_parallel=True)
DISTOPT = dict(distributed_optimizer=True)
OVERLAP = dict(overlap_grad_reduce=True, bucket_size=2000)
TIED = dict(tied=True)


def quiet() -> None:
    """Warnings of libraries, in a spawned process, are not the test's."""
    warnings.simplefilter("ignore")


def features(layout: Scenario) -> set[Any]:
    """What a layout shows: sizes, flags, and every pair of axes that it has together."""
    axes = {axis for axis in ("tp", "pp", "vpp", "cp", "ep", "dp") if (getattr(layout, axis) or 1) > 1}
    modes = {flag for flag in ("sp", "per_token", "distributed_optimizer", "packed") if getattr(layout, flag)}
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
    shown: set[Any] = {(name, getattr(layout, name)) for name in kinds}
    shown |= (
        {flag for flag in flags if getattr(layout, flag)} | axes | modes | ({"shuffle"} if layout.shuffle else set())
    )
    return shown | set(combinations(sorted(axes | modes), 2))


def representative(table: dict[int, tuple[Scenario, ...]]) -> list[Scenario]:
    """The cheap worlds whole; of the larger ones, few layouts that show all that the table shows, and three axes at
    once.
    """
    chosen = [*table[2], *table[1], *(layout for layout in table[8] if len(layout.model_axes) == 3)]
    rest = [layout for world in (4, 8) for layout in table[world]]
    left = set().union(*map(features, rest)).difference(*map(features, chosen))
    while left:
        best = max(rest, key=lambda layout: len(features(layout) & left) / (layout.world or 1))
        chosen.append(best)
        left -= features(best)
    return chosen


def tour(rank: int, world: int, names: list[str] | None = None, precision: str = "float64") -> list[Any]:
    """For `worlds.run_world`: every spec on every layout of this world, or on those of ``names``; all outcomes."""
    from megatron_pgloss.verify.layouts.table import LAYOUTS
    from megatron_pgloss.verify.run.judge import PRECISIONS, Judge
    from megatron_pgloss.verify.run.specs import SPECS, without_edges
    from megatron_pgloss.verify.run.visit import visit

    quiet()
    kind = PRECISIONS[precision]
    judge = Judge({name: without_edges(make()) if kind.half else make() for name, make in SPECS.items()}, kind)
    chosen = [one for one in LAYOUTS[world] if names is None or one.name in names]
    return [outcome for layout in chosen for outcome in visit(layout, judge)]
