"""Normaliser paths to per-token weights, from exact counts. `T` tokens.

For a path ``u_1 > ... > u_n`` with the count set C, the weight of a token is the product over levels k of
``1 / d_k(parent)``, where ``parent`` is the token's unit of level k-1 (the batch for k = 1) and ``d_k`` the level's
divisor: the number of counted units u_k in it for a mean, a constant, a power of that number, or its mean over the
batch. A unit is counted if C holds one of its tokens, or always with ``units="all"``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.planning.sets import ComponentSet
from megatron_pgloss.planning.units import KEYED, Units, per_row, per_unit
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.normalizer import Level
from megatron_pgloss.terms import selected

LOCAL = ("sequence", "turn", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCounts:
    """Counts of one component on this rank."""

    tokens: ComponentSet
    alive: dict[str, Tensor]
    """Unit name to bool [units]: whether the unit is counted."""
    number: dict[str, Tensor]
    """Unit name to int64 [units]: its counted tokens on this rank."""
    value_T: Tensor
    """float64 or int64 [T]: what a token adds to the token level (1, or its user weight)."""
    totals: dict[str, int | float]
    """Counted sequences, turns and tokens on this rank."""


def local_counts(tokens: ComponentSet, units: Units, present_S: Tensor) -> LocalCounts:
    """Count the units of ``tokens`` on this rank.

    Args:
        present_S: bool [S]: rows that exist (not padding, not excluded), for ``units="all"``.
    """
    weighted = tokens.component.divide_by == "weights"
    # A token of weight 0 adds nothing to a sum of weights, so it does not make its unit count either.
    count_T = tokens.count_T & (tokens.user_T != 0) if weighted else tokens.count_T
    value_T = torch.where(count_T, tokens.user_T, 0) if weighted else count_T.view(torch.uint8).to(torch.int64)
    number = {"sequence": per_row(count_T, units.cu_S1)}
    alive: dict[str, Tensor] = {}
    for unit, size in units.size.items():
        if unit == "turn":
            hits_T = count_T.view(torch.uint8).to(torch.int64) if weighted else value_T
            number[unit] = per_unit(hits_T, units.index[unit], size)
        elif unit != "sequence":
            number[unit] = torch.zeros(size, dtype=torch.int64).index_add_(
                0, units.parent["sequence", unit], number["sequence"]
            )
        alive[unit] = number[unit] > 0
        if tokens.component.units == "all":
            alive[unit] = present_S if unit == "sequence" else _holds_row(units, unit, present_S)
    totals: dict[str, int | float] = {unit: int(alive[unit].sum()) for unit in ("sequence", "turn")}
    totals["token"] = value_T.sum().item()
    return LocalCounts(tokens=tokens, alive=alive, number=number, value_T=value_T, totals=totals)


def _holds_row(units: Units, unit: str, present_S: Tensor) -> Tensor:
    if unit == "turn":
        return present_S[units.parent["turn", "sequence"]]
    rows = units.parent["sequence", unit]
    return torch.zeros(units.size[unit], dtype=torch.bool).index_fill_(0, rows[present_S], True)


def named_keyed(spec: LossSpec) -> tuple[str, ...]:
    """Which of prompt and episode any component's path names."""
    return tuple(unit for unit in KEYED if any(unit in part.path.units for part in spec.components))


def finest(spec: LossSpec) -> str | None:
    """The finest unit that needs keys across ranks, or None."""
    named = named_keyed(spec)
    return named[-1] if named else None


def keyed_rows(counts: list[LocalCounts], units: Units | None, unit: str, capacity: int) -> Tensor:
    """This rank's rows for the keyed gather.

    Returns:
        int64 [capacity, 5 + 4 * components]: a flag, the key of ``unit``, the key of its prompt, and per component
        whether it is counted and its counted sequences, turns and tokens (a float's bits where tokens are weighted).
    """
    width = 5 + 4 * len(counts)
    rows = torch.zeros(capacity, width, dtype=torch.int64)
    if units is None:
        return rows
    n = units.size[unit]
    rows[:n, 0] = 1
    rows[:n, 1:3] = units.key[unit]
    prompt = units.key["prompt"] if "prompt" in units.key else torch.zeros(1, 2, dtype=torch.int64)
    owner = units.parent.get(
        (unit, "prompt"), torch.arange(n) if unit == "prompt" else torch.zeros(n, dtype=torch.int64)
    )
    rows[:n, 3:5] = prompt[owner]
    for c, part in enumerate(counts):
        at = 5 + 4 * c
        rows[:n, at] = part.alive[unit].to(torch.int64)
        for i, level in enumerate(LOCAL):
            value = _sums(part, units, level, unit)
            rows[:n, at + 1 + i] = value.view(torch.int64) if value.is_floating_point() else value
    return rows


def _sums(part: LocalCounts, units: Units, child: str, parent: str) -> Tensor:
    """Counted children of every parent unit on this rank; float64 for weighted tokens, else int64."""
    if child == "token":
        if not part.value_T.is_floating_point():
            return part.number[parent]
        return per_unit(part.value_T, units.index[parent], units.size[parent])
    owner = torch.arange(units.size[child]) if child == parent else units.parent[child, parent]
    alive = part.alive[child].to(torch.int64)
    return torch.zeros(units.size[parent], dtype=torch.int64).index_add_(0, owner, alive)


