"""Which part of the vocabulary this rank's logits hold.

Shapes: `Vl` columns of one shard, `tp` shards; shard r holds the global columns [r Vl, (r + 1) Vl).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megatron_pgloss.errors import DataError, LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """The slice of the vocabulary that this rank's logits hold, and the group that holds the rest."""

    columns: int
    """Vl: columns of every shard, padding included."""

    vocab: int
    """Number of real columns, over all shards; columns at or beyond it are padding and no part of the softmax."""

    group: dist.ProcessGroup | None = None
    """The tensor-parallel group, or None where one rank holds everything."""

    rank: int = 0
    size: int = 1

    @property
    def start(self) -> int:
        """Global index of the first column."""
        return self.rank * self.columns

    @property
    def width(self) -> int:
        """Columns of this shard that are no padding: 0 to Vl, the leading ones."""
        return min(max(self.vocab - self.start, 0), self.columns)


def find_shard(
    columns: int, group: dist.ProcessGroup | None, vocab_size: int | None, padded_vocab: int | None = None
) -> VocabShard:
    """Place ``columns`` columns in the vocabulary; refuse what cannot be a shard of it.

    Args:
        padded_vocab: columns of all shards together, where it is known: only by it can a shard that is as wide as a
            small vocabulary be told from gathered logits.
    """
    if columns < 1:
        raise DataError("logits have no vocabulary column", expected="[..., Vl] with Vl >= 1")
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if rank < 0:
        raise LayoutError(
            "this rank is not in the group over which the vocabulary is said to be split",
            fix="pass the tensor-parallel group that this rank belongs to",
        )
    if vocab_size is None:
        return VocabShard(columns=columns, vocab=columns * size, group=group, rank=rank, size=size)
    if not 1 <= vocab_size <= columns * size:
        raise LayoutError(
            "the logits do not cover the vocabulary",
            expected=f"1 <= vocab_size <= {columns} columns x {size} shards",
            got=f"vocab_size={vocab_size}",
            fix="pass group= where the logits are one shard of several",
        )
    if size > 1 and columns >= vocab_size and columns * size != padded_vocab:
        raise LayoutError(
            "gathered logits were given to the vocab-parallel path: every shard would be counted "
            "as another part of the vocabulary",
            expected=f"shards narrower than vocab_size={vocab_size}",
            got=f"{columns} columns on each of {size} ranks",
            fix="pass the local shard (Megatron: parallel_output=True, no runtime_gather_output), "
            "or group=None for logits that hold the whole vocabulary",
        )
    return VocabShard(columns=columns, vocab=vocab_size, group=group, rank=rank, size=size)
