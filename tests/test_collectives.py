"""How many collectives the loss adds to a step: a number that depends on none of its sizes.

Every function of torch.distributed that communicates is wrapped, and a call counts where the package's own code made it
(Megatron's and the CPU layers' do not). One world of four processes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from support import jobs, layouts
from support.cover import EXHAUSTIVE
from support.jobs import Job
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
NAMES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "_all", "_reduce"))
    or name in ("send", "recv", "batch_isend_irecv", "monitored_barrier")  # isend and irecv are compared by identity
]
NOT_OURS = ("megatron_pgloss.megatron.cpu", "megatron_pgloss.verify")


def sequence_mean(x: Any) -> torch.Tensor:
    return x.unit_mean(x.log_ratio, "sequence").square()


def three(x: Any) -> torch.Tensor:
    return sequence_mean(x) + x.prefix_sum(x.log_ratio).tanh() + x.unit_sum(x.logp, "turn")


def chained(x: Any) -> torch.Tensor:
    """A statistic of a statistic, beside one that waits for nothing."""
    centred = x.log_ratio - x.unit_mean(x.log_ratio, "sequence")
    return x.unit_mean(centred.square(), "sequence") + x.unit_sum(x.logp, "turn")


def extremes(x: Any) -> torch.Tensor:
    """A smallest value beside sums: one operation over the ranks cannot take both."""
    return three(x) + x.prefix_min(x.log_ratio) * x.logp


def declared(x: Any) -> torch.Tensor:
    """The statistics of `three`, declared; it notes that it runs."""
    runs.append(1)
    return x.statistic("mean").square() + x.statistic("so_far").tanh() + x.statistic("turns")


DECLARED = (
    pg.Statistic(name="mean"),
    pg.Statistic(name="so_far", how="prefix"),
    pg.Statistic(name="turns", of="logp", how="sum", unit="turn"),
)


def linked() -> pg.LossSpec:
    """Every part that takes a statistic over a unit, and a function that declares one over the ratio over a unit."""
    drift = pg.Surrogate(lambda x: x.statistic("drift") * x.ratio, statistics=(pg.Statistic(name="drift"),))
    return pg.LossSpec(
        components=[
            pg.PolicyGradient(ratio="sequence"),
            pg.PolicyGradient(name="second", surrogate=pg.GMPO()),
            pg.PolicyGradient(name="third", surrogate=drift, ratio="turn"),
        ],
        corrections=[pg.TruncatedIS(of="policy", level="sequence"), pg.Reject(of="policy", statistic="max", high=9.0)],
        gates=[pg.SequenceGate(threshold=0.5)],
    )


def in_place(x: Any) -> torch.Tensor:
    """Statistics written into another tensor."""
    both = torch.zeros_like(x.logp)
    both[:] = x.unit_mean(x.log_ratio, "sequence").square()
    both += x.unit_sum(x.logp, "turn")
    return both


def frozen(x: Any) -> torch.Tensor:
    """A statistic without gradient: nothing to send back."""
    return x.unit_mean(x.log_ratio.detach(), "sequence") * x.logp


def spec(term: Callable[[Any], torch.Tensor] | None = None, path: str = "mean(token)", *statistics: Any) -> pg.LossSpec:
    parts: list[Any] = [pg.PolicyGradient(normalizer=path)]
    if term is not None:
        parts.append(pg.Term("mine", term, needs=("old",), statistics=statistics))
    return pg.LossSpec(components=parts)


@dataclass(frozen=True)
class Case:
    """One step, and the calls it may make: (function, over) to number; per micro-batch in the middle."""

    job: Job
    spec: Callable[[], pg.LossSpec]
    plan: dict[str, int] = field(default_factory=lambda: {"world": 1})
    micro: dict[str, int] = field(default_factory=dict)
    rows: int = 11


BIG = pg.Split(sequences=8)
KEYED = {"world": 1, "dp": 1}
EVERY = {
    "dp4": Case(Job(), spec),
    "dp4, every component": Case(Job(), layouts.rich, KEYED),
    "dp4, prompts": Case(Job(), lambda: spec(path="mean(prompt) > mean(token)"), KEYED),
    "dp4, episodes": Case(Job(), lambda: spec(path="mean(prompt) > mean(episode) > mean(token)"), KEYED),
    "tp2": Case(Job(tp=2), spec, micro={"tp": 1}),
    "tp2, every component": Case(Job(tp=2), layouts.rich, KEYED, {"tp": 1}),
    "tp2, larger micro-batches": Case(Job(tp=2, split=BIG), layouts.rich, KEYED, {"tp": 1}),
    "tp2, fewer rows": Case(Job(tp=2), layouts.rich, KEYED, {"tp": 1}, rows=5),
    "tp4": Case(Job(tp=4), layouts.rich, {"world": 1}, {"tp": 1}),
    "tp2 pp2, per-token": Case(Job(tp=2, pp=2, per_token=True), layouts.rich, {"world": 1}, {"tp": 1}),
    "pp2, per-token, variable": Case(Job(pp=2, per_token=True, model=dict(variable_seq_lengths=True)), spec),
    # Padding counts for MoE losses, and differs from rank to rank: one more gather for Megatron's token count.
    "pp2, per-token, variable, MoE losses": Case(
        Job(pp=2, per_token=True, model=dict(variable_seq_lengths=True, experts=4, topk=2, moe_aux_coeff=0.1)),
        spec,
        {"world": 1, "dp": 1},
    ),
    "cp2": Case(Job(cp=2), spec),
    "cp2, one statistic": Case(Job(cp=2), lambda: spec(sequence_mean), micro={"cp": 2}),
    "cp2, without gradient": Case(Job(cp=2), lambda: spec(frozen), micro={"cp": 1}),
    "cp2, three statistics": Case(Job(cp=2), lambda: spec(three), micro={"cp": 6}),
    "cp2, three declared": Case(Job(cp=2), lambda: spec(declared, "mean(token)", *DECLARED), micro={"cp": 2}),
    "cp2, every part over a unit": Case(Job(cp=2), linked, micro={"cp": 4}),
    "cp2, larger micro-batches": Case(Job(cp=2, split=BIG), lambda: spec(three), micro={"cp": 6}),
    "cp2, fewer rows": Case(Job(cp=2), lambda: spec(three), micro={"cp": 6}, rows=5),
    "cp2, every component": Case(Job(cp=2), layouts.rich, KEYED, {"cp": 2}),
    "cp2, extremes too": Case(Job(cp=2), lambda: spec(extremes), micro={"cp": 7}),
    # What a function asks for when it runs costs one each, forward and backward.
    "cp2, a statistic of a statistic": Case(Job(cp=2), lambda: spec(chained), micro={"cp": 6}),
    "cp2, statistics written in place": Case(Job(cp=2), lambda: spec(in_place), micro={"cp": 4}),
    "cp2, one rank empty": Case(Job(cp=2, empty_rank=True), lambda: spec(sequence_mean), micro={"cp": 2}),
    "cp4 packed": Case(Job(cp=4, split=pg.Split(max_tokens=80)), lambda: spec(sequence_mean), micro={"cp": 2}),
    "tp2 cp2": Case(Job(tp=2, cp=2), lambda: spec(sequence_mean), micro={"tp": 1, "cp": 2}),
}
MORE = (
    "dp4, prompts", "tp2", "pp2, per-token, variable", "cp2, one statistic", "cp2, extremes too", "cp2, one rank empty",
)  # fmt: skip
"""Each a part of another case, or the same number on other data."""
CASES = {name: case for name, case in EVERY.items() if EXHAUSTIVE or name not in MORE}
calls: list[tuple[str, tuple[int, ...]]] = []
runs: list[int] = []
"""One entry for each time that `declared` ran."""


def count() -> None:
    """Wrap what communicates; note the function and its ranks where our own code calls it."""

    def wrap(name: str, inner: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__", "").startswith("torch"):
                frame = frame.f_back
            caller = frame.f_globals.get("__name__", "") if frame is not None else ""
            if caller.startswith("megatron_pgloss") and not caller.startswith(NOT_OURS):
                group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
                calls.append((name, tuple(dist.get_process_group_ranks(group or dist.group.WORLD))))
            return inner(*args, **kwargs)

        return counted

    for name in NAMES:
        if callable(getattr(dist, name)):
            setattr(dist, name, wrap(name, getattr(dist, name)))


def taken(where: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The calls since last asked, by the group they went over."""
    found = Counter(next((axis for axis, ranks in where.items() if ranks == over), f"{over}") for _, over in calls)
    calls.clear()
    return dict(found)


