"""The fused head that computes its gradient in the forward pass: three GEMMs, and memory for one chunk of logits.

Shapes: `T` rows of the micro-batch, `N` wanted rows, `R` rows of one chunk, `H` hidden, `Vl` columns of the shard.

A token-level objective's gradients by a token's log-prob and entropy (g, g_H) are known as soon as the two numbers are,
up to one factor F that the schedule, the wrapper and a loss scale put on the whole micro-batch later. The backward pass
is linear in F: forward keeps dX and dW for F = 1; backward finds F by comparing the gradients that arrive with those
that forward assumed, checks that all tokens agree on F, and multiplies dX and dW by it. Nothing is added to
``main_grad`` before that, so a forward pass without a backward pass leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import UnsupportedError
from megatron_pgloss.logprobs.head.backward import InputGradient, check_once
from megatron_pgloss.logprobs.head.forward import HeadJob, WantedRows, chunks, gather_rows, logit_gradient, row_stats
from megatron_pgloss.logprobs.head.gemm import logit_dtype, write_logits
from megatron_pgloss.logprobs.head.stored import Readable
from megatron_pgloss.logprobs.head.wgrad import WeightGrad, accumulate
from megatron_pgloss.logprobs.upstream import upstream_factors
from megatron_pgloss.logprobs.vocab.merge import Merged, merge

LossGradients = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""A function from log-prob and entropy (or None) of every token to the loss's gradients by both."""


