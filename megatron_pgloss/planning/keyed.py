"""Rows of the keyed gather: what a rank says of each of its prompts or episodes, in columns with names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.spec.levels import IN_ROWS

_ABOUT_UNIT = {"there": 1, "key": 2, "prompt": 2}
"""Columns of the unit itself, with their widths: 1 where the row is no padding; its key; the key of its prompt."""
_OF_COMPONENT = ("counted", *IN_ROWS)
"""Columns of each component: whether it counts the unit; how many sequences, turns and tokens it counts inside."""


def width(components: int) -> int:
    """Numbers in a row."""
    return sum(_ABOUT_UNIT.values()) + len(_OF_COMPONENT) * components


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """One row a unit; every attribute is a view, to be read or filled."""

    table: Tensor
    """int64 [rows, width]; a sum of weights is held by the bits of its float64."""

    @staticmethod
    def zeros(rows: int, components: int) -> KeyedRows:
        """Rows that are all padding."""
        return KeyedRows(torch.zeros(rows, width(components), dtype=torch.int64))

    def _about(self, name: str) -> Tensor:
        before = list(_ABOUT_UNIT)[: list(_ABOUT_UNIT).index(name)]
        start = sum(_ABOUT_UNIT[other] for other in before)
        return self.table[:, start : start + _ABOUT_UNIT[name]]

    @property
    def there(self) -> Tensor:
        """int64 [rows]: 1, or 0 for padding."""
        return self._about("there")[:, 0]

    @property
    def key(self) -> Tensor:
        """int64 [rows, 2]: the unit's key."""
        return self._about("key")

    @property
    def prompt(self) -> Tensor:
        """int64 [rows, 2]: the key of its prompt; 0 where no prompts are given."""
        return self._about("prompt")

    def column(self, component: int, name: str) -> Tensor:
        """int64 [rows]: ``counted``, or the count of a level, of one component."""
        return self.table[:, width(component) + _OF_COMPONENT.index(name)]
