"""A fault of one rank, carried by the gather that all ranks enter, and raised by all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import Caught, PGLossError
from megatron_pgloss.planning import difference
from megatron_pgloss.planning.agreement import PLAN, Ranks, pack, pack_error, raise_agreed


class Carried(Caught):
    """Keeps what the body of a ``with`` raises, until `gather` raises it on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.row: Tensor = pack({}, torch.zeros(0, dtype=torch.int64))
        """int64 [ROW]: what this rank sends where nothing was raised."""
        self.about: dict[str, Callable[[], Any]] = {}
        """Name of a digest in ``row`` to the fields that it is of: an error names those that differ."""

    def gather(self, ranks: Ranks, options: str = PLAN) -> Tensor:
        """int64 [world, ROW]: the rows of all ranks, on which they agree.

        Args:
            options: what ``setup`` of the rows is a hash of, in words for errors.

        Raises:
            PGLossError: the same on every rank: the first faulty rank's error, or a disagreement.
        """
        row = self.row if self.error is None else pack_error(self.error)
        rows = ranks.gather(row, ranks.world, ranks.world_size)
        try:
            raise_agreed(rows, lambda name, one, other: self._told(name, one, other, ranks), options)
        except PGLossError as agreed:
            raise agreed from (None if self.error is None else self.error.__cause__)
        return rows

    def _told(self, name: str, one: int, other: int, ranks: Ranks) -> str:
        # Every rank takes part whatever it has to say, since one of them may be in another call than the others.
        fields = difference.fields_of(self.about[name]()) if name in self.about else {}
        first, second = difference.exchanged(fields, one, other, ranks)
        return difference.said(first, second, one, other)
