"""From log-probs to the loss of one micro-batch."""

from megatron_pgloss.objective.loss import LossOutput, TokenReport, policy_loss, weighted_sum
from megatron_pgloss.objective.streams import Streams

__all__ = ["LossOutput", "Streams", "TokenReport", "policy_loss", "weighted_sum"]
