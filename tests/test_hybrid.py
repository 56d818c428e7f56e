"""HybridModel, the announced successor of GPTModel: the same gradient on its layouts, against the float64 oracle.

Attention and MLP layers in a pattern; Mamba layers need CUDA kernels. For megatron-core 0.18 on, where the model is.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import megatron_pgloss as pg
from support import jobs, layouts
from support.jobs import Job
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]
THERE = importlib.util.find_spec("megatron.core.models.hybrid") is not None
JOBS = {
    "tp2": Job(kind="hybrid", tp=2),
    "pp2, per token": Job(kind="hybrid", pp=2, per_token=True),
    "cp2": Job(kind="hybrid", cp=2),
    "cp2 packed, per token": Job(kind="hybrid", cp=2, split=pg.Split(max_tokens=80), per_token=True),
    "tp2 pp2, per token": Job(kind="hybrid", tp=2, pp=2, per_token=True),
    "tp2 cp2 sp": Job(kind="hybrid", tp=2, cp=2, sp=True),
    "pp2 vpp2, distributed optimizer": Job(kind="hybrid", pp=2, vpp=2, distributed_optimizer=True),
}


def tour(rank: int, world: int) -> dict[str, Any]:
    from megatron_pgloss.verify.run.visit import visit

    layouts.quiet()
    judge = jobs.judge_of({"rich": layouts.rich()})
    return {name: visit(job, judge) for name, job in JOBS.items()}


everyone = world_fixture(tour, 4)


@pytest.fixture(scope="module")
def found(everyone: Any, table: list[str]) -> list[dict[str, Any]]:
    results = everyone
    for name, (seen,) in results[0].items():
        table.append(f"HybridModel, {name}: loss {seen.loss_error:.0e}, gradient {seen.gradient_error:.0e}")
    return results


@pytest.mark.skipif(not THERE, reason="this megatron-core has no HybridModel")
@pytest.mark.parametrize("name", JOBS)
def test_loss_and_every_gradient_of_a_hybrid_model_equal_the_oracle(name: str, found: Any) -> None:
    for (seen,) in (by_rank[name] for by_rank in found):
        assert not seen.error
        assert seen.loss_error < 1e-10
        assert seen.gradient_error < 1e-10, seen.parameter
        assert seen.facts["largest"] > 1e-3


@pytest.mark.skipif(not THERE, reason="this megatron-core has no HybridModel")
@pytest.mark.parametrize("pattern", ["*-*", "*-*-*"])
def test_a_pattern_has_a_letter_for_each_layer(pattern: str) -> None:
    from megatron_pgloss.verify.layouts.models import build_hybrid

    with pytest.raises(pg.SpecError, match="4 letters"):
        build_hybrid(vocab_size=32, seq_length=64, pattern=pattern)


@pytest.mark.skipif(THERE, reason="this megatron-core has a HybridModel")
def test_a_version_without_the_model_says_so() -> None:
    from megatron_pgloss.verify.layouts.models import build_hybrid

    with pytest.raises(pg.UnsupportedError, match="no HybridModel"):
        build_hybrid(vocab_size=32, seq_length=64)
