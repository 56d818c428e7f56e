"""The same policy gradient on every layout: real Megatron-Core models against the float64 oracle.

Every parameter of a GPTModel, after Megatron's own schedule, wrapper and ``finalize_model_grads``, is held against the
loss written from its formulas on the whole step in one process. One world of four processes and one of two visit all
layouts, each with both settings of ``calculate_per_token_loss`` and two specs: ``rich`` (every component and rule, a
user's term with unit statistics, every unit named in a normaliser) and the preset ``dapo``.

Error of a parameter: max |g - g0| / max(max |g0|, 1e-3 of the largest over all parameters).
"""

from __future__ import annotations

import time
from typing import Any

import jobs
import layouts
import pytest

from worlds import run_world

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]
TOLERANCE = 1e-10
CASES = [(name, flag) for names in (layouts.FOUR, layouts.TWO) for name, at in names.items() for flag in at.flags]


@pytest.fixture(scope="module")
def visits(table: list[str]) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """Layout and flag to what every rank brought home."""
    started, found = time.monotonic(), {}
    for world, names in ((4, layouts.FOUR), (2, layouts.TWO)):
        results = run_world(layouts.tour, world, list(names), timeout=800)
        found |= {key: [by_rank[key] for by_rank in results] for key in results[0]}
    table.append("against the float64 oracle, the worst of both specs and flags: loss, and gradient of a parameter")
    everything = []
    for name in layouts.FOUR | layouts.TWO:
        seen = [one for (at, _), ranks in found.items() if at == name for one in ranks[0].values()]
        worst = max(seen, key=lambda one: one["gradient"])
        loss = max(one["loss"] for one in seen)
        everything.append(worst["gradient"])
        table.append(f"  {name:38} loss {loss:.0e}  gradient {worst['gradient']:.0e}  {worst['parameter']}")
    took = time.monotonic() - started
    table.append(f"  {len(everything)} layouts, {len(found)} visits, worst {max(everything):.1e}, {took:.0f} s")
    return found


@pytest.mark.parametrize("spec", layouts.SPECS)
@pytest.mark.parametrize(("name", "per_token"), CASES)
def test_loss_and_every_gradient_equal_the_oracle(name: str, per_token: bool, spec: str, visits: Any) -> None:
    for seen in (by_rank[spec] for by_rank in visits[name, per_token]):
        assert seen["loss"] < TOLERANCE
        assert seen["gradient"] < TOLERANCE, seen["parameter"]
        assert seen["largest"] > 1e-3  # an error relative to nothing would mean nothing


@pytest.mark.parametrize("spec", layouts.SPECS)
@pytest.mark.parametrize(("name", "per_token"), CASES)
def test_metrics_are_the_oracles_and_the_same_on_all_ranks(name: str, per_token: bool, spec: str, visits: Any) -> None:
    ranks = [by_rank[spec] for by_rank in visits[name, per_token]]
    metric, gap = ranks[0]["metric_gap"]
    assert gap < 1e-12, metric
    # Compared as text, for NaN is not equal to itself.
    assert {repr(sorted(seen["metrics"].items())) for seen in ranks} == {repr(sorted(ranks[0]["metrics"].items()))}


def test_data_can_tell_a_right_loss_from_a_wrong_one(visits: Any, table: list[str]) -> None:
    rows = jobs.rows_of_step()
    owners: dict[Any, set[int]] = {}
    for rank in range(2):
        for row in jobs.share(rows, rank, 2):
            for unit in (row["prompt"], (row["prompt"], row["episode"])):
                owners.setdefault(unit, set()).add(rank)
    assert any(len(at) == 2 for unit, at in owners.items() if isinstance(unit, str)), "no prompt straddles ranks"
    assert any(len(at) == 2 for unit, at in owners.items() if isinstance(unit, tuple)), "no episode straddles ranks"
    lengths = [len(row["tokens"]) for row in rows]
    assert max(lengths) >= 4 * min(lengths)
    advantages = [value for row in rows for value in row["advantages"]]
    assert min(advantages) < 0 < max(advantages)
    assert 0.0 in advantages

    metrics = visits["tp2 pp2", False][0]["rich"]["metrics"]
    shares = {side: metrics[f"rl/clip_{side}"] for side in ("low", "high", "dual")}
    table.append(f"tokens on a flat side of the clip: {', '.join(f'{k} {v:.1%}' for k, v in shares.items())}")
    assert all(shares.values())
    assert 0.05 < sum(shares.values()) < 0.4
    assert 0.05 < metrics["rl/is_truncated"] < 0.9
    assert max(seen[0]["rich"]["microbatches"] for seen in visits.values()) >= 3
    assert visits["pp2", False][0]["rich"]["empty"] > 0
