"""From rewards to advantages, before a batch is planned. Every episode counts once, and ranks agree by one keyed
gather.

The functions of advantages take one `TokenBatch` or a list of them, and return the same with new streams, mostly beside
a report.
"""

from megatron_pgloss.advantages.compared import gdpo, given_baseline, opo, pass_at_k
from megatron_pgloss.advantages.gae import gae
from megatron_pgloss.advantages.groups import of_rewards
from megatron_pgloss.advantages.relative import group_relative, per_turn, rloo
from megatron_pgloss.advantages.reports import GAEReport, GroupReport, Moments, SilentGroup
from megatron_pgloss.advantages.rewards import episode_lengths, kl_penalty, linear_length, soft_overlong
from megatron_pgloss.advantages.termination import EFFECTS, Effect
from megatron_pgloss.advantages.turn_gae import turn_gae
from megatron_pgloss.advantages.whitening import reinforce_plus_plus, whiten

__all__ = [
    "EFFECTS",
    "Effect",
    "GAEReport",
    "GroupReport",
    "Moments",
    "SilentGroup",
    "episode_lengths",
    "gae",
    "gdpo",
    "given_baseline",
    "group_relative",
    "kl_penalty",
    "linear_length",
    "of_rewards",
    "opo",
    "pass_at_k",
    "per_turn",
    "reinforce_plus_plus",
    "rloo",
    "soft_overlong",
    "turn_gae",
    "whiten",
]
