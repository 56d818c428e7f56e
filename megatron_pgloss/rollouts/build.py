"""From padded or packed tensors to a `TokenBatch`. `B` rows, `L` width, `T` tokens of all rows end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.errors import DataError, PGLossError
from megatron_pgloss.rollouts import checks
from megatron_pgloss.rollouts.align import Shift, turns
from megatron_pgloss.rollouts.batch import OFF, Id, TokenBatch, UpdateRecord
from megatron_pgloss.rollouts.states import Termination

_FLOATS = {
    "advantages": "advantages",
    "old_logprobs": "old",
    "rollout_logprobs": "rollout",
    "ref_logprobs": "ref",
    "values": "values",
    "returns": "returns",
    "temperature": "temperature",
}
_TAKEN = (
    "tokens", "targets", "turn", "action", "recorded", "interpolation", *_FLOATS.values(), "advantage", *OFF,
)  # fmt: skip
"""Names that a stream of the user's own cannot have."""


def from_padded(
    *,
    tokens: Tensor,
    action_mask: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    **more: Any,
) -> TokenBatch:
    """Build from a padded matrix; everything in token order: ``x[b, i]`` is about ``tokens[b, i]``.

    Args:
        tokens: int64 [B, L].
        action_mask: bool [B, L]: the policy sampled this token.
        lengths: int64 [B], rows padded on the right; or
        attention_mask: bool [B, L]; left padding is fine, holes are refused.
        advantages: float32/64 [B] or [B, L].
        old_logprobs, rollout_logprobs, ref_logprobs: float32/64 [B, L]; anything outside what the loss reads.
        observation_mask: bool [B, L]: answers of the environment, targets of cross entropy.
        turn_ids: int64 [B, L], -1 for none; default: derived from ``action_mask``.
        values, returns: float32/64 [B, L]: the value head's old output and its target, for `Value`.
        streams: name to float32/64 [B, L]: constants of the user's own, read as ``x.stream(name)`` and as bounds. Or
            several numbers a token, [B, L, k]: int64 token ids, -1 where a token has fewer than k, or float32/64 beside
            them, read where the ids are (a teacher's top-k log-probs).
        kept_sets: int64 [B, L, k], -1 where a token has fewer than k: the ids that the sampler could draw from; a token
            without any was drawn from the whole vocabulary. Read where the policy sampled, by ``LossSpec(kept=...)``,
            as are
        top_k, top_p, min_p: a number, [B] or [B, L]: the sampler's own, from which sets are recomputed; 0 (or -1), 1
            and 0 where off.
        weights: component name to float [B, L].
        masks: name to bool [B, L].
        temperature: float, [B] or [B, L], the sampler's; > 0 where the policy sampled.
        versions: int64 [B] or [B, L]: version of the weights that sampled each token.
        prompt_ids, episode_ids, sample_ids: [B], int64 or str, or None.
        terminations: [B] of `Termination` or its values.
        allow_low_precision: names of log-prob or advantage arguments that may be bf16 or fp16.

    Raises:
        DataError: shapes, dtypes, holes. In a world of several ranks the error is kept in the batch and raised by
            `plan` on every rank, so that nobody hangs.
    """
    return _deferred(lambda: _padded(tokens, action_mask, lengths, attention_mask, dict(more)), tokens, "from_padded")


def from_packed(*, tokens: Tensor, action_mask: Tensor, lengths: Tensor | Sequence[int], **more: Any) -> TokenBatch:
    """Build from rows laid end to end; arguments as in `from_padded` with ``[T]`` for ``[B, L]`` and ``[S]`` for
    ``[B]``.

    Args:
        tokens: int64 [T].
        action_mask: bool [T].
        lengths: int64 [S], summing to T.
    """

    def build() -> TokenBatch:
        lengths_S = checks.lengths(lengths, None)
        total = int(lengths_S.sum())
        checks.tokens(tokens, (total,))
        take = _Take(torch.arange(total), (total,), lengths_S)
        width = int(lengths_S.max()) if lengths_S.numel() else 0
        offset_S = torch.zeros_like(lengths_S)
        return _assemble(take, tokens, action_mask, offset_S, width, dict(more))

    return _deferred(build, tokens, "from_packed")


def _deferred(build: Any, tokens: Any, caller: str) -> TokenBatch:
    # One rank that raises here would leave the others waiting in the plan's gather: there it is raised on all.
    try:
        return build()  # type: ignore[no-any-return]
    except PGLossError as error:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            raise
        return broken(error)


