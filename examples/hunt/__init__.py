"""Number hunt: a task of several turns whose best and random results are known exactly.

A number between 0 and ``numbers - 1`` is hidden. Each turn the policy emits two digit tokens, a
guess in base ``base``, and the environment answers with one token: ``higher`` or ``lower`` (where
the hidden number lies from the guess), ``found``, or ``invalid`` (a token that is no digit, or a
code past the last number). The policy samples from its whole vocabulary, so even a legal guess has
to be learnt. An episode ends when the number is found or all turns are used. As tokens::

    bos  d d answer  d d answer  ...            at most 1 + 3 * turns, then pad

Everything is exact or deterministic: no random number is drawn here, the hidden numbers come from
the caller. Pure torch; nothing of Megatron, nothing of the loss.

Shapes: `n` episodes, `L` tokens of a history, `K` turns. Tokens and numbers are int64.
"""

from __future__ import annotations

from .exact import ObservationFloor
from .game import FAILURE, INVALID, RUNNING, SUCCESS, TERMINATIONS, Hunt, HuntState

__all__ = [
    "FAILURE",
    "INVALID",
    "RUNNING",
    "SUCCESS",
    "TERMINATIONS",
    "Hunt",
    "HuntState",
    "ObservationFloor",
]