def visit(case: Case, rows: list[Any]) -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    from megatron_pgloss import megatron as pgm

    chunks, at = jobs.build(case.job)
    groups = {"tp": ps.get_tensor_model_parallel_group(), "cp": ps.get_context_parallel_group()}
    groups["dp"] = ps.get_data_parallel_group(with_context_parallel=False)
    groups["pp"] = ps.get_pipeline_model_parallel_group()
    where = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    # Where an axis is the whole world its calls read as that axis; only a plan's own gather is the world's.
    where = {axis: ranks for axis, ranks in where.items() if len(ranks) > 1}
    step = pgm.PolicyLossStep(case.spec(), chunks, split=case.job.split)
    batches = jobs.batches_of(case.job, at, step.spec, rows[: case.rows])
    calls.clear()
    world = {"world": tuple(range(dist.get_world_size()))}
    step.begin(batches)
    plan = taken(world | where)
    runs.clear()
    losses = jobs.run_schedule(step, chunks)
    found_runs = len(runs)
    micro, number = taken(where), step.num_microbatches
    step.finish(losses)
    found = {"plan": plan, "micro": micro, "finish": taken(world), "number": number, "last": step.layout.last_stage}
    found["runs"] = found_runs
    step.score(batches, into="ref")
    found["score"], found["axes"] = taken(world | where), set(where)
    layouts.leave(chunks)
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    count()
    rows = jobs.rows_of_step(0)
    return {name: visit(case, rows) for name, case in CASES.items()}


