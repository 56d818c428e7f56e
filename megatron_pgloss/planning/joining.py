"""Plan-time corrections over prompts and episodes, whose rows may lie on any rank: their verdicts from the numbers of
all ranks. `S` rows of this rank, `C` pairs of a normalised correction and a component.
"""

from __future__ import annotations

import torch

from megatron_pgloss.errors import Caught
from megatron_pgloss.planning import members, presence
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.planning.counts import Local, counted
from megatron_pgloss.planning.job_rows import JobRows
from megatron_pgloss.planning.units import per_row
from megatron_pgloss.spec import LossSpec


def rows_of_job(local: Local, spec: LossSpec | None, ranks: Ranks, most: int) -> JobRows:
    """This rank's rows among those of the job.

    Args:
        most: the largest number of rows of any rank.
    """
    units, there_S = None, torch.zeros(0, dtype=torch.bool)
    if local.batch is not None and spec is not None:
        units, there_S = local.units, presence.present_rows(local.batch, spec)
    return JobRows(units=units, there_S=there_S, ranks=ranks, most=max(most, 1))


def joined(local: Local, spec: LossSpec, rows: JobRows, here: Caught) -> Local:
    """``local`` counted anew, with the verdicts of the corrections over prompts and episodes. A collective of the
    data-parallel ranks: one gather for the statistics of all of them, and one more where some are normalised.

    Args:
        here: keeps an error of this rank until the gather after it.
    """
    asked = [] if local.members is None else [one.asked for one in local.members.open.values()]
    answers = rows.answers(asked, [str(spec.corrections[i].statistic_unit) for i in spec.straddling])
    found = local.members
    with here:
        if found is not None and local.batch is not None:
            found = members.joined(found, local.batch, spec, answers)
    pairs = [
        (i, part.name) for i in members.normalized(spec) if i in spec.straddling for part in spec.components
        if spec.corrections[i].acts_on(part)
    ]  # fmt: skip
    if pairs:
        alive_SC = torch.zeros(len(rows.there_S), len(pairs), dtype=torch.bool)
        sets = {} if found is None else {item.component.name: item.member_T for item in found.sets}
        for c, (_, name) in enumerate(pairs):
            if rows.units is not None:
                alive_SC[:, c] = per_row(sets[name], rows.units.cu_S1) > 0
        heads_SC = rows.firsts(alive_SC, [str(spec.corrections[i].statistic_unit) for i, _ in pairs])
        with here:
            if found is not None and local.batch is not None:
                found = members.headed(found, local.batch, spec, {pair: heads_SC[:, c] for c, pair in enumerate(pairs)})
    if found is None or here.error is not None:
        return local
    with here:
        local = counted(local, spec, found)
    return local
