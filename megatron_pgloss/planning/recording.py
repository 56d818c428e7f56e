"""``old="record"``: the log-probs of a row's first update are its ``old`` afterwards. `T` tokens, `N` positions.

They are kept row by row in the rows' update records, which every view of a row shares. Inside the loss a micro-batch's
log-probs are only put aside, without a copy to the host; the next plan (or `settle`) lays them out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import TokenBatch


class Recorder:
    """Log-probs of one plan's micro-batches, as the loss saw them. The plan's ledger holds it."""

    def __init__(self, batch: TokenBatch | None) -> None:
        self.batch = batch
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._laid: tuple[Tensor, Tensor] | None = None

    @property
    def wanted(self) -> bool:
        """Whether any row is in its first update: the same on all ranks that share the rows."""
        return self.batch is not None and any(record.logp is None for record in self.batch.records_S)

    def keep(self, number: int, index_N: Tensor, logp_N: Tensor) -> None:
        """Put the log-probs of micro-batch ``number`` aside. A second pass over it (a rerun, an evaluation) has the
        same ones, and is ignored.
        """
        if self.batch is None or number in self._parts:
            return
        self._parts[number] = (index_N, logp_N.detach())
        self._laid = None
        for place, record in enumerate(self.batch.records_S):
            if record.logp is None and record.pending is None:
                record.pending = (self, place)

    def laid_out(self) -> tuple[Tensor, Tensor]:
        """CPU float [T] of this rank's rows, 0 where no micro-batch held the token, and bool [T] where one did."""
        assert self.batch is not None
        if self._laid is None:
            total = self.batch.tokens_T.numel()
            dtype = next((logp_N.dtype for _, logp_N in self._parts.values()), torch.float32)
            values_T, seen_T = torch.zeros(total, dtype=dtype), torch.zeros(total, dtype=torch.bool)
            for index_N, logp_N in self._parts.values():
                real_N = index_N >= 0
                values_T[index_N[real_N]] = logp_N.reshape(-1).cpu()[real_N]
                seen_T[index_N[real_N]] = True
            self._laid = values_T, seen_T
        return self._laid

    def settle(self, values_T: Tensor) -> None:
        """Record, for each row in its first update, its own piece of ``values_T``.

        Args:
            values_T: log-probs of all rows as a whole, float [T] on the CPU.
        """
        if self.batch is None:
            return
        edges = self.batch.cu_S1.tolist()
        for place, record in enumerate(self.batch.records_S):
            if record.logp is None:
                record.logp, record.pending = values_T[edges[place] : edges[place + 1]].clone(), None

    def forget(self) -> None:
        """The update was not made: its rows are still before their first."""
        for record in self.batch.records_S if self.batch is not None else ():
            if record.pending is not None and record.pending[0] is self:
                record.pending = None


def recalled(batch: TokenBatch) -> tuple[TokenBatch, Tensor]:
    """``batch`` with the recorded log-probs as its ``old`` stream, and bool [T]: the tokens of the rows that have some.

    Raises:
        DataError: this rank has seen only part of a row's log-probs.
    """
    parts: list[Tensor] = []
    flags: list[Tensor] = []
    for row, (record, length) in enumerate(zip(batch.records_S, batch.lengths_S.tolist(), strict=True)):
        if record.logp is None and record.pending is not None:
            recorder, place = record.pending
            record.logp, record.pending = _whole(recorder, place, batch, row), None
        known = record.logp is not None
        parts.append(record.logp if record.logp is not None else torch.zeros(length))
        flags.append(torch.full((length,), known))
    double = any(part.dtype == torch.float64 for part in parts)
    dtype = torch.float64 if double else torch.float32
    old_T = torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0)
    recorded_T = torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool)
    return batch.with_stream("old", old_T), recorded_T


def _whole(recorder: Recorder, place: int, batch: TokenBatch, row: int) -> Tensor | None:
    values_T, seen_T = recorder.laid_out()
    assert recorder.batch is not None
    start, end = int(recorder.batch.cu_S1[place]), int(recorder.batch.cu_S1[place + 1])
    seen = int(seen_T[start:end].sum())
    if not seen:
        return None  # its micro-batch was never run: still before its first update
    if seen < end - start:
        raise DataError(
            "old='record': only a part of the row's log-probs came by",
            expected=f"{end - start} tokens",
            got=seen,
            where=batch.sample_name(row),
            fix="call step.finish after the schedule: it joins the context-parallel shards",
        )
    return values_T[start:end].clone()
