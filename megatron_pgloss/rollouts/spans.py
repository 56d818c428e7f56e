"""From agent traces to the fields of a `TokenBatch`. `T` tokens of all rows end to end, `n` tokens of one span."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import arrays, checks
from megatron_pgloss.rollouts.align import Shift, turns
from megatron_pgloss.rollouts.build import Fields, align, fields
from megatron_pgloss.rollouts.frame import Frame
from megatron_pgloss.rollouts.place import short
from megatron_pgloss.rollouts.states import Author
from megatron_pgloss.rollouts.streams import BY_NAME, OFF, STREAMS, StreamSpec
from megatron_pgloss.rollouts.traces import Sampler, Span, Trace
from megatron_pgloss.spec import RoleTable
from megatron_pgloss.spec.words import nearest

_OWN = {"rollout_logprobs": ("logprobs", "log-probs"), "versions": ("version", "versions"),
        "kept_sets": ("kept_sets", "kept sets")}  # fmt: skip
"""Streams that have a field of their own in `Span`: the field, and the word for it in errors."""
_FURTHER = tuple(row.argument for row in STREAMS if row.optional and row.read_by == "loss")
"""The streams that ``Span(streams=...)`` may hold; the sampler's numbers belong to the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A span whose tokens and author were read and checked."""

    span: Span
    row: int
    author: Author
    tokens_n: Tensor
    place: str
    """The name of the span in errors."""


def fields_of_traces(traces: Sequence[Trace], roles: RoleTable | None) -> Fields:
    """The fields of a batch of traces; see `TokenBatch.from_traces`."""
    traces, roles = _checked(traces), RoleTable() if roles is None else roles
    runs = [_read(trace, row, place) for row, trace in enumerate(traces) for place in range(len(trace.spans))]
    counts = torch.tensor([run.tokens_n.numel() for run in runs], dtype=torch.int64)
    row_of = torch.tensor([row for row, trace in enumerate(traces) for _ in trace.spans], dtype=torch.int64)
    lengths_S = torch.zeros(len(traces), dtype=torch.int64).index_add(0, row_of, counts)
    frame, shift = Frame.packed(lengths_S), Shift(lengths_S)

    def spread(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=dtype), counts)

    action_T = spread([run.author is Author.POLICY for run in runs], torch.bool)
    seen_T = turns(action_T, lengths_S) >= 0
    observation_T = spread([run.author is Author.ENVIRONMENT for run in runs], torch.bool) & seen_T & ~action_T
    table = roles.ce
    target_T = observation_T & spread([table is None or run.span.role in table for run in runs], torch.bool)
    _roles_known(runs, table)
    words = tuple(dict.fromkeys([*(run.author.value for run in runs), *(run.span.role for run in runs)]))
    code = {word: i for i, word in enumerate(words)}
    given: dict[str, Any] = {
        "tokens": torch.cat([torch.zeros(0, dtype=torch.int64), *(run.tokens_n for run in runs)]),
        "action_mask": action_T,
        "observation_mask": target_T,
        **_streams(traces, runs),
        "prompt_ids": _all_or_none([trace.prompt_id for trace in traces], "prompt_id"),
        "episode_ids": _all_or_none([trace.episode_id for trace in traces], "episode_id"),
        "sample_ids": _all_or_none([trace.sample_id for trace in traces], "sample_id"),
        "terminations": _all_or_none([trace.termination for trace in traces], "termination"),
    }
    if table is not None:
        given["weights"] = {"ce": spread([table.get(run.span.role, 0.0) for run in runs], torch.float32)}
    labels = {
        "author": spread([code[run.author.value] for run in runs], torch.int32),
        "role": spread([code[run.span.role] for run in runs], torch.int32),
    }
    return fields(frame, given["tokens"], given) | {
        "observation_T": align(BY_NAME["target"], observation_T, shift),
        "labels": {name: shift(codes_T, 0) for name, codes_T in labels.items()},
        "words": words,
    }


def _roles_known(runs: list[_Stretch], table: Mapping[str, float] | None) -> None:
    """Refuse a table that names a role of no span, where a span has one that differs by a letter or two."""
    found = {run.span.role: run.place for run in runs if run.author is Author.ENVIRONMENT}
    for role in table or ():
        close = difflib.get_close_matches(role, [name for name in found if name not in (table or ())], 1, cutoff=0.8)
        if role not in found and close:
            raise DataError(
                f"roles.ce names {role!r}, a role of no span, and {close[0]!r} would be trained on by nobody",
                expected="the roles of the environment's spans", got=", ".join(sorted(found)), where=found[close[0]],
                fix=f"did you mean {close[0]!r}? If both are meant, name both, one with weight 0",
            )  # fmt: skip


