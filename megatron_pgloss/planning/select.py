"""Counts, sums and order statistics over all tokens of a step, exact and equal on every rank. `T` tokens of this rank.

Everything that travels is an integer: counts and fixed-point sums add up in any order to the same bits, so what is
decided from them does not depend on how the tokens are spread over ranks. An order statistic is found digit by digit
(radix selection on the bits of the float, 8 bits a round), without a sort and without moving a token.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction

import torch
from torch import Tensor

from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.rollouts import TokenBatch

_DIGITS = range(56, -8, -8)
_BINS = 256
_LIMIT = float(2**30)
"""Values beyond count as this in sums, so that 2^33 tokens cannot overflow them."""
_LOW = 0x7FFF_FFFF_FFFF_FFFF


class Job:
    """Statistics over the data-parallel ranks of a plan. Each method is a collective of all of them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def _total(self, numbers: Tensor) -> Tensor:
        return self.ranks.total(numbers, self.ranks.data)

    def count(self, mask_T: Tensor) -> int:
        """Tokens where ``mask_T``, over all ranks."""
        return int(self._total(mask_T.sum().reshape(1)))

    def sum(self, values_T: Tensor, mask_T: Tensor) -> float:
        """Sum of finite ``values_T`` where ``mask_T``: fixed point to 2^-52, correctly rounded."""
        return float(_fraction(*self._total(torch.stack([part.sum() for part in _fixed(values_T, mask_T)])).tolist()))

    def mean(self, values_T: Tensor, mask_T: Tensor) -> float:
        """Mean of ``values_T`` where ``mask_T``; 0 over no token."""
        parts = (mask_T, *_fixed(values_T, mask_T))
        number, high, low = self._total(torch.stack([part.sum() for part in parts])).tolist()
        return float(_fraction(high, low) / number) if number else 0.0

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
        """The smallest value to be cut so that the mean of those below it is at most ``mean``; infinity: none.

        ``values_T`` are 0 or more. Equal values are cut together.
        """
        key_T, limit = order(values_T), Fraction(mean)
        high_T, low_T = _fixed(values_T, mask_T)
        number, total, found = 0, Fraction(0), 0
        for shift in _DIGITS:
            digit_T = _digit(key_T, shift)
            table = torch.zeros(3, _BINS, dtype=torch.int64)
            picked_T = digit_T[mask_T]
            for row, part_T in enumerate((torch.ones_like(key_T), high_T, low_T)):
                table[row].index_add_(0, picked_T, part_T[mask_T])
            counts, highs, lows = self._total(table).tolist()
            for at in range(_BINS):
                if not counts[at]:
                    continue
                more = total + _fraction(highs[at], lows[at])
                if more > limit * (number + counts[at]):
                    break
                number, total = number + counts[at], more
            else:
                return float("inf")  # in the first round alone: later ones look inside a bin that is too much
            mask_T = mask_T & (digit_T == at)
            found = (found << 8) | (at - 128 if shift == 56 else at)
        return float(torch.tensor(_flip(found)).view(torch.float64))


def order(values_T: Tensor) -> Tensor:
    """int64 [T] in the order of the float values; -0 is 0."""
    bits_T = (values_T.detach().double() + 0.0).view(torch.int64)
    return bits_T ^ ((bits_T >> 63) & _LOW)


def _flip(key: int) -> int:
    return key ^ _LOW if key < 0 else key


def _digit(key_T: Tensor, shift: int) -> Tensor:
    """8 bits of the key, 0 to 255; the first ones carry the sign."""
    return (key_T >> shift) + 128 if shift == 56 else (key_T >> shift) & 255


def _fixed(values_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """Values as ``high / 2^16 + low / 2^52``, int64 [T] each; truncated value by value, so that sums have no order."""
    scaled_T = torch.where(mask_T, values_T.detach().double(), 0).clamp(-_LIMIT, _LIMIT) * 2.0**16
    floor_T = scaled_T.floor()
    return floor_T.to(torch.int64), ((scaled_T - floor_T) * 2.0**36).to(torch.int64)


def _fraction(high: int, low: int) -> Fraction:
    return Fraction(high, 2**16) + Fraction(low, 2**52)


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
