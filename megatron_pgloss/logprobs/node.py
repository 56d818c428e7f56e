"""The autograd node of given logits: closed-form gradient, written once.

Shapes: `T` rows (tokens, in memory order), `C` statistics per row.

Forward keeps the logits themselves (no copy) and a few numbers per token; the gradient's formula is in `upstream`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pgloss.errors import UnsupportedError

from .backends import Backend
from .merge import Merged, merge
from .order import RowOrder
from .rows import maths_dtype
from .shard import VocabShard
from .sweep import measure, write_gradient
from .upstream import upstream_factors


class Job(NamedTuple):
    """What a pass needs besides tensors."""

    shard: VocabShard
    order: RowOrder
    entropy: bool
    lse: bool
    reuse_logits: bool
    backend: Backend
    chunk_elements: int


class GivenLogits(torch.autograd.Function):
    """(logits, targets, 1/tau or None, job) to (log-prob, entropy or None, lse or None), in targets' shape."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, inverse_tau: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
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
        backend=job.backend,
        chunk_elements=job.chunk_elements,
    )
    return merge(stats_TC, target_T, shard)


def _outputs(whole: Merged, logits: Tensor, job: Job) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-prob, entropy and lse in targets' shape, in memory of their own: callers may write there."""

    def shaped(value_T: Tensor) -> Tensor:
        out = torch.empty(job.order.shape, dtype=maths_dtype(logits), device=logits.device)
        return out.copy_(job.order.unflatten(value_T))

    entropy = None if whole.entropy is None else shaped(whole.entropy)
    return shaped(whole.logprob), entropy, shaped(whole.lse) if job.lse else None


def _gradient(
    logits: Tensor,
    upstream: tuple[Tensor | None, ...],
    targets: Tensor,
    inverse_tau: Tensor | None,
    whole: Merged,
    job: Job,
) -> Tensor:
    """The factors of each row, and the pass that writes."""
    order = job.order
    g_T, h_T, lse_grad_T = (None if g is None else order.flatten(g) for g in upstream)
    tau_T = None if inverse_tau is None else order.flatten(inverse_tau)
    factors = upstream_factors(g_T, h_T, whole, tau_T, lse_grad_T=lse_grad_T)
    return write_gradient(
        logits,
        factors.a_T,
        factors.b_T,
        entry_T=factors.entry_T,
        hit_T=factors.hit_T,
        live_T=factors.live_T,
        target_T=order.flatten(targets) - job.shard.start,
        lse_T=whole.lse,
        inverse_tau_T=tau_T,
        order=order,
        width=job.shard.width,
        reuse=job.reuse_logits,
        backend=job.backend,
        chunk_elements=job.chunk_elements,
    )
