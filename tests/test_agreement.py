"""Bad input on one rank is the same error on every rank, in seconds.

A world of four. The limit of 20 s per case is for a rank that waits for another: a case that hangs ends in
the world's deadline instead.
"""

# Lambdas run inside the iteration that makes them; models are deleted at its end, before their groups go.
# ruff: noqa: B023, F821

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from support import faulty, jobs
from support.faulty import GUILTY, dealt, outcome, padded, plan_faults
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
LIMIT = 20.0
SPLIT = pg.Split(sequences=2)


def disagreements(rank: int, world: int) -> dict[str, tuple[str, str, float]]:
    """Every rank is right by itself; together they are not. Also two faults at once, long texts, and what is legal."""
    import megatron_pgloss.planning.wire as wire

    me, rows, spec = rank == GUILTY, dealt(rank, world), faulty.spec()
    given = padded(rows)

    def planned(given: Any = given, spec: Any = spec, split: Any = SPLIT, batches: Any = None, **more: Any) -> Callable:
        def call() -> Any:
            made = [pg.TokenBatch.from_padded(**given)] if batches is None else batches
            return pg.plan(made, spec, split=split, group=dist.group.WORLD, **more)

        return call

    found = {}
    dapo = pg.presets.dapo()
    found["specs"] = outcome(planned(spec=pg.presets.dapo(high=0.29) if me else dapo))
    found["three specs"] = outcome(planned(spec=pg.presets.dapo(high={1: 0.3, 3: 0.31}.get(rank, 0.28))))
    found["specs of other forms"] = outcome(planned(spec=pg.presets.cispo() if me else dapo))
    found["other calls"] = outcome(lambda: list(pg.minibatches([], 1, group=dist.group.WORLD)) if me else planned()())
    found["splits"] = outcome(planned(split=pg.Split(sequences=3) if me else SPLIT))
    found["coefficients"] = outcome(planned(coef={"kl": 0.5} if me else None))
    ours, wire.__version__ = wire.__version__, "other" if me else wire.__version__
    found["versions"] = outcome(planned())
    wire.__version__ = ours
    fewer = {key: value for key, value in given.items() if key != "ref_logprobs"}
    found["a stream on some ranks"] = outcome(planned(fewer if me else given, dapo))
    found["temperature on some ranks"] = outcome(planned(given | {"temperature": 0.9} if me else given))
    found["a mask on some ranks"] = outcome(planned(given | {"masks": {}} if me else given, dapo))
    found["ids on some ranks"] = outcome(planned(given | {"sample_ids": None} if me else given))
    weights = {"weights": {"rl": torch.ones_like(given["old_logprobs"])}}
    found["weights on some ranks"] = outcome(planned(given | weights if me else given))
    found["two faulty ranks"] = outcome(planned(faulty.first_token(given) if rank in (1, 3) else given))
    names = {"sample_ids": [f"{'long ' * 600}{i}" for i in range(len(rows))]}
    found["a long name"] = outcome(
        planned(faulty.at_action(given | names, "old_logprobs", float("nan")) if me else given)
    )
    found["over the token budget"] = outcome(planned(split=pg.Split(max_tokens=39)))
    found["no batch object"] = outcome(planned(batches=[given] if me else None))
    pair = [pg.TokenBatch.from_padded(**given), pg.TokenBatch.from_padded(**fewer)]
    found["batches that differ"] = outcome(planned(batches=pair if me else None, spec=dapo))
    found["unknown coefficient"] = outcome(planned(coef={"ratio": 1.0} if me else {}))
    nothing = {key: torch.zeros_like(given[key]) for key in ("action_mask", "observation_mask")}
    observed = nothing | {"observation_mask": torch.arange(given["tokens"].shape[1]).expand_as(given["tokens"]) > 0}
    ce = pg.LossSpec(components=[pg.PolicyGradient(), pg.CrossEntropy()])
    found["no action anywhere"] = outcome(planned(given | observed, ce))
    many = pg.LossSpec(components=[pg.Entropy(name=f"h{i}") for i in range(20)])
    found["too many components"] = outcome(planned(batches=[] if me else None, spec=many))
    found["no rows anywhere"] = outcome(planned(batches=[]))
    # Legal: no rows here, no action here, values outside a component.
    found["legal: no rows here"] = outcome(planned(batches=[] if me else None))
    found["legal: no action here"] = outcome(planned(given | observed if me else given, ce))
    noise = torch.where(given["action_mask"], given["old_logprobs"], float("nan"))
    found["legal: NaN outside"] = outcome(planned(given | {"old_logprobs": noise} if me else given))
    batch = pg.TokenBatch.from_padded(**given)
    found["group None"] = outcome(lambda: pg.plan([batch], spec, split=SPLIT))
    found["group of another name"] = outcome(lambda: pg.plan([batch], spec, split=SPLIT, group="global"))
    found["legal: group local"] = outcome(lambda: pg.plan([batch], spec, split=SPLIT, group="local"))
    return found


