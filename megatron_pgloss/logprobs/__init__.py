"""Token log-probabilities and entropies on any vocabulary layout, from logits or from hidden states and the head."""

from .backends import Backend, backend_report
from .given import token_logprobs
from .head import linear_token_logprobs
from .result import TokenLogprobs

__all__ = ["Backend", "TokenLogprobs", "backend_report", "linear_token_logprobs", "token_logprobs"]
