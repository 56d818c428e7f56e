"""From padded or packed numbers to the fields of a `TokenBatch`. `S` rows, `T` tokens of all rows end to end."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import checks
from megatron_pgloss.rollouts.align import Shift, turns
from megatron_pgloss.rollouts.frame import Frame
from megatron_pgloss.rollouts.keywords import PackedArguments, PaddedArguments, check_names
from megatron_pgloss.rollouts.place import Id, token_name
from megatron_pgloss.rollouts.states import Termination
from megatron_pgloss.rollouts.streams import BY_ARGUMENT, STREAMS, StreamSpec, is_own
from megatron_pgloss.spec.words import nearest

Fields = dict[str, Any]


def padded(given: Mapping[str, Any]) -> Fields:
    """The fields of a batch of padded rows; see `TokenBatch.from_padded`."""
    check_names(given, PaddedArguments, "from_padded")
    tokens = checks.tokens(given["tokens"], (None, None))
    rows, width = tokens.shape
    frame = Frame.padded((rows, width), given.get("lengths"), given.get("attention_mask"))
    return fields(frame, tokens, given)


def packed(given: Mapping[str, Any]) -> Fields:
    """The fields of a batch of packed rows; see `TokenBatch.from_packed`."""
    check_names(given, PackedArguments, "from_packed")
    frame = Frame.packed(checks.lengths(given["lengths"], None))
    return fields(frame, checks.tokens(given["tokens"], frame.shape), given)


def fields(frame: Frame, tokens: Tensor, given: Mapping[str, Any]) -> Fields:
    """All fields of a batch but those that its caller adds.

    Args:
        frame: where the rows lie.
        tokens: int64 of the frame's shape.
        given: further keywords of `BatchArguments`.
    """
    shift, lengths_S = Shift(frame.lengths_S), frame.lengths_S
    action_T = _flags(frame, "action_mask", given["action_mask"])
    frame.check_inside("action_mask", given["action_mask"])
    ids = {name: _ids(name, given.get(name), frame.rows) for name in ("prompt_ids", "episode_ids", "sample_ids")}
    target_T = _observations(frame, given.get("observation_mask"), action_T, ids["sample_ids"])
    turn_T = turns(action_T, lengths_S)
    if given.get("turn_ids") is not None:
        turn_T = checks.whole("turn_ids", frame.take("turn_ids", given["turn_ids"]))
    required = {"action": action_T, "target": target_T, "turn": turn_T}
    first_S = torch.zeros(frame.rows, dtype=torch.bool)
    filled = lengths_S > 0
    first_S[filled] = action_T[frame.cu_S1[:-1][filled]]
    tokens_T = frame.take("tokens", tokens)
    aligned = {row.name: align(row, required[row.name], shift) for row in STREAMS if row.name in required}
    return {
        "tokens_T": tokens_T,
        "targets_T": align(BY_ARGUMENT["tokens"], tokens_T, shift),
        "cu_S1": frame.cu_S1,
        "action_T": aligned["action"],
        "observation_T": aligned["target"],
        "target_T": aligned["target"],
        "turn_T": aligned["turn"],
        "streams": _streams(frame, given, shift),
        "weights": {name: shift(each, 0.0) for name, each in _named(frame, given, "weights", checks.floating).items()},
        "masks": {name: shift(each, False) for name, each in _named(frame, given, "masks", checks.boolean).items()},
        "terminations": _terminations(given.get("terminations"), frame.rows),
        "offset_S": frame.offset_S,
        "first_action_S": first_S,
        "width": frame.width,
        "device": given["tokens"].device if isinstance(given["tokens"], Tensor) else torch.device("cpu"),
        **ids,
    }


def align(row: StreamSpec, stream_T: Tensor, shift: Shift) -> Tensor:
    """A stream in token order made target-aligned, with the fill that its row of the table says."""
    return shift(stream_T, row.fill)


def _streams(frame: Frame, given: Mapping[str, Any], shift: Shift) -> dict[str, Tensor]:
    """The optional streams of the table, and the user's own."""
    low = _low(given.get("allow_low_precision", ()))
    found: dict[str, Tensor] = {}
    for row in STREAMS:
        value = given.get(row.argument)
        if row.optional and value is not None:
            found[row.name] = align(row, checks.stream(row, flat(frame, row, value), low), shift)
    for name, stream_T in _named(frame, given, "streams", checks.own_stream, wide=True).items():
        if not is_own(name):
            raise DataError(f"streams: {name!r} is no name for a stream of your own", expected="another identifier")
        found[name] = shift(stream_T, 0.0 if stream_T.is_floating_point() else -1)
    return found


