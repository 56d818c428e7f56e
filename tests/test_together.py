"""Statistics taken over ranks together are those taken one by one, value and gradient, and cost one collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.maths import Asked, UnitSums, running, taken
from support.worlds import world_fixture

Questions = Callable[[Tensor, UnitSums], list[Asked]]
UNITS, LENGTH = 3, 12


def sums(v: Tensor, unit: UnitSums) -> list[Asked]:
    every = torch.ones_like(v, dtype=torch.bool)
    return [unit.asked_mean(v, every), unit.asked_prefix(v.sin(), every), unit.asked_total(v, v.detach() > 0)]


def extremes(v: Tensor, unit: UnitSums) -> list[Asked]:
    every, place = torch.ones_like(v, dtype=torch.bool), torch.arange(LENGTH).repeat(UNITS)
    more = [unit.asked_largest(v, every), running.asked_minimum(unit, v, every)]
    return [*sums(v, unit), *more, running.asked_discounted(unit, v, every, place, 0.5)]


def mixed(v: Tensor, unit: UnitSums) -> list[Asked]:
    """Sums in two widths: each keeps its own dtype."""
    every = torch.ones_like(v, dtype=torch.bool)
    return [unit.asked_mean(v.float(), every), unit.asked_prefix(v, every)]


def constants(v: Tensor, unit: UnitSums) -> list[Asked]:
    """Without gradient there is nothing to send back."""
    every = torch.ones_like(v, dtype=torch.bool)
    return [unit.asked_joined(how, v, every) for how in ("mean", "sum", "max")]


QUESTIONS: dict[str, tuple[Questions, int]] = {
    "sums": (sums, 2),
    "extremes": (extremes, 2),
    "mixed": (mixed, 2),
    "constants": (constants, 1),
}
"""What is asked for, and the collectives forward and backward of all of it together."""


def shard(rank: int, world: int) -> tuple[Tensor, dict[str, Any]]:
    """Values of this rank's half of each unit, zigzag as context parallelism has it."""
    dice = torch.Generator().manual_seed(rank)
    values = torch.randn(UNITS * LENGTH, generator=dice, dtype=torch.float64)
    unit = torch.arange(UNITS).repeat_interleave(LENGTH)
    chunk = torch.tensor([rank, 2 * world - 1 - rank]).repeat_interleave(LENGTH // 2).repeat(UNITS)
    return values, dict(unit_N=unit, units=UNITS, chunk_N=chunk, chunks=2 * world)


def solve(ask: Questions, rank: int, world: int, *, together: bool) -> tuple[Tensor, Tensor]:
    values, given = shard(rank, world)
    leaf, group = values.requires_grad_(), dist.group.WORLD
    asked = ask(leaf, UnitSums(group=group, **given))
    answers = taken(asked, group) if together else [taken([one], group)[0] for one in asked]
    flat = torch.cat([answer.double().reshape(-1) for answer in answers])
    total = (flat.sin() * torch.arange(1, flat.numel() + 1)).sum() + 0 * leaf.sum()
    total.backward()
    assert leaf.grad is not None
    return flat.detach(), leaf.grad


def tour(rank: int, world: int) -> dict[str, Any]:
    count = [0]
    for name in ("all_reduce", "all_gather_into_tensor"):
        real = getattr(dist, name)

        def counted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            count[0] += 1
            return real(*args, **kwargs)

        setattr(dist, name, counted)
    found: dict[str, Any] = {}
    for name, (ask, _) in QUESTIONS.items():
        apart, one_by_one = solve(ask, rank, world, together=False), count[0]
        count[0] = 0
        together = solve(ask, rank, world, together=True)
        gaps = [float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(together, apart, strict=True)]
        found[name] = {"gaps": gaps, "apart": one_by_one, "together": count[0]}
        count[0] = 0
    return found


found = world_fixture(tour, 2)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", QUESTIONS)
def test_values_and_gradients_are_those_of_one_by_one(name: str, found: Any) -> None:
    for seen in (by_rank[name] for by_rank in found):
        assert max(seen["gaps"]) < 1e-14


@pytest.mark.multiproc
@pytest.mark.parametrize("name", QUESTIONS)
def test_any_number_of_them_is_one_collective_each_way(name: str, found: Any) -> None:
    for seen in (by_rank[name] for by_rank in found):
        assert seen["together"] == QUESTIONS[name][1] < seen["apart"]
