"""Which rows stay in the loss; only their episodes may vote in baselines. `S` rows, `T` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.planning import frozen, members
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec import LossSpec, PolicyGradient
from megatron_pgloss.spec.words import closed


@closed
def voters(batch: TokenBatch, spec: LossSpec, *, version: int | None = None) -> Tensor:
    """Rows with at least one token left in a policy-gradient component after faults, masks and rejections.

    For ``voters=`` of `megatron_pgloss.advantages`: an episode that leaves the loss must not move the baseline of the
    others. Masks that read the advantage are left out: the advantage is yet to be computed.

    Args:
        batch: rollouts, with the streams that the spec's corrections read.
        version: version of the weights being trained, for `Staleness`.

    Returns:
        bool [S].
    """
    masks = tuple(mask for mask in spec.masks if "advantages" not in mask.reads)
    without = spec.replace(masks=masks)
    stays_T = torch.zeros_like(batch.action_T)
    verdicts = frozen.verdicts(batch, without, version)
    for part in without.components:
        if isinstance(part, PolicyGradient):
            stays_T = stays_T | members.component_set(batch, part, without, verdicts).member_T
    return torch.zeros(len(batch), dtype=torch.int64).index_add(0, batch.seq_T, stays_T.to(torch.int64)) > 0
