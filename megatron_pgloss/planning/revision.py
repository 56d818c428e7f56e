"""A plan with the findings of a statistics pass. `T` tokens of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron_pgloss.errors import PGLossError
from megatron_pgloss.planning import agreement
from megatron_pgloss.planning.local import body, count, head
from megatron_pgloss.planning.plan import Plan, assemble


def revise(
    made: Plan, streams: Mapping[str, Tensor], rejected: Mapping[str, Tensor], constants: Mapping[str, float]
) -> Plan:
    """``made`` with the findings of a statistics pass.

    A collective where a component has ``count_rejected=False``: its counts are then agreed anew, by the same gathers as
    in `plan`.

    Args:
        streams: name to [T], into the plan's table.
        rejected: component to bool [T]: what leaves its denominators.
        constants: numbers, the same on every rank.
    """
    if not rejected:
        return replace(made, table={**made.table, **streams}, constants={**made.constants, **constants}, decided=True)
    assert made.spec is not None
    error: PGLossError | None = None
    local, counted = made.local, torch.zeros(0, dtype=torch.int64)
    try:
        local = count(made.local, made.spec, rejected)
        counted = body(local)
    except PGLossError as caught:
        error = caught
    setup = agreement.digest(repr(sorted(constants.items())).encode())
    row = agreement.pack(head(local, made.spec, made.arrangement, made.ranks, setup), counted, error)
    rows = made.ranks.gather(row, made.ranks.world, made.ranks.world_size)
    agreement.raise_agreed(rows)
    again = assemble(
        local, made.spec, made.coef, made.split, made.arrangement, made.ranks, rows, None, made.version
    )  # fmt: skip
    return replace(
        made, table={**again.table, **streams}, counts=again.counts, local=local,
        constants={**again.constants, **constants}, decided=True,
    )  # fmt: skip
