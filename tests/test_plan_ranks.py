"""What several ranks agree on is what one process would have counted, bit for bit: weights, counts, mini-batches.

Prompts and episodes straddle ranks here, and one rank of the last case has no rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from support import jobs
from support.data import Row
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
SPLIT = pg.Split(sequences=2)
PATHS = [
    "mean(token)",
    "mean(sequence) > mean(token)",
    "mean(sequence) > sum(token)",
    "sum(sequence) > sum(token)/4096",
    "mean(prompt) > mean(token)",
    "mean(episode) > mean(token)",
    "mean(prompt) > mean(episode) > mean(token)",
    "mean(prompt) > mean(episode) > mean(sequence) > mean(turn) > mean(token)",
    "mean(episode) > mean(turn) > mean(token)",
    "mean(prompt) > sum(token)/sqrt",
    "mean(episode) > sum(token)/pow(0.3)",
    "mean(prompt) > sum(episode)/avg > sum(token)/avg",
]


def spec_of(path: str) -> pg.LossSpec:
    """Sets that differ between components, so that a mix-up of their counts would show."""
    return pg.LossSpec(
        components=[
            pg.PolicyGradient(normalizer=path),
            pg.KL(normalizer=path, coef=0.1),
            pg.CrossEntropy(normalizer=path, count="observations", units="all", coef=0.1),
        ],
        corrections=[pg.TruncatedIS()],
        masks=[pg.DropTruncated(), pg.DropZeroAdvantage(), pg.UserMask(name="keep", on=("kl",))],
    )


def corrected() -> pg.LossSpec:
    """Rules over episodes and prompts, whose rows lie on several ranks; `REJECTING` takes some of both out."""
    path = "mean(prompt) > mean(episode) > mean(token)"
    parts = [pg.PolicyGradient(normalizer=path, count_rejected=False), pg.KL(coef=0.1), pg.Entropy(coef=0.01)]
    return pg.LossSpec(
        components=parts,
        corrections=[
            pg.TruncatedIS(level="episode", high=3.0),
            pg.TruncatedIS(level="prompt_geometric", high=1.05, on=("kl",)),
            *REJECTING,
        ],
        masks=[pg.DropTruncated()],
    )


REJECTING = (
    pg.Veto(unit="episode", low=0.4, high=2.5, on=("rl",)),
    pg.RatioMask(unit="prompt", low=0.9, high=1.1, on=("kl",)),
    pg.Reject(unit="episode", estimator="k2", statistic="max", high=0.5, on=("entropy",)),
)


def means_differ(mine: Sequence[Row], whole: pg.TokenBatch, group: Any) -> float:
    """Largest relative error of mean weights over episodes and prompts: float sums, not bitwise."""
    rules = [pg.TruncatedIS(level=level, high=3.0, normalize=True) for level in ("episode", "prompt_geometric")]
    spec = corrected().replace(corrections=(*rules, *REJECTING))
    many = pg.plan([jobs.batch_of(mine)] if mine else [], spec, split=SPLIT, group=group).components["rl"].means
    one = pg.plan([whole], spec, split=SPLIT, group="local").components["rl"].means
    assert sorted(many) == sorted(one) == [0, 1] and len(set(one.values()) | {1.0}) == 3
    return max(abs(many[i] / one[i] - 1) for i in one)


def by_sample(plan: pg.Plan, name: str) -> dict[str, torch.Tensor]:
    """Weights of every row of a plan, by the row's name."""
    if plan.batch is None:
        return {}
    rows = plan.components[name].weight_T.split(plan.batch.lengths_S.tolist())
    return {plan.batch.sample_name(i): row for i, row in enumerate(rows)}


def weights_differ(spec: pg.LossSpec, mine: Sequence[Row], whole: pg.TokenBatch, group: Any) -> list[Any]:
    """What is not the same, bit for bit, between this group's plan and one process's."""
    many = pg.plan([jobs.batch_of(mine)] if mine else [], spec, split=SPLIT, group=group)
    one = pg.plan([whole], spec, split=SPLIT, group="local")
    wrong: list[Any] = []
    for name in spec.names:
        alone, dtype = by_sample(one, name), many.components[name].weight_T.dtype
        for sample, weight in by_sample(many, name).items():
            if not torch.equal(weight, alone[sample]) or dtype != torch.float64:
                wrong.append((name, sample))
    wrong += [(key, many.counts[key], one.counts[key]) for key in one.counts if many.counts[key] != one.counts[key]]
    if many.gradient_scale != (1.0 if group == "local" else dist.get_world_size(group)):
        wrong.append(("gradient_scale", many.gradient_scale))
    return wrong


