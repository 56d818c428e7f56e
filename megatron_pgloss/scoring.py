"""After forward-only passes: log-probs of micro-batches are laid out as whole rows, and a step decides from them. `T`
tokens of a rank, `N` positions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.logprobs import TokenLogprobs
from megatron_pgloss.objective.decisions import decide, look
from megatron_pgloss.objective.straddling import with_slopes
from megatron_pgloss.planning import MicroBatch, Plan
from megatron_pgloss.planning.revision import revise
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec.words import closed


def gather_tokens(scored: Iterable[tuple[MicroBatch, Tensor]], total: int, dtype: torch.dtype) -> Tensor:
    """Lay the scores of micro-batches (or shards of them) out as one stream.

    Args:
        scored: each micro-batch with float scores of its shape.
        total: the number T of this rank's tokens.

    Returns:
        CPU float [T]: 0 where no given micro-batch holds the token, so that disjoint shards add up.
    """
    values_T = torch.zeros(total, dtype=dtype)
    for micro, scores in scored:
        real_N = micro.index_N >= 0
        values_T[micro.index_N[real_N]] = scores.detach().reshape(-1).to("cpu", dtype)[real_N]
    return values_T


def into_batches(batches: Sequence[TokenBatch], values_T: Tensor, name: str) -> list[TokenBatch]:
    """The batches with stream ``name`` set from the stream of their concatenation; empty batches stay as they are."""
    out, at = [], 0
    for batch in batches:
        size = batch.tokens_T.numel()
        out.append(batch.with_stream(name, values_T[at : at + size].clone(), add=True) if len(batch) else batch)
        at += size
    return out


@closed
def statistics_pass(plan: Plan, scored: Sequence[TokenLogprobs]) -> Plan:
    """The plan with everything decided that needs the whole step: gates by quantile, second moment or covariance,
    statistics of the policy over prompts and episodes, mean weights, denominators without what gates reject.

    Run the model over ``plan.microbatches()`` forward-only, then call this, then train on the micro-batches of the plan
    it returns. `PolicyLossStep.begin` does all of this by itself. It is a collective of all ranks of the plan: one
    gather over the world, all-reduces of counts over data-parallel ranks (docs/conventions.md), and the plan's own
    gathers once more where a component has ``count_rejected=False``. Where the spec decides nothing over the step, the
    plan comes back as it is.

    Args:
        plan: as `megatron_pgloss.plan` made it.
        scored: one entry per micro-batch, in order, with entropy where `LossSpec.needs_entropy`.

    Raises:
        DataError: there is another number of entries than micro-batches, an entry has the wrong shape, or entropy is
            missing; or what a user's function raised, with its type's name. On every rank alike.
    """
    if not plan.needs_statistics_pass:
        return plan
    return decided(plan, lambda: _whole_rows(plan, list(scored)))


def decided(plan: Plan, rows: Callable[[], tuple[Tensor, Tensor | None]]) -> Plan:
    """The plan that `statistics_pass` returns, from whole rows: ``rows()`` gives log-probs, and the entropy where the
    spec reads it, float [T] on the CPU.
    """
    looked, logp_T, entropy_T = look(plan, rows)
    return with_slopes(revise(plan, decide(plan, looked)), logp_T, entropy_T)


def _whole_rows(plan: Plan, scored: list[TokenLogprobs]) -> tuple[Tensor, Tensor | None]:
    micros = list(plan.microbatches("cpu"))
    if len(scored) != len(micros):
        raise DataError("log-probs of another number of micro-batches", expected=len(micros), got=len(scored))
    assert plan.spec is not None
    for micro, lp in zip(micros, scored, strict=True):
        if plan.spec.needs_entropy and lp.entropy is None:
            raise DataError("the spec reads the entropy, but none came", fix="token_logprobs(..., entropy=True)")
        if tuple(lp.logprob.shape) != micro.shape:
            raise DataError(
                "log-probs have the wrong shape", expected=list(micro.shape), got=list(lp.logprob.shape),
                where=f"micro-batch {micro.number}",
            )  # fmt: skip
    total = plan.table["tokens"].numel()
    dtype = torch.float64 if any(lp.logprob.dtype == torch.float64 for lp in scored) else torch.float32
    logp_T = gather_tokens(((m, lp.logprob) for m, lp in zip(micros, scored, strict=True)), total, dtype)
    if not plan.spec.needs_entropy:
        return logp_T, None
    pairs = [(m, lp.entropy) for m, lp in zip(micros, scored, strict=True) if lp.entropy is not None]
    return logp_T, gather_tokens(pairs, total, dtype)
