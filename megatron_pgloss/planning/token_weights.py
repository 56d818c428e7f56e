"""From normaliser paths to per-token weights, by exact counts. `T` tokens.

For a path ``u_1 > ... > u_n`` with the count set C, the weight of a token is the product over levels k of
``1 / d_k(parent)``, where ``parent`` is the token's unit of level k-1 (the batch for k = 1) and ``d_k`` the level's
divisor: for a mean, the number of counted units u_k in that parent; for another divisor
(`megatron_pgloss.spec.divisors`), what it makes of that number. A unit is counted if C holds one of its tokens, or
always with ``units="all"``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import selected
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.planning.counts import Local, LocalCounts
from megatron_pgloss.planning.keyed import KeyedRows
from megatron_pgloss.planning.units import Units, distinct, per_unit
from megatron_pgloss.spec import LossSpec, Step
from megatron_pgloss.spec.divisors import Divisor
from megatron_pgloss.spec.levels import IN_ROWS, KEYED


def named_keyed(spec: LossSpec) -> tuple[str, ...]:
    """The keyed levels (prompt, episode) that some component's path names."""
    return tuple(unit for unit in KEYED if any(unit in part.path.units for part in spec.components))


def finest(spec: LossSpec) -> str | None:
    """The finest unit that needs keys across ranks, or None."""
    named = named_keyed(spec)
    return named[-1] if named else None


