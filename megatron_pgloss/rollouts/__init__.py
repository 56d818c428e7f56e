"""From what a rollout engine hands over to aligned token streams."""

from megatron_pgloss.rollouts.batch import TokenBatch, broken
from megatron_pgloss.rollouts.concatenation import concatenate
from megatron_pgloss.rollouts.place import Id
from megatron_pgloss.rollouts.states import Author, Termination
from megatron_pgloss.rollouts.streams import STREAMS, StreamSpec
from megatron_pgloss.rollouts.traces import Sampler, Span, Trace

__all__ = [
    "STREAMS",
    "Author",
    "Id",
    "Sampler",
    "Span",
    "StreamSpec",
    "Termination",
    "TokenBatch",
    "Trace",
    "broken",
    "concatenate",
]
