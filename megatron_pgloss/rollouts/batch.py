"""`TokenBatch`: rollouts as target-aligned token streams. `T` tokens of all rows laid end to end, `S` rows.

After construction, position t of every stream is about **the token predicted from position t**, ``targets_T[t]``.
The shift from token order happens once, in `megatron_pgloss.rollouts.align`, and nowhere else in the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, PGLossError
from megatron_pgloss.rollouts.states import Termination

Id = int | str
_STREAM_DICTS = ("streams", "weights", "masks", "labels")
_ROW_TUPLES = ("prompt_ids", "episode_ids", "sample_ids", "terminations")
STREAMS = ("advantages", "old", "rollout", "ref", "values", "returns")
"""Optional float streams; ``temperature`` is kept beside them because it shapes the log-probs."""
OFF: dict[str, float] = {"kept": -1, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Streams that say what the sampler could draw from, with the value that says: from the whole vocabulary."""


class UpdateRecord:
    """Whether a row has been updated on: shared by every batch that holds the row, so that a second on-policy
    update is seen whichever view it comes through."""

    __slots__ = ("logp", "pending", "plan")

    def __init__(self) -> None:
        self.plan: int | None = None
        self.logp: Tensor | None = None
        """Log-probs of the row's targets at its first update, with ``old="record"``."""
        self.pending: Any = None
        """Where they are still kept micro-batch by micro-batch, until the next plan reads them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """Rows of tokens with everything the loss needs to know about them. Build it with a ``from_*`` method.

    Tensors live on the CPU; `MicroBatch` moves what the model needs to ``device``.
    """

    tokens_T: Tensor
    """int64 [T]: the token the model reads at each position."""
    targets_T: Tensor
    """int64 [T]: the token predicted from each position; 0 at the last position of a row, which predicts nothing."""
    cu_S1: Tensor
    """int64 [S + 1]: where each row begins in the token streams."""
    action_T: Tensor
    """bool [T]: the target was sampled by the policy."""
    observation_T: Tensor
    """bool [T]: the target is an answer of the environment after the first policy turn (the set O of ECHO)."""
    target_T: Tensor
    """bool [T]: the targets cross entropy trains on, a subset of ``observation_T`` (O')."""
    turn_T: Tensor
    """int64 [T]: turn of the target, -1 before the first policy turn."""
    streams: dict[str, Tensor] = field(default_factory=dict)
    """float [T] each, names of `STREAMS`, ``temperature``, and the user's own; constants. Wide ones are [T, k]: int64
    token ids with -1 where a token has fewer than k, and floats beside them; ``kept`` (the sampler's kept set) is one,
    and ``top_k`` (int64 [T]), ``top_p``, ``min_p`` go with it."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """float [T] per component name: the user's weights."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """bool [T] per name: the user's masks."""
    versions_T: Tensor | None = None
    """int64 [T]: version of the weights that sampled the target; read only at actions."""
    labels: dict[str, Tensor] = field(default_factory=dict)
    """int16 [T]: ``role`` and ``author`` of each target as indices into ``words``, for people to read."""
    words: tuple[str, ...] = ()
    prompt_ids: tuple[Id, ...] | None = None
    episode_ids: tuple[Id, ...] | None = None
    sample_ids: tuple[Id, ...] | None = None
    terminations: tuple[Termination, ...] | None = None
    offset_S: Tensor
    """int64 [S]: column where each row began in the caller's padded tensor."""
    first_action_S: Tensor
    """bool [S]: the caller marked the first token of the row as an action, which nothing predicts."""
    width: int
    """Width of the caller's padded tensor, or the longest row."""
    device: torch.device
    records_S: tuple[UpdateRecord, ...]
    fault: PGLossError | None = None
    """Bad input found while building in a world of several ranks; `plan` raises it on all of them."""

    def __len__(self) -> int:
        return self.cu_S1.numel() - 1

    @property
    def lengths_S(self) -> Tensor:
        """int64 [S]: tokens per row."""
        return self.cu_S1.diff()

    @property
    def seq_T(self) -> Tensor:
        """int64 [T]: row of each position."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths_S)

    @property
    def predicts_T(self) -> Tensor:
        """bool [T]: whether the position predicts a token (all but a row's last)."""
        predicts = torch.ones(self.tokens_T.numel(), dtype=torch.bool)
        predicts[self.cu_S1[1:][self.lengths_S > 0] - 1] = False
        return predicts

    def sample_name(self, row: int) -> str:
        """How errors and reports call a row."""
        return f"sample {self.sample_ids[row]!r}" if self.sample_ids is not None else f"row {row}"

    def select(self, rows: Sequence[int]) -> TokenBatch:
        """These rows, in this order, as a batch; it shares the record of updates with the original."""
        picked = torch.as_tensor(list(rows), dtype=torch.int64)
        lengths = self.lengths_S[picked]
        cu = torch.zeros(len(rows) + 1, dtype=torch.int64)
        cu[1:] = lengths.cumsum(0)
        index_T = torch.arange(int(cu[-1])) + torch.repeat_interleave(self.cu_S1[picked] - cu[:-1], lengths)
        changes: dict[str, Any] = {"cu_S1": cu, "records_S": tuple(self.records_S[row] for row in rows)}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_T"):
                changes[item.name] = None if value is None else value[index_T]
            elif item.name in _STREAM_DICTS:
                changes[item.name] = {name: stream[index_T] for name, stream in value.items()}
            elif item.name in ("offset_S", "first_action_S"):
                changes[item.name] = value[picked]
            elif item.name in _ROW_TUPLES and value is not None:
                changes[item.name] = tuple(value[row] for row in rows)
        return replace(self, **changes)

    def with_stream(self, name: str, stream_T: Tensor) -> TokenBatch:
        """The same rows with the target-aligned constant stream ``name`` (``old``, ``rollout``, ``ref``) set.

        Args:
            stream_T: float32 or float64 [T], position t about ``targets_T[t]``.
        """
        if name not in STREAMS and name not in self.streams:
            raise DataError(f"no stream {name!r}", expected=", ".join(STREAMS))
        if stream_T.dtype not in (torch.float32, torch.float64):
            raise DataError(f"stream {name!r} has the wrong dtype", expected="float32 or float64", got=stream_T.dtype)
        if stream_T.shape != self.tokens_T.shape:
            raise DataError(
                f"stream {name!r} has the wrong length",
                expected=list(self.tokens_T.shape),
                got=list(stream_T.shape),
            )
        # A constant by definition: nothing is differentiated through what the policy was.
        return replace(self, streams={**self.streams, name: stream_T.detach().cpu()})

    @classmethod
    def from_padded(cls, **given: Any) -> TokenBatch:
        """Rows of a padded ``[B, L]`` matrix; see `megatron_pgloss.rollouts.build.from_padded`."""
        from megatron_pgloss.rollouts.build import from_padded

        return from_padded(**given)

    @classmethod
    def from_packed(cls, **given: Any) -> TokenBatch:
        """Rows laid end to end in ``[T]``; see `megatron_pgloss.rollouts.build.from_packed`."""
        from megatron_pgloss.rollouts.build import from_packed

        return from_packed(**given)

    @classmethod
    def from_traces(cls, traces: Sequence[Any], **given: Any) -> TokenBatch:
        """Agent traces made of spans; see `megatron_pgloss.rollouts.traces.from_traces`."""
        from megatron_pgloss.rollouts.traces import from_traces

        return from_traces(traces, **given)


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch | None:
    """One batch of all rows in order; None for no batches.

    Raises:
        DataError: a stream, mask, weight or id is given by some batches and absent in others.
    """
    batches = [batch for batch in batches if batch.fault is not None or len(batch)]
    for batch in batches:
        if batch.fault is not None:
            raise batch.fault
    if not batches:
        return None
    if len(batches) == 1:
        return batches[0]
    sizes = torch.tensor([0] + [int(batch.cu_S1[-1]) for batch in batches]).cumsum(0).tolist()
    starts = [batch.cu_S1[1:] + base for batch, base in zip(batches, sizes, strict=False)]
    words = tuple(dict.fromkeys(word for batch in batches for word in batch.words))
    changes: dict[str, Any] = {
        "cu_S1": torch.cat([torch.zeros(1, dtype=torch.int64), *starts]),
        "records_S": sum((batch.records_S for batch in batches), ()),
        "width": max(batch.width for batch in batches),
        "words": words,
    }
    for item in fields(batches[0]):
        values = [getattr(batch, item.name) for batch in batches]
        if item.name == "labels":
            values = [_reworded(batch, words) for batch in batches]
        if item.name in changes:
            continue
        if item.name == "versions_T":
            _all_or_none("versions", [value is not None for value in values])
            changes[item.name] = None if values[0] is None else torch.cat(values)
        elif item.name.endswith("_T") or item.name in ("offset_S", "first_action_S"):
            changes[item.name] = torch.cat(values)
        elif item.name in _STREAM_DICTS:
            names = sorted({name for value in values for name in value})
            if item.name == "labels":  # for people to read: those that every batch has
                names = [name for name in names if all(name in value for value in values)]
            for name in names:
                _all_or_none(f"{item.name} {name!r}", [name in value for value in values])
            changes[item.name] = {name: _joined([value[name] for value in values]) for name in names}
        elif item.name in _ROW_TUPLES:
            _all_or_none(item.name, [value is not None for value in values])
            changes[item.name] = None if values[0] is None else sum(values, ())
    return replace(batches[0], **changes)


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts end to end; wide ones filled up to the widest, ids with -1."""
    if parts[0].dim() > 1:
        width = max(part.size(1) for part in parts)
        fill = 0 if parts[0].is_floating_point() else -1
        parts = [torch.nn.functional.pad(part, (0, width - part.size(1)), value=fill) for part in parts]
    return torch.cat(parts)


def _reworded(batch: TokenBatch, words: tuple[str, ...]) -> dict[str, Tensor]:
    table = torch.tensor([words.index(word) for word in batch.words], dtype=torch.int16)
    return {name: table[codes_T.long()] for name, codes_T in batch.labels.items()}


def _all_or_none(name: str, present: list[bool]) -> None:
    if any(present) and not all(present):
        raise DataError(
            f"{name} is given by some batches of this step and absent in others",
            expected="all or none",
            got=f"absent in batch {present.index(False)} of {len(present)}",
            fix="give it for every batch",
        )
