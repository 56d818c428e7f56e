"""A fault of one rank, carried by the gather that all ranks enter, and raised by all of them alike."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.errors import Caught, PGLossError
from megatron_pgloss.planning.agreement import PLAN, Ranks, pack, pack_error, raise_agreed


class Carried(Caught):
    """Keeps what the body of a ``with`` raises, until `gather` raises it on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.row: Tensor = pack({}, torch.zeros(0, dtype=torch.int64))
        """int64 [ROW]: what this rank sends where nothing was raised."""

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
            raise_agreed(rows, options)
        except PGLossError as agreed:
            raise agreed from (None if self.error is None else self.error.__cause__)
        return rows