def replicas(rank: int, world: int) -> dict[str, tuple[str, str, float]]:
    """Tensor, context and pipeline ranks of one data-parallel rank with different batches; the step's own checks."""
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss.verify.layouts.models import destroy_parallel

    found = {}
    for axis in ("tp", "pp", "cp"):
        job = jobs.Job(**{axis: 2})
        chunks, where = jobs.build(job)
        step = pgm.PolicyLossStep(faulty.spec(), chunks[0], split=SPLIT)
        rows = jobs.share(jobs.rows_of_step(0), where.dp_rank, where.dp)
        batch, me = jobs.batch_of(rows), rank == GUILTY
        turned = batch.select(range(len(batch) - 1, -1, -1))
        other = batch.with_stream("old", batch.streams["old"] - 1e-9)
        found[f"{axis}: another order"] = outcome(lambda: step.begin([turned if me else batch]))
        found[f"{axis}: another value"] = outcome(lambda: step.begin([other if me else batch]))
        found[f"{axis}: no rows"] = outcome(lambda: step.begin([] if me else [batch]))
        off = replace(batch, tokens_T=torch.where(torch.arange(batch.tokens_T.numel()) == 3, 32, batch.tokens_T))
        found[f"{axis}: off the vocabulary"] = outcome(lambda: step.begin([off if me else batch]))
        found[f"{axis}: off the vocabulary, in score"] = outcome(lambda: step.score([off if me else batch], into="old"))
        found[f"{axis}: legal"] = outcome(lambda: step.begin([batch]))
        found[f"{axis}: legal, one replica without rows"] = outcome(
            lambda: step.begin([batch] if where.dp_rank else [])
        )
        found[f"{axis}: nobody has rows"] = outcome(lambda: step.begin([]))
        del chunks, step
        destroy_parallel()
        gc.collect()
    return found


def all_faults(rank: int, world: int) -> dict[str, tuple[str, str, float]]:
    found = plan_faults(rank, world) | disagreements(rank, world)
    return found | replicas(rank, world) | {"places": (faulty.action_place(padded(dealt(GUILTY, world))), "", 0.0)}


faults = world_fixture(all_faults, 4)


def agreed(faults: Any, name: str) -> tuple[str, str]:
    """The one error that all ranks raised."""
    seen = {by_rank[name][:2] for by_rank in faults}
    assert len(seen) == 1, seen
    assert max(by_rank[name][2] for by_rank in faults) < LIMIT
    return seen.pop()


@pytest.mark.parametrize("name", [*faulty.BUILD, *faulty.PLAN])
def test_one_ranks_fault_is_the_same_error_everywhere(name: str, faults: Any) -> None:
    fault = (faulty.BUILD | faulty.PLAN)[name]
    kind, text = agreed(faults, name)
    assert kind == fault.kind
    assert f"rank {GUILTY}" in text
    assert [words for words in fault.words if words not in text] == [], text


@pytest.mark.parametrize(("name", "stream"), [("NaN in old", "old"), ("inf in ref", "ref"), ("temperature 0", "temp")])
def test_the_error_names_rank_sample_position_and_stream(name: str, stream: str, faults: Any) -> None:
    _, text = agreed(faults, name)
    place = faults[0]["places"][0] if name != "temperature 0" else "sample 's"
    assert f"rank {GUILTY}, {place}" in text
    assert f"stream '{stream}" in text