def weighted_totals(mine: Sequence[Row], whole: pg.TokenBatch, group: Any, where: list[int]) -> float:
    """Largest relative error where user weights, not counts, are in the denominators: float sums, not bitwise."""
    spec = pg.LossSpec(
        components=[pg.PolicyGradient(normalizer="mean(prompt) > mean(episode) > mean(token)", divide_by="weights")]
    )
    weight = torch.rand(whole.tokens_T.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    whole = replace(whole, weights={"rl": weight})
    many = pg.plan([whole.select(where)], spec, split=SPLIT, group=group)
    one = by_sample(pg.plan([whole], spec, split=SPLIT, group="local"), "rl")
    pairs = [(row, one[name]) for name, row in by_sample(many, "rl").items()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def compositions(rows: Sequence[Row], groups: dict[int, Any], rank: int) -> dict[Any, list[list[str]]]:
    """This rank's samples of every mini-batch, on one, two and four data-parallel ranks."""
    found = {}
    for size, group in groups.items():
        mine = jobs.share(rows, rank % size, size) if size > 1 else list(rows)
        for by in ("prompt", "episode", "sequence"):
            for seed in (0, 1):
                deal = pg.minibatches([jobs.batch_of(mine)], 3, by=by, seed=seed, group=group)
                found[size, by, seed] = [
                    [item.sample_name(i) for item in mini for i in range(len(item))] for mini in deal
                ]
    return found


def ranks(rank: int, world: int) -> dict[str, Any]:
    rows = jobs.rows_of_step(0)
    whole, mine = jobs.batch_of(rows), jobs.share(rows, rank, world)
    two = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    found: dict[str, Any] = {}
    for path in PATHS:
        found[path] = weights_differ(spec_of(path), mine, whole, dist.group.WORLD)
        found[path] += weights_differ(spec_of(path), jobs.share(rows, rank % 2, 2), whole, two)
        found[path] += weights_differ(
            spec_of(path), jobs.share(rows, rank, world, empty_rank=True), whole, dist.group.WORLD
        )
    lean = jobs.share(rows, rank, world, empty_rank=True)
    found["corrected"] = weights_differ(corrected(), mine, whole, dist.group.WORLD)
    found["corrected"] += weights_differ(corrected(), lean, whole, dist.group.WORLD)
    found["means"] = max(means_differ(part, whole, dist.group.WORLD) for part in (mine, lean))
    found["left"] = pg.plan([whole], corrected(), split=SPLIT, group="local").counts
    where = [i for i, row in enumerate(rows) if row in mine]
    found["weighted"] = weighted_totals(mine, whole, dist.group.WORLD, where)
    found["minibatches"] = compositions(rows, {1: "local", 2: two, 4: dist.group.WORLD}, rank)

    for by, ids in (("prompt", "prompt_ids"), ("sequence", "sample_ids")):
        held = replace(jobs.batch_of(mine), **{ids: None}) if rank == 2 else jobs.batch_of(mine)
        try:
            pg.minibatches([held], 2, by=by)
        except pg.PGLossError as error:
            found[f"no {ids}"] = type(error).__name__, str(error)
    return found


found = world_fixture(ranks, 4)


@pytest.mark.parametrize("path", PATHS)
def test_weights_and_counts_are_those_of_one_process_bit_for_bit(path: str, found: Any) -> None:
    assert [by_rank[path] for by_rank in found] == [[]] * 4


def test_rules_over_episodes_and_prompts_say_what_they_say_in_one_process_bit_for_bit(found: Any) -> None:
    assert [by_rank["corrected"] for by_rank in found] == [[]] * 4
    assert max(by_rank["means"] for by_rank in found) < 1e-15
    for name, counts in found[0]["left"].items():  # the data can tell
        assert 0 < counts["members"] < counts["base"], name


def test_user_weights_in_the_denominator_agree_to_rounding(found: Any) -> None:
    assert max(by_rank["weighted"] for by_rank in found) < 1e-14


@pytest.mark.parametrize("by", ["prompt", "episode", "sequence"])
@pytest.mark.parametrize("seed", [0, 1])
def test_minibatches_are_the_same_on_one_two_and_four_ranks(by: str, seed: int, found: Any) -> None:
    dealt = {}
    for size in (1, 2, 4):
        parts = [by_rank["minibatches"][size, by, seed] for by_rank in found[:size]]
        dealt[size] = [sorted(name for part in parts for name in part[step]) for step in range(3)]
    assert dealt[1] == dealt[2] == dealt[4]
    everyone = [f"sample 'r{i}'" for i in range(len(jobs.rows_of_step(0)))]
    assert sorted(name for step in dealt[1] for name in step) == sorted(everyone)  # each row once


@pytest.mark.parametrize("by", ["prompt", "episode", "sequence"])
def test_minibatches_are_balanced_in_whole_units(by: str, found: Any) -> None:
    rows = jobs.rows_of_step(0)
    keys = {"prompt": ("prompt",), "episode": ("prompt", "episode"), "sequence": ("name",)}[by]
    unit = {f"sample '{row['name']}'": tuple(row[key] for key in keys) for row in rows}
    steps = found[0]["minibatches"][1, by, 0]
    held = [{unit[name] for name in step} for step in steps]
    sizes = Counter(len(units) for units in held)
    assert max(sizes) - min(sizes) <= 1
    assert sum(len(units) for units in held) == len(set(unit.values()))  # no unit in two steps


def test_another_seed_deals_otherwise(found: Any) -> None:
    dealt = found[0]["minibatches"]
    assert dealt[1, "episode", 0] != dealt[1, "episode", 1]
    assert dealt[4, "sequence", 0] != dealt[4, "sequence", 1]


@pytest.mark.parametrize("ids", ["prompt_ids", "sample_ids"])
def test_ids_missing_on_one_rank_are_an_error_on_all(ids: str, found: Any) -> None:
    first = found[0][f"no {ids}"]
    assert [by_rank[f"no {ids}"] for by_rank in found] == [first] * 4
    assert first[0] == "DataError" and f"needs {ids}" in first[1] and "rank 2" in first[1]
