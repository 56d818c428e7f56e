"""Agent traces: a rollout as spans of tokens, each with a role and an author."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts.align import turns
from megatron_pgloss.rollouts.batch import Id, TokenBatch
from megatron_pgloss.rollouts.build import _assemble, _deferred, _Take
from megatron_pgloss.rollouts.states import Author, Termination
from megatron_pgloss.spec import RoleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An unbroken run of tokens from one author."""

    role: str
    """Chat role; decides weights only."""
    author: Author | Literal["policy", "environment", "harness", "renderer", "verifier", "copied"]
    """Who wrote it; decides membership."""
    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None
    """For policy spans: the sampler's own log-prob of every token."""
    version: int | Sequence[int] | None = None
    """For policy spans: version of the weights that sampled it, or of each token where they changed on the way."""
    kept_sets: Sequence[Sequence[int]] | None = None
    """For policy spans: of every token, the ids that the sampler could draw from (what top-k, top-p or a grammar left);
    an empty one means the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How the policy's tokens were drawn."""

    temperature: float = 1.0
    top_k: int = 0
    """0 or less: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: Literal["processed", "raw"] = "processed"
    """Whether reported log-probs are of the distribution drawn from, or of the raw logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One row the model reads: a rollout, or a part of one."""

    spans: Sequence[Span]
    advantage: float | None = None
    """Of every token of the row; None where `megatron_pgloss.advantages` makes it from rewards afterwards."""
    prompt_id: Id | None = None
    episode_id: Id | None = None
    sample_id: Id | None = None
    termination: Termination | None = None
    sampler: Sampler = field(default_factory=Sampler)


def from_traces(traces: Sequence[Trace], *, roles: RoleTable | None = None) -> TokenBatch:
    """A batch of traces, one row each.

    Actions are the policy's tokens. Observations (the set O) are the environment's tokens after the first policy
    turn, never the initial prompt; of them, those whose role is in ``roles.ce`` are targets (O') with that weight,
    all with weight 1 where there is no table (ECHO 2605.24517). Copied tokens are neither.

    Args:
        traces: rows; every policy span of a batch carries log-probs, or none does.
        roles: the spec's role table.

    Raises:
        DataError: log-probs missing in places, of the wrong length, or raw while a temperature, top-k, top-p, min-p or
            a recorded set was active.
    """
    some = torch.zeros(1, dtype=torch.int64)
    return _deferred(lambda: _build(list(traces), roles or RoleTable()), some, "from_traces")


def _build(traces: list[Trace], roles: RoleTable) -> TokenBatch:
    lengths_S = torch.tensor([sum(len(span.tokens) for span in trace.spans) for trace in traces], dtype=torch.int64)
    spans = [span for trace in traces for span in trace.spans]
    counts = torch.tensor([len(span.tokens) for span in spans], dtype=torch.int64)
    authors = [_author(span) for span in spans]
    words = tuple(dict.fromkeys([*(author.value for author in authors), *(span.role for span in spans)]))

    def spread(values: list[int] | list[bool] | list[float]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values), counts)

    tokens_T = torch.tensor([token for span in spans for token in span.tokens], dtype=torch.int64)
    action_T = spread([author is Author.POLICY for author in authors]).bool()
    seen_T = turns(action_T, lengths_S) >= 0
    observation_T = spread([author is Author.ENVIRONMENT for author in authors]).bool() & seen_T & ~action_T
    weight = [1.0 if roles.ce is None else roles.ce.get(span.role, 0.0) for span in spans]
    named = [roles.ce is None or span.role in roles.ce for span in spans]
    rows = len(traces)
    more = {
        "advantages": _advantages(traces),
        "rollout_logprobs": _logprobs(traces, spans),
        "versions": _versions(spans),
        "observation_mask": observation_T & spread(named).bool(),
        "observation_set": observation_T,
        "weights": None if roles.ce is None else {"ce": spread(weight).float()},
        "temperature": torch.tensor([float(trace.sampler.temperature) for trace in traces]),
        **_processors(traces, spans),
        "prompt_ids": _all_or_none([trace.prompt_id for trace in traces], "prompt_id"),
        "episode_ids": _all_or_none([trace.episode_id for trace in traces], "episode_id"),
        "sample_ids": _all_or_none([trace.sample_id for trace in traces], "sample_id"),
        "terminations": _all_or_none([trace.termination for trace in traces], "termination"),
        "labels": {
            "author": spread([words.index(author.value) for author in authors]).to(torch.int16),
            "role": spread([words.index(span.role) for span in spans]).to(torch.int16),
        },
        "words": words,
    }
    width = int(lengths_S.max()) if rows else 0
    take = _Take(torch.arange(tokens_T.numel()), (tokens_T.numel(),), lengths_S)
    return _assemble(take, tokens_T, action_T, torch.zeros_like(lengths_S), width, more)


def _advantages(traces: list[Trace]) -> Tensor | None:
    given = _all_or_none([trace.advantage for trace in traces], "advantage")
    return None if given is None and traces else torch.tensor([float(value) for value in given or []])


def _author(span: Span) -> Author:
    try:
        return Author(span.author)
    except ValueError:
        known = ", ".join(author.value for author in Author)
        raise DataError("a span has an unknown author", expected=known, got=repr(span.author)) from None


def _all_or_none(values: list, name: str) -> list | None:  # type: ignore[type-arg]
    absent = [value is None for value in values]
    if all(absent):
        return None
    if any(absent):
        raise DataError(f"{name} is given for some traces only", where=f"trace {absent.index(True)} has none")
    return values


def _logprobs(traces: list[Trace], spans: list[Span]) -> Tensor | None:
    policy = [span for span in spans if _author(span) is Author.POLICY and len(span.tokens)]
    given = [span.logprobs is not None for span in policy]
    if not any(given):
        return None
    if not all(given):
        raise DataError("some policy spans have log-probs and some have none", expected="all or none")
    for trace in traces:
        active = _active(trace)
        if trace.sampler.logprobs == "raw" and active:
            raise DataError(
                f"the sampler reports raw log-probs while a {active.split('=')[0]} was active",
                expected="logprobs='processed'",
                got=active,
                where=f"trace {trace.sample_id!r}",
                fix="ask the engine for processed log-probs",
            )
    values: list[float] = []
    for span in spans:
        if span.logprobs is not None and len(span.logprobs) != len(span.tokens):
            raise DataError(
                "a span has another number of log-probs than tokens",
                expected=len(span.tokens),
                got=len(span.logprobs),
                where=f"span of role {span.role!r}",
            )
        # Nobody sampled the other authors' tokens; NaN makes a wrong reader visible.
        values.extend(span.logprobs if span.logprobs is not None else [float("nan")] * len(span.tokens))
    return torch.tensor(values, dtype=torch.float32)


def _active(trace: Trace) -> str:
    """The first processor that made the distribution drawn from another than the raw one; empty for none."""
    sampler = trace.sampler
    found = {
        f"temperature={sampler.temperature}": sampler.temperature != 1.0,
        f"top_k={sampler.top_k}": sampler.top_k > 0,
        f"top_p={sampler.top_p}": sampler.top_p != 1.0,
        f"min_p={sampler.min_p}": sampler.min_p != 0.0,
        "kept set=recorded": any(ids for span in trace.spans for ids in span.kept_sets or ()),
    }
    return next((name for name, active in found.items() if active), "")


def _processors(traces: list[Trace], spans: list[Span]) -> dict[str, Tensor]:
    """What the samplers could draw from: recorded sets, and the numbers of those that had any."""
    samplers = [trace.sampler for trace in traces]
    found: dict[str, Tensor] = {}
    if any(sampler.top_k > 0 for sampler in samplers):
        found["top_k"] = torch.tensor([sampler.top_k for sampler in samplers])
    if any(sampler.top_p != 1.0 for sampler in samplers):
        found["top_p"] = torch.tensor([float(sampler.top_p) for sampler in samplers])
    if any(sampler.min_p != 0.0 for sampler in samplers):
        found["min_p"] = torch.tensor([float(sampler.min_p) for sampler in samplers])
    if any(span.kept_sets is not None for span in spans):
        found["kept_sets"] = _ids(spans)
    return found


def _ids(spans: list[Span]) -> Tensor:
    """int64 [T, k], -1 for none."""
    rows: list[Sequence[int]] = []
    for span in spans:
        given = span.kept_sets if span.kept_sets is not None else [()] * len(span.tokens)
        if len(given) != len(span.tokens):
            raise DataError(
                "a span has another number of kept sets than tokens", expected=len(span.tokens), got=len(given),
                where=f"span of role {span.role!r}",
            )  # fmt: skip
        rows.extend(given)
    wide = max((len(row) for row in rows), default=0)
    return torch.tensor([[*row, *[-1] * (wide - len(row))] for row in rows], dtype=torch.int64).reshape(len(rows), wide)


def _versions(spans: list[Span]) -> Tensor | None:
    policy = [span for span in spans if _author(span) is Author.POLICY and len(span.tokens)]
    if _all_or_none([span.version for span in policy], "version of policy spans") is None:
        return None
    values: list[int] = []
    for span in spans:
        given = span.version if span.version is not None else 0  # read at actions alone
        each = [given] * len(span.tokens) if isinstance(given, int) else list(given)
        if len(each) != len(span.tokens):
            raise DataError(
                "a span has another number of versions than tokens",
                expected=len(span.tokens),
                got=len(each),
                where=f"span of role {span.role!r}",
            )
        values.extend(each)
    return torch.tensor(values, dtype=torch.int64)
