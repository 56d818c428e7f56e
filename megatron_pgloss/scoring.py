"""Forward-only passes: log-probs of micro-batches back to whole rows. `T` tokens of a rank, `N` positions of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.rollouts import TokenBatch


def gather_tokens(scored: Iterable[tuple[MicroBatch, Tensor]], total: int, dtype: torch.dtype) -> Tensor:
    """Lay the scores of micro-batches (or shards of them) out as one stream.

    Args:
        scored: each micro-batch with float scores of its shape.
        total: T of this rank.

    Returns:
        CPU float [T]: 0 where no given micro-batch holds the token, so that disjoint shards add up.
    """
    values_T = torch.zeros(total, dtype=dtype)
    for micro, scores in scored:
        real_N = micro.index_N >= 0
        values_T[micro.index_N[real_N]] = scores.detach().reshape(-1).to("cpu", dtype)[real_N]
    return values_T


def into_batches(batches: Sequence[TokenBatch], values_T: Tensor, name: str) -> list[TokenBatch]:
    """The batches with stream ``name`` set from the stream of their concatenation; empty batches stay as they are."""
    out, at = [], 0
    for batch in batches:
        size = batch.tokens_T.numel()
        out.append(batch.with_stream(name, values_T[at : at + size].clone()) if len(batch) else batch)
        at += size
    return out
