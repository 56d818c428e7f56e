"""Which positions of a micro-batch a context-parallel rank holds: zigzag for padded rows, per document for packed ones.

A sequence of padded length s is cut into 2*cp chunks; rank r holds chunks r and 2*cp - 1 - r, in that order. `N`
positions of the whole micro-batch, `K` of this rank's shard. The maths is the package's own: Megatron's helpers changed
their signatures between 0.16 and 0.18, and the packed one lives in Transformer Engine on CUDA alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import LayoutError
from megatron_pgloss.planning import MicroBatch


def zigzag(length: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Positions of one sequence on one rank, and the chunk each lies in.

    Args:
        length: padded length, a multiple of 2 * size.

    Returns:
        int64 [length / size] twice.

    Raises:
        LayoutError: the length does not divide.
    """
    if length % (2 * size):
        raise LayoutError(
            "a sequence cannot be cut for context parallelism", expected=f"length a multiple of {2 * size}", got=length
        )
    chunk = length // (2 * size)
    pieces = (rank, 2 * size - 1 - rank)
    position_K = torch.cat([torch.arange(piece * chunk, (piece + 1) * chunk) for piece in pieces])
    return position_K, torch.tensor(pieces).repeat_interleave(chunk)


def shard(micro: MicroBatch, rank: int, size: int, group: Any) -> MicroBatch:
    """This rank's part of ``micro``; the micro-batch itself where there is no context parallelism.

    Args:
        group: the context-parallel process group; statistics over units are summed over it.
    """
    if size == 1:
        return micro
    if micro.cu_seqlens is None:
        rows, width = micro.shape
        position_K, chunk_K = zigzag(width, rank, size)
        picked = (torch.arange(rows)[:, None] * width + position_K[None, :]).reshape(-1)
        return micro.take(picked, (rows, width // size), chunk_K.repeat(rows), 2 * size, group)
    edges = micro.cu_seqlens.tolist()
    parts = [zigzag(end - start, rank, size) for start, end in itertools.pairwise(edges)]
    picked = torch.cat([position_K + start for (position_K, _), start in zip(parts, edges, strict=False)])
    return micro.take(picked, (1, picked.numel()), torch.cat([chunk_K for _, chunk_K in parts]), 2 * size, group)
