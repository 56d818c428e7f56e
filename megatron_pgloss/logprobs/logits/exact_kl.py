"""Log-prob, entropy and the exact KL to a reference, in one pass over both logits and with one collective.

Shapes: `T` rows (tokens, in memory order), `R` rows of one chunk, `V` columns of this shard that are no padding, `Vl`
all columns of this shard, `S` shards in rank order.

With u = z/tau, y = u - lse, p = exp(y) for the policy and log q = w/tau - lse_q for the reference,

    KL(p || q) = sum_v p_v (y_v - log q_v),    d KL / d u_v = p_v (y_v - log q_v - KL)

and over the shards r of a vocabulary, with W_r and V_r their probabilities under p and q, by the chain rule

    KL = sum_r W_r (KL_r + log W_r - log V_r).

Differences are computed first (u - w, then lse - lse_q) and multiplied by p afterwards, so that a small KL is not the
difference of two large sums.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pgloss.logprobs.inputs import check_backward
from megatron_pgloss.logprobs.rows.per_row import maths_dtype, put_one_per_row
from megatron_pgloss.logprobs.vocab.join import join_lse
from megatron_pgloss.logprobs.vocab.merge import Merged, gather_stats, merge_gathered
from megatron_pgloss.logprobs.vocab.order import RowOrder
from megatron_pgloss.logprobs.vocab.shard import VocabShard


class ReferenceJob(NamedTuple):
    """The settings of one pass: all of its inputs but the tensors."""

    shard: VocabShard
    order: RowOrder
    entropy: bool
    lse: bool
    reuse_logits: bool
    step: int
    """Rows per chunk."""


class _Whole(NamedTuple):
    """Statistics of each row over the whole vocabulary, float64 [T]."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    ref_lse: Tensor
    kl: Tensor


class GivenBoth(torch.autograd.Function):
    """Maps (logits, reference logits, targets, 1/tau, job) to (log-prob, entropy, lse, KL), all in targets' shape."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, ref_logits: Tensor, targets: Tensor, inverse_tau: Tensor | None, job: ReferenceJob
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Measure both distributions, merge the shards, and keep what backward needs."""
        order = job.order
        target_T, tau_T = order.flatten(targets), job.order.flatten_some(inverse_tau)
        stats_TC = _measure(logits, ref_logits, target_T - job.shard.start, tau_T, job)
        whole = _merge(stats_TC, target_T, job.shard)
        ctx.save_for_backward(logits, ref_logits, targets.clone(), inverse_tau, *whole)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.spent = job, False

        dtype = maths_dtype(logits)
        return (
            order.output(whole.logprob, dtype),
            order.output(whole.entropy, dtype) if job.entropy else None,
            order.output(whole.lse, dtype) if job.lse else None,
            order.output(whole.kl, dtype),
        )

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradient of the policy's logits; no collective. The reference is a constant."""
        job: ReferenceJob = ctx.job
        check_backward(ctx.spent)
        logits, ref_logits, targets, inverse_tau, *saved = ctx.saved_tensors
        ctx.spent = job.reuse_logits
        whole = _Whole(*saved)
        grads = [torch.zeros_like(whole.lse) if g is None else job.order.flatten(g).double() for g in upstream]
        target_T = job.order.flatten(targets) - job.shard.start
        out = _gradient(logits, ref_logits, target_T, job.order.flatten_some(inverse_tau), grads, whole, job)
        return out, None, None, None, None


def _scaled(z_RV: Tensor, tau_R: Tensor | None, dtype: torch.dtype) -> Tensor:
    wide_RV = z_RV.to(dtype)
    return wide_RV if tau_R is None else wide_RV * tau_R[:, None].to(dtype)


def _measure(logits: Tensor, ref_logits: Tensor, target_T: Tensor, tau_T: Tensor | None, job: ReferenceJob) -> Tensor:
    """(lse_r, H_r, KL_r, lse_q_r, u_target) of the shard's own distributions, float64 [T, 5]."""
    width, dtype = job.shard.width, maths_dtype(logits)
    stats_TC = logits.new_zeros(job.order.rows, 5, dtype=torch.float64)
    if width == 0:
        stats_TC[:, 0] = stats_TC[:, 3] = -math.inf
        return stats_TC
    column_T1 = target_T.clamp(0, width - 1)[:, None]
    ref_TV = job.order.flatten(ref_logits)
    for rows, z_RV in job.order.chunks(logits, job.step):
        tau_R = None if tau_T is None else tau_T[rows]
        u_RV = _scaled(z_RV[:, :width], tau_R, dtype)
        w_RV = _scaled(ref_TV[rows, :width], tau_R, dtype)
        lse_R, ref_lse_R = _lse(u_RV), _lse(w_RV)
        y_RV = u_RV - lse_R[:, None].to(dtype)
        p_RV = y_RV.exp()
        # Select before the product: a column that the policy cannot draw may be -inf in both.
        some_RV = p_RV > 0
        gap_RV = torch.where(some_RV, (u_RV - w_RV) - (lse_R - ref_lse_R)[:, None].to(dtype), 0)
        stats_TC[rows, 0], stats_TC[rows, 3] = lse_R, ref_lse_R
        stats_TC[rows, 1] = -(p_RV * torch.where(some_RV, y_RV, 0)).sum(-1).double()
        stats_TC[rows, 2] = (p_RV * gap_RV).sum(-1).double()
        target_R = z_RV[:, :width].gather(1, column_T1[rows])[:, 0].double()
        stats_TC[rows, 4] = target_R if tau_R is None else target_R * tau_R
    return stats_TC


