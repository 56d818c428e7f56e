"""A value head and an exact KL to a reference on real Megatron-Core layouts, four ranks, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest

import megatron_pgloss as pg
from support import heads, layouts
from support.jobs import Job
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
THD = pg.Split(max_tokens=80)
ON: dict[str, list[dict[str, Any]]] = {
    "critic": [
        dict(tp=2, sp=True, per_token=True),
        dict(pp=2, vpp=2, distributed_optimizer=True, empty_rank=True),
        dict(tp=2, cp=2, sp=True),
    ],
    "both": [
        dict(tp=2, sp=True, pp=2),
        dict(cp=2, split=THD, per_token=True),
        dict(tp=2, sp=True, temperature=True, options=dict(head="recompute")),
    ],
    "exact": [
        dict(tp=2),
        dict(tp=2, sp=True, cp=2, temperature=True),
        dict(cp=2, split=THD, shuffle=1, per_token=True),
        dict(tp=2, pp=2),
        dict(pp=2, vpp=2, empty_rank=True),
    ],
    "exact, handed over": [dict(cp=2, per_token=True)],
}
CASES = [(name, place) for name, many in ON.items() for place in range(len(many))]


def tour(rank: int, world: int) -> dict[tuple[str, int], Any]:
    layouts.quiet()
    truth, found = heads.Truth(), {}
    for name, place in CASES:
        job = Job(world=world, **ON[name][place])
        found[name, place] = heads.visit(job, name.split(",")[0], truth, own_forward_step="handed" in name)
    return found | {("refused", 0): heads.refusals()}


everyone = world_fixture(tour, 4)


@pytest.fixture(scope="module")
def found(everyone: Any, table: list[str]) -> list[dict[tuple[str, int], Any]]:
    for name in ON:
        worst = max((seen for (one, _), seen in everyone[0].items() if one == name), key=lambda s: s.gradient_error)
        table.append(
            f"{name} on {len(ON[name])} layouts: worst gradient {worst.gradient_error:.1e} ({worst.parameter})"
        )
    return everyone


@pytest.mark.parametrize(("name", "place"), CASES)
def test_loss_and_every_gradient_are_the_oracles(name: str, place: int, found: Any) -> None:
    for seen in (by_rank[name, place] for by_rank in found):
        assert seen.loss_error < 1e-10
        assert seen.gradient_error < 1e-10, seen.parameter
        assert seen.scored < 1e-12
        assert seen.least > 1e-6  # no parameter is left out of it


def test_the_data_clip_some_values_and_the_reference_is_another_model(found: Any) -> None:
    for name in ("critic", "both"):
        assert 0.05 < found[0][name, 0].metrics["value/value_clipped"] < 0.95
    assert found[0]["exact", 0].metrics["kl/kl"] > 0.1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no reference", ("DataError", "no logits of the reference", "reference=MODEL")),
        ("other logits", ("DataError", "do not belong")),
        ("reference unread", ("SpecError", "exact KL alone", 'into="ref"')),
        ("chunks", ("LayoutError", "another number of chunks")),
        ("fused", ("SpecError", "head='given'")),
        ("forward", ("SpecError", "more than one token")),
        ("logits for a value", ("DataError", "wrong shape", "ValueHead")),
        ("one output", ("DataError", "one output", "presets.critic()")),
        ("tied", ("UnsupportedError", "share_embeddings_and_output_weights=False")),
        ("mtp", ("UnsupportedError", "mtp_num_layers=None")),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_way_out(name: str, words: tuple[str, ...], found: Any) -> None:
    for seen in (by_rank["refused", 0] for by_rank in found):
        assert all(word in seen[name] for word in words), seen.get(name)
        assert seen["half"] == "torch.float32 True"
