"""Scoring old and ref through the schedule, ratios of exactly 1, and data shared inside a replica.

One world of four processes; every layout scores whole rows on every rank, held against the oracle's log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from support import jobs, layouts
from support.data import Row
from support.jobs import Job
from support.layouts import SP
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
THD = pg.Split(max_tokens=96)
JOBS = {
    "dp4": Job(),
    "tp2 pp2": Job(tp=2, pp=2),
    "pp2 vpp2, one rank empty": Job(pp=2, vpp=2, empty_rank=True),
    "cp2 pp2 packed": Job(cp=2, pp=2, split=THD, model=dict(variable_seq_lengths=True)),
    "tp2 cp2 sp": Job(tp=2, cp=2, model=SP, split=pg.Split(microbatches=3)),
    "cp4 packed, per-token": Job(cp=4, split=THD, per_token=True),
}
POLICY, REFERENCE = 3, 9


def bare_batch(rows: Sequence[Row]) -> pg.TokenBatch:
    """Rows as sampled: no log-probs of anybody."""
    whole = jobs.batch_of(rows)
    kept = {name: stream for name, stream in whole.streams.items() if name in ("advantages", "temperature")}
    return replace(whole, streams=kept)


def judged(batch: pg.TokenBatch, stream: str, rows: Sequence[Row], scores: list[torch.Tensor]) -> float:
    """Largest difference between a scored stream and the oracle's log-probs, over every target of every row."""
    found = batch.streams[stream].split(batch.lengths_S.tolist())
    gaps = [(line[:-1] - score[1:]).abs().max() for line, score in zip(found, scores, strict=True)]
    assert len(found) == len(rows)
    return float(max(gaps))


def heat_of(row: Row) -> list[float]:
    """The sampler's temperature at what it sampled and at what it was answered; the prompt is scored at 1."""
    said = zip(row["temperature"], row["action"], row["observation"], strict=True)
    return [heat if action or observation else 1.0 for heat, action, observation in said]


@contextmanager
def swapped(chunks: Any) -> Iterator[None]:
    """The reference's weights in place of the policy's, as adapters that are switched off."""
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    deterministic_weights(chunks, seed=REFERENCE)
    yield
    deterministic_weights(chunks, seed=POLICY)