def _lse(u_RV: Tensor) -> Tensor:
    """Log-sum-exp, float64 [R]: the sum is taken in the dtype of the maths, its logarithm in float64."""
    peak_R = u_RV.amax(-1)
    centre_R = torch.where(peak_R == -math.inf, 0, peak_R)
    return centre_R.double() + (u_RV - centre_R[:, None]).exp().sum(-1).double().log()


def _merge(stats_TC: Tensor, target_T: Tensor, shard: VocabShard) -> _Whole:
    stats_STC = gather_stats(stats_TC, shard)
    policy: Merged = merge_gathered(stats_STC[..., [0, 1, 4]], target_T, shard)
    lse_ST, kl_ST, ref_ST = stats_STC[..., 0], stats_STC[..., 2], stats_STC[..., 3]
    ref_lse_T = join_lse(ref_ST)
    empty_ST = lse_ST == -math.inf
    log_share_ST = lse_ST - policy.lse
    ref_share_ST = ref_ST - ref_lse_T
    part_ST = log_share_ST.exp() * (kl_ST + log_share_ST - ref_share_ST)
    kl_T = torch.where(empty_ST, 0.0, part_ST).sum(0)
    kl_T = torch.where(policy.lse == -math.inf, math.nan, kl_T)
    assert policy.entropy is not None
    return _Whole(policy.logprob, policy.entropy, policy.lse, ref_lse_T, kl_T)


def _gradient(
    logits: Tensor, ref_logits: Tensor, target_T: Tensor, tau_T: Tensor | None, grads: list[Tensor], whole: _Whole,
    job: ReferenceJob,
) -> Tensor:  # fmt: skip
    """``(1/tau) (p (A + B y + C (y - log q)) + g 1[v = target])`` with A = -g - g_H H + g_lse - g_K KL, B = -g_H,
    C = g_K, written into the logits or one new tensor.
    """
    g_T, h_T, l_T, k_T = grads
    width, dtype = job.shard.width, maths_dtype(logits)
    scale_T = torch.ones_like(g_T) if tau_T is None else tau_T
    a_T = -g_T - h_T * whole.entropy + l_T - torch.where(k_T == 0, 0.0, k_T * whole.kl)
    a_T = torch.where((g_T != 0) & ~whole.logprob.isfinite(), math.nan, a_T)
    live_T = (g_T != 0) | (h_T != 0) | (l_T != 0) | (k_T != 0)
    inside_T = (target_T >= 0) & (target_T < width)
    column_T1 = target_T.clamp(0, max(width - 1, 0))[:, None]
    ref_TV = job.order.flatten(ref_logits)
    flat_TV = None if job.reuse_logits else logits.new_empty(job.order.rows, logits.size(-1))
    for rows, z_RV in job.order.chunks(logits.detach(), job.step):
        out_RV = z_RV if flat_TV is None else flat_TV[rows]
        out_RV[:, width:].zero_()
        if not width:
            continue
        tau_R = None if tau_T is None else tau_T[rows]
        u_RV, w_RV = (_scaled(x_RV[:, :width], tau_R, dtype) for x_RV in (z_RV, ref_TV[rows]))
        y_RV, shift_R = u_RV - whole.lse[rows, None].to(dtype), whole.lse[rows] - whole.ref_lse[rows]
        p_RV = y_RV.exp()
        gap_RV = torch.where(p_RV > 0, (u_RV - w_RV) - shift_R[:, None].to(dtype), 0)
        slope_RV = a_T[rows, None].to(dtype) - h_T[rows, None].to(dtype) * torch.where(p_RV > 0, y_RV, 0)
        kl_R1 = k_T[rows, None].to(dtype)
        slope_RV = slope_RV + torch.where(kl_R1 == 0, 0, kl_R1 * gap_RV)
        # The target's own entry in float64: its 1 - p must survive where p is nearly 1.
        p_R, y_R = whole.logprob[rows].exp(), whole.logprob[rows]
        gap_R = y_R - (w_RV.gather(1, column_T1[rows])[:, 0].double() - whole.ref_lse[rows])
        own_R = a_T[rows] - h_T[rows] * y_R + torch.where(k_T[rows] == 0, 0.0, k_T[rows] * gap_R)
        entry_R = (p_R * own_R + g_T[rows]) * scale_T[rows]
        grad_RV = (p_RV * slope_RV * scale_T[rows, None].to(dtype)).to(logits.dtype)
        hit_R = inside_T[rows] & (g_T[rows] != 0)
        kept_R = grad_RV.gather(1, column_T1[rows])[:, 0]
        put_one_per_row(grad_RV, column_T1[rows, 0], torch.where(hit_R, entry_R.to(logits.dtype), kept_R))
        out_RV[:, :width] = torch.where(live_T[rows, None], grad_RV, 0)
    return logits.detach() if flat_TV is None else job.order.unflatten(flat_TV)
