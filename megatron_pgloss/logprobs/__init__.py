"""Token log-probabilities and entropies on any vocabulary layout, from logits or from hidden states and the head."""

from megatron_pgloss.logprobs.head.linear import linear_token_logprobs
from megatron_pgloss.logprobs.logits.given import token_logprobs
from megatron_pgloss.logprobs.result import TokenLogprobs
from megatron_pgloss.logprobs.rows.backends import Backend, backend_report

__all__ = ["Backend", "TokenLogprobs", "backend_report", "linear_token_logprobs", "token_logprobs"]
