"""Running minima and discounted sums along a unit, against loops, in chunks of any order and over ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.maths import UnitSums, running
from support.steps import near
from support.worlds import world_fixture

VALUES = torch.sin(torch.arange(24, dtype=torch.float64) * 1.7) * 2
VOTES = torch.tensor([k % 3 != 0 for k in range(24)])
UNIT = torch.tensor([0] * 12 + [1] * 8 + [-1] * 4)
PLACE = torch.tensor([*range(12), *range(8), *range(4)])
GAMMA = 0.7


def brute(inclusive: bool) -> tuple[Tensor, Tensor]:
    """(running minimum, discounted sum of what follows), by definition."""
    least, after = [], []
    for t in range(24):
        mine = [k for k in range(24) if UNIT[k] == UNIT[t] and UNIT[k] >= 0 and VOTES[k]]
        before = [float(VALUES[k]) for k in mine if k < t or (inclusive and k == t)]
        least.append(min(before, default=math.inf))
        after.append(sum(GAMMA ** (k - t) * float(VALUES[k]) for k in mine if k >= t))
    return torch.tensor(least, dtype=torch.float64), torch.tensor(after, dtype=torch.float64)


def cut(order: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Places of the tokens, and their chunk of four, where each unit's chunks come in ``order``."""
    size = {0: 3, 1: 2}
    places = [12 * unit + size[unit] * chunk + k for unit in (0, 1) for chunk in order for k in range(size[unit])]
    chunks = [chunk for unit in (0, 1) for chunk in order for _ in range(size[unit])]
    return torch.tensor([*places, *range(20, 24)]), torch.tensor([*chunks, 0, 0, 0, 0])


@pytest.mark.parametrize("inclusive", [True, False])
def test_statistics_along_a_unit_equal_loops(inclusive: bool) -> None:
    least, after = brute(inclusive)
    sums = UnitSums(UNIT, 2)
    assert torch.equal(running.minimum(sums, VALUES, VOTES, inclusive=inclusive), least)
    near(running.discounted(sums, VALUES, VOTES, PLACE, GAMMA), after, 1e-13)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (2, 1, 3, 0)])
@pytest.mark.parametrize("inclusive", [True, False])
def test_chunks_of_a_sequence_may_lie_in_any_order(order: tuple[int, ...], inclusive: bool) -> None:
    place, chunk = cut(order)
    least, after = brute(inclusive)
    sums = UnitSums(UNIT[place], 2, None, chunk, 4)
    assert torch.equal(running.minimum(sums, VALUES[place], VOTES[place], inclusive=inclusive), least[place])
    near(running.discounted(sums, VALUES[place], VOTES[place], PLACE[place], GAMMA), after[place], 1e-13)


def test_what_is_masked_never_enters() -> None:
    wild = torch.where(VOTES, VALUES, math.nan)
    sums = UnitSums(UNIT, 2)
    least, after = brute(True)
    assert torch.equal(running.minimum(sums, wild, VOTES), least)
    near(running.discounted(sums, wild, VOTES, PLACE, GAMMA), after, 1e-13)


def test_a_long_sequence_and_a_short_memory_stay_finite() -> None:
    """100,000 positions: gamma^t underflows, the sum does not. Of ones: 1/(1 - gamma) but for the end."""
    size = 100_000
    one, votes = torch.ones(size), torch.ones(size, dtype=torch.bool)
    found = running.discounted(UnitSums(torch.zeros(size, dtype=torch.int64), 1), one, votes, torch.arange(size), 0.5)
    torch.testing.assert_close(found[[0, 50_000, size - 1]], torch.tensor([2.0, 2.0, 1.0]))


def test_nothing_at_all() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    sums, votes = UnitSums(none, 0), torch.zeros(0, dtype=torch.bool)
    assert running.minimum(sums, torch.zeros(0), votes).shape == (0,)
    assert running.discounted(sums, torch.zeros(0), votes, none, 0.5).shape == (0,)


def shared(rank: int, world: int) -> list[float]:
    """Two ranks share the units as zigzag shards: chunks 0 and 3, chunks 1 and 2."""
    place, chunk = cut((0, 3, 1, 2))
    mine = torch.tensor([(int(c) in (0, 3)) == (rank == 0) for c in chunk]) & (UNIT[place] >= 0)
    place, chunk = place[mine], chunk[mine]
    sums = UnitSums(UNIT[place], 2, dist.group.WORLD, chunk, 4)
    worst = []
    for inclusive in (True, False):
        least, after = brute(inclusive)
        worst.append(_gap(running.minimum(sums, VALUES[place], VOTES[place], inclusive=inclusive), least[place]))
        worst.append(_gap(running.discounted(sums, VALUES[place], VOTES[place], PLACE[place], GAMMA), after[place]))
    return worst


def _gap(one: Any, two: Any) -> float:
    return float(torch.where(one == two, 0.0, (one - two).abs()).max())


everyone = world_fixture(shared, 2)


@pytest.mark.multiproc
def test_ranks_that_share_a_sequence_agree_with_one_that_holds_it(everyone: Any) -> None:
    for gaps in everyone:
        assert max(gaps) < 1e-13