DISAGREE = {
    "specs": ("LayoutError", ("different loss specs", "surrogate.high = 0.28 on rank 0 and 0.29 on rank 2; at")),
    "splits": ("LayoutError", ("differ in split", "got split.sequences = 2 on rank 0 and 3 on rank 2; at")),
    "coefficients": ("LayoutError", ("differ in split, coefficients", "coef.kl = 0.1 on rank 0 and 0.5 on rank 2; at")),
    "versions": ("LayoutError", ("different versions", "megatron_pgloss = ", "on rank 0 and 'other' on rank 2")),
    "three specs": ("LayoutError", ("high = 0.28 on rank 0 and 0.3 on rank 1", "3 of the others differ from rank 0")),
    "specs of other forms": (
        "LayoutError",
        ("kind = 'clip' on rank 0 and 'cispo' on rank 2", "dual = None on rank 0 and (absent)"),
    ),
    "other calls": ("LayoutError", ("components[0].kind = 'policy_gradient' on rank 0 and (absent) on rank 2",)),
    "a stream on some ranks": ("LayoutError", ("some ranks only: ref", "rank 0 and rank 2")),
    "temperature on some ranks": ("LayoutError", ("some ranks only: temperature",)),
    "a mask on some ranks": (
        "LayoutError",
        ("some ranks only: masks or weights", "masks.keep = True on rank 0 and (absent) on rank 2"),
    ),
    "ids on some ranks": ("LayoutError", ("some ranks only: sample_ids",)),
    "weights on some ranks": ("LayoutError", ("some ranks only: masks or weights",)),
    "two faulty ranks": ("DataError", ("rank 1, ", "1 more rank", "3")),
    "a long name": ("DataError", ("rank 2", "long long", "non-finite")),
    "over the token budget": ("DataError", ("longer than the token budget", "rank 0")),
    "no batch object": ("DataError", ("TokenBatch", "rank 2")),
    "batches that differ": ("DataError", ("streams 'ref'", "rank 2")),
    "unknown coefficient": ("SpecError", ("no component 'ratio'", "rank 2")),
    "no action anywhere": ("DataError", ("no action anywhere", "'rl'")),
    "too many components": ("LayoutError", ("too many components", "rank 0")),
    "no rows anywhere": ("DataError", ("no action anywhere", "0 rows")),
    "group None": ("LayoutError", ("world of several ranks", "group='local'")),
    "group of another name": ("LayoutError", ("group='global'",)),
}


@pytest.mark.parametrize("name", DISAGREE)
def test_a_disagreement_is_the_same_error_everywhere(name: str, faults: Any) -> None:
    kind, words = DISAGREE[name]
    found, text = agreed(faults, name)
    assert found == kind
    assert [part for part in words if part not in text] == [], text


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
@pytest.mark.parametrize("name", ["another order", "another value", "no rows", "nobody has rows"])
def test_a_replica_has_one_batch(axis: str, name: str, faults: Any) -> None:
    kind, text = agreed(faults, f"{axis}: {name}")
    if name == "nobody has rows":
        assert (kind, "no action anywhere" in text) == ("DataError", True)
    else:
        assert kind == "LayoutError"
        assert "ranks of one replica" in text
        assert f"rank {GUILTY}" in text
        said = {
            "another order": "tokens, action, ",
            "another value": "contents of old, row 0 (sample ",
            "no rows": "number of rows = ",
        }
        assert said[name] in text, text


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
@pytest.mark.parametrize("where", ["", ", in score"])
def test_a_token_off_the_models_vocabulary(axis: str, where: str, faults: Any) -> None:
    kind, text = agreed(faults, f"{axis}: off the vocabulary{where}")
    assert kind == "DataError"
    assert f"rank {GUILTY}" in text
    assert "token 3" in text


def test_what_is_legal_is_planned(faults: Any) -> None:
    legal = [name for name in faults[0] if "legal" in name]
    assert len(legal) == 10
    assert {name: agreed(faults, name) for name in legal} == {name: ("fine", "") for name in legal}
