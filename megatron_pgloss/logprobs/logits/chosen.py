"""Log-probs at a few chosen ids of every token (a teacher's top-k, say), beside the log-prob of the token's target.

Shapes: `T` rows (tokens, in memory order), `k` chosen ids per row (-1 for none), `S` shards in rank order.

In forward the chosen logits are k more columns of the pass's one gather. In backward, with upstream g_j at the j-th id
and G = sum_j g_j,

    dz_v = (1/tau) (-G p_v + sum_j g_j 1[v = id_j])

so -G joins the gradient of the log-sum-exp, and the entries at the ids are written after all other entries, each
computed whole in float64: where the policy equals the teacher -G p_v and g_j cancel, and a sum of rounded parts would
be noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.logprobs.rows.per_row import put_one_per_row
from megatron_pgloss.logprobs.upstream import Upstream
from megatron_pgloss.logprobs.vocab.merge import Merged
from megatron_pgloss.logprobs.vocab.order import RowOrder
from megatron_pgloss.logprobs.vocab.shard import VocabShard


def check_chosen(ids: Tensor, targets: Tensor) -> None:
    """Refuse ids that do not belong to the targets."""
    if ids.dtype != torch.int64 or ids.shape[:-1] != targets.shape or ids.device != targets.device:
        raise DataError(
            "chosen_ids do not belong to the targets",
            expected=f"int64 {[*targets.shape, 'k']} on {targets.device}",
            got=f"{ids.dtype} {list(ids.shape)} on {ids.device}",
            fix="give one row of k ids per target, -1 where a token has fewer than k",
        )


def measure_chosen(
    logits: Tensor, ids_Tk: Tensor, inverse_tau_T: Tensor | None, order: RowOrder, shard: VocabShard
) -> Tensor:
    """z/tau at the ids that this shard holds, an arbitrary number at other ids; float64 [T, k]."""
    u_Tk = logits.new_zeros(ids_Tk.shape, dtype=torch.float64)
    if shard.width == 0:
        return u_Tk
    column_Tk = (ids_Tk - shard.start).clamp(0, shard.width - 1)
    for first, z_RV in order.blocks(logits):
        block = slice(first, first + z_RV.size(0))
        u_Tk[block] = z_RV.gather(1, column_Tk[block]).double()
    return u_Tk if inverse_tau_T is None else u_Tk * inverse_tau_T[:, None]


def merge_chosen(u_STk: Tensor, ids_Tk: Tensor, whole: Merged, shard: VocabShard) -> Tensor:
    """Log-probs at the ids, float64 [T, k]: -inf at id -1, NaN at ids off the vocabulary and in rows that name one
    twice.
    """
    owner_Tk = (ids_Tk // shard.columns).clamp(0, shard.size - 1)
    logp_Tk = u_STk.gather(0, owner_Tk[None])[0] - whole.lse[:, None]
    ordered_Tk = ids_Tk.sort(1).values
    twice_T = ((ordered_Tk[:, 1:] == ordered_Tk[:, :-1]) & (ordered_Tk[:, 1:] >= 0)).any(1)
    lost_Tk = twice_T[:, None] | (ids_Tk < 0) | (ids_Tk >= shard.vocab)
    return torch.where(ids_Tk == -1, -math.inf, torch.where(lost_Tk, math.nan, logp_Tk))


def lse_gradient(g_Tk: Tensor, ids_Tk: Tensor, logp_Tk: Tensor) -> tuple[Tensor, Tensor]:
    """-G, float64 [T], NaN in rows that use a log-prob that is not finite; and which rows any g_j reaches, bool [T]."""
    used_Tk = (ids_Tk != -1) & (g_Tk != 0)
    lost_T = (used_Tk & ~logp_Tk.isfinite()).any(1)
    return torch.where(lost_T, math.nan, -torch.where(used_Tk, g_Tk, 0).sum(1)), used_Tk.any(1)


def write_chosen(
    gradient: Tensor,
    g_Tk: Tensor,
    ids_Tk: Tensor,
    logp_Tk: Tensor,
    target_T: Tensor,
    target_g_T: Tensor | None,
    factors: Upstream,
    inverse_tau_T: Tensor | None,
    order: RowOrder,
    shard: VocabShard,
) -> None:
    """Write the whole gradient at the chosen ids of this shard, in place, into the rows that have a gradient.

    Args:
        gradient: [..., Vl], the logits' gradient without the chosen ids' own entries.
        g_Tk: float64, the gradients that arrived for the chosen log-probs.
        target_g_T: the gradient that arrived for the target's log-prob; None: none did.
        factors: the rows' factors, with -G among the gradients of the log-sum-exp.
    """
    if shard.width == 0 or not ids_Tk.numel():
        return
    own_Tk = g_Tk
    if target_g_T is not None:
        own_Tk = own_Tk + torch.where(ids_Tk == target_T[:, None], target_g_T.double()[:, None], 0)
    if inverse_tau_T is not None:
        own_Tk = own_Tk * inverse_tau_T[:, None]
    slope_Tk = factors.a_T[:, None] if factors.b_T is None else factors.a_T[:, None] + factors.b_T[:, None] * logp_Tk
    p_Tk = logp_Tk.exp()
    entry_Tk = torch.where(p_Tk == 0, 0, p_Tk * slope_Tk) + own_Tk
    local_Tk = ids_Tk - shard.start
    inside_Tk = (local_Tk >= 0) & (local_Tk < shard.width) & factors.live_T[:, None]
    column_Tk = local_Tk.clamp(0, shard.width - 1)
    for first, out_RV in order.blocks(gradient):
        block = slice(first, first + out_RV.size(0))
        for j in range(ids_Tk.size(1)):
            # One id after the other: a row that has nothing to write at its j-th id writes back what is there, so that
            # no host sync is needed.
            column_R = column_Tk[block, j]
            before_R = out_RV.gather(1, column_R[:, None])[:, 0]
            entry_R = entry_Tk[block, j].to(out_RV.dtype)
            put_one_per_row(out_RV, column_R, torch.where(inside_Tk[block, j], entry_R, before_R))