def visit(job: Job, rows: list[Row], scores: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    chunks, where = jobs.build(job)
    spec = pg.presets.grpo(kl=0.1, normalizer="mean(token)").add(pg.KL(name="taught", to="teacher", coef=0.1))
    step = pgm.PolicyLossStep(spec, chunks, split=job.split)
    mine = [i for i, row in enumerate(rows) if row in jobs.share(rows, where.dp_rank, where.dp, job.empty_rank)]
    # Two batches, to be scored as two and told apart again.
    halves = [mine[: len(mine) // 2], mine[len(mine) // 2 :]]
    batches = [bare_batch([rows[i] for i in half]) for half in halves if half]

    modules = [module for chunk in chunks for module in chunk.modules()]
    modules[-1].eval()  # one part frozen by its owner
    before = [module.training for module in modules]
    modes: set[bool] = set()
    hooks = [module.register_forward_pre_hook(lambda m, _: modes.add(m.training)) for module in modules]
    old = step.score(batches, into="old")
    for hook in hooks:
        hook.remove()
    found: dict[str, Any] = {"modes": modes, "restored": [module.training for module in modules] == before}
    deterministic_weights(chunks, seed=REFERENCE)
    ready = step.score(old, chunks if len(chunks) > 1 else chunks[0], into="ref")
    deterministic_weights(chunks, seed=POLICY)
    # A second reference by its name, whose weights are there for the pass alone.
    ready = step.score(ready, into="teacher", under=swapped(chunks))

    parts = [(batch, half) for batch, half in zip(ready, [half for half in halves if half], strict=True)]
    for stream in ("old", "ref"):
        found[stream] = max(
            (judged(b, stream, [rows[i] for i in half], [scores[stream][i] for i in half]) for b, half in parts),
            default=0.0,
        )
    found["teacher"] = all(torch.equal(b.streams["teacher"], b.streams["ref"]) for b in ready)
    found["graph"] = any(batch.streams[name].requires_grad for batch in ready for name in ("old", "ref"))
    found["bytes"] = [batch.streams[name].numpy().tobytes() for batch in ready for name in ("old", "ref")]
    found["replica"] = where.dp_rank

    step.begin(ready)
    metrics = step.finish(jobs.run_schedule(step, chunks))
    found["ratio"] = (metrics["rl/ratio_min"], metrics["rl/ratio"], metrics["rl/ratio_max"], metrics["rl/k1_old"])
    layouts.leave(chunks)
    return found


def shared(job: Job, rows: list[Row]) -> dict[str, Any]:
    """What `broadcast` brings to every rank, where only the first of a replica has the data."""
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss.planning.agreement import batch_digest

    chunks, where = jobs.build(job)
    first = where.tp_rank == where.cp_rank == where.pp_rank == 0
    mine = [jobs.batch_of(jobs.share(rows, where.dp_rank, where.dp))]
    step = pgm.PolicyLossStep(pg.presets.dapo(), chunks, split=job.split)
    got = pgm.broadcast(mine if first else None)
    found: dict[str, Any] = {"same": [batch_digest(b) for b in got] == [batch_digest(b) for b in mine]}
    found["begun"] = step.begin(got).job["rows"]
    found["ignored"] = [batch_digest(b) for b in pgm.broadcast(mine if first else [mine[0].select([0])])]
    found["ignored"] = found["ignored"] == [batch_digest(b) for b in mine]
    # Nothing on the first rank of replica 0, or something broken there: an error on every rank of the job.
    errors = []
    for bad in (None, [pg.TokenBatch.from_packed(tokens=torch.zeros(3), action_mask=torch.zeros(3), lengths=[3])], 5):
        try:
            step.begin(pgm.broadcast(bad if dist.get_rank() == 0 else mine))
        except pg.PGLossError as error:
            errors.append(f"{type(error).__name__}: {error}")
    found["errors"] = errors
    layouts.leave(chunks)
    return found


AXES = {"tp2": Job(tp=2), "pp2": Job(pp=2), "cp2": Job(cp=2), "tp2 cp2": Job(tp=2, cp=2), "cp2 pp2": Job(cp=2, pp=2)}


def tour(rank: int, world: int) -> dict[str, Any]:
    from megatron_pgloss.verify.layouts.weights import deterministic_weights
    from megatron_pgloss.verify.oracle import oracle_logprobs

    layouts.quiet()
    rows = jobs.rows_of_step(0, temperature=True)
    scores: dict[int, dict[str, list[torch.Tensor]]] = {}
    for layers in {job.depth for job in JOBS.values()}:
        chunks, model_fn = jobs.oracle_model(layers=layers)
        scores[layers] = {}
        for stream, seed in (("old", POLICY), ("ref", REFERENCE)):
            deterministic_weights(chunks, seed=seed)
            with torch.no_grad():
                scores[layers][stream] = [
                    oracle_logprobs(model_fn(torch.tensor(row["tokens"])[None])[0], row["tokens"], heat_of(row))[0]
                    for row in rows
                ]
        layouts.leave(chunks)
    found = {name: visit(job, rows, scores[job.depth]) for name, job in JOBS.items()}
    return found | {f"broadcast {name}": shared(job, rows) for name, job in AXES.items()}


everyone = world_fixture(tour, 4)


@pytest.fixture(scope="module")
def found(everyone: Any, table: list[str]) -> list[dict[str, Any]]:
    results = everyone
    for name in JOBS:
        gaps = {stream: max(by_rank[name][stream] for by_rank in results) for stream in ("old", "ref")}
        table.append(f"score on {name}: old {gaps['old']:.0e}, ref {gaps['ref']:.0e} from the oracle")
    return results


@pytest.mark.parametrize("name", JOBS)
def test_scores_of_whole_rows_are_the_oracles_on_every_rank(name: str, found: Any) -> None:
    for seen in (by_rank[name] for by_rank in found):
        assert seen["old"] < 1e-12
        assert seen["ref"] < 1e-12
        assert not seen["graph"]
    # The ranks of a replica hold the same bits.
    by_replica: dict[int, set[str]] = {}
    for by_rank in found:
        by_replica.setdefault(by_rank[name]["replica"], set()).add(repr(by_rank[name]["bytes"]))
    assert all(len(kinds) == 1 for kinds in by_replica.values())


@pytest.mark.parametrize("name", JOBS)
def test_a_named_reference_is_scored_inside_a_context_that_ends_with_the_pass(name: str, found: Any) -> None:
    """Bit for bit what ``ref`` got by loading the same weights; then the policy's are back, with a ratio of 1."""
    assert all(by_rank[name]["teacher"] for by_rank in found)


@pytest.mark.parametrize("name", JOBS)
def test_scoring_runs_in_eval_mode_and_puts_every_module_back(name: str, found: Any) -> None:
    assert [by_rank[name]["modes"] for by_rank in found] == [{False}] * 4
    assert all(by_rank[name]["restored"] for by_rank in found)


@pytest.mark.parametrize("name", JOBS)
def test_the_first_update_on_recorded_scores_has_ratio_exactly_one(name: str, found: Any) -> None:
    assert [by_rank[name]["ratio"] for by_rank in found] == [(1.0, 1.0, 1.0, 0.0)] * 4


@pytest.mark.parametrize("axis", AXES)
def test_broadcast_gives_every_rank_of_a_replica_the_first_ones_batches(axis: str, found: Any) -> None:
    seen = [by_rank[f"broadcast {axis}"] for by_rank in found]
    assert all(one["same"] and one["ignored"] for one in seen)
    assert {one["begun"] for one in seen} == {len(jobs.rows_of_step(0))}


@pytest.mark.parametrize("axis", AXES)
def test_nothing_to_broadcast_is_an_error_on_every_rank(axis: str, found: Any) -> None:
    errors = found[0][f"broadcast {axis}"]["errors"]
    assert [by_rank[f"broadcast {axis}"]["errors"] for by_rank in found] == [errors] * 4
    nothing, broken, number = errors
    assert nothing.startswith("LayoutError: the first rank of the replica passed no batches")
    assert "rank 0" in nothing
    assert broken.startswith("DataError: tokens must be an integer tensor")
    assert number.startswith("DataError: TypeError") and "rank 0" in number
