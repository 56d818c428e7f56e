"""One rollout batch into several optimizer steps, in one process: whole units, dealt evenly, each row once."""

from __future__ import annotations

import pytest
import torch

import megatron_pgloss as pg
from support.steps import pictured, refused

PROMPTS = ["a", "b", "a", "c", "d", "b", "e", "f"]


def batches() -> list[pg.TokenBatch]:
    rows = pictured(*["cA"] * 8, prompt_ids=PROMPTS, episode_ids=[0, 0, 1, 0, 0, 0, 0, 0], sample_ids=list(range(8)))
    return [rows.select([0, 1, 2]), rows.select([]), rows.select([3, 4, 5, 6, 7])]


def dealt(count: int, **more: object) -> list[list[int]]:
    found = pg.minibatches(batches(), count, **more)  # type: ignore[arg-type]
    return [[int(name) for batch in mini for name in batch.sample_ids or ()] for mini in found]


@pytest.mark.parametrize("by", ["prompt", "episode", "sequence"])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_every_row_lands_in_one_step_and_units_stay_whole(by: str, count: int) -> None:
    steps = dealt(count, by=by)
    assert len(steps) == count and sorted(row for step in steps for row in step) == list(range(8))
    keys = {"prompt": PROMPTS, "episode": [f"{p}{e}" for p, e in zip(PROMPTS, [0, 0, 1, 0, 0, 0, 0, 0], strict=True)]}
    keys["sequence"] = [str(row) for row in range(8)]
    units = [{keys[by][row] for row in step} for step in steps]
    assert sum(map(len, units)) == len(set(keys[by]))  # no unit in two steps
    assert max(map(len, units)) - min(map(len, units)) <= 1


def test_the_deal_follows_the_seed_and_nothing_else() -> None:
    assert dealt(3, seed=1) == dealt(3, seed=1)
    assert len({str(dealt(3, seed=seed)) for seed in range(8)}) > 4
    other = pictured("cAA", *["cA"] * 7, prompt_ids=PROMPTS, sample_ids=list(range(8)), advantages=3.0)
    found = [[int(n) for b in mini for n in b.sample_ids or ()] for mini in pg.minibatches([other], 3, seed=1)]
    assert [sorted(step) for step in found] == [sorted(step) for step in dealt(3, seed=1)]


def test_more_steps_than_units_and_missing_ids_are_refused() -> None:
    refused(pg.DataError, lambda: dealt(7), "fewer prompts than steps", "at least 7", "got 6", "minibatches(..., 6)")
    bare = [pictured("cA", "cA")]
    for by in ("prompt", "episode"):
        words = (f"minibatches(by='{by}') needs {by}_ids",)
        refused(pg.DataError, lambda by=by: list(pg.minibatches(bare, 2, by=by)), *words)
    assert sorted(len(mini[0]) for mini in pg.minibatches(bare, 2, by="sequence")) == [1, 1]


def test_an_update_on_a_part_is_remembered_by_the_whole() -> None:
    whole = batches()
    first, second = pg.minibatches(whole, 2)
    spec = pg.presets.reinforce()
    plan = pg.plan(first, spec, split=pg.Split(microbatches=1))
    (micro,) = plan.microbatches()
    pg.policy_loss(pg.TokenLogprobs(logprob=torch.zeros(micro.shape, requires_grad=True), entropy=None), micro)
    pg.plan(second, spec, split=pg.Split(microbatches=1))
    refused(pg.DataError, lambda: pg.plan(whole, spec, split=pg.Split(microbatches=1)), "second update")