found = world_fixture(tour, 4)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_one_gather_over_the_world_and_one_over_data_where_prompts_are_named(name: str, found: Any) -> None:
    want = CASES[name].plan
    if CASES[name].job == Job():  # four data-parallel ranks are the world
        want = {"world": sum(want.values())}
    assert [by_rank[name]["plan"] for by_rank in found] == [want] * 4


@pytest.mark.parametrize("name", CASES)
def test_a_microbatch_is_one_gather_over_tensor_ranks_and_one_for_all_statistics(name: str, found: Any) -> None:
    for seen in (by_rank[name] for by_rank in found):
        want = {axis: n * seen["number"] for axis, n in CASES[name].micro.items()} if seen["last"] else {}
        assert seen["micro"] == want


def test_a_user_s_function_runs_once_for_each_micro_batch(found: Any) -> None:
    for seen in (by_rank["cp2, three declared"] for by_rank in found):
        assert seen["runs"] == seen["number"] > 1


@pytest.mark.parametrize("name", CASES)
def test_a_step_ends_with_one_gather_over_the_world(name: str, found: Any) -> None:
    assert [by_rank[name]["finish"] for by_rank in found] == [{"world": 1}] * 4


@pytest.mark.parametrize("name", ["dp4", "tp2 pp2, per-token", "cp2", "tp2 cp2"])
def test_scoring_joins_context_ranks_and_tells_pipeline_ranks_once(name: str, found: Any) -> None:
    for seen in (by_rank[name] for by_rank in found):
        want = {"world": 1} | ({"pp": 1} if "pp" in seen["axes"] else {})
        if seen["last"]:
            want |= ({"tp": seen["number"]} if "tp" in seen["axes"] else {}) | (
                {"cp": 1} if "cp" in seen["axes"] else {}
            )
        assert seen["score"] == want


def test_the_cases_differ_in_what_must_not_matter(found: Any) -> None:
    numbers = {name: found[0][name]["number"] for name in CASES}
    assert (
        len({numbers[name] for name in ("tp2, every component", "tp2, larger micro-batches", "tp2, fewer rows")}) == 3
    )
    assert numbers["tp2, every component"] >= 3
    assert len({numbers[f"cp2, {name}"] for name in ("three statistics", "larger micro-batches", "fewer rows")}) == 3
