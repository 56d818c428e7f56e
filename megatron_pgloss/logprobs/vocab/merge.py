"""From the shards' row statistics to log-prob and entropy, by one collective and with equal bits on all ranks.

Shapes: `T` rows, `R` shards in rank order, `C` statistics per row and shard: (lse_r, H_r, u_target)
or, where no entropy is asked for, (lse_r, u_target). lse_r and H_r are log-sum-exp and entropy of
the shard's own distribution (-inf and an arbitrary number where the shard is padding alone); u_target is
z/tau of the target where the shard holds it, else an arbitrary number. They are float64: float32 would
round lse_r at 30 nats to 2e-6, and differently on each layout.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.logprobs.vocab.join import join_entropy as _entropy
from megatron_pgloss.logprobs.vocab.join import join_lse
from megatron_pgloss.logprobs.vocab.shard import VocabShard


class Merged(NamedTuple):
    """Statistics of each row over the whole vocabulary, float64 [T]."""

    logprob: Tensor
    entropy: Tensor | None
    lse: Tensor


def concatenated(parts: list[Merged]) -> Merged:
    """The statistics of consecutive chunks of rows as those of all their rows."""
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return Merged(
        torch.cat([part.logprob for part in parts]),
        torch.cat(entropies) if entropies else None,
        torch.cat([part.lse for part in parts]),
    )


def merge(stats_TC: Tensor, target_T: Tensor, shard: VocabShard) -> Merged:
    """Combine the shards' statistics by the chain rule of entropy.

    lse = log sum_r exp(lse_r),  W_r = exp(lse_r - lse),  H = sum_r W_r (H_r - log W_r).

    A target off the vocabulary has log-prob NaN, and so has a row without any finite logit.
    """
    return merge_gathered(gather_stats(stats_TC, shard), target_T, shard)


def merge_with_peak(stats_TC: Tensor, peak_T: Tensor, target_T: Tensor, shard: VocabShard) -> tuple[Merged, Tensor]:
    """`merge`, and in the same collective the largest of each row's ``peak_T`` (float64) over the shards."""
    gathered_RTC = gather_stats(torch.cat([stats_TC, peak_T[:, None]], 1), shard)
    return merge_gathered(gathered_RTC[..., :-1], target_T, shard), gathered_RTC[..., -1].amax(0)


def merge_gathered(stats_RTC: Tensor, target_T: Tensor, shard: VocabShard) -> Merged:
    """`merge` of statistics [R, T, C] that are already gathered from all shards."""
    lse_RT = stats_RTC[..., 0]
    lse_T = join_lse(lse_RT)
    # Every rank knows which shard owns the target and reads that shard's number alone; the others' are arbitrary.
    owner_T = (target_T // shard.columns).clamp(0, shard.size - 1)
    u_T = stats_RTC[..., -1].gather(0, owner_T[None])[0]
    known_T = (target_T >= 0) & (target_T < shard.vocab)
    logprob_T = torch.where(known_T, u_T - lse_T, math.nan)
    entropy_T = _entropy(lse_RT, stats_RTC[..., 1], lse_T) if stats_RTC.size(-1) == 3 else None
    return Merged(logprob_T, entropy_T, lse_T)


def gather_stats(stats_TC: Tensor, shard: VocabShard) -> Tensor:
    """Statistics [R, T, C] of all shards, by the pass's one collective."""
    if shard.size == 1 or stats_TC.numel() == 0:  # tensor-parallel ranks all have the same rows
        return stats_TC.expand(shard.size, *stats_TC.shape)
    rows, columns = stats_TC.shape
    gathered = stats_TC.new_empty(shard.size * rows, columns)
    dist.all_gather_into_tensor(gathered, stats_TC, group=shard.group)
    return gathered.view(shard.size, rows, columns)