def _checked(traces: Any) -> list[Trace]:
    """The traces as a list, after a check that they are made of `Trace`, `Span` and `Sampler`."""
    if not isinstance(traces, Sequence) or not all(isinstance(trace, Trace) for trace in traces):
        raise DataError("from_traces takes a list of traces", expected="list of Trace", got=type(traces).__name__)
    for row, trace in enumerate(traces):
        if not isinstance(trace.spans, Sequence) or not all(isinstance(span, Span) for span in trace.spans):
            raise DataError("a trace has something else than spans", expected="list of Span", where=f"trace {row}")
        if not isinstance(trace.sampler, Sampler) or trace.sampler.logprobs not in ("processed", "raw"):
            raise DataError(
                "a trace has no known sampler", expected="Sampler(logprobs='processed' or 'raw')",
                got=repr(getattr(trace.sampler, "logprobs", trace.sampler))[:64], where=f"trace {row}",
            )  # fmt: skip
    return list(traces)


def _read(trace: Trace, row: int, number: int) -> _Stretch:
    span = trace.spans[number]
    name = row if trace.sample_id is None else short(trace.sample_id)
    place = f"trace {name}, span {number} of role {short(span.role)}"
    if not isinstance(span.role, str):
        raise DataError("a span has a role that is no text", expected="str", got=type(span.role).__name__, where=place)
    for stream in span.streams:
        if stream not in _FURTHER:
            fix = nearest(str(stream), _FURTHER)
            raise DataError(f"a span has no stream {stream!r}", expected=", ".join(_FURTHER), where=place, fix=fix)
    try:
        author = Author(span.author)
    except ValueError:
        known = [author.value for author in Author]
        raise DataError(
            "a span has an unknown author", expected=", ".join(known), got=repr(span.author)[:32], where=place,
            fix=nearest(str(span.author), known),
        ) from None  # fmt: skip
    tokens_n = _one_a_token(BY_NAME["tokens"], span.tokens, None, place)
    return _Stretch(span=span, row=row, author=author, tokens_n=tokens_n, place=place)


def _one_a_token(row: StreamSpec, value: Any, count: int | None, place: str) -> Tensor:
    """A span's stream in the dtype of the table: [n], or [n, k] of ids; n is ``count``, or any number where it is
    None.
    """
    field, words = _OWN.get(row.argument, (row.argument, row.argument))
    called = f"{field} of {place}"
    if row.argument == "rollout_logprobs" and isinstance(value, list | tuple):
        # None: the sampler did not score the token. `TokenBatch.with_unscored` gives it a rule, else the plan refuses
        # it.
        value = [math.nan if item is None else item for item in value]
    if row.dtype == "ids":
        found = _ids(called, value)
    else:
        found = arrays.tensor(called, value, row.python_floats)
        found = found.expand(count).clone() if found.dim() == 0 and row.shape == "row" and count is not None else found
        empty = not found.numel() and found.dim() == 1
        found = found.to(torch.int64) if empty and not row.is_float else checks.stream(row, found, name=called)
    if found.dim() != (2 if row.dtype == "ids" else 1) or (count is not None and len(found) != count):
        raise DataError(
            f"a span has another number of {words} than tokens", expected=count if count is not None else "[n]",
            got=len(found) if found.dim() else "one", where=place,
        )  # fmt: skip
    return found


def _ids(called: str, given: Any) -> Tensor:
    """The ids of each token, int64 [n, k], filled up with -1."""
    if not isinstance(given, list | tuple):
        return checks.ids(called, arrays.tensor(called, given))
    sets = [checks.whole(called, arrays.tensor(called, ids)) if len(ids) else torch.zeros(0, dtype=torch.int64)
            for ids in given]  # fmt: skip
    if any(ids.dim() != 1 for ids in sets):
        raise DataError(f"{called} must be one list of ids a token", expected="[n][k]")
    wide = max((ids.numel() for ids in sets), default=0)
    filled = [torch.nn.functional.pad(ids, (0, wide - ids.numel()), value=-1) for ids in sets]
    return checks.ids(called, torch.stack(filled) if filled else torch.zeros(0, 0, dtype=torch.int64))


