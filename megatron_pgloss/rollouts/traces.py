"""Agent traces: a rollout as spans of tokens, each with a role and an author."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from megatron_pgloss.rollouts.arrays import Array
from megatron_pgloss.rollouts.place import Id
from megatron_pgloss.rollouts.states import Author, Termination
from megatron_pgloss.spec.words import closed


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An unbroken run of tokens from one author."""

    role: str
    """Chat role; it decides only weights."""
    author: Author | Literal["policy", "environment", "harness", "renderer", "verifier", "copied"]
    """Who wrote the tokens; the author decides which components they are in."""
    tokens: Sequence[int] | Tensor | Array
    logprobs: Sequence[float | None] | Tensor | Array | None = None
    """For policy spans: the sampler's own log-prob of every token; None in the list for a token that it did not score
    (`TokenBatch.with_unscored`)."""
    version: int | Sequence[int] | Tensor | Array | None = None
    """For policy spans: the version of the weights that sampled it, or one per token where the weights changed within
    it."""
    kept_sets: Sequence[Sequence[int]] | Tensor | Array | None = None
    """For policy spans: for every token the ids that the sampler could draw from (those that top-k, top-p or a grammar
    left); an empty set means the whole vocabulary."""
    streams: Mapping[str, Sequence[Any] | Tensor | Array] = field(default_factory=dict)
    """Further streams of its tokens by the constructors' keywords (``old_logprobs``, ``values``, ...), one
    entry per token. A stream that one policy span has, every policy span of the batch must have."""


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How the policy's tokens were drawn."""

    temperature: float = 1.0
    top_k: int = 0
    """0 or less: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: Literal["processed", "raw"] = "processed"
    """Whether reported log-probs are those of the distribution that tokens were drawn from, or of the raw logits."""


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One row the model reads: a rollout, or a part of one."""

    spans: Sequence[Span]
    advantage: float | None = None
    """The advantage of every token of the row; None where `megatron_pgloss.advantages` makes it from rewards later."""
    prompt_id: Id | None = None
    episode_id: Id | None = None
    sample_id: Id | None = None
    termination: Termination | None = None
    sampler: Sampler = field(default_factory=Sampler)
