"""The statistics pass and ``old="record"`` through Megatron's schedule: the same on every layout and every rank.

One world of four processes. What is decided is held against the plain-torch pass over the oracle's log-probs, and the
second update of a recorded batch against one whose ``old`` was scored before the first.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_collectives
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from support import jobs, layouts
from support.cover import EXHAUSTIVE
from support.jobs import Job
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
THD = pg.Split(max_tokens=96)
ALL = {
    "dp4, one rank empty": Job(empty_rank=True),
    "tp2 pp2": Job(tp=2, pp=2),
    "cp2 dp2": Job(cp=2, split=pg.Split(microbatches=3)),
    "cp2 pp2 packed": Job(cp=2, pp=2, split=THD, model=dict(variable_seq_lengths=True)),
    # Without memory for logits: "recompute" under the decisions (they read statistics of turns), "forward" if recorded.
    "tp2 sp, fused head": Job(tp=2, sp=True, options=dict(head="auto", head_memory=0)),
    "tp2, fused head keeps": Job(tp=2, per_token=True, options=dict(head="keep")),
}
MORE = ("dp4, one rank empty", "tp2, fused head keeps")
"""Their axes are in the others."""
JOBS = {name: job for name, job in ALL.items() if EXHAUSTIVE or name not in MORE}
POLICY, LATER = 3, 9
NORM = "mean(sequence) > mean(token)"


def decided(old: str = "given") -> pg.LossSpec:
    """Every kind of decision: a quantile, a second moment, a draw, the top; kept denominators and a mean weight; and
    statistics of the policy over episodes and prompts, differentiated and not, beside those of ``old``.
    """
    rl = pg.PolicyGradient(normalizer="mean(prompt) > mean(token)", count_rejected=False)
    episodes = pg.PolicyGradient(
        name="episodes", surrogate=pg.Clip(low=0.02, high=0.02), ratio=pg.Ratio(level="episode"), coef=0.5,
        normalizer="mean(episode) > mean(token)", count_rejected=False,
    )  # fmt: skip
    return pg.LossSpec(
        components=[
            rl,
            pg.KL(coef=0.1, normalizer=NORM, count_rejected=False),
            pg.Entropy(coef=0.01),
            episodes,
            pg.PolicyGradient(
                name="prompts", surrogate=pg.Unclipped(), ratio=pg.Ratio(level="prompt", statistic="sum"), coef=0.1
            ),
        ],
        gates=[
            pg.EntropyGate(share=0.8, on=("rl",)),
            pg.SecondMomentGate(threshold=0.04, base="rollout", on=("rl",)),
            pg.CovarianceGate(select="band", low=-0.1, high=0.5, share=0.2, on=("rl",)),
            pg.CovarianceGate(select="top", share=0.1, on=("kl",)),
            pg.SequenceGate(threshold=0.0, unit="episode", on=("episodes", "prompts")),
        ],
        corrections=[
            pg.TruncatedIS(of="policy", level="turn", high=1.5, normalize=True, on=("rl",)),
            pg.RatioMask(of="policy", low=0.5, high=1.4, on=("kl",)),
            pg.Reject(of="policy", estimator="k2", statistic="max", unit="turn", high=0.2, on=("kl",)),
            pg.TruncatedIS(of="policy", level="episode", high=1.5, normalize=True, on=("episodes",)),
            pg.TruncatedIS(level="episode_geometric", high=1.05, on=("episodes", "prompts")),
            pg.Veto(unit="episode", high=2.5, low=0.4, on=("prompts",)),
        ],
        old=old,
    )


def named(plan: pg.Plan) -> dict[str, Any]:
    """What was decided and weighed, by sample and position."""
    batch, found = plan.batch, {}
    if batch is None:
        return found
    for name, table in plan.components.items():
        streams = {("gate", name, i): kept_T for i, kept_T in table.gates.items()}
        for key, stream_T in (streams | {("weight", name): table.weight_T}).items():
            for row, part_T in enumerate(stream_T.split(batch.lengths_S.tolist())):
                found[key, batch.sample_ids[row]] = part_T.tolist()  # type: ignore[index]
    return found


def constants(plan: pg.Plan) -> dict[Any, float]:
    """The numbers that were decided."""
    found: dict[Any, float] = {}
    for part, table in plan.components.items():
        found |= {("mean", part, i): mean for i, mean in table.means.items()}
        found |= {(part, i, name): number for i, some in table.thresholds.items() for name, number in some.items()}
    return found


def reference(rows: list[Any], model_fn: Any) -> dict[str, Any]:
    """The same decisions in one process, from the oracle's log-probs of the whole step."""
    from megatron_pgloss.verify.oracle import oracle_logprobs

    with torch.no_grad():
        scored = [oracle_logprobs(model_fn(torch.tensor(row["tokens"])[None])[0], row["tokens"]) for row in rows]
    spec = decided()
    plan = pg.plan([jobs.batch_of(rows)], spec, split=pg.Split(sequences=1), group="local")
    lps = []
    for micro, both in zip(plan.microbatches(), scored, strict=True):
        padded = [torch.nn.functional.pad(part[1:], (0, micro.shape[1] - len(part) + 1))[None] for part in both]
        lps.append(pg.TokenLogprobs(logprob=padded[0], entropy=padded[1]))
    done = pg.statistics_pass(plan, lps)
    total = sum(float(pg.policy_loss(lp, micro).loss) for lp, micro in zip(lps, done.microbatches(), strict=True))
    return {"table": named(done), "constants": constants(done), "counts": done.counts, "loss": total}


