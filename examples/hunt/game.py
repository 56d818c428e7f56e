"""The game itself: episodes in a batch, stepped, rewarded and played to the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .exact import Exact

RUNNING, SUCCESS, FAILURE, INVALID = range(4)
TERMINATIONS = ("running", "success", "failure", "invalid")
"""Names of the codes in `HuntState.termination`, as the package calls them. Running out of turns is
a failure, not a truncation: the number of turns is part of the task."""


@dataclass(slots=True)
class HuntState:
    """A batch of episodes; `Hunt.step` updates it in place. All tensors are ``[n]``."""

    hidden: Tensor
    low: Tensor
    """Smallest number still possible given the answers so far; int64."""
    high: Tensor
    """Largest number still possible; int64."""
    turn: Tensor
    """Guesses made; int64."""
    valid: Tensor
    """Valid guesses made; int64."""
    termination: Tensor
    """Index into `TERMINATIONS`; int64."""

    @property
    def done(self) -> Tensor:
        """Whether each episode has ended, bool ``[n]``."""
        return self.termination != RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunt(Exact):
    """The environment; every tensor it returns lies where its input lies."""

    def reset(self, hidden: Tensor) -> HuntState:
        """Start one episode per hidden number: int64 ``[n]``, each in 0 .. numbers - 1."""
        if hidden.dtype != torch.int64 or hidden.ndim != 1:
            raise ValueError(f"hidden: expected int64 [n], got {hidden.dtype} {list(hidden.shape)}")
        if bool(((hidden < 0) | (hidden >= self.numbers)).any()):
            raise ValueError(f"hidden: expected numbers in 0 .. {self.numbers - 1}, got {hidden.tolist()}")
        # Tensors of a state are replaced, never written to, so they may share their storage.
        zero = torch.zeros_like(hidden)
        last = torch.full_like(hidden, self.numbers - 1)
        return HuntState(hidden.clone(), low=zero, high=last, turn=zero, valid=zero, termination=zero)

    def step(self, state: HuntState, guess: Tensor) -> tuple[Tensor, Tensor]:
        """Answer one guess per episode and update ``state`` in place.

        Args:
            state: from `reset`.
            guess: int64 ``[n, 2]``, any token ids; rows that are done are not read.

        Returns:
            observation int64 ``[n]``, the answer token, pad where the episode was done before; and
            done bool ``[n]``, whether it is done now.
        """
        if guess.dtype != torch.int64 or guess.shape != (*state.hidden.shape, 2):
            got = f"{guess.dtype} {list(guess.shape)}"
            raise ValueError(f"guess: expected int64 {[*state.hidden.shape, 2]}, got {got}")
        live = ~state.done
        outside = ((guess < 0) | (guess >= self.vocab_size)).any(-1) & live
        if bool(outside.any()):
            row = int(outside.nonzero()[0])
            got = f"{guess[row].tolist()} in row {row}"
            raise ValueError(f"guess: expected ids in 0 .. {self.vocab_size - 1}, got {got}")
        number = self.guessed_number(guess)
        answer = self.answer(number, state.hidden)
        told = torch.where(live, answer, -1)
        state.low, state.high = self.narrowed(state.low, state.high, number, told)
        state.turn = state.turn + live
        state.valid = state.valid + (live & (number >= 0))
        ended = torch.where(state.turn >= self.turns, FAILURE, RUNNING)
        if self.invalid_ends:
            ended = torch.where(number < 0, INVALID, ended)
        ended = torch.where(number == state.hidden, SUCCESS, ended)
        state.termination = torch.where(live, ended, state.termination)
        return torch.where(live, answer, self.token("pad")), state.done

    def reward(self, state: HuntState, *, valid_bonus: float = 0.0) -> Tensor:
        """Reward of finished episodes, float32 ``[n]``: 1 for success, 0 otherwise.

        Args:
            state: every episode must be done.
            valid_bonus: reward shaping, off by default: ``valid_bonus`` times the share of valid
                guesses among those made is added. A policy that hardly ever finds the number can
                then still learn to write numbers. With a bonus below 1, no episode without success
                has a higher reward than one with success.
        """
        if not bool(state.done.all()):
            running = int((~state.done).sum())
            raise ValueError(f"reward: expected finished episodes, got {running} running")
        success = (state.termination == SUCCESS).float()
        return success + valid_bonus * (state.valid / state.turn)

    def play(self, policy: Callable[[Tensor, HuntState], Tensor], hidden: Tensor) -> tuple[Tensor, HuntState]:
        """Play whole episodes with ``policy(history [n, 1 + 3 t], state) -> guess [n, 2]``.

        Returns:
            tokens int64 ``[n, max_length]``, pad after the end of each episode; and the final
            state.
        """
        state = self.reset(hidden)
        tokens = hidden.new_full((len(hidden), self.max_length), self.token("pad"))
        tokens[:, 0] = self.token("bos")
        for at in range(1, self.max_length, 3):
            live = ~state.done
            if not bool(live.any()):
                break
            guess = policy(tokens[:, :at], state)
            tokens[:, at : at + 2] = torch.where(live[:, None], guess, self.token("pad"))
            tokens[:, at + 2], _ = self.step(state, guess)
        return tokens, state

    def optimal_policy(self, history: Tensor, state: HuntState) -> Tensor:
        """`optimal_guess` for every running episode, as a policy for `play`. -> ``[n, 2]``."""
        fields = (state.low, state.high, state.turn, state.done)
        rows = zip(*(field.tolist() for field in fields), strict=True)
        guesses = [0 if done else self.optimal_guess(low, high, self.turns - turn) for low, high, turn, done in rows]
        return self.encode_guess(state.hidden.new_tensor(guesses))
