"""Third stage of a plan: the counted units of every component on this rank. `T` tokens, `S` rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_pgloss.planning import members, presence, units
from megatron_pgloss.planning.members import ComponentSet, Members
from megatron_pgloss.planning.preflight import CheckedRows, Request
from megatron_pgloss.planning.units import Units, per_row, per_unit
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.levels import IN_ROWS, INSIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCounts:
    """Counts of one component on this rank."""

    tokens: ComponentSet
    alive: dict[str, Tensor]
    """Unit name to bool [units]: whether the unit is counted."""
    number: dict[str, Tensor]
    """Unit name to int64 [units]: its counted tokens on this rank."""
    value_T: Tensor
    """float64 or int64 [T]: what a token adds to the count of its level (1, or its user weight; 0 if not counted)."""
    totals: dict[str, int | float]
    """Level that lies in rows to its counted units on this rank."""


def local_counts(tokens: ComponentSet, units: Units, present_S: Tensor) -> LocalCounts:
    """Count the units of ``tokens`` on this rank.

    Args:
        present_S: bool [S]: rows that ``units="all"`` counts (`presence.present_rows`).
    """
    weighted = tokens.component.divide_by == "weights"
    # A token of weight 0 adds nothing to a sum of weights, so it does not make its unit count either.
    count_T = tokens.count_T & (tokens.user_T != 0) if weighted else tokens.count_T
    value_T = torch.where(count_T, tokens.user_T, 0) if weighted else count_T.view(torch.uint8).to(torch.int64)
    number = {"sequence": per_row(count_T, units.cu_S1)}
    alive: dict[str, Tensor] = {}
    for unit, size in units.size.items():
        if unit in INSIDE:
            hits_T = count_T.view(torch.uint8).to(torch.int64) if weighted else value_T
            number[unit] = per_unit(hits_T, units.index[unit], size)
        elif unit != "sequence":
            number[unit] = torch.zeros(size, dtype=torch.int64).index_add_(
                0, units.parent["sequence", unit], number["sequence"]
            )
        alive[unit] = number[unit] > 0
        if tokens.component.units == "all":
            alive[unit] = present_S if unit == "sequence" else _holds_row(units, unit, present_S)
    totals: dict[str, int | float] = {unit: int(alive[unit].sum()) for unit in IN_ROWS[:-1]}
    totals["token"] = value_T.sum().item()
    return LocalCounts(tokens=tokens, alive=alive, number=number, value_T=value_T, totals=totals)


def _holds_row(units: Units, unit: str, present_S: Tensor) -> Tensor:
    if unit in INSIDE:
        return present_S[units.parent[unit, "sequence"]]
    rows = units.parent["sequence", unit]
    return torch.zeros(units.size[unit], dtype=torch.bool).index_fill_(0, rows[present_S], True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What a rank knows before the gather; empty where it has no rows."""

    rows: CheckedRows | None = None
    units: Units | None = None
    members: Members | None = None
    counts: list[LocalCounts] = field(default_factory=list)
    """Counts of each component."""
    live: list[int] = field(default_factory=list)
    """How many members of each component can move the policy."""
    excluded: int = 0
    """How many rows have no member of any component."""

    @property
    def batch(self) -> TokenBatch | None:
        """This rank's rows in one batch."""
        return None if self.rows is None else self.rows.batch


def count(rows: CheckedRows | None, asked: Request) -> Local:
    """Members, units and counts of a rank's rows.

    Raises:
        DataError: see `members.find`.
    """
    if rows is None:
        return Local()
    batch, spec = rows.batch, asked.spec
    local = Local(rows=rows, units=units.find(batch))
    if spec is None:
        return local
    found = members.find(batch, spec, asked.version, rows.uncorrected)
    return counted(replace(local, excluded=int(presence.empty_rows(batch, spec).sum())), spec, found)


def recount(local: Local, spec: LossSpec, rejected: Mapping[str, Tensor]) -> Local:
    """``local`` counted anew after a statistics pass.

    Args:
        rejected: component to bool [T]: the tokens that leave its denominators.
    """
    if local.rows is None or local.members is None:
        return local
    return counted(local, spec, members.without(local.members, local.rows.batch, spec, rejected))


def counted(local: Local, spec: LossSpec, found: Members) -> Local:
    """``local`` with the counts of these members."""
    assert local.rows is not None and local.units is not None
    batch, of_rows = local.rows.batch, local.units
    present_S = presence.present_rows(batch, spec)
    counts = [local_counts(item, of_rows, present_S) for item in found.sets]
    return replace(local, members=found, counts=counts, live=[members.live(batch, item) for item in found.sets])
