"""Token log-probabilities and entropies from logits, on any vocabulary layout."""

from .given import token_logprobs
from .result import TokenLogprobs

__all__ = ["TokenLogprobs", "token_logprobs"]