class PlannedHead(torch.autograd.Function):
    """Maps (hidden, weight, targets, 1/tau, job, upstream) to (log-prob, entropy or None)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, inverse_tau: Tensor | None, job: HeadJob,
        upstream: LossGradients,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """For each chunk: compute logits, merge their statistics by one collective, compute the gradient, dX and dW."""
        rows = gather_rows(hidden, targets, inverse_tau, job)
        run = _Forward(rows, weight, targets.size(0), job, upstream, *ctx.needs_input_grad[:2])
        for part in chunks(rows.hidden_NH.size(0), job.chunk_tokens):
            run.chunk(part)
        ctx.save_for_backward(weight)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.run, ctx.spent = job, run, False
        return run.logprob_T.clone(), None if run.entropy_T is None else run.entropy_T.clone()

    @staticmethod
    def backward(ctx: Any, g_T: Tensor | None, h_T: Tensor | None) -> tuple[Tensor | None, ...]:
        """Multiply dX and dW by the factor that the schedule, the wrapper and the loss scale put on the loss."""
        check_once(ctx)
        (weight,) = ctx.saved_tensors
        run: _Forward = ctx.run
        ctx.run = None
        # A gradient that arrives at a row that was not wanted is dropped.
        wanted = slice(None) if ctx.job.rows is None else ctx.job.rows
        arrived, assumed = (
            [None if x is None else x[wanted] for x in pair] for pair in ((g_T, h_T), (run.g_T, run.h_T))
        )
        factor = _common_factor(arrived, assumed)
        dw = None
        if run.dw_VH is not None:
            sink = WeightGrad(weight, ctx.job.into_main_grad, 1)
            sink.add_sum(run.dw_VH, factor)
            dw = sink.result()
        dx_TH = None if run.dx_TH is None else (run.dx_TH * factor.to(run.dx_TH.dtype)).to(weight.dtype)
        return InputGradient(dx_TH, ctx.job).result(), dw, None, None, None, None


class _Forward:
    """One forward pass over chunks, and the tensors that it leaves for backward."""

    def __init__(
        self, rows: WantedRows, weight: Tensor, count: int, job: HeadJob, upstream: LossGradients, for_hidden: bool,
        for_weight: bool,
    ) -> None:  # fmt: skip
        self._rows, self._weight, self._job, self._upstream = rows, weight, job, upstream
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.logprob_T = torch.zeros(count, dtype=wide, device=weight.device)
        self.entropy_T = torch.zeros_like(self.logprob_T) if job.entropy else None
        self.g_T = torch.zeros_like(self.logprob_T)
        self._chunk_2T = self.logprob_T.new_zeros(2, count)
        self.h_T = torch.zeros_like(self.logprob_T) if job.entropy else None
        self.dx_TH = torch.zeros(count, weight.size(1), dtype=wide, device=weight.device) if for_hidden else None
        self.dw_VH = torch.zeros_like(weight, dtype=wide) if for_weight else None
        size = min(rows.hidden_NH.size(0), job.chunk_tokens), weight.size(0)
        self._buffer_RV = weight.new_empty(size, dtype=logit_dtype(weight.dtype, job.head_dtype))

    def chunk(self, part: slice) -> None:
        """Run one chunk of wanted rows, from its logits to its share of dX and dW."""
        rows, job = self._rows, self._job
        z_RV = self._buffer_RV[: part.stop - part.start]
        here = rows.take(part)
        write_logits(here.hidden_NH, self._weight, job.head_dtype, z_RV)
        whole = merge(row_stats(z_RV, here, job), here.target_N, job.shard)
        place_R = torch.arange(part.start, part.stop, device=z_RV.device) if job.rows is None else job.rows[part]
        g_R, h_R = self._gradients(whole, place_R)
        # Scaled by a power of two, which is exact: a 16-bit gradient would lose gradients of 1e-8, which only a later
        # loss scale makes large enough.
        exponent = _exponent(g_R, h_R)
        g_R, h_R = torch.ldexp(g_R, -exponent), None if h_R is None else torch.ldexp(h_R, -exponent)
        factors = upstream_factors(g_R, h_R, whole, here.inverse_tau_N)
        read = Readable(z_RV, whole.lse, here.inverse_tau_N)
        dz_RV = logit_gradient(read, here.target_N, factors, job, self._weight.dtype)
        scale = torch.ldexp(torch.ones_like(exponent, dtype=self.g_T.dtype), exponent)
        if self.dx_TH is not None:
            self.dx_TH.index_copy_(0, place_R, dz_RV.mm(self._weight).to(self.dx_TH.dtype) * scale)
        if self.dw_VH is not None:
            accumulate(self.dw_VH, dz_RV, here.hidden_NH, float(scale))

    def _gradients(self, whole: Merged, place_R: Tensor) -> tuple[Tensor, Tensor | None]:
        """The objective's gradients at this chunk's tokens. All other tokens are handed over as 0, and their gradients
        ignored.
        """
        logprob_T = self._alone(place_R, whole.logprob, self.logprob_T, 0)
        entropy_T = None
        if self.entropy_T is not None and whole.entropy is not None:
            entropy_T = self._alone(place_R, whole.entropy, self.entropy_T, 1)
        with torch.enable_grad():
            g_T, h_T = self._upstream(logprob_T, entropy_T)
        g_R, h_R = g_T[place_R], None if self.h_T is None or h_T is None else h_T[place_R]
        self._chunk_2T[:, place_R] = 0
        self.g_T[place_R] = g_R.to(self.g_T.dtype)
        if self.h_T is not None and h_R is not None:
            self.h_T[place_R] = h_R.to(self.h_T.dtype)
        return g_R.double(), None if h_R is None else h_R.double()

    def _alone(self, place_R: Tensor, found_R: Tensor, all_T: Tensor, which: int) -> Tensor:
        """Write this chunk's numbers into ``all_T``, and return them among zeros, [T], in memory that every chunk
        reuses.
        """
        all_T[place_R] = self._chunk_2T[which, place_R] = found_R.to(all_T.dtype)
        return self._chunk_2T[which].detach()


def _exponent(g_R: Tensor, h_R: Tensor | None) -> Tensor:
    """Binary exponent of the largest gradient, int32 0-d; that of 1.0 where all are 0 or one is not finite."""
    peak = g_R.abs().amax() if h_R is None else torch.maximum(g_R.abs().amax(), h_R.abs().amax())
    usable = (peak > 0) & torch.isfinite(peak)
    return torch.frexp(torch.where(usable, peak, 1.0)).exponent


def _common_factor(arrived: list[Tensor | None], assumed: list[Tensor | None]) -> Tensor:
    """The one factor F with ``arrived = F assumed``, float64 0-d.

    Raises:
        UnsupportedError: there is no such factor.
    """
    pairs = [
        (torch.zeros_like(b) if a is None else a, b) for a, b in zip(arrived, assumed, strict=True) if b is not None
    ]
    came, guess = (torch.cat([pair[i].double() for pair in pairs]) for i in (0, 1))
    if guess.numel() == 0:
        return guess.new_ones(())
    largest = guess.abs().argmax()
    factor = torch.where(guess[largest] == 0, 1.0, came[largest] / guess[largest])
    # The bound is many roundings of the streams' own dtype; a wrong factor or another loss is off by orders more.
    eps = torch.finfo(arrived[0].dtype if arrived[0] is not None else torch.float32).eps
    gap = (came - factor * guess).abs().amax()
    if not bool(gap <= 64 * eps * came.abs().amax()):
        raise UnsupportedError(
            "mode='forward': the gradient that arrived is not the one that the forward pass took",
            expected="the same objective on the same log-probs, times one factor for the whole micro-batch",
            got=f"largest difference {float(gap):.3g} at gradients of {float(came.abs().amax()):.3g}",
            fix="mode='keep' or 'recompute' for losses that are not a function of each token alone",
        )
    return factor
