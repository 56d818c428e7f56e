"""From what a rollout engine hands over to aligned token streams."""

from megatron_pgloss.rollouts.batch import STREAMS, Id, TokenBatch, concatenate
from megatron_pgloss.rollouts.build import broken
from megatron_pgloss.rollouts.states import Author, Termination
from megatron_pgloss.rollouts.traces import Sampler, Span, Trace

__all__ = [
    "STREAMS",
    "Author",
    "Id",
    "Sampler",
    "Span",
    "Termination",
    "TokenBatch",
    "Trace",
    "broken",
    "concatenate",
]
