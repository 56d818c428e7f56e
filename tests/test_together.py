"""Statistics taken over ranks together are those taken one by one, value and gradient, and cost fewer collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.maths import UnitSums, running
from megatron_pgloss.maths.together import NotDeferrable, Placeholder, Together, rounds
from support.worlds import world_fixture

Term = Callable[[Tensor, UnitSums], Tensor]
UNITS, LENGTH = 3, 12


def several(v: Tensor, unit: UnitSums) -> Tensor:
    every = torch.ones_like(v, dtype=torch.bool)
    return unit.mean(v, every).square() + unit.prefix(v.sin(), every).tanh() + unit.total(v, v.detach() > 0) * v


def chain(v: Tensor, unit: UnitSums) -> Tensor:
    every = torch.ones_like(v, dtype=torch.bool)
    spread = unit.mean((v - unit.mean(v, every)).square(), every)
    return unit.total(v * spread.detach(), every) + spread


def extremes(v: Tensor, unit: UnitSums) -> Tensor:
    every = torch.ones_like(v, dtype=torch.bool)
    return several(v, unit) * unit.largest(v, every) + running.minimum(unit, v, every)


def mixed(v: Tensor, unit: UnitSums) -> Tensor:
    """Sums in two widths: each keeps its own dtype."""
    every = torch.ones_like(v, dtype=torch.bool)
    return unit.mean(v.float(), every).to(v.dtype) + unit.prefix(v, every)


def written(v: Tensor, unit: UnitSums) -> Tensor:
    out = torch.zeros_like(v)
    out[:] = unit.mean(v, torch.ones_like(v, dtype=torch.bool))
    return out


def read(v: Tensor, unit: UnitSums) -> Tensor:
    return v * float(unit.mean(v, torch.ones_like(v, dtype=torch.bool))[0])


TERMS: dict[str, tuple[Term, int]] = {
    "several": (several, 1),
    "chain": (chain, 3),
    "extremes": (extremes, 1),
    "mixed": (mixed, 1),
}
"""A term, and the collectives of its forward pass."""
REFUSED: dict[str, Term] = {"written": written, "read": read}


def shard(rank: int, world: int) -> tuple[Tensor, dict[str, Any]]:
    """Values of this rank's half of each unit, zigzag as context parallelism has it."""
    dice = torch.Generator().manual_seed(rank)
    values = torch.randn(UNITS * LENGTH, generator=dice, dtype=torch.float64)
    unit = torch.arange(UNITS).repeat_interleave(LENGTH)
    chunk = torch.tensor([rank, 2 * world - 1 - rank]).repeat_interleave(LENGTH // 2).repeat(UNITS)
    return values, dict(unit_N=unit, units=UNITS, chunk_N=chunk, chunks=2 * world)


def solve(term: Term, rank: int, world: int, group: Any) -> tuple[Tensor, Tensor]:
    values, given = shard(rank, world)
    leaf = values.requires_grad_()

    def run() -> Tensor:
        return term(leaf, UnitSums(group=group, **given))

    out = rounds(group, run) if isinstance(group, Together) else run()
    assert not isinstance(out, Placeholder)
    (out * torch.arange(1, out.numel() + 1)).sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def tour(rank: int, world: int) -> dict[str, Any]:
    count = [0]
    for name in ("all_reduce", "all_gather_into_tensor"):
        real = getattr(dist, name)

        def counted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            count[0] += 1
            return real(*args, **kwargs)

        setattr(dist, name, counted)
    found: dict[str, Any] = {}
    for name, (term, _) in TERMS.items():
        count[0] = 0
        apart = solve(term, rank, world, dist.group.WORLD)
        one_by_one, count[0] = count[0], 0
        together = solve(term, rank, world, Together(dist.group.WORLD))
        gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(together, apart, strict=True)]
        found[name] = {"gaps": gaps, "apart": one_by_one, "together": count[0]}
    for name, term in REFUSED.items():
        count[0] = 0
        with pytest.raises(NotDeferrable):
            solve(term, rank, world, Together(dist.group.WORLD))
        found[name] = count[0]
    return found


found = world_fixture(tour, 2)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", TERMS)
def test_values_and_gradients_are_those_of_one_by_one(name: str, found: Any) -> None:
    for seen in (by_rank[name] for by_rank in found):
        assert max(seen["gaps"]) < 1e-14


@pytest.mark.multiproc
@pytest.mark.parametrize("name", TERMS)
def test_there_are_as_many_collectives_as_the_chain_is_long_each_way(name: str, found: Any) -> None:
    length = TERMS[name][1]
    for seen in (by_rank[name] for by_rank in found):
        assert length < seen["together"] <= 2 * length
        assert seen["together"] < seen["apart"] or name == "chain"


@pytest.mark.multiproc
@pytest.mark.parametrize("name", REFUSED)
def test_a_term_that_needs_the_value_at_once_is_told_apart_before_anything_is_sent(name: str, found: Any) -> None:
    assert [by_rank[name] for by_rank in found] == [0, 0]