def keyed_rows(counts: list[LocalCounts], units: Units | None, unit: str, capacity: int) -> Tensor:
    """This rank's `KeyedRows` for the gather, int64 [capacity, width]."""
    rows = KeyedRows.zeros(capacity, len(counts))
    if units is None:
        return rows.table
    n = units.size[unit]
    rows.there[:n] = 1
    rows.key[:n] = units.key[unit]
    prompt = units.key["prompt"] if "prompt" in units.key else torch.zeros(1, 2, dtype=torch.int64)
    owner = units.parent.get(
        (unit, "prompt"), torch.arange(n) if unit == "prompt" else torch.zeros(n, dtype=torch.int64)
    )
    rows.prompt[:n] = prompt[owner]
    for c, part in enumerate(counts):
        rows.column(c, "counted")[:n] = part.alive[unit].to(torch.int64)
        for level in IN_ROWS:
            value = _sums(part, units, level, unit)
            rows.column(c, level)[:n] = value.view(torch.int64) if value.is_floating_point() else value
    return rows.table


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
        batch_totals: per component, counted sequences, turns and tokens over all ranks.
        table: int64 [rows, width]: `KeyedRows` of all ranks, or None where no path names a keyed unit.
        unit: the unit of the table's rows.
    """

    def __init__(self, batch_totals: list[dict[str, int | float]], table: Tensor | None, unit: str | None) -> None:
        self.batch, self.unit = batch_totals, unit
        self._groups: dict[str, tuple[Tensor, Tensor]] = {}
        self._places: dict[str, Tensor] = {}
        if table is None or unit is None:
            return
        self._rows = rows = KeyedRows(table[KeyedRows(table).there == 1])
        self._groups[unit] = distinct(rows.key)
        if unit == "episode" and bool(rows.prompt.any()):  # keys of prompts are 0 where no prompt ids were given
            self._groups["prompt"] = distinct(rows.prompt)
        for c, totals in enumerate(self.batch):
            for name, (names, of_row) in self._groups.items():
                totals[name] = int(self._alive(c, names.shape[0], of_row).sum())

    def _alive(self, c: int, size: int, of_row: Tensor) -> Tensor:
        flags = self._rows.column(c, "counted") == 1
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
            column = self._rows.column(c, child)
            if part.value_T.is_floating_point() and child == "token":
                column = column.view(torch.float64)
            total = torch.zeros(keys.shape[0], dtype=column.dtype).index_add_(0, of_row, column)
        return total[self._place(units, parent)]

    def _place(self, units: Units, unit: str) -> Tensor:
        """int64 [units]: the place of each of this rank's units among the job's, in whose table it is."""
        if unit not in self._places:
            keys = self._groups[unit][0]
            everywhere, of_key = distinct(torch.cat([keys, units.key[unit]]))
            assert everywhere.shape == keys.shape
            self._places[unit] = of_key[keys.shape[0] :]
        return self._places[unit]


def unit_totals(
    local: Local, spec: LossSpec | None, counts: list[dict[str, int | float]], ranks: Ranks, capacity: int
) -> Totals:
    """Counts of units over the job; gathers the keyed ones over the data-parallel ranks where a path names any."""
    unit = finest(spec) if spec is not None else None
    if spec is None or unit is None:
        return Totals(counts, None, None)
    mine = (
        keyed_rows(local.counts, local.units, unit, capacity)
        if local.batch is not None
        else KeyedRows.zeros(capacity, len(spec.components)).table
    )
    table = ranks.gather(mine, ranks.data, ranks.data_size).reshape(-1, mine.shape[1])
    return Totals(counts, table, unit)


def check_range(spec: LossSpec, counts: Mapping[str, Mapping[str, int | float]], rows: int) -> None:
    """Refuse a path whose weights no float32 holds: they would be infinite, or 0.

    A weight is ``1 / (d_1 ... d_n)`` times what the user and corrections say. A divisor lies between what it makes of
    one unit and what it makes of all the units of the step, which every rank knows, so every rank refuses alike.

    Args:
        rows: number of rows in the step, an upper bound on its prompts and episodes.

    Raises:
        DataError: the product of the divisors can leave 2^-126 to 2^126.
    """
    for part in spec.components:
        least = most = 0.0
        for step in part.path.steps:
            if step.divisor is None or (part.divide_by == "weights" and step.unit == "token"):
                continue
            ends = sorted(_log2(step.divisor, float(max(n, 1))) for n in (1, counts[part.name].get(step.unit, rows)))
            least, most = least + ends[0], most + ends[1]
        if least < -126 or most > 126:
            raise DataError(
                f"{part.name}'s weights can be too {'large' if least < -126 else 'small'} for a float32",
                expected="divisors whose product lies between 2^-126 and 2^126",
                got=f"{part.normalizer!r}: 2^{least:g} to 2^{most:g}",
                fix="scale the component by coef=",
            )


def _log2(divisor: Divisor, count: float) -> float:
    try:
        number = float(divisor.of(count))
    except OverflowError:
        return math.inf
    return math.log2(number) if number > 0 else -math.inf


def weights(c: int, part: LocalCounts, units: Units, totals: Totals) -> Tensor:
    """Per-token weight of one component: 0 outside its members. float64 [T]."""
    member_T = part.tokens.member_T
    # Members with a factor are counted, so their divisors are positive; elsewhere the weight is 0 whatever those are.
    live_T = member_T & (part.tokens.factor_T != 0)
    # One number for each unit of the level above (at first one for all), spread to its tokens at the end.
    weight = torch.ones(1, dtype=torch.float64)
    parent: str | None = None
    for step in part.tokens.component.path.steps:
        weight = weight / _divisor(c, part, units, totals, step, parent)
        if step.unit != "token":
            owner = None if parent is None else units.parent[step.unit, parent]
            weight = weight.expand(units.size[step.unit]) if owner is None else weight[owner]
            parent = step.unit
    if parent is not None:
        # A unit's number, or 1 for a token that belongs to none.
        index_T = units.index[parent]
        weight = torch.cat([weight.new_ones(1), weight]).index_select(0, index_T + 1)
    return selected(live_T, weight * part.tokens.factor_T)


def _divisor(c: int, part: LocalCounts, units: Units, totals: Totals, step: Step, parent: str | None) -> Tensor:
    """The divisor of one step of the path, for each parent unit of this rank or for the whole batch, float64 [units] or
    [1]. It is 1 where it would be 0: no token has a weight there.
    """
    number = 1.0
    if step.divisor is not None and step.divisor.reads == "count" and parent is not None:
        per_parent = totals.children(c, part, units, step.unit, parent).to(torch.float64)
        found: Tensor = step.divisor.of(torch.where(per_parent == 0, 1.0, per_parent))
        return found
    if step.divisor is not None:
        parents = 1 if parent is None or step.divisor.reads == "nothing" else totals.batch[c][parent]
        count = totals.batch[c][step.unit] / parents if parents else 0.0
        # Without a counted unit there is no member either; a negative power of 0 must not be taken.
        number = float(step.divisor.of(count or 1.0))
    return torch.full((1,), number or 1.0, dtype=torch.float64)
