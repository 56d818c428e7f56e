"""The table of layouts, by the number of processes they take.

Models have hidden size 32, and one layer for each stage but at least two. A layout of a larger world is slower and
shows nothing new in kind, so most layouts take one, two or four processes. The table respects Megatron-Core's limits:
no averaging collectives in per-token mode, and tensor parallelism with experts only under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from packaging.version import Version

from megatron_pgloss.planning import Split
from megatron_pgloss.verify.layouts.scenario import EXPERTS, Scenario

__all__ = ["LAYOUTS", "Scenario", "every_layout", "since"]

THD = Split(max_tokens=80)
WIDE = Split(max_tokens=160)
ROW = Split(sequences=1)


def _of(world: int, *rows: dict[str, Any]) -> tuple[Scenario, ...]:
    return tuple(Scenario(world=world, **row) for row in rows)


def _mb(count: int) -> Split:
    return Split(microbatches=count)


MOE = dict(experts=EXPERTS)

AUX = dict(own="moe", **MOE)
MTP = dict(own="mtp")
HYBRID = dict(kind="hybrid")


def since(release: str, *rows: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Rows that need this release of megatron-core; none on an earlier one."""
    import megatron.core  # what is imported counts: a source tree may stand before what pip installed

    return rows if Version(megatron.core.__version__) >= Version(release) else ()


LAYOUTS: dict[int, tuple[Scenario, ...]] = {
    1: _of(
        1,
        dict(split=_mb(1)),
        dict(split=_mb(8), per_token=True),
        dict(split=WIDE, per_token=True),
        dict(split=THD, shuffle=1, temperature=True),
        dict(tied=True, loss_scale=1024.0, per_token=True),
        dict(split=ROW, variable_lengths=True),
        dict(**MOE),
        dict(head="auto", split=WIDE),
    ),
    2: _of(
        2,
        dict(),
        dict(empty_rank=True, per_token=True),
        dict(distributed_optimizer=True, per_token=True),
        dict(split=THD, shuffle=2, distributed_optimizer=True),
        dict(tp=2, per_token=True),
        dict(tp=2, per_token=True, head="auto"),
        dict(tp=2, sp=True, distributed_optimizer=True),
        dict(pp=2, split=ROW),
        dict(pp=2, split=THD, per_token=True),
        dict(pp=2, vpp=2),
        dict(pp=2, vpp=2, tied=True, per_token=True, split=THD),
        dict(cp=2, per_token=True),
        dict(cp=2, split=THD),
        dict(cp=2, tail=True),
        dict(cp=2, tail=True, split=Split(max_tokens=32), per_token=True),
        dict(ep=2, per_token=True, **MOE),
        dict(ep=2, distributed_optimizer=True, **MOE),
        dict(ep=2, **AUX),
        dict(cp=2, per_token=True, **AUX),
        *since("0.18", dict(tp=2, sp=True, **HYBRID), dict(cp=2, split=THD, per_token=True, **HYBRID)),
        *since("0.19", dict(pp=2, per_token=True, **MTP)),
    ),
    4: _of(
        4,
        dict(),
        dict(empty_rank=True),
        dict(overlap=True, per_token=True),
        dict(distributed_optimizer=True),
        dict(average=True),
        dict(tp=2),
        dict(tp=2, sp=True, per_token=True),
        dict(tp=2, sp=True, recompute="full"),
        dict(tp=4, vocab=30),
        dict(tp=4, vocab=30, sp=True, per_token=True, distributed_optimizer=True),
        dict(tp=2, tied=True, per_token=True),
        dict(pp=2, empty_rank=True),
        dict(pp=2, loss_scale=1024.0, per_token=True),
        dict(pp=2, variable_lengths=True),
        dict(pp=4, split=_mb(4)),
        dict(pp=4, tied=True, split=ROW, per_token=True),
        dict(pp=2, vpp=2),
        dict(pp=2, vpp=2, empty_rank=True, per_token=True),
        # Rows for three micro-batches, which the interleaved schedule does not accept: the plan makes four.
        dict(pp=2, vpp=2, overlap=True),
        dict(pp=2, vpp=2, tied=True, distributed_optimizer=True, per_token=True),
        dict(cp=2),
        dict(cp=2, empty_rank=True, per_token=True),
        dict(cp=2, recompute="selective"),
        dict(cp=2, split=THD, shuffle=3),
        dict(cp=2, split=THD, temperature=True, per_token=True),
        dict(cp=2, distributed_optimizer=True, split=WIDE, per_token=True),
        dict(cp=4, split=_mb(3)),
        dict(cp=4, split=THD, per_token=True),
        dict(cp=4, tail=True, split=ROW, per_token=True),
        dict(cp=4, tail=True, split=Split(max_tokens=32)),
        dict(tp=2, pp=2, per_token=True),
        dict(tp=2, pp=2, temperature=True),
        dict(tp=2, sp=True, pp=2, vpp=2),
        dict(tp=2, cp=2, per_token=True),
        dict(tp=2, sp=True, cp=2, split=THD),
        dict(tp=2, sp=True, cp=2, split=THD, head="recompute", per_token=True),
        dict(tp=2, pp=2, tied=True, head="keep"),
        dict(cp=2, pp=2, split=THD, variable_lengths=True, per_token=True),
        dict(cp=2, pp=2, collection=True),
        dict(cp=2, pp=2, vpp=2, per_token=True),
        dict(ep=2, pp=2, per_token=True, **MOE),
        dict(ep=2, tp=2, sp=True, **MOE),
        dict(ep=2, cp=2, distributed_optimizer=True, **MOE),
        dict(ep=4, empty_rank=True, per_token=True, **MOE),
        dict(ep=2, average=True, **MOE),
        dict(ep=2, pp=2, **AUX),
        dict(ep=2, tp=2, sp=True, per_token=True, **AUX),
        dict(ep=4, distributed_optimizer=True, per_token=True, **AUX),
        *since(
            "0.18",
            dict(pp=2, vpp=2, per_token=True, **HYBRID),
            dict(tp=2, pp=2, distributed_optimizer=True, **HYBRID),
            dict(pp=4, tied=True, **HYBRID),
        ),
        *since("0.19", dict(tp=2, sp=True, **MTP), dict(pp=2, vpp=2, tied=True, per_token=True, **MTP)),
    ),
    8: _of(
        8,
        dict(empty_rank=True),
        dict(distributed_optimizer=True, per_token=True, split=ROW),
        dict(tp=2, pp=2, cp=2, per_token=True),
        dict(tp=2, sp=True, cp=2, split=THD, distributed_optimizer=True),
        dict(pp=2, vpp=2, cp=2, split=THD),
        dict(tp=4, sp=True, pp=2, per_token=True),
        dict(ep=2, tp=2, sp=True, pp=2, **MOE),
    ),
}
"""Number of processes to layouts. Names are unique. Layouts that the installed megatron-core cannot build (HybridModel
before 0.18, multi-token prediction without labels before 0.19) are left out."""


def every_layout(worlds: Iterable[int] = LAYOUTS) -> list[Scenario]:
    """All layouts of the table in one list, those of larger worlds first."""
    return [layout for world in sorted(worlds, reverse=True) for layout in LAYOUTS[world]]
