"""Statistics over prompts and episodes, whose rows may lie on any data-parallel rank. `S` rows of this rank, `K` of all
ranks, `U` units that this rank holds a row of.

The ranks gather a number of each row, which does not depend on the layout, with the key of its unit. Each rank adds up
the numbers of its own units with one exact rounding, so that every rank and every layout finds the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.maths import Asked
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.planning.units import Units, distinct
from megatron_pgloss.spec.levels import KEYED


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """This rank's rows among those of the job."""

    units: Units | None
    """The units of this rank's rows; None: it has no rows."""
    there_S: Tensor
    """bool [S]: the rows that count (`megatron_pgloss.planning.presence`); others enter no statistic."""
    ranks: Ranks
    most: int
    """The largest number of rows of any rank, 1 or more; the same on every rank."""

    def answers(self, asked: Sequence[Asked], units: Sequence[str]) -> list[Tensor]:
        """The answers to statistics over prompts and episodes. A collective of the data-parallel ranks: one gather,
        however many statistics there are.

        Args:
            asked: for each statistic its part of each *row* of this rank, as for the unit "sequence"; ``[]`` where the
                rank has no rows.
            units: ``prompt`` or ``episode`` for each statistic, the same on every rank.

        Returns:
            What `Asked.finish` makes of the number of the whole unit; ``[]`` where the rank has no rows.
        """
        if not units:
            return []
        columns = [torch.zeros(0, 2, dtype=torch.float64)] * len(units) if self.units is None else []
        for one in asked if self.units is not None else ():
            columns.append(torch.where(self.there_S[:, None], _of_rows(one)[: len(self.there_S)], 0))
        rows = self._gathered(torch.stack(columns, 1).view(torch.int64), units)
        if self.units is None:
            return []
        found = []
        for j, (one, name) in enumerate(zip(asked, units, strict=True)):
            own_K, value_K2 = rows.own[name], rows.value[:, j].view(torch.float64)
            of_K, value_K2 = own_K[own_K >= 0], value_K2[own_K >= 0]
            whole_U2 = torch.stack(
                [
                    _largest(of_K, value_K2, self.units.size[name])
                    if one.op == "max"
                    else _total(of_K, value_K2[:, 0], self.units.size[name]),
                    _total(of_K, value_K2[:, 1], self.units.size[name]),
                ],
                1,
            )
            whole_S2 = whole_U2[self.units.parent["sequence", name]]
            whole_S2 = torch.cat([whole_S2, whole_S2.new_zeros(max(1 - len(whole_S2), 0), 2)])
            found.append(one.finish(whole_S2[:, 0] if one.op == "max" else whole_S2.T))
        return found

    def firsts(self, alive_SC: Tensor, units: Sequence[str]) -> Tensor:
        """bool [S, C]: for every unit of the whole job the one row that stands for it, among the rows that are alive. A
        collective of the data-parallel ranks.

        Args:
            alive_SC: bool [S, C], the rows that may stand for their unit.
            units: the unit of each column, the same on every rank.
        """
        rows = self._gathered(alive_SC.to(torch.int64), units)
        first_SC = torch.zeros_like(alive_SC)
        here = self.ranks.data_rank * self.most
        for c, name in enumerate(units):
            if self.units is None:
                continue
            own_K = rows.own[name]
            at_K = ((own_K >= 0) & (rows.value[:, c] == 1)).nonzero().flatten()
            first_U = torch.full((self.units.size[name],), len(own_K), dtype=torch.int64)
            first_U = first_U.scatter_reduce(0, own_K[at_K], at_K, "amin")
            mine_U = first_U[(first_U >= here) & (first_U < here + self.most)] - here
            first_SC[mine_U, c] = True
        return first_SC

    def _gathered(self, value: Tensor, units: Sequence[str]) -> _Everyone:
        """``value`` int64 [S, C, ...] of every rank's rows, and which of this rank's units they belong to."""
        names = [name for name in KEYED if name in units]
        flat = value.reshape(len(value), math.prod(value.shape[1:]))
        table = torch.zeros(self.most, 2 * len(names) + flat.shape[1], dtype=torch.int64)
        if self.units is not None:
            keys = [self.units.key[name][self.units.parent["sequence", name]] for name in names]
            table[: len(value)] = torch.cat([*keys, flat], 1)
        whole = self.ranks.gather(table, self.ranks.data, self.ranks.data_size).reshape(-1, table.shape[1])
        own = {}
        for i, name in enumerate(names):
            if self.units is not None:
                own[name] = _places(self.units.key[name], whole[:, 2 * i : 2 * i + 2])
        return _Everyone(own, whole[:, 2 * len(names) :].reshape(-1, *value.shape[1:]).contiguous())


@dataclass(frozen=True, slots=True)
class _Everyone:
    own: dict[str, Tensor]
    """Unit name to int64 [K]: the place of a row's unit among this rank's; -1 where this rank has no row of it."""
    value: Tensor


def _of_rows(one: Asked) -> Tensor:
    """float64 [S, 2]: a row's part of a statistic: its sum or largest value, and its voters."""
    if one.op != "max":
        return one.part.detach().double().T
    top_S = one.part.detach().double()
    told_S = top_S > -torch.inf
    return torch.stack([torch.where(told_S, top_S, 0), told_S.double()], 1)


def _places(own_U2: Tensor, keys_K2: Tensor) -> Tensor:
    everywhere, of_key = distinct(torch.cat([own_U2, keys_K2]))
    place = torch.full((len(everywhere),), -1, dtype=torch.int64)
    place[of_key[: len(own_U2)]] = torch.arange(len(own_U2))
    return place[of_key[len(own_U2) :]]


def _total(of_K: Tensor, value_K: Tensor, units: int) -> Tensor:
    """float64 [U]: the sum of each unit's numbers, correctly rounded; not finite where one of them is not."""
    some: list[list[float]] = [[] for _ in range(units)]
    for unit, value in zip(of_K.tolist(), value_K.tolist(), strict=True):
        some[unit].append(value)
    return torch.tensor([_exact(values) for values in some], dtype=torch.float64)


def _exact(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _largest(of_K: Tensor, value_K2: Tensor, units: int) -> Tensor:
    """float64 [U]: the largest number of each unit's rows with a voter; minus infinity without any."""
    value_K = torch.where(value_K2[:, 1] > 0, value_K2[:, 0], -torch.inf)
    return torch.full((units,), -torch.inf, dtype=torch.float64).scatter_reduce(0, of_K, value_K, "amax")
