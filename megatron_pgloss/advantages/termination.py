"""The effects of a rollout's termination on masks, baselines and values, in one table that code and docs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_pgloss.rollouts import Termination


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effects of one termination state."""

    masks: str
    """When, and from which components, the tokens of such a row are masked."""
    votes: bool
    """Whether the episode counts in the baseline of its group (a mask that takes it out of the loss overrides this)."""
    bootstrap: Literal["zero", "value", "leaves"]
    """What GAE continues with after the last token: 0, or the value of the last state; ``leaves``: the episode takes no
    part."""


EFFECTS: dict[Termination, Effect] = {
    Termination.SUCCESS: Effect(masks="none", votes=True, bootstrap="zero"),
    Termination.FAILURE: Effect(masks="none", votes=True, bootstrap="zero"),
    Termination.TRUNCATED: Effect(
        masks="with DropTruncated: all components over actions", votes=True, bootstrap="value"
    ),
    Termination.INVALID: Effect(masks="none", votes=True, bootstrap="zero"),
    Termination.FAULT: Effect(masks="always: all components", votes=False, bootstrap="leaves"),
}
"""Termination to its effects. EOS is a token of the policy, not a termination. ``invalid`` output is the policy's own
choice and is treated like a failure."""