def flat(frame: Frame, row: StreamSpec, value: Any) -> Tensor:
    """A stream of the table in token order, in the dtype that it came in."""
    per_row, wide = row.shape == "row", row.dtype == "ids"
    return frame.take(row.argument, value, floats=row.python_floats, per_row=per_row, wide=wide)


def _flags(frame: Frame, name: str, value: Any) -> Tensor:
    return checks.boolean(name, frame.take(name, value))


def _low(given: Any) -> tuple[str, ...]:
    """Names of the streams that may be in low precision."""
    names = (given,) if isinstance(given, str) else tuple(given)
    floats = [row.argument for row in STREAMS if row.is_float]
    for name in names:
        if name not in floats:
            raise DataError(f"allow_low_precision names {name!r}", expected=", ".join(floats))
    return names


def _observations(frame: Frame, mask: Any, action_T: Tensor, sample_ids: Sequence[Id] | None) -> Tensor:
    if mask is None:
        return torch.zeros_like(action_T)
    observation_T = _flags(frame, "observation_mask", mask)
    both_T = observation_T & action_T
    if bool(both_T.any()):
        raise DataError(
            "a token is marked as action and as observation",
            expected="one author per token",
            got=f"{int(both_T.sum())} such tokens",
            where=token_name(frame.cu_S1, int(both_T.to(torch.int8).argmax()), sample_ids),
            fix="observation_mask must be false where the policy sampled",
        )
    return observation_T


def _named(
    frame: Frame, given: Mapping[str, Any], argument: str, check: Callable[[str, Tensor], Tensor], wide: bool = False
) -> dict[str, Tensor]:
    """Tensors that the caller named, in token order."""
    named = given.get(argument)
    if named is not None and not isinstance(named, Mapping):
        raise DataError(f"{argument} must name its tensors", expected="{name: tensor}", got=type(named).__name__)
    found: dict[str, Tensor] = {}
    for name, value in (named or {}).items():
        if not isinstance(name, str):
            raise DataError(f"a name in {argument} is no text", expected="str", got=repr(name)[:32])
        called = f"{argument}[{name!r}]"
        found[name] = check(called, frame.take(called, value, floats=_own_floats(frame, argument, value), wide=wide))
    return found


def _own_floats(frame: Frame, argument: str, value: Any) -> torch.dtype | None:
    """The dtype that Python's numbers get in a tensor that the caller named; several integers per token are ids."""
    depth = 0
    while isinstance(value, Sequence) and not isinstance(value, str) and value:  # a text's first letter is a text
        value, depth = value[0], depth + 1
    are_ids = isinstance(value, int) and depth > len(frame.shape)
    return None if argument == "masks" or are_ids else torch.float32


def _ids(name: str, given: Any, rows: int) -> tuple[Id, ...] | None:
    if given is None:
        return None
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise DataError(f"{name} is no list", expected=f"[{rows}] of int64 or str", got=type(given).__name__)
    if len(values) != rows:
        raise DataError(f"{name} has the wrong length", expected=rows, got=len(values))
    return tuple(_id(name, value) for value in values)


def _id(name: str, value: Any) -> Id:
    if isinstance(value, str):
        return str(value)
    # numpy's whole numbers are not instances of int, but are taken as such; its bools and floats are refused.
    kind = getattr(getattr(value, "dtype", None), "kind", "i")
    if isinstance(value, bool | Tensor) or kind not in "iu" or not hasattr(value, "__index__"):
        raise DataError(f"{name} must be int64 or str", got=type(value).__name__)
    return operator.index(value)


def _terminations(given: Any, rows: int) -> tuple[Termination, ...] | None:
    if given is None:
        return None
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise DataError("terminations is no list", expected=f"[{rows}] of Termination", got=type(given).__name__)
    if len(given) != rows:
        raise DataError("terminations has the wrong length", expected=rows, got=len(given))
    try:
        return tuple(Termination(value) for value in given)
    except ValueError:
        known = [state.value for state in Termination]
        row, wrong = next((row, value) for row, value in enumerate(given) if value not in known)
        raise DataError(
            "unknown termination",
            expected=", ".join(known),
            got=repr(wrong)[:64],
            where=f"row {row}",
            fix=nearest(str(wrong), known),
        ) from None
