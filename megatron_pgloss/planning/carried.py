"""A fault of one rank, carried by the gather that all ranks enter, and raised by all of them alike."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, PGLossError
from megatron_pgloss.planning.agreement import Ranks, pack, pack_error, raise_agreed


class Carried:
    """Keeps what the body of a ``with`` raises, until `gather` raises it on every rank.

    Whatever its type is: a rank that left before a collective would keep the others waiting for the whole timeout.
    """

    def __init__(self) -> None:
        self.row: Tensor = pack({}, torch.zeros(0, dtype=torch.int64))
        """int64 [ROW]: what this rank sends where nothing was raised."""
        self.error: PGLossError | None = None

    def __enter__(self) -> Carried:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):  # none, or an interrupt of the user's
            return False
        self.error = as_error(error)
        return True

    def gather(self, ranks: Ranks) -> Tensor:
        """int64 [world, ROW]: the rows of all ranks, on which they agree.

        Raises:
            PGLossError: the same on every rank: the first faulty rank's error, or a disagreement.
        """
        row = self.row if self.error is None else pack_error(self.error)
        rows = ranks.gather(row, ranks.world, ranks.world_size)
        try:
            raise_agreed(rows)
        except PGLossError as agreed:
            raise agreed from (None if self.error is None else self.error.__cause__)
        return rows


def as_error(error: Exception) -> PGLossError:
    """``error`` as one of the package's: itself, or one that names its type and the line that raised it."""
    if isinstance(error, PGLossError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1:]
    found = DataError(
        f"{type(error).__name__}: {error}".strip().rstrip(":"),
        where=f"{Path(last[0].filename).name}, line {last[0].lineno}" if last else None,
        fix="an argument or a value has a form that was not expected; the faulty rank's log has the whole traceback",
    )
    found.__cause__ = error
    return found