def _streams(traces: list[Trace], runs: list[_Stretch]) -> dict[str, Tensor | None]:
    """Every optional stream that traces, their samplers or their spans have, by its keyword."""
    sampled = _sampled(traces)
    found = {row.argument: _of_spans(row, runs) for row in STREAMS if row.optional and row.argument not in sampled}
    if found["rollout_logprobs"] is not None:
        _processed(traces, runs)
    advantages = _all_or_none([trace.advantage for trace in traces], "advantage")
    if advantages is not None:
        if found["advantages"] is not None:
            raise DataError("advantages are given by traces and by their spans", expected="one of the two")
        found["advantages"] = arrays.tensor("advantage", advantages, torch.float32)
    elif not traces:
        found["advantages"] = torch.zeros(0)
    return found | sampled


def _of_spans(row: StreamSpec, runs: list[_Stretch]) -> Tensor | None:
    """One stream [T] from the spans that have it; None where none has."""
    field, words = _OWN.get(row.argument, ("", row.argument))
    parts: list[Tensor | None] = []
    for run in runs:
        own = getattr(run.span, field) if field else None
        other = run.span.streams.get(row.argument)
        if own is not None and other is not None:
            raise DataError(f"a span has {field} twice", expected=f"{field}= or streams=", where=run.place)
        value = other if own is None else own
        parts.append(None if value is None else _one_a_token(row, value, run.tokens_n.numel(), run.place))
    given = [part for part in parts if part is not None]
    if not given:
        return None
    for run, part in zip(runs, parts, strict=True):
        # A token without a set had the whole vocabulary. Any other stream must be given for all tokens that were
        # sampled.
        if part is None and row.dtype != "ids" and run.author is Author.POLICY and run.tokens_n.numel():
            raise DataError(
                f"{field or words} of policy spans: some have it and some have none", expected="all or none",
                where=run.place,
            )  # fmt: skip
    wide = max((part.size(1) for part in given), default=0) if row.dtype == "ids" else None
    kind = given[0].dtype
    filled = []
    for run, part in zip(runs, parts, strict=True):
        if part is None:
            shape = (run.tokens_n.numel(),) if wide is None else (run.tokens_n.numel(), wide)
            part = torch.full(shape, row.absent, dtype=kind)
        elif wide is not None:
            part = torch.nn.functional.pad(part, (0, wide - part.size(1)), value=-1)
        filled.append(part)
    return torch.cat(filled)


def _sampled(traces: list[Trace]) -> dict[str, Tensor | None]:
    """The samplers' numbers, [S] each: the temperature always, the others where any of them was active."""
    found: dict[str, Tensor | None] = {}
    for row in STREAMS:
        if row.argument in Sampler.__dataclass_fields__:
            values = [getattr(trace.sampler, row.argument) for trace in traces]
            number_S = checks.stream(row, arrays.tensor(row.argument, values, row.python_floats))
            off = number_S <= 0 if row.argument == "top_k" else number_S == row.fill
            found[row.argument] = None if row.name in OFF and bool(off.all()) else number_S
    return found


def _processed(traces: list[Trace], runs: list[_Stretch]) -> None:
    """Refuse log-probs of the raw logits where tokens were drawn from another distribution."""
    for row, trace in enumerate(traces):
        if trace.sampler.logprobs == "processed":
            continue
        sets = [run for run in runs if run.row == row and run.span.kept_sets is not None]
        active = _active(trace.sampler, any(bool((_ids("kept_sets", run.span.kept_sets) >= 0).any()) for run in sets))
        if active:
            raise DataError(
                f"the sampler reports raw log-probs while a {active.split('=')[0]} was active",
                expected="logprobs='processed'",
                got=active,
                where=f"trace {short(trace.sample_id)}",
                fix="ask the engine for processed log-probs",
            )


def _active(sampler: Sampler, has_sets: bool) -> str:
    """The first processor by which tokens were drawn from another distribution than the raw one; empty for none."""
    found = {
        f"temperature={sampler.temperature}": sampler.temperature != 1.0,
        f"top_k={sampler.top_k}": sampler.top_k > 0,
        f"top_p={sampler.top_p}": sampler.top_p != 1.0,
        f"min_p={sampler.min_p}": sampler.min_p != 0.0,
        "kept set=recorded": has_sets,
    }
    return next((name for name, active in found.items() if active), "")


def _all_or_none(values: list[Any], name: str) -> list[Any] | None:
    absent = [value is None for value in values]
    if all(absent):
        return None
    if any(absent):
        raise DataError(f"{name} is given for some traces only", where=f"trace {absent.index(True)} has none")
    return values