def broken(error: PGLossError) -> TokenBatch:
    """A batch without rows that carries ``error`` to the plan."""
    none_T, none_S = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    flag = torch.zeros(0, dtype=torch.bool)
    return TokenBatch(
        tokens_T=none_T, targets_T=none_T, cu_S1=torch.zeros(1, dtype=torch.int64), action_T=flag,
        observation_T=flag, target_T=flag, turn_T=none_T, offset_S=none_S, first_action_S=flag, width=0,
        device=torch.device("cpu"), records_S=(), fault=error,
    )  # fmt: skip


class _Take:
    """Flattens caller-shaped tensors to token order ``[T]``."""

    def __init__(self, index_T: Tensor, shape: tuple[int, ...], lengths_S: Tensor) -> None:
        self.index_T, self.shape, self.lengths_S = index_T, shape, lengths_S
        self.rows = lengths_S.numel()

    def __call__(self, name: str, value: Tensor, per_row: bool = False, wide: bool = False) -> Tensor:
        if not isinstance(value, Tensor):
            raise DataError(f"{name} is not a tensor", expected="a torch.Tensor", got=type(value).__name__)
        value = value.detach()
        if value.device.type != "cpu":
            value = value.cpu()
        if per_row and tuple(value.shape) == (self.rows,):
            if (self.rows,) == self.shape and bool((self.lengths_S != 1).any()):
                raise DataError(
                    f"{name} can be read as one number a row and as one a token",
                    got=f"{self.rows} rows and as many tokens",
                    fix="leave out rows of length 0, which are padding",
                )
            return torch.repeat_interleave(value, self.lengths_S)
        if wide and value.dim() == len(self.shape) + 1 and tuple(value.shape[:-1]) == self.shape:
            return value.reshape(-1, value.size(-1))[self.index_T]
        if tuple(value.shape) != self.shape:
            options = f"{list(self.shape)}" + (f" or [{self.rows}]" if per_row else "")
            options += f" or {[*self.shape, 'k']}" if wide else ""
            raise DataError(f"{name} has the wrong shape", expected=options, got=list(value.shape))
        return value.reshape(-1)[self.index_T]


def _padded(
    tokens: Tensor, action_mask: Tensor, lengths: Any, attention_mask: Tensor | None, more: dict[str, Any]
) -> TokenBatch:
    checks.tokens(tokens, (None, None))
    rows, width = tokens.shape
    if (lengths is None) == (attention_mask is None):
        raise DataError("give either lengths or attention_mask", expected="one of the two")
    if attention_mask is None:
        lengths_S, offset_S = checks.lengths(lengths, rows), torch.zeros(rows, dtype=torch.int64)
        if rows and int(lengths_S.max()) > width:
            raise DataError(
                "a length is larger than the width of tokens",
                expected=f"<= {width}",
                got=int(lengths_S.max()),
                where=f"row {int(lengths_S.argmax())}",
            )
    else:
        lengths_S, offset_S = checks.contiguous(attention_mask, (rows, width))
    cu = lengths_S.cumsum(0) - lengths_S
    start_S = torch.arange(rows) * width + offset_S - cu
    index_T = torch.arange(int(lengths_S.sum())) + torch.repeat_interleave(start_S, lengths_S)
    return _assemble(_Take(index_T, (rows, width), lengths_S), tokens, action_mask, offset_S, width, more)


