"""Causal core attention for context parallelism and packed sequences, in plain torch.

Shapes: `s` tokens of this rank, `c` the context-parallel size, `b` rows, `n` heads of this tensor-parallel rank,
`g` their key/value groups, `d` channels per head; `_Q` over this rank's tokens, `_K` over all ranks' tokens in
gather order (rank 0's tokens, rank 1's, ...).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist

from megatron_pgloss.errors import LayoutError, UnsupportedError


class _Gather(torch.autograd.Function):
    """All-gather along dim 0; backward sums what every rank's queries send back to the rank that owns the token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


def rank_positions(total: int, cp: int, rank: int) -> torch.Tensor:
    """Positions of one sequence of ``total`` tokens that context-parallel rank ``rank`` holds: int64 [total / cp].

    The sequence is cut into ``2 cp`` chunks; rank r holds chunks r and 2 cp - 1 - r, in that order.
    """
    if cp == 1:
        return torch.arange(total)
    chunk, rest = divmod(total, 2 * cp)
    if rest:
        raise LayoutError(
            "a sequence does not split into zigzag chunks",
            expected=f"a length divisible by 2 * cp = {2 * cp}",
            got=total,
            fix="pad every sequence to a multiple of 2 * cp",
        )
    first, second = rank * chunk, (2 * cp - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def _layout_bshd(local: int, cp: int) -> tuple[torch.Tensor, torch.Tensor]:
    position_K = torch.cat([rank_positions(local * cp, cp, rank) for rank in range(cp)])
    return position_K, torch.zeros_like(position_K)


def _layout_thd(cu_seqlens: list[int], local: int, cp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The position of each token inside its document, and the index of that document, in gather order."""
    if cu_seqlens[-1] != local * cp:
        raise LayoutError(
            "cu_seqlens does not cover the packed row",
            expected=f"cu_seqlens[-1] = {local * cp} ({local} tokens on each of {cp} context-parallel ranks)",
            got=cu_seqlens[-1],
            fix="count padding at the end of the row as a document, or as padding of the last one",
        )
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    position, document = [], []
    for rank in range(cp):
        for index, length in enumerate(lengths):
            position.append(rank_positions(length, cp, rank))
            document.append(torch.full_like(position[-1], index))
    return torch.cat(position), torch.cat(document)


class CoreAttention(torch.nn.Module):
    """Softmax attention over all earlier tokens of the same document; takes the place of DotProductAttention.

    Keys and values are gathered over the context-parallel group, queries stay. ``attention_mask`` is ignored: the
    mask is causal by global position, so no token before a row's padding attends to it. Scores are computed
    in float32 for half precision, in the input's own dtype otherwise.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.config = config
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refused = {
            "attention_dropout": dropout not in (0, 0.0, None),
            "window_size": getattr(config, "window_size", None) is not None,
            "softmax_type": getattr(config, "softmax_type", "vanilla") != "vanilla",
            "attention_type": attention_type != "self",
        }
        for name, is_set in refused.items():
            if is_set:
                raise UnsupportedError(
                    f"the plain-torch core attention has no {name}", expected="plain causal self-attention"
                )
        if pg_collection is None:
            from megatron.core import parallel_state

            self.cp_group = parallel_state.get_context_parallel_group()
        else:
            self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """``query`` [s, b, n, d], ``key`` and ``value`` [s, b, g, d] -> [s, b, n * d]; packed: without ``b``."""
        if attention_bias is not None:
            raise UnsupportedError("the plain-torch core attention has no attention_bias")
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        group = getattr(packed_seq_params, "cp_group", None) or self.cp_group
        cp, local = group.size(), query.shape[0]
        if packed:
            padded = packed_seq_params.cu_seqlens_q_padded
            cu_seqlens = packed_seq_params.cu_seqlens_q if padded is None else padded
            position_K, document_K = _layout_thd(cu_seqlens.tolist(), local, cp)
        else:
            position_K, document_K = _layout_bshd(local, cp)
        mine = slice(group.rank() * local, (group.rank() + 1) * local)
        visible_QK = (position_K[mine, None] >= position_K) & (document_K[mine, None] == document_K)
        if cp > 1:
            key, value = _Gather.apply(torch.cat([key, value], dim=-1), group).split(key.shape[-1], dim=-1)
        out = self._attend(query, key, value, visible_QK.to(query.device))
        return out.squeeze(1) if packed else out

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible_QK: torch.Tensor
    ) -> torch.Tensor:
        dtype = query.dtype
        if dtype in (torch.bfloat16, torch.float16):
            query, key, value = query.float(), key.float(), value.float()
        scale = self.softmax_scale or 1.0 / math.sqrt(query.shape[-1])
        repeats = query.shape[2] // key.shape[2]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, tokens, d]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scores = query @ key.transpose(-1, -2) * scale
        weights = scores.masked_fill(~visible_QK, -torch.inf).softmax(-1)
        context = (weights @ value).permute(2, 0, 1, 3)  # [s, b, n, d]
        return context.flatten(2).to(dtype)
