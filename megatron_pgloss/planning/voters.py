"""Which rows stay in the loss; only their episodes may vote in baselines. `S` rows, `T` tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.planning import faults, frozen, members, units
from megatron_pgloss.planning.agreement import FIELDS, Ranks, pack
from megatron_pgloss.planning.carried import Carried
from megatron_pgloss.planning.job_rows import JobRows
from megatron_pgloss.planning.presence import present_rows
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.rules import Verdict
from megatron_pgloss.spec import LossSpec, PolicyGradient
from megatron_pgloss.spec.words import closed


@closed
def voters(batch: TokenBatch, spec: LossSpec, *, version: int | None = None, group: Any = None) -> Tensor:
    """Rows with at least one token left in a policy-gradient component after faults, masks and rejections.

    For ``voters=`` of `megatron_pgloss.advantages`: an episode that leaves the loss must not move the baseline of the
    others. Masks that read the advantage are left out, because the advantage has not been computed yet. Where the spec
    has corrections over prompts or episodes, it is a collective of ``group``.

    Args:
        batch: rollouts, with the streams that the spec's corrections read.
        version: version of the weights being trained, for `Staleness`.
        group: process group of the data-parallel ranks, as in `plan`; read by corrections over prompts or episodes.

    Returns:
        bool [S].

    Raises:
        DataError: a stream or the ids that a correction reads are absent; on every rank alike if a correction is over
            prompts or episodes.
        LayoutError: there is such a correction, and no ``group`` in a world of several ranks.
    """
    masks = tuple(mask for mask in spec.masks if "advantages" not in mask.reads)
    without = spec.replace(masks=masks)
    stays_T = torch.zeros_like(batch.action_T)
    verdicts = _verdicts(batch, without, version, group)
    for part in without.components:
        if isinstance(part, PolicyGradient):
            stays_T = stays_T | members.component_set(batch, part, without, verdicts).member_T
    return torch.zeros(len(batch), dtype=torch.int64).index_add(0, batch.seq_T, stays_T.to(torch.int64)) > 0


def _verdicts(batch: TokenBatch, spec: LossSpec, version: int | None, group: Any) -> list[Verdict | None]:
    """The verdicts of the plan-time corrections; those over prompts and episodes are from the rows of all ranks."""
    if not spec.straddling:
        return frozen.verdicts(batch, spec, version).said
    ranks = Ranks.named(group, "voters")
    found = frozen.Verdicts([], {})
    with Carried() as here:
        faults.check_units(batch, spec)
        found = frozen.verdicts(batch, spec, version)
        here.row = pack({"spec": spec.digest, "rows": len(batch)}, torch.zeros(0, dtype=torch.int64))
    most = max(int(here.gather(ranks)[:, FIELDS.index("rows")].max()), 1)
    rows = JobRows(units=units.find(batch), there_S=present_rows(batch, spec), ranks=ranks, most=most)
    asked = [one.asked for one in found.open.values()]
    return found.completed(rows.answers(asked, [str(one.rule.statistic_unit) for one in found.open.values()]))