def _assemble(
    take: _Take, tokens: Tensor, action_mask: Tensor, offset_S: Tensor, width: int, more: dict[str, Any]
) -> TokenBatch:
    lengths_S = take.lengths_S
    shift = Shift(lengths_S)
    action_T = checks.boolean("action_mask", take("action_mask", action_mask))
    target_T = _observations(take, more.pop("observation_mask", None), action_T)
    turn_ids = more.pop("turn_ids", None)
    turn_T = turns(action_T, lengths_S) if turn_ids is None else checks.whole("turn_ids", take("turn_ids", turn_ids))
    low = tuple(more.pop("allow_low_precision", ()))
    ids = {name: _ids(name, more.pop(name, None), take.rows) for name in ("prompt_ids", "episode_ids", "sample_ids")}
    terminations = _terminations(more.pop("terminations", None), take.rows)
    streams: dict[str, Tensor] = {}
    for argument, name in _FLOATS.items():
        value = more.pop(argument, None)
        if value is None:
            continue
        if argument == "temperature" and not isinstance(value, Tensor):
            value = torch.full((take.rows,), float(value))
        flat_T = take(argument, value, per_row=argument in ("advantages", "temperature"))
        # Temperature at a row's end scores nothing; 1 keeps the logits as they are.
        streams[name] = shift(checks.floating(argument, flat_T, low), 1.0 if name == "temperature" else 0.0)
    own = _named(take, more.pop("streams", None), "streams", checks.own_stream, wide=True)
    for name, stream_T in own.items():
        if name in _TAKEN or not name.isidentifier():
            raise DataError(f"streams: {name!r} is no name for a stream of your own", expected="another identifier")
        streams[name] = shift(stream_T, 0.0 if stream_T.is_floating_point() else -1)
    streams |= {name: shift(stream_T, OFF[name]) for name, stream_T in checks.sampler(take, more).items()}
    weights = _named(take, more.pop("weights", None), "weights", checks.floating)
    masks = _named(take, more.pop("masks", None), "masks", checks.boolean)
    versions = more.pop("versions", None)
    versions_T = None if versions is None else checks.whole("versions", take("versions", versions, per_row=True))
    labels, words = more.pop("labels", {}), more.pop("words", ())
    observation_T = more.pop("observation_set", None)
    if more:
        raise checks.unknown_argument(next(iter(more)))
    observation_T = target_T if observation_T is None else observation_T
    first_S = torch.zeros(take.rows, dtype=torch.bool)
    filled = lengths_S > 0
    first_S[filled] = action_T[(lengths_S.cumsum(0) - lengths_S)[filled]]
    tokens_T = take("tokens", tokens)
    return TokenBatch(
        tokens_T=tokens_T,
        targets_T=shift(tokens_T, 0),
        cu_S1=torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)]),
        action_T=shift(action_T, False),
        observation_T=shift(observation_T, False),
        target_T=shift(target_T, False),
        turn_T=shift(turn_T, -1),
        streams=streams,
        weights={name: shift(stream_T, 0.0) for name, stream_T in weights.items()},
        masks={name: shift(stream_T, False) for name, stream_T in masks.items()},
        versions_T=None if versions_T is None else shift(versions_T, 0),
        labels={name: shift(codes_T, 0) for name, codes_T in labels.items()},
        words=words,
        terminations=terminations,
        offset_S=offset_S,
        first_action_S=first_S,
        width=width,
        device=tokens.device,
        records_S=tuple(UpdateRecord() for _ in range(take.rows)),
        **ids,  # type: ignore[arg-type]
    )


def _observations(take: _Take, mask: Tensor | None, action_T: Tensor) -> Tensor:
    if mask is None:
        return torch.zeros_like(action_T)
    observation_T = checks.boolean("observation_mask", take("observation_mask", mask))
    both = observation_T & action_T
    if bool(both.any()):
        at, ends_S = int(both.to(torch.int8).argmax()), take.lengths_S.cumsum(0)
        row = int(torch.searchsorted(ends_S, at, right=True))
        raise DataError(
            "a token is marked as action and as observation",
            expected="one author per token",
            got=f"{int(both.sum())} such tokens",
            where=f"row {row}, token {at - int(ends_S[row] - take.lengths_S[row])}",
            fix="observation_mask must be false where the policy sampled",
        )
    return observation_T


def _named(
    take: _Take, given: Mapping[str, Tensor] | None, argument: str, check: Any, wide: bool = False
) -> dict[str, Tensor]:
    if given is not None and not isinstance(given, Mapping):
        raise DataError(f"{argument} must name its tensors", expected="{name: tensor}", got=type(given).__name__)
    return {
        name: check(f"{argument}[{name!r}]", take(f"{argument}[{name!r}]", value, wide=wide))
        for name, value in (given or {}).items()
    }


def _ids(name: str, given: Any, rows: int) -> tuple[Id, ...] | None:
    if given is None:
        return None
    values = given.tolist() if isinstance(given, Tensor) else list(given)
    if len(values) != rows:
        raise DataError(f"{name} has the wrong length", expected=rows, got=len(values))
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise DataError(f"{name} must be int64 or str", got=type(value).__name__)
    return tuple(values)


def _terminations(given: Any, rows: int) -> tuple[Termination, ...] | None:
    if given is None:
        return None
    if len(given) != rows:
        raise DataError("terminations has the wrong length", expected=rows, got=len(given))
    try:
        return tuple(Termination(value) for value in given)
    except ValueError as error:
        raise DataError(
            f"unknown termination: {error}", expected=", ".join(state.value for state in Termination)
        ) from None
