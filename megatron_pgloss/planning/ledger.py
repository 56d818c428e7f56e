"""The ledger of one plan: which of its rows it has updated on, and the log-probs that ``old="record"`` keeps.

The notes stand in the rows' own records, which every view of a row shares; the ledger writes its plan's number into
them.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.planning.recording import Recorder
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec import LossSpec

_SERIAL = itertools.count(1)


class Ledger:
    """Notes of the updates that one plan makes.

    Args:
        batch: this rank's rows, or None.
        spec: None for a forward-only plan, which makes no update.
    """

    def __init__(self, batch: TokenBatch | None, spec: LossSpec | None) -> None:
        self.serial = next(_SERIAL)
        self.recorder = Recorder(batch) if spec is not None and spec.old == "record" else None
        """Keeps the log-probs of first updates, with ``old="record"``."""
        self.pulled = False
        """Whether a gradient went back through a loss of this plan on this rank: an evaluation has none, although a
        forward-only schedule may leave autograd on."""
        self._records = batch.records_S if batch is not None else ()
        self._batch = batch
        self._once = spec is not None and spec.old == "policy"

    def check_open(self) -> None:
        """Refuse a second on-policy update: with ``old="policy"``, on rows that another plan has updated on."""
        for row, record in enumerate(self._records if self._once else ()):
            if record.plan not in (None, self.serial):
                assert self._batch is not None
                raise DataError(
                    "a second update on the same rollouts with old='policy'",
                    where=self._batch.sample_name(row),
                    fix="use old='given' with scored log-probs, or sample anew",
                )

    @property
    def updated(self) -> bool:
        """Whether a gradient of this plan's loss has been asked for on this rank."""
        return any(record.plan == self.serial for record in self._records)

    def mark_updated(self) -> None:
        """Remember that these rows have been updated on by this plan."""
        for record in self._records:
            record.plan = self.serial

    def pull(self, gradient: Tensor) -> None:
        """Note that ``gradient`` went back through a loss of this plan; a hook of that loss."""
        self.pulled = True

    def take_back(self) -> None:
        """Forget that these rows have been updated on by this plan: the update was not made."""
        for record in self._records:
            record.take_back(self.serial)
        if self.recorder is not None:
            self.recorder.forget()

    def record(self, number: int, index_N: Tensor, logp_N: Tensor) -> None:
        """With ``old="record"``: keep the log-probs of micro-batch ``number``, which is being updated on."""
        if self.recorder is not None and self.recorder.wanted:
            self.recorder.keep(number, index_N, logp_N)
