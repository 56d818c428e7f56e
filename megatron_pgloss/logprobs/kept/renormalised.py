"""Log-prob and entropy renormalised on the set that the sampler could draw from.

Shapes: `T` rows (tokens, in memory order), `R` rows of one chunk, `V` columns of this shard that are no padding, `Vl`
all columns of this shard, `K` recorded ids per token.

On a set K, with u = z/tau and P_K the share of K under softmax(u),

    lse_K = log sum_{v in K} exp(u_v),   logp_K = u_target - lse_K,   H_K = -sum_{v in K} p_v/P_K log(p_v/P_K)
    dz_v = (1/tau) (g 1[v = target] + 1[v in K] p_v/P_K (A + B log(p_v/P_K)))      A, B as in `upstream`

This is the pass over the whole vocabulary with logits of -inf outside K. The set is a constant: thresholds have no
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, UnsupportedError
from megatron_pgloss.logprobs.inputs import check_backward, rows_per_chunk
from megatron_pgloss.logprobs.kept.radix import Rows
from megatron_pgloss.logprobs.kept.threshold import limits
from megatron_pgloss.logprobs.rows.per_row import maths_dtype, put_one_per_row
from megatron_pgloss.logprobs.upstream import upstream_factors
from megatron_pgloss.logprobs.vocab.merge import Merged, gather_stats, merge_gathered
from megatron_pgloss.logprobs.vocab.order import RowOrder
from megatron_pgloss.logprobs.vocab.shard import VocabShard
from megatron_pgloss.maths.kept import Kept


class KeptJob(NamedTuple):
    """The settings of one pass: all of its inputs but the tensors."""

    shard: VocabShard
    order: RowOrder
    entropy: bool
    lse: bool
    reuse_logits: bool
    step: int
    """Rows per chunk."""
    add_target: bool


class _Set(NamedTuple):
    """The sets of all rows, as thresholds or as recorded ids; the other of the two is None."""

    target_T: Tensor
    """int64 [T]: targets, counted from the shard's first column."""
    limit_T: Tensor | None
    """[T]: the least logit of the set."""
    ids_TK: Tensor | None
    """int64 [T, K]: recorded ids, -1 where a row has fewer than K."""


class GivenKept(torch.autograd.Function):
    """Maps (logits, targets, 1/tau, limits [T] or None, ids [T, K] or None, job) to (log-prob, entropy, lse, size of
    the set over the vocabulary's, whether the target is outside), all in targets' shape.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, inverse_tau: Tensor | None, limit_T: Tensor | None,
        ids_TK: Tensor | None, job: KeptJob,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:  # fmt: skip
        """Measure and merge; keep what backward needs."""
        target_T = job.order.flatten(targets)
        sets = _Set(target_T - job.shard.start, limit_T, ids_TK)
        stats_STC = gather_stats(_measure(logits, sets, job.order.flatten_some(inverse_tau), job), job.shard)
        whole = merge_gathered(stats_STC[..., [0, 1, 3]], target_T, job.shard)
        ctx.save_for_backward(logits, targets.clone(), inverse_tau, limit_T, ids_TK, *whole)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.spent = job, False

        order, dtype = job.order, maths_dtype(logits)
        share = order.output(stats_STC[..., 2].sum(0) / job.shard.vocab, dtype)
        owner_T = (target_T // job.shard.columns).clamp(0, job.shard.size - 1)
        outside = order.output(stats_STC[..., 4].gather(0, owner_T[None])[0] == 0, torch.bool)
        ctx.mark_non_differentiable(share, outside)
        assert whole.entropy is not None
        return (
            order.output(whole.logprob, dtype),
            order.output(whole.entropy, dtype) if job.entropy else None,
            order.output(whole.lse, dtype) if job.lse else None,
            share,
            outside,
        )

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradient of the logits; no collective."""
        job: KeptJob = ctx.job
        if all(g is None for g in upstream[:3]):
            return (None,) * 6
        check_backward(ctx.spent)
        logits, targets, inverse_tau, limit_T, ids_TK, *saved = ctx.saved_tensors
        ctx.spent = job.reuse_logits
        sets = _Set(job.order.flatten(targets) - job.shard.start, limit_T, ids_TK)
        grads = [job.order.flatten_some(g) for g in upstream[:3]]
        out = _gradient(logits, sets, job.order.flatten_some(inverse_tau), grads, Merged(*saved), job)
        return out, None, None, None, None, None


