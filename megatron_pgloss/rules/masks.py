"""Which tokens each kind of mask takes out. `T` tokens, `S` rows.

One function per kind, ``(batch, mask) -> bool [T]``, in the table `TAKEN`; the kinds stand in
`megatron_pgloss.spec.masks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.rollouts import Termination, TokenBatch
from megatron_pgloss.rules.verdict import Verdict
from megatron_pgloss.spec import Mask, UserMask


def ended(batch: TokenBatch, state: Termination) -> Tensor:
    """bool [S]: rows that ended in this state."""
    states = batch.terminations if batch.terminations is not None else (None,) * len(batch)
    return torch.tensor([other is state for other in states], dtype=torch.bool)


def tokens_ended(batch: TokenBatch, state: Termination) -> Tensor:
    """bool [T]: tokens of the rows that ended in this state."""
    if batch.terminations is None or state not in batch.terminations:
        return torch.zeros_like(batch.action_T)
    return torch.repeat_interleave(ended(batch, state), batch.lengths_S)


def truncated(batch: TokenBatch, mask: Any) -> Tensor:
    """Tokens of truncated rows."""
    return tokens_ended(batch, Termination.TRUNCATED)


def zero_advantage(batch: TokenBatch, mask: Any) -> Tensor:
    """Tokens whose advantage is exactly 0."""
    return batch.streams["advantages"] == 0


def not_positive(batch: TokenBatch, mask: Any) -> Tensor:
    """Tokens whose advantage is not above 0, or is NaN."""
    return ~(batch.streams["advantages"] > 0)


def unmarked(batch: TokenBatch, mask: UserMask) -> Tensor:
    """Tokens where the user's mask is false."""
    return ~batch.masks[mask.name]


def apply(mask: Mask, batch: TokenBatch) -> Verdict:
    """The verdict of a mask: which tokens it leaves."""
    return Verdict(passes=~TAKEN[mask.kind](batch, mask))


TAKEN: dict[str, Callable[[TokenBatch, Any], Tensor]] = {
    "drop_truncated": truncated,
    "drop_zero_advantage": zero_advantage,
    "keep_positive_advantage": not_positive,
    "user_mask": unmarked,
}
"""Kind of mask to its function."""
