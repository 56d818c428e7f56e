"""The rules: the vocabulary, the meaning of a guess, the environment's answers, and how a history is read back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ANSWERS = ("higher", "lower", "found", "invalid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The fields of a `Hunt`, and everything that follows from them alone.

    Token ids: digits 0 to ``base - 1``, then bos, higher, lower, found, invalid, pad, then unused
    ids up to a multiple of ``vocab_multiple``.
    """

    numbers: int = 12
    """How many numbers may be hidden, at most ``base ** 2``; codes past them are invalid."""
    base: int = 4
    turns: int = 4
    """Guesses per episode."""
    vocab_multiple: int = 4
    """The vocabulary is padded to a multiple of this: tensor parallel 1, 2 and 4 divide it."""
    invalid_ends: bool = False
    """Whether an invalid guess ends the episode (as `INVALID`) or only costs the turn."""

    def __post_init__(self) -> None:
        if min(self.base - 1, self.turns, self.vocab_multiple, self.numbers) < 1:
            raise ValueError(f"a hunt needs base >= 2 and numbers, turns, vocab_multiple >= 1; got {self}")
        if self.numbers > self.base**2:
            expected = f"at most {self.base**2}, what two digits of base {self.base} can name"
            raise ValueError(f"numbers: expected {expected}; got {self.numbers}")

    # The vocabulary.

    @property
    def vocab(self) -> tuple[str, ...]:
        """Token names by id."""
        names = [*(str(digit) for digit in range(self.base)), "bos", *ANSWERS, "pad"]
        return (*names, *(f"unused{i}" for i in range(-len(names) % self.vocab_multiple)))

    @property
    def vocab_size(self) -> int:
        """Number of ids, unused ones included."""
        return len(self.vocab)

    @property
    def max_length(self) -> int:
        """Tokens of the longest episode."""
        return 1 + 3 * self.turns

    def token(self, name: str) -> int:
        """Id of the token called ``name``."""
        return self.vocab.index(name)

    def decode(self, token: int) -> str:
        """Name of the token with id ``token``."""
        return self.vocab[token]

    def encode_guess(self, number: Tensor) -> Tensor:
        """The two digit tokens of ``number``, high digit first. ``[n]`` -> ``[n, 2]``."""
        return torch.stack([number // self.base, number % self.base], dim=-1)

    def guessed_number(self, guess: Tensor) -> Tensor:
        """The number that two tokens name, -1 where they are no valid guess. ``[n, 2]`` -> ``[n]``."""
        code = guess[..., 0] * self.base + guess[..., 1]
        digits = ((guess >= 0) & (guess < self.base)).all(-1)
        return torch.where(digits & (code < self.numbers), code, -1)

    def answer(self, number: Tensor, hidden: Tensor) -> Tensor:
        """The answer to the guess ``number`` (-1: invalid). ``[n]``, ``[n]`` -> ``[n]``."""
        higher, lower, found, invalid = (self.token(name) for name in ANSWERS)
        answer = torch.where(hidden > number, higher, lower)
        answer = torch.where(hidden == number, found, answer)
        return torch.where(number < 0, invalid, answer)

    def narrowed(self, low: Tensor, high: Tensor, number: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
        """The interval still possible after an answer; any other token leaves it as it is."""
        higher, lower, found = (answer == self.token(name) for name in ANSWERS[:3])
        low = torch.where(higher, torch.maximum(low, number + 1), torch.where(found, number, low))
        high = torch.where(lower, torch.minimum(high, number - 1), torch.where(found, number, high))
        return low, high

    # Reading a history back, by position and answer alone: the policy may itself emit any token,
    # pad and found included.

    def turns_of(self, history: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Guesses ``[n, k, 2]``, answers ``[n, k]``, and whether the turn was played, bool."""
        if history.dtype != torch.int64 or history.ndim != 2 or history.shape[1] % 3 != 1:
            got = f"{history.dtype} {list(history.shape)}"
            raise ValueError(f"history: expected int64 [n, 1 + 3 turns], got {got}")
        turns = history[:, 1:].reshape(len(history), history.shape[1] // 3, 3)
        answers = turns[..., 2]
        ends = answers == self.token("found")
        if self.invalid_ends:
            ends = ends | (answers == self.token("invalid"))
        before = torch.cumsum(ends, dim=1) - ends.long()
        return turns[..., :2], answers, (before == 0) & (answers != self.token("pad"))

    def action_mask(self, history: Tensor) -> Tensor:
        """Where the policy's own tokens stand. ``[n, L]`` -> bool ``[n, L]``."""
        return self._mask(history, (True, True, False))

    def observation_mask(self, history: Tensor) -> Tensor:
        """Where the environment's answers stand. ``[n, L]`` -> bool ``[n, L]``."""
        return self._mask(history, (False, False, True))

    def _mask(self, history: Tensor, of_turn: tuple[bool, bool, bool]) -> Tensor:
        played = self.turns_of(history)[2]
        pattern = torch.tensor(of_turn, device=history.device)
        return torch.nn.functional.pad((played[..., None] & pattern).flatten(1), (1, 0))
