"""A plan with the findings of a statistics pass. `T` tokens of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_pgloss.planning import agreement, wire
from megatron_pgloss.planning.carried import Carried
from megatron_pgloss.planning.component_table import Decided, with_findings
from megatron_pgloss.planning.counts import recount
from megatron_pgloss.planning.plan import Plan, assemble


def revise(made: Plan, found: Mapping[str, Decided]) -> Plan:
    """``made`` with the findings of a statistics pass.

    A collective where a component has ``count_rejected=False``: its counts are then agreed anew, by the same gathers as
    in `plan`.

    Args:
        found: component to what was found about it. Whether it has a ``rejected_T`` is the same on every rank, and so
            are its `numbers`.
    """
    rejected = {name: one.rejected_T for name, one in found.items() if one.rejected_T is not None}
    if not rejected:
        return replace(made, components=with_findings(made.components, found), decided=True)
    asked = made.request
    assert asked.spec is not None
    with Carried() as here:
        local = recount(made.local, asked.spec, rejected)
        numbers = {name: one.numbers for name, one in sorted(found.items())}
        here.row = wire.pack(local, asked, made.ranks, agreement.digest(repr(numbers).encode()))
        here.about = wire.fields(local, asked) | {"setup": lambda: numbers}
    again = assemble(asked, local, wire.read(here.gather(made.ranks), asked), made.ranks)
    return replace(
        made, local=local, components=with_findings(again.components, found), counts=again.counts, decided=True
    )
