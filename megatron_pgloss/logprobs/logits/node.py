"""The autograd node of given logits. Its gradient has a closed form and is written in one pass.

Shapes: `T` rows (tokens, in memory order), `C` statistics per row.

Forward keeps the logits themselves (no copy) and a few numbers per token. `logprobs.upstream` has the gradient's
formula.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pgloss.logprobs.inputs import check_backward
from megatron_pgloss.logprobs.logits import chosen
from megatron_pgloss.logprobs.rows.backends import Backend
from megatron_pgloss.logprobs.rows.per_row import maths_dtype
from megatron_pgloss.logprobs.rows.sweep import measure, write_gradient
from megatron_pgloss.logprobs.upstream import upstream_factors
from megatron_pgloss.logprobs.vocab.merge import Merged, gather_stats, merge, merge_gathered
from megatron_pgloss.logprobs.vocab.order import RowOrder
from megatron_pgloss.logprobs.vocab.shard import VocabShard


class GivenJob(NamedTuple):
    """The settings of one pass: all of its inputs but the tensors."""

    shard: VocabShard
    order: RowOrder
    entropy: bool
    lse: bool
    reuse_logits: bool
    backend: Backend
    chunk_elements: int


class Picked(NamedTuple):
    """Gradients that arrived for the log-probs at chosen ids (float64), the ids, and the log-probs, [T, k] each."""

    g_Tk: Tensor
    ids_Tk: Tensor
    logp_Tk: Tensor


class GivenLogits(torch.autograd.Function):
    """Maps (logits, targets, 1/tau, chosen ids, job) to (log-prob, entropy, lse, log-probs at the chosen ids), in
    targets' shape. All outputs but the log-prob are None where they were not asked for.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, inverse_tau: Tensor | None, ids: Tensor | None, job: GivenJob
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Measure the shard, merge the shards, and keep what backward needs."""
        ids_Tk = job.order.flatten_some(ids)
        whole, chosen_Tk = _merged(logits, targets, inverse_tau, ids_Tk, job)
        # mark_dirty is not needed: reused logits are written in backward, and forward leaves them as they are.
        # The targets are cloned since the caller may refill their buffer before backward.
        kept_ids = ids_Tk if ids_Tk is None else ids_Tk.clone()
        ctx.save_for_backward(logits, targets.clone(), inverse_tau, kept_ids, chosen_Tk, *whole)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.spent = job, False
        return _outputs(whole, chosen_Tk, logits, job)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        """Gradient of the logits; no collective."""
        if all(g is None for g in upstream):
            return None, None, None, None, None
        job: GivenJob = ctx.job
        check_backward(ctx.spent)
        logits, targets, inverse_tau, ids_Tk, chosen_Tk, *whole = ctx.saved_tensors
        ctx.spent = job.reuse_logits
        picked = None
        if upstream[3] is not None:
            picked = Picked(job.order.flatten(upstream[3]).double(), ids_Tk, chosen_Tk)
        gradient = _gradient(logits, upstream, targets, inverse_tau, Merged(*whole), picked, job)
        return gradient, None, None, None, None


def _merged(
    logits: Tensor, targets: Tensor, inverse_tau: Tensor | None, ids_Tk: Tensor | None, job: GivenJob
) -> tuple[Merged, Tensor | None]:
    """The forward pass: one streaming pass over the shard, one collective."""
    order, shard = job.order, job.shard
    target_T = order.flatten(targets)
    tau_T = order.flatten_some(inverse_tau)
    stats_TC = measure(
        logits,
        target_T - shard.start,
        tau_T,
        order=order,
        width=shard.width,
        entropy=job.entropy,
        backend=job.backend,
        chunk_elements=job.chunk_elements,
    )
    if ids_Tk is None:
        return merge(stats_TC, target_T, shard), None
    columns = stats_TC.size(1)
    u_Tk = chosen.measure_chosen(logits, ids_Tk, tau_T, order, shard)
    gathered_STC = gather_stats(torch.cat([stats_TC, u_Tk], 1), shard)
    whole = merge_gathered(gathered_STC[..., :columns], target_T, shard)
    return whole, chosen.merge_chosen(gathered_STC[..., columns:], ids_Tk, whole, shard)


def _outputs(
    whole: Merged, chosen_Tk: Tensor | None, logits: Tensor, job: GivenJob
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Log-prob, entropy, lse and chosen log-probs in targets' shape, in new memory that callers may write to."""
    order, dtype = job.order, maths_dtype(logits)
    entropy = None if whole.entropy is None else order.output(whole.entropy, dtype)
    lse = order.output(whole.lse, dtype) if job.lse else None
    picked = None if chosen_Tk is None else order.output(chosen_Tk, dtype)
    return order.output(whole.logprob, dtype), entropy, lse, picked


def _gradient(
    logits: Tensor,
    upstream: tuple[Tensor | None, ...],
    targets: Tensor,
    inverse_tau: Tensor | None,
    whole: Merged,
    picked: Picked | None,
    job: GivenJob,
) -> Tensor:
    """Compute the factors of each row, and write the gradient in one pass over the logits."""
    order = job.order
    g_T, h_T, lse_grad_T = (order.flatten_some(g) for g in upstream[:3])
    tau_T = order.flatten_some(inverse_tau)
    if picked is not None:
        through_T, reached_T = chosen.lse_gradient(*picked)
        lse_grad_T = through_T if lse_grad_T is None else lse_grad_T + through_T
    factors = upstream_factors(g_T, h_T, whole, tau_T, lse_grad_T=lse_grad_T)
    if picked is not None:
        factors = factors._replace(live_T=factors.live_T | reached_T)  # -G may be 0 although no g_j is
    target_T = order.flatten(targets)
    gradient = write_gradient(
        logits,
        factors.a_T,
        factors.b_T,
        entry_T=factors.entry_T,
        hit_T=factors.hit_T,
        live_T=factors.live_T,
        target_T=target_T - job.shard.start,
        lse_T=whole.lse,
        inverse_tau_T=tau_T,
        order=order,
        width=job.shard.width,
        reuse=job.reuse_logits,
        backend=job.backend,
        chunk_elements=job.chunk_elements,
    )
    if picked is not None:
        chosen.write_chosen(gradient, *picked, target_T, g_T, factors, tau_T, order, job.shard)
    return gradient
