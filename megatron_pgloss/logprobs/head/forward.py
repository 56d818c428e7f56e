"""The forward half of the fused head, and what both of its autograd nodes share.

Shapes: `T` rows of the micro-batch, `N` wanted rows, `R` rows of one chunk, `H` hidden, `Vl` columns of the shard,
`C` statistics per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.logprobs.rows.per_row import maths_dtype
from megatron_pgloss.logprobs.rows.sweep import measure, write_gradient
from megatron_pgloss.logprobs.upstream import Upstream
from megatron_pgloss.logprobs.vocab.merge import Merged, merge
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
    keep: bool


class WantedRows(NamedTuple):
    """Hidden state, target and 1/tau of the wanted rows."""

    hidden_NH: Tensor
    target_N: Tensor
    inverse_tau_N: Tensor | None


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


def row_stats(z_RV: Tensor, rows: WantedRows, part: slice, job: HeadJob) -> Tensor:
    """This shard's statistics of a chunk of logits, float64 [R, C]."""
    return measure(
        z_RV,
        rows.target_N[part] - job.shard.start,
        None if rows.inverse_tau_N is None else rows.inverse_tau_N[part],
        order=RowOrder.of(z_RV),
        width=job.shard.width,
        entropy=job.entropy,
        chunk_elements=job.chunk_elements,
    )


def write_rows(
    z_RV: Tensor, rows: WantedRows, index: slice | Tensor, factors: Upstream, whole: Merged, job: HeadJob
) -> None:
    """Overwrite logits by their gradient. ``index`` says which of the wanted rows the logits belong to."""
    tau_N = rows.inverse_tau_N
    write_gradient(
        z_RV, factors.a_T, factors.b_T, entry_T=factors.entry_T, hit_T=factors.hit_T, live_T=factors.live_T,
        target_T=rows.target_N[index] - job.shard.start, lse_T=whole.lse[index],
        inverse_tau_T=None if tau_N is None else tau_N[index], order=RowOrder.of(z_RV), width=job.shard.width,
        reuse=True, chunk_elements=job.chunk_elements,
    )  # fmt: skip


def run_forward(rows: WantedRows, weight: Tensor, job: HeadJob) -> tuple[Merged, Tensor | None]:
    """Statistics of all wanted rows, merged by one collective; and the logits [N, Vl] where ``job.keep``, else None."""
    count, columns = rows.hidden_NH.size(0), weight.size(0)
    stats_NC = weight.new_empty(count, 3 if job.entropy else 2, dtype=torch.float64)
    kept_NV = weight.new_empty(count, columns) if job.keep else None
    buffer_RV = None if job.keep else weight.new_empty(min(count, job.chunk_tokens), columns)
    for part in chunks(count, job.chunk_tokens):
        z_RV = kept_NV[part] if kept_NV is not None else _front(buffer_RV, part)
        torch.mm(rows.hidden_NH[part], weight.t(), out=z_RV)
        stats_NC[part] = row_stats(z_RV, rows, part, job)
    return merge(stats_NC, rows.target_N, job.shard), kept_NV


def spread(value_N: Tensor, count: int, job: HeadJob, like: Tensor) -> Tensor:
    """Spread [N] values of the wanted rows to [T], 0 at all other rows, in the dtype of the maths on ``like``."""
    out = torch.zeros(count, dtype=maths_dtype(like), device=like.device)
    if job.rows is None:
        return out.copy_(value_N)
    return out.index_copy_(0, job.rows, value_N.to(out.dtype))


def _front(buffer_RV: Tensor | None, part: slice) -> Tensor:
    assert buffer_RV is not None
    return buffer_RV[: part.stop - part.start]
