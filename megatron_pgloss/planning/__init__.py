"""What a step settles before its first forward pass: masks, normalisers, the agreement of all ranks, micro-batches."""

from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.planning.arrangement import Arrangement
from megatron_pgloss.planning.microbatch import MicroBatch
from megatron_pgloss.planning.minibatches import minibatches
from megatron_pgloss.planning.plan import Plan, plan
from megatron_pgloss.planning.split import Split
from megatron_pgloss.planning.voters import voters

__all__ = ["Arrangement", "MicroBatch", "Plan", "Ranks", "Split", "minibatches", "plan", "voters"]