def axes() -> dict[str, tuple[int, ...]]:
    """This rank's groups of more than one rank, and the world."""
    from megatron.core import parallel_state as ps

    groups = {
        "tp": ps.get_tensor_model_parallel_group(),
        "cp": ps.get_context_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(),
        "dp": ps.get_data_parallel_group(with_context_parallel=False),
    }
    found = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    return {axis: ranks for axis, ranks in found.items() if len(ranks) > 1} | {"world": (0, 1, 2, 3)}


def visit(job: Job, rows: list[Any], truth: dict[str, Any]) -> dict[str, Any]:
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss.verify.layouts.reshard import full_gradients
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    chunks, where = jobs.build(job)
    groups, calls = axes(), {}
    mine = jobs.share(rows, where.dp_rank, where.dp, job.empty_rank)
    step = pgm.PolicyLossStep(decided(), chunks, split=job.split, **job.step_options)
    test_collectives.calls.clear()
    made = step.begin([jobs.batch_of(mine)] if mine else [])
    calls["begin"] = test_collectives.taken(groups)
    calls["number"], calls["last"] = made.num_microbatches, step.layout.last_stage
    found: dict[str, Any] = {"calls": calls}
    found |= {"table": named(made), "constants": constants(made), "counts": made.counts}
    found["loss"] = step.finish(jobs.run_schedule(step, chunks))["loss"]
    found["against the oracle"] = jobs.worst(full_gradients(chunks), truth)

    # Two updates at different weights: recorded at the first, or scored before it.
    losses: dict[str, list[float]] = {}
    grads: dict[str, Any] = {}
    for old in ("record", "given"):
        deterministic_weights(chunks, seed=POLICY)
        spec = pg.presets.ppo(old=old)
        step = pgm.PolicyLossStep(spec, chunks, split=job.split, **job.step_options)
        batches = [jobs.batch_of(mine)] if mine else []
        if old == "given":
            batches = step.score(batches, into="old")
        losses[old] = []
        for seed in (POLICY, LATER):
            deterministic_weights(chunks, seed=seed)
            step.begin(batches)
            reports = jobs.run_schedule(step, chunks)
            test_collectives.calls.clear()
            metrics = step.finish(reports)
            calls[f"{old} {seed}"] = test_collectives.taken(groups)
            grads[old] = full_gradients(chunks)
            losses[old] += [metrics["loss"], metrics["rl/ratio"], metrics["rl/ratio_max"]]
        if old == "record" and mine:
            found["bits"] = [record.logp.numpy().tobytes() for record in batches[0].records_S]
    found["gradient"] = jobs.worst(grads["record"], grads["given"])
    found["losses"], found["replica"] = losses, where.dp_rank
    layouts.leave(chunks)
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    test_collectives.count()
    chunks, model_fn = jobs.oracle_model()
    rows = jobs.rows_of_step(0, model_fn)
    found: dict[str, Any] = {"reference": reference(rows, model_fn)}
    unweighted = [row | {"weights": {}} for row in rows]
    loss, truth, _ = jobs.oracle_answer(chunks, model_fn, unweighted, decided())
    assert abs(found["reference"]["loss"] - loss) < 1e-12
    layouts.leave(chunks)
    return found | {name: visit(job, rows, truth) for name, job in JOBS.items()}


