"""Exact numbers to hold a policy against: blind and best success, the entropy of the answers."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from .rules import ANSWERS, Rules


@cache
def _most_found(count: int, turns: int) -> int:
    """How many of ``count`` equally possible numbers the best strategy finds in ``turns`` turns.

    F(m, k) = max over g < m of 1 + F(g, k - 1) + F(m - 1 - g, k - 1): the guess with g numbers
    below it finds one number, and the answer says on which side to go on. F(m, 0) = F(0, k) = 0. A
    guess outside the interval brings no knowledge and costs a turn.
    """
    if not count or not turns:
        return 0
    return max(1 + _most_found(g, turns - 1) + _most_found(count - 1 - g, turns - 1) for g in range(count))


@dataclass(frozen=True, slots=True)
class ObservationFloor:
    """What answers cost a reader who knows all that the history tells; each field ``[n, k]``."""

    entropy: Tensor
    """Entropy of the answer given what came before it, in nats; float64, 0 where not played."""
    surprisal: Tensor
    """-log of the probability of the answer that came, in nats; float64, 0 where not played. Its
    mean over hidden numbers is ``entropy``; compare a model's cross entropy on the same tokens
    with it."""
    members: Tensor
    """Whether the turn was played, bool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact(Rules):
    """The facts of a hunt that follow from its rules alone."""

    def random_success(self, over: Literal["vocabulary", "valid"] = "vocabulary") -> float:
        """Exact success probability of a policy that guesses blindly.

        ``vocabulary``: both tokens uniform over all ``vocab_size`` ids, unused ones included (a
        policy at its start). ``valid``: uniform over the valid numbers, with no memory. With p the
        chance that a guess is right and s that the episode goes on without, success is p (1 + s +
        ... + s^(turns - 1)).
        """
        outcomes = {"vocabulary": self.vocab_size**2, "valid": self.numbers}[over]
        right = Fraction(1, outcomes)
        invalid = 1 - Fraction(self.numbers, outcomes)
        goes_on = 1 - right - (invalid if self.invalid_ends else 0)
        return float(sum(right * goes_on**turn for turn in range(self.turns)))

    def optimal_success(self) -> float:
        """Best achievable share of hidden numbers found, by dynamic programming; exact."""
        return float(Fraction(_most_found(self.numbers, self.turns), self.numbers))

    def optimal_guess(self, low: int, high: int, turns_left: int) -> int:
        """A guess that keeps the best success rate where low .. high are possible.

        Of several such guesses it is the one nearest to the middle, then the lowest.
        """
        if not 0 <= low <= high < self.numbers or turns_left < 1:
            got = f"low {low}, high {high}, turns_left {turns_left}"
            raise ValueError(f"expected 0 <= low <= high < {self.numbers} and a turn; got {got}")
        left = turns_left - 1

        def rank(guess: int) -> tuple[int, int]:
            found = _most_found(guess - low, left) + _most_found(high - guess, left)
            return found, -abs(2 * guess - low - high)

        return max(range(low, high + 1), key=rank)

    def observation_surprisal(self, history: Tensor) -> ObservationFloor:
        """What each answer costs at best, in nats, given all before it and a uniform hidden number.

        A policy guesses from the history alone, so after any history the hidden number is uniform
        over the m numbers still possible. A guess with b of them below, a above and f (0 or 1) at
        it is answered lower, higher or found with probability b/m, a/m, f/m: entropy -sum q log q.
        An invalid guess has one answer: 0.

        Args:
            history: int64 ``[n, 1 + 3 k]`` as from `play`, finished or not.

        Raises:
            ValueError: ``history`` holds an answer that the answers before it rule out.
        """
        guesses, answers, played = self.turns_of(history)
        low = torch.zeros_like(history[:, 0])
        high = torch.full_like(low, self.numbers - 1)
        names = torch.tensor([self.token(name) for name in ANSWERS], device=history.device)
        entropy = torch.zeros(played.shape, dtype=torch.float64, device=history.device)
        surprisal = entropy.clone()
        for turn in range(played.shape[1]):
            live, answer = played[:, turn], answers[:, turn]
            number = self.guessed_number(guesses[:, turn])
            chances = self._answer_chances(low, high, number)
            chance = torch.where(answer[:, None] == names, chances, 0).sum(1)
            self._refuse_impossible(history, live & (chance == 0))
            plogp = torch.special.xlogy(chances, chances)  # 0 where the chance is 0
            entropy[:, turn] = torch.where(live, -plogp.sum(1), 0)
            surprisal[:, turn] = -torch.where(live, chance, 1).log()
            low, high = self.narrowed(low, high, number, torch.where(live, answer, -1))
        return ObservationFloor(entropy, surprisal, played)

    def _answer_chances(self, low: Tensor, high: Tensor, number: Tensor) -> Tensor:
        """Probabilities of higher, lower, found, invalid; float64 ``[n, 4]``."""
        size = high - low + 1
        above = torch.minimum(high - number, size).clamp(min=0)
        below = torch.minimum(number - low, size).clamp(min=0)
        at = ((number >= low) & (number <= high)).long()
        counts = torch.stack([above, below, at, torch.zeros_like(at)], dim=1)
        invalid = counts.new_tensor([0, 0, 0, 1]) * size[:, None]
        return torch.where(number[:, None] < 0, invalid, counts).double() / size[:, None]

    def _refuse_impossible(self, history: Tensor, impossible: Tensor) -> None:
        if bool(impossible.any()):
            row = int(impossible.nonzero()[0])
            tokens = " ".join(self.decode(token) for token in history[row].tolist())
            raise ValueError(f"history: row {row} holds an answer it rules out itself: {tokens}")

    def observation_entropy(self, history: Tensor) -> float:
        """Mean entropy of the answers in ``history``, in nats per observation token.

        It is the entropy of the environment itself: a model that predicts the answers to these
        guesses from the history alone has at least this expected cross entropy.
        """
        floor = self.observation_surprisal(history)
        answers = int(floor.members.sum())
        if not answers:
            raise ValueError("history: expected at least one answer, got none")
        return float(floor.entropy.sum()) / answers
