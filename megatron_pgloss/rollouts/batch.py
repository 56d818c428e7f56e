"""`TokenBatch`: rollouts as target-aligned token streams. `T` tokens of all rows laid end to end, `S` rows.

After construction, position t of every stream is about **the token predicted from position t**, ``targets_T[t]``.
The shift from token order happens once, in `megatron_pgloss.rollouts.align`, and nowhere else in the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.errors import Caught, DataError, PGLossError
from megatron_pgloss.rollouts import arrays, build, checks
from megatron_pgloss.rollouts.keywords import PackedArguments, PaddedArguments, takes
from megatron_pgloss.rollouts.place import Id, row_name, token_name
from megatron_pgloss.rollouts.spans import fields_of_traces
from megatron_pgloss.rollouts.states import Termination
from megatron_pgloss.rollouts.streams import BY_NAME, OPTIONAL, is_own
from megatron_pgloss.rollouts.traces import Trace
from megatron_pgloss.spec import RoleTable

STREAM_DICTS = ("streams", "weights", "masks", "labels")
ROW_TUPLES = ("prompt_ids", "episode_ids", "sample_ids", "terminations")


class UpdateRecord:
    """Whether a row has been updated on: shared by every batch that holds the row, so that a second on-policy
    update is seen whichever view it comes through."""

    __slots__ = ("_before", "_plan", "logp", "pending")

    def __init__(self) -> None:
        self._plan: int | None = None
        self._before: int | None = None
        self.logp: Tensor | None = None
        """Log-probs of the row's targets at its first update, with ``old="record"``."""
        self.pending: Any = None
        """The recorder that still holds these log-probs micro-batch by micro-batch, until the next plan reads them."""

    @property
    def plan(self) -> int | None:
        """Serial of the plan that last updated on the row."""
        return self._plan

    @plan.setter
    def plan(self, serial: int) -> None:
        if serial != self._plan:
            self._before, self._plan = self._plan, serial

    def take_back(self, serial: int) -> None:
        """Note that the update by plan ``serial`` was not made after all."""
        if self._plan == serial:
            self._plan = self._before


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
    """The optional streams of the table (`megatron_pgloss.rollouts.streams`) that were given, by name, and the user's
    own; constants, [T] each. A stream with several numbers per token is [T, k]: int64 token ids, -1 where a token has
    fewer than k, or one float for each of these ids."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """float [T] per component name: the user's weights."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """bool [T] per name: the user's masks."""
    labels: dict[str, Tensor] = field(default_factory=dict)
    """int32 [T]: ``role`` and ``author`` of each target as indices into ``words``, for people to read."""
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
        """The name of a row in errors and reports; a very long id is shortened."""
        return row_name(row, self.sample_ids)

    def where(self, position: int, stream: str | None = None, *, read: bool = False) -> str:
        """``sample 'id', token 3, stream 'old'``: the text by which errors say where a token lies.

        Args:
            position: position in the streams, [T].
            stream: the name of the stream that was looked at.
            read: whether the token that the model reads there is meant, instead of the one predicted from there.
        """
        return token_name(self.cu_S1, position, self.sample_ids, stream, predicted=not read)

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
            elif item.name in STREAM_DICTS:
                changes[item.name] = {name: stream[index_T] for name, stream in value.items()}
            elif item.name in ("offset_S", "first_action_S"):
                changes[item.name] = value[picked]
            elif item.name in ROW_TUPLES and value is not None:
                changes[item.name] = tuple(value[row] for row in rows)
        return replace(self, **changes)

    def with_stream(
        self, name: str, stream_T: arrays.Array | Tensor | Sequence[Any], *, add: bool = False
    ) -> TokenBatch:
        """The same rows with a stream set: an optional one of the table (``old``, ``ref``, ...), or one of the user's
        own that the batch has.

        Args:
            name: name of the stream.
            stream_T: [T], or [T, k] for a stream of several numbers per token; already target-aligned: position t is
                about ``targets_T[t]``. Its type is that of the table: float32 or float64, int64, bool.
            add: whether it may be a stream of the user's own that the batch does not have yet, such as a teacher's
                log-probs.

        Raises:
            DataError: there is no such stream, or its shape or type does not fit.
        """
        if name not in OPTIONAL and name not in self.streams and not (add and is_own(name)):
            raise DataError(
                f"no stream {name!r}", expected=", ".join(OPTIONAL), fix=None if add else "add=True for one of your own"
            )
        called, row = f"stream {name!r}", BY_NAME.get(name)
        given = arrays.tensor(called, stream_T, torch.float32 if row is None else row.python_floats)
        wide = given.dim() == 2 and (row is None or row.dtype == "ids")
        if given.shape[:1] != self.tokens_T.shape or not (wide or given.dim() == 1):
            raise DataError(
                f"{called} has the wrong length",
                expected=list(self.tokens_T.shape),
                got=list(given.shape),
            )
        if given.dtype in (torch.bfloat16, torch.float16):
            raise DataError(f"{called} has the wrong dtype", expected="float32 or float64", got=given.dtype)
        kept = checks.own_stream(called, given) if row is None else checks.stream(row, given, name=called)
        # A stream is constant by definition: no gradient passes through what earlier policies gave.
        return replace(self, streams={**self.streams, name: kept})

    def with_unscored(self, rule: Literal["ratio_1"]) -> TokenBatch:
        """The same rows, in which action tokens that the sampler did not score (NaN in stream ``rollout``) are covered
        by a stated rule.

        Args:
            rule: ``ratio_1``: mu is taken to be old there. The ratio old/mu is exactly 1, so a correction neither
                weighs nor rejects the token; it adds 0 to the statistic of its sequence or turn, and votes in it.

        Raises:
            DataError: the rule is unknown, a stream is absent, or old is not finite at such a token.
        """
        if rule != "ratio_1":
            raise DataError(f"with_unscored({rule!r})", expected="'ratio_1'")
        for name in ("rollout", "old"):
            if name not in self.streams:
                fix = "score the batch into old first" if name == "old" else "rollout_logprobs=, NaN where unscored"
                raise DataError(f"with_unscored reads stream {name!r}, which the batch does not have", fix=fix)
        rollout_T, old_T = self.streams["rollout"], self.streams["old"]
        unscored_T = self.action_T & rollout_T.isnan()
        bad_T = unscored_T & ~old_T.isfinite()
        if bool(bad_T.any()):
            at = int(bad_T.to(torch.int8).argmax())
            raise DataError("a token was scored by nobody", got=float(old_T[at]), where=self.where(at, "old"))
        kind = torch.promote_types(rollout_T.dtype, old_T.dtype)
        # In the wider of both types: a rounded old would not give a ratio of exactly 1.
        return self.with_stream("rollout", torch.where(unscored_T, old_T.to(kind), rollout_T.to(kind)))

    @classmethod
    @takes(PaddedArguments)
    def from_padded(cls, **given: Unpack[PaddedArguments]) -> TokenBatch:
        """Build from a padded matrix; everything is in token order: ``x[b, i]`` is about ``tokens[b, i]``.

        The keywords are ``tokens`` and ``action_mask``; where the rows lie (``lengths`` [B], padded on the right, or
        ``attention_mask`` [B, L], padded on either side, without holes); every other stream of the table in
        docs/conventions.md; and those that `megatron_pgloss.rollouts.keywords` has beside them: ids, terminations, and
        weights, masks and streams that the caller names.

        Values may be tensors, numpy arrays or nested lists of numbers. Python's floats become float32; those of the
        sampler (``temperature``, ``top_p``, ``min_p``) stay float64.

        Raises:
            DataError: a shape or type does not fit, ``attention_mask`` has holes, or a mask marks padding. In a world
                of several ranks the error is kept in the batch and raised by `plan` on every rank, so that no rank
                hangs.
        """
        return _carrying(lambda: cls._of(build.padded(given)))

    @classmethod
    @takes(PackedArguments)
    def from_packed(cls, **given: Unpack[PackedArguments]) -> TokenBatch:
        """Build from rows laid end to end; keywords as in `from_padded`, with ``[T]`` for ``[B, L]`` and ``[S]`` for
        ``[B]``; ``lengths`` [S] sums to T.
        """
        return _carrying(lambda: cls._of(build.packed(given)))

    @classmethod
    def from_traces(cls, traces: Sequence[Trace], *, roles: RoleTable | None = None) -> TokenBatch:
        """A batch of traces, one row each.

        Actions are the policy's tokens. Observations (the set O) are the environment's tokens after the first policy
        turn, never the initial prompt; of them, those whose role is in ``roles.ce`` are targets (O') with that weight,
        all with weight 1 where there is no table (ECHO 2605.24517). Copied tokens are neither.

        Args:
            traces: rows; every policy span of a batch carries log-probs, or none does.
            roles: the spec's role table.

        Raises:
            DataError: a value is of the wrong kind; log-probs are missing in places, have the wrong length, or are raw
                while a temperature, top-k, top-p, min-p or a recorded set was active. The error is kept in the batch as
                by `from_padded`.
        """
        return _carrying(lambda: cls._of(fields_of_traces(traces, roles)))

    @classmethod
    def _of(cls, made: build.Fields) -> TokenBatch:
        """A batch of rows that nobody has updated on."""
        return cls(**made, records_S=tuple(UpdateRecord() for _ in range(made["cu_S1"].numel() - 1)))


def _carrying(make: Callable[[], TokenBatch]) -> TokenBatch:
    # A rank that raised here would leave the others waiting in the plan's gather, so the plan raises it on all ranks.
    with Caught() as here:
        return make()
    assert here.error is not None
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        raise here.error
    return broken(here.error)


def broken(error: PGLossError) -> TokenBatch:
    """A batch without rows that carries ``error`` to the plan."""
    none_T, none_S = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    flag = torch.zeros(0, dtype=torch.bool)
    return TokenBatch(
        tokens_T=none_T, targets_T=none_T, cu_S1=torch.zeros(1, dtype=torch.int64), action_T=flag,
        observation_T=flag, target_T=flag, turn_T=none_T, offset_S=none_S, first_action_S=flag, width=0,
        device=torch.device("cpu"), records_S=(), fault=error,
    )  # fmt: skip
