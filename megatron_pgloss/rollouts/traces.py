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
    """Chat role; decides weights only."""
    author: Author | Literal["policy", "environment", "harness", "renderer", "verifier", "copied"]
    """Who wrote it; decides membership."""
    tokens: Sequence[int] | Tensor | Array
    logprobs: Sequence[float | None] | Tensor | Array | None = None
    """For policy spans: the sampler's own log-prob of every token; None in the list for one that it did not score
    (`TokenBatch.with_unscored`)."""
    version: int | Sequence[int] | Tensor | Array | None = None
    """For policy spans: version of the weights that sampled it, or of each token where they changed on the way."""
    kept_sets: Sequence[Sequence[int]] | Tensor | Array | None = None
    """For policy spans: of every token, the ids that the sampler could draw from (what top-k, top-p or a grammar left);
    an empty one means the whole vocabulary."""
    streams: Mapping[str, Sequence[Any] | Tensor | Array] = field(default_factory=dict)
    """Further streams of its tokens by the constructors' keywords (``old_logprobs``, ``values``, ...), one
    entry a token. What one policy span has, every policy span of the batch must have."""


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
    """Whether reported log-probs are of the distribution drawn from, or of the raw logits."""


@closed
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
