"""Sharing data inside a replica, where only one of its ranks has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from megatron_pgloss.errors import Caught, LayoutError
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.rollouts import TokenBatch, broken
from megatron_pgloss.spec.words import closed


@closed
def broadcast(batches: Iterable[TokenBatch] | None, *, pg_collection: Any = None) -> list[TokenBatch]:
    """Share the batches of a replica's first rank (tensor, context and pipeline rank 0) with its other ranks.

    A collective: every rank calls it; what the others pass is ignored. It is needed only where one rank has the data.

    Returns:
        The first rank's batches, on every rank of its replica.
    """
    layout = Layout.read(pg_collection)
    box: list[Any] = [None]
    with Caught() as here:
        box = [list(batches) if batches is not None else None]
    if here.error is not None:
        box = [[broken(here.error)]]  # raised by the next plan, on every rank
    for group, rest in (
        (layout.tp, layout.cp_rank == 0 and layout.pp_rank == 0),
        (layout.cp, layout.pp_rank == 0),
        (layout.pp, True),
    ):
        if group is not None and rest:
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if box[0] is None:
        # Raised by the next plan: here it would leave the other replicas waiting.
        missing = LayoutError("the first rank of the replica passed no batches", expected="a list of TokenBatch")
        return [broken(missing)]
    return box[0]  # type: ignore[no-any-return]
