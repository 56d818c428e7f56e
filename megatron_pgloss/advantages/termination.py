"""What the end of a rollout does to masks, baselines and values: one table, read by the code and by the docs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_pgloss.rollouts import Termination


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What one state does."""

    masks: str
    """Which of its tokens leave which component."""
    votes: bool
    """Whether the episode counts in the baseline of its group, unless a mask takes it out of the loss."""
    bootstrap: Literal["zero", "value", "leaves"]
    """What GAE continues with after the last token: 0, the value of the last state, or not at all."""


EFFECTS: dict[Termination, Effect] = {
    Termination.SUCCESS: Effect(masks="none", votes=True, bootstrap="zero"),
    Termination.FAILURE: Effect(masks="none", votes=True, bootstrap="zero"),
    Termination.TRUNCATED: Effect(
        masks="with DropTruncated: all components over actions", votes=True, bootstrap="value"
    ),
    Termination.INVALID: Effect(masks="none", votes=True, bootstrap="zero"),
    Termination.FAULT: Effect(masks="always: all components", votes=False, bootstrap="leaves"),
}
"""EOS is a token of the policy and no state. ``invalid`` is a choice of the policy and is judged like a failure."""
