"""Counts, sums and order statistics over all tokens of a step, exact and equal on every rank. `T` tokens of this rank.

Everything that travels is an integer: counts and pieces of floats add up in any order to the same bits, so what is
decided from them does not depend on how the tokens are spread over ranks. An order statistic is found digit by digit
(radix selection on the bits of the float, 8 bits a round), without a sort and without moving a token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.rollouts import TokenBatch

_DIGITS = range(56, -8, -8)
_BINS = 256
_WIDTH, _PIECES, _OCTAVES = 24, 3, 128
_PIECE = (1 << _WIDTH) - 1
_LOW = 0x7FFF_FFFF_FFFF_FFFF


class Job:
    """Statistics over the data-parallel ranks of a plan. Each method is a collective of all of them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def _total(self, numbers: Tensor) -> Tensor:
        return self.ranks.total(numbers, self.ranks.data)

    def count(self, mask_T: Tensor) -> int:
        """How many tokens of all ranks ``mask_T`` has."""
        return int(self._total(mask_T.sum().reshape(1)))

    def sum(self, values_T: Tensor, mask_T: Tensor) -> float:
        """Sum of finite ``values_T`` where ``mask_T``, correctly rounded; infinite where no float holds it."""
        total = self._exact(values_T, mask_T)[1]
        try:
            return float(total)
        except OverflowError:
            return math.inf if total > 0 else -math.inf

    def mean(self, values_T: Tensor, mask_T: Tensor) -> float:
        """Mean of finite ``values_T`` where ``mask_T``, correctly rounded; 0 over no token."""
        number, total = self._exact(values_T, mask_T)
        return float(total / number) if number else 0.0

    def _exact(self, values_T: Tensor, mask_T: Tensor) -> tuple[int, Fraction]:
        """How many ``values_T`` there are where ``mask_T``, and their exact sum."""
        octave_T, pieces_T3 = pieces(values_T[mask_T])
        table = torch.zeros(_OCTAVES, 1 + _PIECES, dtype=torch.int64)
        table[:, 0].index_add_(0, octave_T, torch.ones_like(octave_T))
        table[:, 1:].index_add_(0, octave_T, pieces_T3)
        rows = self._total(table).tolist()
        return sum(row[0] for row in rows), sum((joined(i, row[1:]) for i, row in enumerate(rows)), Fraction(0))

    def smallest(self, values_T: Tensor, mask_T: Tensor, k: int) -> float:
        """The ``k``-th smallest (from 1) of ``values_T`` where ``mask_T``: an actual value.

        Args:
            k: 1 to the number of tokens.
        """
        key = self._kth(order(values_T), mask_T, k - 1)
        return float(torch.tensor(_flip(key)).view(torch.float64))

    def lowest_draws(self, draw_T: Tensor, mask_T: Tensor, k: int) -> Tensor:
        """bool [T]: the ``k`` tokens of the job with the lowest ``draw_T`` (int64, see `draws`) where ``mask_T``; all
        of them where there are fewer.
        """
        number = self.count(mask_T)
        if number <= k:
            return mask_T
        return mask_T & (draw_T <= self._kth(draw_T, mask_T, k - 1))

    def _kth(self, key_T: Tensor, mask_T: Tensor, k: int) -> int:
        """The ``k``-th smallest key (from 0)."""
        found = 0
        for shift in _DIGITS:
            digit_T = _digit(key_T, shift)
            edges = self._total(torch.bincount(digit_T[mask_T], minlength=_BINS)).cumsum(0)
            at = int(torch.searchsorted(edges, k, right=True))
            k -= int(edges[at - 1]) if at else 0
            mask_T = mask_T & (digit_T == at)
            found = (found << 8) | (at - 128 if shift == 56 else at)
        return found

    def cut(self, values_T: Tensor, mask_T: Tensor, mean: float) -> float:
        """The lowest of the values that must be cut, largest first, for the mean of the rest to be at most ``mean``;
        infinity: none must.

        ``values_T`` are 0 or more. Equal values are cut together.
        """
        values_T = values_T[mask_T]
        key_T, limit = order(values_T), Fraction(mean)
        octave_T, pieces_T3 = pieces(values_T)
        number, total, found = 0, Fraction(0), 0
        for shift in _DIGITS:
            digit_T = _digit(key_T, shift)
            table = torch.zeros(_BINS, 2 + _PIECES, dtype=torch.int64)
            table[:, 0].index_add_(0, digit_T, torch.ones_like(digit_T))
            # All values of a bin are of one octave: the first digit says which, and later ones divide its bin further.
            table[:, 1].index_add_(0, digit_T, octave_T)
            table[:, 2:].index_add_(0, digit_T, pieces_T3)
            rows = self._total(table).tolist()
            for at, (count, octaves, *sums) in enumerate(rows):
                if not count:
                    continue
                more = total + joined(octaves // count, sums)
                if more > limit * (number + count):
                    first = at
                    break
                number, total = number + count, more
            else:
                return float("inf")  # in the first round alone: later ones look inside a bin that exceeds the mean
            here_T = digit_T == first
            key_T, octave_T, pieces_T3 = key_T[here_T], octave_T[here_T], pieces_T3[here_T]
            found = (found << 8) | (first - 128 if shift == 56 else first)
        return float(torch.tensor(_flip(found)).view(torch.float64))


def pieces(values_T: Tensor) -> tuple[Tensor, Tensor]:
    """Finite floats as integers that add up without rounding and without overflow.

    A float64 is ``m * 2^(e - 1075)`` with an integer ``|m| < 2^53`` and ``e`` in 1 to 2046. With ``e = 16 octave + s``
    it is ``(m 2^s) * 2^(16 octave - 1075)``, and ``|m 2^s| < 2^(53 + 15) = 2^68`` is cut into three pieces of 24 bits,
    which carry the sign of m. Each is at most ``2^24 - 1`` in size, so a sum over up to `MOST_TOKENS` = 2^39 tokens is
    at most ``(2^24 - 1) * 2^39 < 2^63`` in size; so are the number of tokens, and the sum of their octaves, which are
    at most ``127 * 2^39 < 2^46``. A plan of more tokens is refused (`megatron_pgloss.planning.wire.read`).

    Returns:
        int64 [T], 0 to 127: octaves; and int64 [T, 3]: pieces, the lowest first.
    """
    bits_T = values_T.detach().double().contiguous().view(torch.int64)
    raised_T, mantissa_T = (bits_T >> 52) & 0x7FF, bits_T & ((1 << 52) - 1)
    normal_T = raised_T > 0
    mantissa_T = torch.where(normal_T, mantissa_T | (1 << 52), mantissa_T)
    exponent_T = torch.where(normal_T, raised_T, 1)
    octave_T, shift_T = exponent_T >> 4, exponent_T & 15
    low_T = (mantissa_T & _PIECE) << shift_T  # below 2^39
    high_T = ((mantissa_T >> _WIDTH) << shift_T) + (low_T >> _WIDTH)  # below 2^44 + 2^15
    sign_T = torch.where(bits_T < 0, -1, 1)
    return octave_T, torch.stack([low_T & _PIECE, high_T & _PIECE, high_T >> _WIDTH], 1) * sign_T[:, None]


def joined(octave: int, sums: Sequence[int]) -> Fraction:
    """The exact sum that sums of `pieces` of one octave stand for."""
    whole = sum(number << (_WIDTH * i) for i, number in enumerate(sums))
    return Fraction(whole << (16 * octave), 1 << 1075)


def order(values_T: Tensor) -> Tensor:
    """int64 keys [T] that sort as the float values do; -0 sorts as 0."""
    bits_T = (values_T.detach().double() + 0.0).view(torch.int64)
    return bits_T ^ ((bits_T >> 63) & _LOW)


def _flip(key: int) -> int:
    return key ^ _LOW if key < 0 else key


def _digit(key_T: Tensor, shift: int) -> Tensor:
    """8 bits of the key, 0 to 255; the first ones carry the sign."""
    return (key_T >> shift) + 128 if shift == 56 else (key_T >> shift) & 255


def draws(batch: TokenBatch | None, seed: int) -> Tensor:
    """int64 [T], 0 or more: a draw for every token, from its sample id, its position and ``seed`` alone.

    The rows need sample ids. Splitmix64 (Steele, Lea, Flood 2014) on a hash of the id.
    """
    if batch is None or batch.sample_ids is None:
        return torch.zeros(0, dtype=torch.int64)
    keys = [hashlib.blake2b(repr((seed, name)).encode(), digest_size=8).digest() for name in batch.sample_ids]
    key_S = torch.tensor([int.from_bytes(key, "big", signed=True) for key in keys], dtype=torch.int64)
    position_T = torch.arange(batch.tokens_T.numel()) - torch.repeat_interleave(batch.cu_S1[:-1], batch.lengths_S)
    state_T = key_S[batch.seq_T] + (position_T + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state_T = (state_T ^ _unsigned_shift(state_T, shift)) * _signed(factor)
    return _unsigned_shift(state_T ^ _unsigned_shift(state_T, 31), 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _unsigned_shift(state_T: Tensor, shift: int) -> Tensor:
    return (state_T >> shift) & ((1 << (64 - shift)) - 1)