def kept_logprobs(
    logits: Tensor, targets: Tensor, inverse_tau: Tensor | None, kept: Kept, shard: VocabShard, *,
    entropy: bool, lse: bool, reuse_logits: bool, chunk_elements: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Run `GivenKept` on the sets that ``kept`` describes. Thresholds are searched first, by collectives of their own.

    Raises:
        DataError: a part of ``kept`` that does not fit the targets, or both recorded ids and rules.
    """
    order = RowOrder.of(logits)
    step = rows_per_chunk(chunk_elements, shard.width)
    job = KeptJob(shard, order, entropy, lse, reuse_logits, step, kept.add_target)
    rules = {name: _rule(name, getattr(kept, name), targets, order) for name in ("top_k", "top_p", "min_p")}
    ids_TK = limit_T = None
    if kept.ids is not None:
        if any(rule_T is not None for rule_T in rules.values()):
            raise DataError(
                "kept sets are given both as recorded ids and as rules", expected="ids, or some of top_k, top_p, min_p"
            )
        if kept.ids.dtype != torch.int64 or kept.ids.dim() != targets.dim() + 1 or kept.ids.shape[:-1] != targets.shape:
            raise DataError(
                "recorded ids do not fit the targets",
                expected=f"int64 {[*targets.shape, 'k']}",
                got=f"{kept.ids.dtype} {list(kept.ids.shape)}",
            )
        ids_TK = order.flatten(kept.ids.detach())
    else:
        rows = Rows(logits.detach(), order, shard, step, order.flatten_some(inverse_tau))
        limit_T = limits(rows, **rules, top_p_of=kept.top_p_of)
    return GivenKept.apply(logits, targets, inverse_tau, limit_T, ids_TK, job)  # type: ignore[no-any-return]


def check_alone(ref_logits: Tensor | None, chosen_ids: Tensor | None, backend: str | None) -> None:
    """Refuse options that are not defined on kept sets."""
    if ref_logits is not None:
        raise UnsupportedError(
            "the exact KL on kept sets: it would be infinite where the reference's set lacks a token of the policy's",
            fix="estimate it from log-probs renormalised on the sets, KL(estimator='k3')",
        )
    if chosen_ids is not None:
        raise UnsupportedError("chosen_ids on kept sets: a teacher's token may lie outside the set")
    if backend not in (None, "eager"):
        raise UnsupportedError(f"kept sets do not run on backend {backend!r}", fix="backend=None")


def _rule(name: str, value: Any, targets: Tensor, order: RowOrder) -> Tensor | None:
    """A rule's number, or tensor of the targets' shape, as [T]; None where the rule is off."""
    if value is None:
        return None
    given = torch.as_tensor(value, device=targets.device).detach()
    whole = not given.is_floating_point() and given.dtype != torch.bool
    if (name == "top_k") != whole or (given.dim() and given.shape != targets.shape):
        raise DataError(
            f"{name} does not fit the targets",
            expected=f"{'int64' if name == 'top_k' else 'float32 or float64'}, one number or {list(targets.shape)}",
            got=f"{given.dtype} {list(given.shape)}",
        )
    return order.flatten(given.expand(targets.shape))


def _members(z_RV: Tensor, rows: slice, sets: _Set, job: KeptJob) -> Tensor:
    """bool [R, V]: the columns of each row's set, before the target joins it (``add_target``)."""
    width = job.shard.width
    if sets.limit_T is not None:
        inside_RV = ~(z_RV < sets.limit_T[rows, None])  # a NaN counts as inside, so that the result shows it
    else:
        assert sets.ids_TK is not None
        ids_RK = sets.ids_TK[rows]
        column_RK = ids_RK - job.shard.start
        here_RK = (ids_RK >= 0) & (column_RK >= 0) & (column_RK < width)
        # The last column takes the ids of other shards.
        wide_RV = torch.zeros(z_RV.size(0), width + 1, dtype=torch.bool, device=z_RV.device)
        wide_RV.scatter_(1, torch.where(here_RK, column_RK, width), True)
        inside_RV = wide_RV[:, :width] | ~(ids_RK >= 0).any(1, keepdim=True)
    return inside_RV & (z_RV != -math.inf)


def _chunks(
    logits: Tensor, sets: _Set, tau_T: Tensor | None, job: KeptJob
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield (rows, their logits [R, Vl], u [R, V] in the dtype of the maths with -inf outside the set, bool [R]:
    whether the target is a column of this shard and in the set without ``add_target``).
    """
    width = job.shard.width
    for rows, z_RV in job.order.chunks(logits, job.step):
        inside_RV = _members(z_RV[:, :width], rows, sets, job)
        target_R1 = sets.target_T[rows, None]
        here_R1, column_R1 = (target_R1 >= 0) & (target_R1 < width), target_R1.clamp(0, max(width - 1, 0))
        own_R1 = inside_RV.gather(1, column_R1) & here_R1 if width else here_R1
        if job.add_target and width:
            joins_R1 = here_R1 & (z_RV.gather(1, column_R1) != -math.inf)
            inside_RV.scatter_(1, column_R1, inside_RV.gather(1, column_R1) | joins_R1)
        u_RV = z_RV[:, : job.shard.width].to(maths_dtype(logits))
        if tau_T is not None:
            u_RV = u_RV * tau_T[rows, None].to(u_RV.dtype)
        yield rows, z_RV, torch.where(inside_RV, u_RV, -math.inf), own_R1[:, 0]


def _measure(logits: Tensor, sets: _Set, tau_T: Tensor | None, job: KeptJob) -> Tensor:
    """(lse_r, H_r, size, u_target, target inside) of the shard's part of every set, float64 [T, 5]."""
    stats_TC = logits.new_zeros(job.order.rows, 5, dtype=torch.float64)
    width = job.shard.width
    if width == 0:
        stats_TC[:, 0] = -math.inf
        return stats_TC
    column_T1 = sets.target_T.clamp(0, width - 1)[:, None]
    for rows, z_RV, u_RV, own_R in _chunks(logits, sets, tau_T, job):
        peak_R1 = u_RV.amax(-1, keepdim=True)
        e_RV = (u_RV - torch.where(peak_R1 == -math.inf, 0, peak_R1)).exp()
        total_R = e_RV.sum(-1).double()
        inside_RV = u_RV != -math.inf
        gap_RV = torch.where(inside_RV, u_RV - peak_R1, 0)
        stats_TC[rows, 0] = peak_R1[:, 0].double() + total_R.log()
        stats_TC[rows, 1] = total_R.log() - (e_RV * gap_RV).sum(-1).double() / total_R
        stats_TC[rows, 2] = inside_RV.sum(-1).double()
        picked_R = u_RV.gather(1, column_T1[rows])[:, 0]
        z_R = z_RV.gather(1, column_T1[rows])[:, 0].double()
        exact_R = z_R if tau_T is None else z_R * tau_T[rows]
        stats_TC[rows, 3] = torch.where(picked_R == -math.inf, -math.inf, exact_R)
        stats_TC[rows, 4] = own_R.double()
    return stats_TC


def _gradient(
    logits: Tensor, sets: _Set, tau_T: Tensor | None, grads: list[Tensor | None], whole: Merged, job: KeptJob
) -> Tensor:
    """The gradient of the logits, in their own memory or one new tensor; exactly 0 outside the set."""
    g_T, h_T, lse_grad_T = grads
    factors = upstream_factors(g_T, h_T, whole, tau_T, lse_grad_T=lse_grad_T)
    width, dtype = job.shard.width, maths_dtype(logits)
    flat_TV = None if job.reuse_logits else logits.new_empty(job.order.rows, logits.size(-1))
    here_T = (sets.target_T >= 0) & (sets.target_T < width) & factors.hit_T
    column_T1 = sets.target_T.clamp(0, max(width - 1, 0))[:, None]
    for rows, z_RV, u_RV, _ in _chunks(logits.detach(), sets, tau_T, job):
        out_RV = z_RV if flat_TV is None else flat_TV[rows]
        out_RV[:, width:].zero_()
        if not width:
            continue
        y_RV = u_RV - whole.lse[rows, None].to(dtype)
        slope_R1: Tensor = factors.a_T[rows, None].to(dtype)
        if factors.b_T is not None:
            inside_RV = u_RV != -math.inf
            slope_R1 = slope_R1 + factors.b_T[rows, None].to(dtype) * torch.where(inside_RV, y_RV, 0)
        grad_RV = (y_RV.exp() * slope_R1).to(logits.dtype)
        kept_R = grad_RV.gather(1, column_T1[rows])[:, 0]
        entry_R = torch.where(here_T[rows], factors.entry_T[rows].to(logits.dtype), kept_R)
        put_one_per_row(grad_RV, column_T1[rows, 0], entry_R)
        out_RV[:, :width] = torch.where(factors.live_T[rows, None], grad_RV, 0)
    return logits.detach() if flat_TV is None else job.order.unflatten(flat_TV)