found = world_fixture(tour, 4)


@pytest.mark.parametrize("name", JOBS)
def test_what_is_decided_over_a_step_does_not_depend_on_the_layout(name: str, found: Any) -> None:
    truth = found[0]["reference"]
    for key, kept in truth["table"].items():
        if key[0][0] == "gate":
            assert len(kept) > 3
    for seen in (by_rank[name] for by_rank in found):
        assert seen["constants"].keys() == truth["constants"].keys()
        for key, value in truth["constants"].items():
            assert abs(seen["constants"][key] - value) <= 1e-12 * abs(value), key
        assert seen["counts"] == truth["counts"]
        for key, values in seen["table"].items():
            if key[0][0] == "gate":
                assert values == truth["table"][key], key
            else:
                gap = (torch.tensor(values) - torch.tensor(truth["table"][key])).abs().max()
                assert float(gap) < 1e-15, key
        assert abs(seen["loss"] - truth["loss"]) < 1e-12
        assert seen["against the oracle"][0] < 1e-10, seen["against the oracle"]
    # Bit for bit the same numbers on every rank, and all rows were looked at.
    assert len({repr(by_rank[name]["constants"]) for by_rank in found}) == 1
    rows = {key for by_rank in found for key in by_rank[name]["table"]}
    assert rows == truth["table"].keys()


def test_the_data_decide_something(found: Any) -> None:
    truth = found[0]["reference"]
    for gate in (("gate", "rl", 0), ("gate", "rl", 1), ("gate", "rl", 2), ("gate", "kl", 3)):
        kept = [flag for (key, _), flags in truth["table"].items() if key == gate for flag in flags]
        assert any(kept) and not all(kept)
    assert truth["counts"]["rl"]["token"] < truth["counts"]["rl"]["members"]
    assert truth["counts"]["kl"]["token"] < truth["counts"]["kl"]["members"]


@pytest.mark.parametrize("name", JOBS)
def test_a_recorded_update_is_as_if_old_had_been_scored_before_it(name: str, found: Any) -> None:
    for seen in (by_rank[name] for by_rank in found):
        record, given = seen["losses"]["record"], seen["losses"]["given"]
        assert record[1:3] == [1.0, 1.0] and abs(record[4] - 1) > 1e-3
        assert max(abs(a - b) for a, b in zip(record, given, strict=True)) < 1e-12
        assert seen["gradient"][0] < 1e-11, seen["gradient"]
    by_replica: dict[int, set[str]] = {}
    for by_rank in found:
        if "bits" in by_rank[name]:
            by_replica.setdefault(by_rank[name]["replica"], set()).add(repr(by_rank[name]["bits"]))
    assert by_replica and all(len(kinds) == 1 for kinds in by_replica.values())


@pytest.mark.parametrize("name", ["tp2 pp2", "cp2 dp2"])
def test_the_pass_adds_few_and_small_collectives(name: str, found: Any) -> None:
    """Plan and revision: a gather over the world and one of prompts each. Gates: per quantile a count and 8 digits, per
    cut 8, per draw two means, two counts and 8, of the top two means, a count and 8; and one mean weight. Episodes and
    prompts: one gather and a row once more for the plan's corrections; in the pass one gather, one of the rows that
    stand for their episodes in a mean weight and that mean, and one of slopes.
    """
    for calls in (by_rank[name]["calls"] for by_rank in found):
        want = {"world": 3}
        if name == "cp2 dp2":
            want |= {"dp": 2 + (1 + 8) + 8 + (2 + 2 + 8) + (2 + 1 + 8) + 1 + 1 + (1 + 2 + 1), "cp": 1}
        else:
            # Log-probs: one gather a micro-batch; whole rows: one message to the other stages.
            want |= {"pp": 1} | ({"tp": calls["number"]} if calls["last"] else {})
        assert calls["begin"] == want
        # Recording joins and sends whole rows once, after a first update.
        more = {"cp": 1} if name == "cp2 dp2" else {"pp": 1}
        assert calls[f"record {POLICY}"] == {"world": 1} | more
        assert calls[f"record {LATER}"] == calls[f"given {POLICY}"] == {"world": 1}
