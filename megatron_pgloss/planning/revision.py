"""A plan with the findings of a statistics pass. `T` tokens of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron_pgloss.errors import PGLossError
from megatron_pgloss.planning import agreement
from megatron_pgloss.planning.component_table import Decided, with_findings
from megatron_pgloss.planning.local import body, count, head
from megatron_pgloss.planning.plan import Plan, assemble


def revise(made: Plan, found: Mapping[str, Decided]) -> Plan:
    """``made`` with the findings of a statistics pass.

    A collective where a component has ``count_rejected=False``: its counts are then agreed anew, by the same gathers as
    in `plan`.

    Args:
        found: component to what was found about it; whether something is ``rejected_T`` is the same on every rank, and
            so are the numbers.
    """
    rejected = {name: one.rejected_T for name, one in found.items() if one.rejected_T is not None}
    if not rejected:
        return replace(made, components=with_findings(made.components, found), decided=True)
    assert made.spec is not None
    error: PGLossError | None = None
    local, counted = made.local, torch.zeros(0, dtype=torch.int64)
    try:
        local = count(made.local, made.spec, rejected)
        counted = body(local)
    except PGLossError as caught:
        error = caught
    setup = agreement.digest(repr(sorted((name, one.numbers) for name, one in found.items())).encode())
    row = agreement.pack(head(local, made.spec, made.arrangement, made.ranks, setup), counted, error)
    rows = made.ranks.gather(row, made.ranks.world, made.ranks.world_size)
    agreement.raise_agreed(rows)
    again = assemble(
        local, made.spec, made.coef, made.split, made.arrangement, made.ranks, rows, None, made.version
    )  # fmt: skip
    return replace(
        made, components=with_findings(again.components, found), counts=again.counts, local=local, decided=True
    )
