"""The fused head that computes its gradient in the backward pass, from logits that were stored or are computed again.

Shapes: `T` rows of the micro-batch, `N` wanted rows, `L` wanted rows that may get a gradient, `R` rows of one chunk,
`H` hidden, `Vl` columns of the shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.errors import UnsupportedError
from megatron_pgloss.logprobs.head.forward import (
    HeadJob,
    WantedRows,
    chunks,
    gather_rows,
    logit_gradient,
    run_forward,
    spread,
)
from megatron_pgloss.logprobs.head.gemm import logit_dtype, write_logits
from megatron_pgloss.logprobs.head.stored import Readable, Stored, decode
from megatron_pgloss.logprobs.head.wgrad import WeightGrad
from megatron_pgloss.logprobs.rows.per_row import maths_dtype
from megatron_pgloss.logprobs.upstream import Upstream, upstream_factors
from megatron_pgloss.logprobs.vocab.merge import Merged


class BackwardHead(torch.autograd.Function):
    """Maps (hidden, weight, targets, 1/tau, job, whether a backward may follow) to (log-prob, entropy or None)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, inverse_tau: Tensor | None, job: HeadJob, train: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits and their row statistics; merge the shards' statistics by one collective."""
        if not train:
            job = job._replace(store="none")  # no backward will read the logits
        rows = gather_rows(hidden, targets, inverse_tau, job)
        whole, stored = run_forward(rows, weight, job)
        if train:
            ctx.save_for_backward(hidden, weight, targets.clone(), inverse_tau, *(stored or (None, None)), *whole)
            ctx.set_materialize_grads(False)
            ctx.job, ctx.spent = job, False
        count = targets.size(0)
        entropy = None if whole.entropy is None else spread(whole.entropy, count, job, weight)
        return spread(whole.logprob, count, job, weight), entropy

    @staticmethod
    def backward(ctx: Any, g_T: Tensor | None, h_T: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute dX and dW over the rows that have a gradient; reduce dX over the ranks once."""
        check_once(ctx)
        hidden, weight, targets, inverse_tau, code_NV, lse_N, *merged = ctx.saved_tensors
        job: HeadJob = ctx.job
        stored = None if code_NV is None else Stored(code_NV, lse_N)
        whole = Merged(*merged)
        rows = gather_rows(hidden, targets, inverse_tau, job)
        g_N, h_N = (None if g is None else g if job.rows is None else g[job.rows] for g in (g_T, h_T))
        factors = upstream_factors(g_N, h_N, whole, rows.inverse_tau_N)
        if job.live is not None:
            factors = _spoiled(factors, job.live)
        back = _Backward(rows, weight, stored, factors, whole, job, *ctx.needs_input_grad[:2])
        dx, dw = back.run(targets.size(0))
        return dx, dw, None, None, None, None


class _Backward:
    """The state and the loop of one backward pass."""

    def __init__(
        self, rows: WantedRows, weight: Tensor, stored: Stored | None, factors: Upstream, whole: Merged, job: HeadJob,
        for_hidden: bool, for_weight: bool,
    ) -> None:  # fmt: skip
        self.rows, self.weight, self.stored = rows, weight, stored
        self.factors, self.whole, self.job = factors, whole, job
        self.for_hidden, self.for_weight = for_hidden, for_weight

    def run(self, count: int) -> tuple[Tensor | None, Tensor | None]:
        """Return dX of this rank's rows, and the tensor that autograd gets for the weight."""
        # Which rows may have a gradient is known before; to find those that have one would be a host sync.
        live_L, total = self.job.live, self.rows.hidden_NH.size(0)
        if live_L is None or live_L.numel() == total:
            live_L, number = None, total
        else:
            number = live_L.numel()
        # Stored logits of the weight's own dtype are overwritten by their gradient. Where no row is left out they need
        # no chunks, so that dX and dW are one GEMM each.
        in_place = self.stored is not None and self.stored.code_NV.dtype == self.weight.dtype
        at_once = number if live_L is None and in_place else 0
        parts = list(chunks(number, max(at_once, self.job.chunk_tokens)))
        sink = WeightGrad(self.weight, self.job.into_main_grad, len(parts)) if self.for_weight else None
        dx_TH = self.weight.new_zeros(count, self.weight.size(1)) if self.for_hidden else None
        reduction = InputGradient(dx_TH, self.job)
        for part in parts:
            index = part if live_L is None else live_L[part]
            dz_RV = self._logit_gradient(index)
            if dx_TH is not None:
                dx_TH[index if self.job.rows is None else self.job.rows[index]] = dz_RV.mm(self.weight)
            if part is parts[-1]:
                reduction.start()  # the reduction runs while the last weight gradient is computed
            if sink is not None:
                sink.add(dz_RV, self.rows.hidden_NH[index])
        return reduction.result(), None if sink is None else sink.result()

    def _logit_gradient(self, index: slice | Tensor) -> Tensor:
        rows, weight, job = self.rows.take(index), self.weight, self.job
        if self.stored is not None:  # a slice where no row is left out (a view), else a tensor (a copy of the chunk)
            read = decode(self.stored, index, self.whole.lse, self.rows.inverse_tau_N, maths_dtype(weight))
        else:
            dtype = logit_dtype(weight.dtype, job.head_dtype)
            z_RV = weight.new_empty(rows.hidden_NH.size(0), weight.size(0), dtype=dtype)
            write_logits(rows.hidden_NH, weight, job.head_dtype, z_RV)
            read = Readable(z_RV, self.whole.lse[index], rows.inverse_tau_N)
        return logit_gradient(read, rows.target_N, self.factors.take(index), job, weight.dtype)


def _spoiled(factors: Upstream, live_L: Tensor) -> Upstream:
    """``factors``, of NaN where a gradient arrived at a row that was said to get none."""
    astray = factors.live_T.index_fill(0, live_L, False).any()
    nan = torch.where(astray, torch.nan, 0.0)
    return factors._replace(a_T=factors.a_T + nan, entry_T=factors.entry_T + nan, live_T=factors.live_T | astray)


class InputGradient:
    """Reduces dX over the tensor-parallel ranks: reduce-scatter to sequence shards, or all-reduce. Every rank enters
    it.
    """

    def __init__(self, dx_TH: Tensor | None, job: HeadJob) -> None:
        self._dx, self._job, self._handle, self._out = dx_TH, job, None, dx_TH
        self._started = dx_TH is None or job.shard.size == 1

    def start(self) -> None:
        """Begin the reduction."""
        if self._started or self._dx is None:
            return
        self._started = True
        job = self._job
        if job.sequence_parallel:
            self._out = self._dx.new_empty(self._dx.size(0) // job.shard.size, self._dx.size(1))
            self._handle = dist.reduce_scatter_tensor(self._out, self._dx, group=job.group, async_op=True)
        else:
            self._handle = dist.all_reduce(self._dx, group=job.group, async_op=True)

    def result(self) -> Tensor | None:
        """The reduced gradient."""
        self.start()  # not begun yet where no row had a gradient
        if self._handle is not None:
            self._handle.wait()
        return self._out


def check_once(ctx: Any) -> None:
    """Refuse a second backward through the same node, and a backward that is to be differentiated."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "the fused head has first derivatives only",
            got="a backward with create_graph=True",
            fix="call backward or autograd.grad without create_graph",
        )
    if ctx.spent:
        raise UnsupportedError(
            "second backward through the fused head: the first one used up its buffers",
            fix="add the losses up and call backward once",
        )
    ctx.spent = True