class Totals:
    """Counts over the whole job: of the batch, and of every prompt and episode this rank knows.

    Args:
        ranks: who takes part.
        batch_totals: per component, counted sequences, turns and tokens over all ranks.
        table: int64 [rows, width]: all ranks' `keyed_rows`, or None where no path names a keyed unit.
        unit: the unit of the table's rows.
    """

    def __init__(self, batch_totals: list[dict[str, int | float]], table: Tensor | None, unit: str | None) -> None:
        self.batch, self.unit = batch_totals, unit
        self._groups: dict[str, tuple[Tensor, Tensor]] = {}
        self._places: dict[str, Tensor] = {}
        if table is None or unit is None:
            return
        table = table[table[:, 0] == 1]
        self._table = table
        self._groups[unit] = distinct(table[:, 1:3])
        if unit == "episode" and bool(table[:, 3:5].any()):  # keys of prompts are 0 where no prompt ids were given
            self._groups["prompt"] = distinct(table[:, 3:5])
        for c, totals in enumerate(self.batch):
            for name, (names, of_row) in self._groups.items():
                totals[name] = int(self._alive(c, names.shape[0], of_row).sum())

    def _alive(self, c: int, size: int, of_row: Tensor) -> Tensor:
        flags = self._table[:, 5 + 4 * c] == 1
        return torch.zeros(size, dtype=torch.bool).index_fill_(0, of_row[flags], True)

    def children(self, c: int, part: LocalCounts, units: Units, child: str, parent: str) -> Tensor:
        """How many counted ``child`` units each of this rank's ``parent`` units has, over all ranks."""
        if parent not in KEYED:
            return _sums(part, units, child, parent)
        keys, of_row = self._groups[parent]
        if child == "episode":
            episodes, row_episode = self._groups["episode"]
            alive = self._alive(c, episodes.shape[0], row_episode)
            owner = torch.zeros(episodes.shape[0], dtype=torch.int64)
            owner[row_episode] = of_row
            total = torch.zeros(keys.shape[0], dtype=torch.int64).index_add_(0, owner, alive.to(torch.int64))
        else:
            column = self._table[:, 5 + 4 * c + 1 + LOCAL.index(child)]
            if part.value_T.is_floating_point() and child == "token":
                column = column.view(torch.float64)
            total = torch.zeros(keys.shape[0], dtype=column.dtype).index_add_(0, of_row, column)
        return total[self._place(units, parent)]

    def _place(self, units: Units, unit: str) -> Tensor:
        """Which of the job's units each of this rank's is: all of them are in the table, so the order stays."""
        if unit not in self._places:
            keys = self._groups[unit][0]
            everywhere, of_key = distinct(torch.cat([keys, units.key[unit]]))
            assert everywhere.shape == keys.shape
            self._places[unit] = of_key[keys.shape[0] :]
        return self._places[unit]


def distinct(keys_K2: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of int64 ``[K, 2]`` in order, and int64 ``[K]``: which of them each row is.

    ``torch.unique(dim=0)`` by two sorts of integers, several times as fast.
    """
    order_K = torch.argsort(keys_K2[:, 1], stable=True)
    order_K = order_K[torch.argsort(keys_K2[order_K, 0], stable=True)]
    sorted_K2 = keys_K2[order_K]
    begins_K = torch.ones_like(order_K, dtype=torch.bool)
    begins_K[1:] = (sorted_K2[1:] != sorted_K2[:-1]).any(1)
    of_key_K = torch.empty_like(order_K)
    of_key_K[order_K] = begins_K.cumsum(0) - 1
    return sorted_K2[begins_K], of_key_K


def weights(c: int, part: LocalCounts, units: Units, totals: Totals) -> Tensor:
    """Per-token weight of one component: 0 outside its members. float64 [T]."""
    member_T = part.tokens.member_T
    # Members with a factor are counted, so their divisors are positive; elsewhere the weight is 0 whatever they are.
    live_T = member_T & (part.tokens.factor_T != 0)
    # One number for each unit of the level above (at first one for all), spread to its tokens at the end.
    weight = torch.ones(1, dtype=torch.float64)
    parent: str | None = None
    for level in part.tokens.component.path.levels:
        weight = weight / _divisor(c, part, units, totals, level, parent)
        if level.unit != "token":
            owner = None if parent is None else units.parent[level.unit, parent]
            weight = weight.expand(units.size[level.unit]) if owner is None else weight[owner]
            parent = level.unit
    if parent is not None:
        # A unit's number, or 1 for a token that belongs to none.
        index_T = units.index[parent]
        weight = torch.cat([weight.new_ones(1), weight]).index_select(0, index_T + 1)
    return selected(live_T, weight * part.tokens.factor_T)


def _divisor(c: int, part: LocalCounts, units: Units, totals: Totals, level: Level, parent: str | None) -> Tensor:
    """The level's divisor: of each parent unit of this rank, or of the batch, float64 [units] or [1]; 1 where it would
    be 0, where no token has a weight.
    """
    if level.divisor is not None:
        number = float(level.divisor)
    elif level.average:
        parents = 1 if parent is None else totals.batch[c][parent]
        number = totals.batch[c][level.unit] / parents if parents else 0.0
    elif level.power is None:
        number = 1.0
    elif parent is None:
        # Without a counted unit there is no member either; a negative power of 0 must not be taken.
        number = (float(totals.batch[c][level.unit]) or 1.0) ** level.power
    else:
        per_parent = totals.children(c, part, units, level.unit, parent).to(torch.float64)
        return torch.where(per_parent == 0, 1.0, per_parent) ** level.power
    return torch.full((1,), number or 1.0, dtype=torch.float64)
