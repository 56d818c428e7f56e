"""The autograd node of given logits: closed-form gradient, written once.

Shapes: `T` rows (tokens, in memory order), `C` statistics per row.

Forward keeps the logits themselves (no copy) and a few numbers per token. With u = z/tau,
y = u - lse, p = exp(y), upstream g (log-prob) and g_H (entropy), backward writes

    dz_v = (1/tau) (p_v (A + B y_v) + g 1[v = target]),    A = -g - g_H H,    B = -g_H
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pgloss.errors import UnsupportedError

from .merge import Merged, merge
from .order import RowOrder
from .shard import VocabShard
from .sweep import maths_dtype, measure, write_gradient


class Job(NamedTuple):
    """What a pass needs besides tensors."""

    shard: VocabShard
    order: RowOrder
    entropy: bool
    reuse_logits: bool
    chunk_elements: int


class GivenLogits(torch.autograd.Function):
    """(logits, targets, 1/tau or None, job) to (log-prob, entropy or None), in targets' shape."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, inverse_tau: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor | None]:
        """Measure and merge; keep what backward needs."""
        whole = _merged(logits, targets, inverse_tau, job)
        # No mark_dirty: reused logits are written in backward, forward leaves them as they are.
        # The targets are cloned since the caller may refill their buffer before backward.
        ctx.save_for_backward(logits, targets.clone(), inverse_tau, *whole)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.spent = job, False
        return _outputs(whole, logits, job)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """Gradient of the logits; no collective."""
        if all(g is None for g in upstream):
            return None, None, None, None
        job: Job = ctx.job
        if torch.is_grad_enabled():  # torch's once_differentiable lets a constant upstream pass
            raise UnsupportedError(
                "token_logprobs has first derivatives only, and its gradient would be a constant",
                got="a backward with create_graph=True",
                fix="call backward or autograd.grad without create_graph",
            )
        if ctx.spent:
            raise UnsupportedError(
                "second backward through token_logprobs(reuse_logits=True): the first one wrote "
                "its gradient over the logits",
                fix="pass reuse_logits=False, or add the losses up and call backward once",
            )
        logits, targets, inverse_tau, *whole = ctx.saved_tensors
        ctx.spent = job.reuse_logits
        gradient = _gradient(logits, upstream, targets, inverse_tau, Merged(*whole), job)
        return gradient, None, None, None


def _merged(logits: Tensor, targets: Tensor, inverse_tau: Tensor | None, job: Job) -> Merged:
    """The forward pass: one streaming pass over the shard, one collective."""
    order, shard = job.order, job.shard
    target_T = order.flatten(targets)
    stats_TC = measure(
        logits,
        target_T - shard.start,
        None if inverse_tau is None else order.flatten(inverse_tau),
        order=order,
        width=shard.width,
        entropy=job.entropy,
        chunk_elements=job.chunk_elements,
    )
    return merge(stats_TC, target_T, shard)


def _outputs(whole: Merged, logits: Tensor, job: Job) -> tuple[Tensor, Tensor | None]:
    """Log-prob and entropy in targets' shape, in memory of their own: callers may write there."""

    def shaped(value_T: Tensor) -> Tensor:
        out = torch.empty(job.order.shape, dtype=maths_dtype(logits), device=logits.device)
        return out.copy_(job.order.unflatten(value_T))

    return shaped(whole.logprob), None if whole.entropy is None else shaped(whole.entropy)


def _gradient(
    logits: Tensor,
    upstream: tuple[Tensor | None, ...],
    targets: Tensor,
    inverse_tau: Tensor | None,
    whole: Merged,
    job: Job,
) -> Tensor:
    """Per-row factors of the gradient, in float64, and the pass that writes it."""
    order = job.order
    g_T, h_T = (None if g is None else order.flatten(g).double() for g in upstream)
    if g_T is None:
        g_T = torch.zeros_like(whole.lse)
    tau_T = None if inverse_tau is None else order.flatten(inverse_tau)
    scale_T = torch.ones_like(g_T) if tau_T is None else tau_T
    a_T, b_T, live_T = -g_T, None, g_T != 0
    if h_T is not None and whole.entropy is not None:
        a_T, b_T, live_T = a_T - h_T * whole.entropy, -h_T * scale_T, live_T | (h_T != 0)
    # A log-prob that is no number (label off the vocabulary, say) has no gradient to be plausible.
    lost_T = (g_T != 0) & ~torch.isfinite(whole.logprob)
    a_T = torch.where(lost_T, math.nan, a_T * scale_T)
    # The target's own entry, once and in float64: its 1 - p must survive where p is nearly 1.
    p_T = whole.logprob.exp()
    entry_T = p_T * (a_T if b_T is None else a_T + b_T * whole.logprob) + g_T * scale_T
    return write_gradient(
        logits,
        a_T,
        b_T,
        entry_T=entry_T,
        hit_T=g_T != 0,  # elsewhere the label has no part in the gradient, not by a bit
        live_T=live_T,
        target_T=order.flatten(targets) - job.shard.start,
        lse_T=whole.lse,
        inverse_tau_T=tau_T,
        order=order,
        width=job.shard.width,
        reuse=job.reuse_logits,
        chunk_elements=job.chunk_elements,
    )
