"""The forward half of the fused head, and what both of its autograd nodes share.

Shapes: `T` rows of the micro-batch, `N` wanted rows, `R` rows of one chunk, `H` hidden, `Vl` columns of the shard,
`C` statistics per row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.logprobs.head.gemm import HeadDtype, logit_dtype, write_logits
from megatron_pgloss.logprobs.head.stored import Readable, Store, Stored, empty_store, encode
from megatron_pgloss.logprobs.rows.per_row import maths_dtype
from megatron_pgloss.logprobs.rows.sweep import measure, write_gradient
from megatron_pgloss.logprobs.upstream import Upstream
from megatron_pgloss.logprobs.vocab.merge import Merged, concatenated, merge, merge_with_peak
from megatron_pgloss.logprobs.vocab.order import RowOrder
from megatron_pgloss.logprobs.vocab.shard import VocabShard


class HeadJob(NamedTuple):
    """The settings of one pass: all of its inputs but the tensors that it differentiates or reads per token."""

    shard: VocabShard
    entropy: bool
    rows: Tensor | None
    live: Tensor | None
    """int64 [L], ascending: places among the wanted rows of those that may get a gradient; None: all may."""
    group: dist.ProcessGroup | None
    sequence_parallel: bool
    into_main_grad: bool
    chunk_tokens: int
    chunk_elements: int
    store: Store
    head_dtype: HeadDtype


class WantedRows(NamedTuple):
    """Hidden state, target and 1/tau of the wanted rows."""

    hidden_NH: Tensor
    target_N: Tensor
    inverse_tau_N: Tensor | None

    def take(self, index: slice | Tensor) -> WantedRows:
        """Some of them."""
        return WantedRows(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]


def gather_rows(hidden: Tensor, targets: Tensor, inverse_tau: Tensor | None, job: HeadJob) -> WantedRows:
    """Gather hidden states over the sequence-parallel ranks and pick the wanted rows."""
    whole = gather_sequence(hidden, job)
    if job.rows is None:
        return WantedRows(whole, targets, inverse_tau)
    tau = None if inverse_tau is None else inverse_tau[job.rows]
    return WantedRows(whole.index_select(0, job.rows), targets[job.rows], tau)


def gather_sequence(hidden: Tensor, job: HeadJob) -> Tensor:
    """Hidden states [T, H], all-gathered where each rank holds a shard along T."""
    if not job.sequence_parallel:
        return hidden
    whole = hidden.new_empty(hidden.size(0) * job.shard.size, hidden.size(1))
    dist.all_gather_into_tensor(whole, hidden.contiguous(), group=job.group)
    return whole


def chunks(count: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most ``step`` rows that cover ``count`` rows; none where ``count`` is 0."""
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def row_stats(z_RV: Tensor, rows: WantedRows, job: HeadJob) -> Tensor:
    """This shard's statistics of the logits of ``rows``, float64 [R, C]."""
    return measure(
        z_RV,
        rows.target_N - job.shard.start,
        rows.inverse_tau_N,
        order=RowOrder.of(z_RV),
        width=job.shard.width,
        entropy=job.entropy,
        chunk_elements=job.chunk_elements,
    )


def logit_gradient(read: Readable, target_R: Tensor, factors: Upstream, job: HeadJob, dtype: torch.dtype) -> Tensor:
    """The logits' gradient in ``dtype``: over the logits where they have that dtype, else in new memory."""
    return write_gradient(
        read.z_RV, factors.a_T, factors.b_T, entry_T=factors.entry_T, hit_T=factors.hit_T, live_T=factors.live_T,
        target_T=target_R - job.shard.start, lse_T=read.lse_R, inverse_tau_T=read.inverse_tau_R,
        order=RowOrder.of(read.z_RV), width=job.shard.width, reuse=read.z_RV.dtype == dtype, dtype=dtype,
        chunk_elements=job.chunk_elements,
    )  # fmt: skip


def run_forward(rows: WantedRows, weight: Tensor, job: HeadJob) -> tuple[Merged, Stored | None]:
    """Statistics of all wanted rows over the whole vocabulary, and what ``job.store`` stores of their logits.

    One collective; one for each chunk where logits are stored relative to their row's largest, which must be known.
    """
    count, columns = rows.hidden_NH.size(0), weight.size(0)
    dtype = logit_dtype(weight.dtype, job.head_dtype)
    stats_NC = weight.new_empty(count, 3 if job.entropy else 2, dtype=torch.float64)
    stored = empty_store(count, weight, dtype, job.store)
    exact = stored is not None and stored.lse_N is None
    buffer_RV = weight.new_empty(0 if exact else min(count, job.chunk_tokens), columns, dtype=dtype)
    merged: list[Merged] = []
    for part in chunks(count, job.chunk_tokens):
        z_RV = stored.code_NV[part] if stored is not None and exact else buffer_RV[: part.stop - part.start]
        here = rows.take(part)
        write_logits(here.hidden_NH, weight, job.head_dtype, z_RV)
        stats_NC[part] = row_stats(z_RV, here, job)
        if stored is not None and not exact:
            merged.append(_store(stored, part, z_RV, stats_NC[part], here, job))
    if merged:
        return concatenated(merged), stored
    return merge(stats_NC, rows.target_N, job.shard), stored


def _store(stored: Stored, part: slice, z_RV: Tensor, stats_RC: Tensor, rows: WantedRows, job: HeadJob) -> Merged:
    """Store a chunk relative to each row's largest logit, and return its merged statistics. ``z_RV`` is used up."""
    u_RV = z_RV.to(maths_dtype(z_RV))
    if rows.inverse_tau_N is not None:
        u_RV.mul_(rows.inverse_tau_N[:, None].to(u_RV.dtype))
    width = job.shard.width
    peak_R = u_RV[:, :width].amax(1).double() if width else stats_RC.new_full((u_RV.size(0),), -math.inf)
    whole, peak_R = merge_with_peak(stats_RC, peak_R, rows.target_N, job.shard)
    code_RV, lse_N = stored
    assert lse_N is not None
    encode(code_RV[part, :width], u_RV[:, :width], peak_R)
    lse_N[part] = whole.lse - peak_R
    return whole


def spread(value_N: Tensor, count: int, job: HeadJob, like: Tensor) -> Tensor:
    """Spread [N] values of the wanted rows to [T], 0 at all other rows, in the dtype of the maths on ``like``."""
    out = torch.zeros(count, dtype=maths_dtype(like), device=like.device)
    if job.rows is None:
        return out.copy_(value_N)
    return out.index_copy_(0, job.rows, value_N.to(out.dtype))
