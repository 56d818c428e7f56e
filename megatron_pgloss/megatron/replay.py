"""Scoring rollouts through Megatron's own schedule, forward-only. `T` tokens of this rank's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_pgloss.planning import MicroBatch, Plan
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.scoring import gather_tokens, into_batches

if TYPE_CHECKING:
    from megatron_pgloss.megatron.step import PolicyLossStep


def score(
    step: PolicyLossStep, made: Plan, batches: Sequence[TokenBatch], chunks: list[Any], into: str
) -> list[TokenBatch]:
    """Log-probs of every target under ``chunks``' weights, into stream ``into`` of the batches, on every rank."""
    micros: list[MicroBatch] = []

    def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        micro = next(data_iterator)
        return step.run_model(micro, model), lambda logits, non_loss_data=True: _keep(micro, logits)

    def _keep(micro: MicroBatch, logits: Tensor) -> Tensor:
        micros.append(micro)
        return step.logprobs(micro, logits, entropy=False).logprob

    training = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        # Dropout off, and router statistics untouched: a train-mode pass would count tokens twice.
        chunk.eval()
    try:
        # Megatron's forward-only schedules leave autograd on: without this every graph would be built and kept.
        with torch.no_grad():
            scores = run_forward(step, made, forward_step, chunks)
    finally:
        # Module by module: a part may be frozen in eval mode by its owner.
        for module, was in training:
            module.training = was
    total = 0 if made.batch is None else made.batch.tokens_T.numel()
    double = step.config.params_dtype == torch.float64
    values_T = gather_tokens(zip(micros, scores, strict=True), total, torch.float64 if double else torch.float32)
    return into_batches(batches, whole_rows(values_T, step), into)


def run_forward(step: PolicyLossStep, made: Plan, forward_step: Any, chunks: list[Any]) -> list[Any]:
    """What the loss function returned per micro-batch on the last stage; ``[]`` on the others."""
    layout, groups = step.layout, {}
    if layout.collection is not None:
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        groups = {"pg_collection": layout.collection}
        if layout.pp_size > 1:
            groups["p2p_communicator"] = P2PCommunicator(layout.pp, step.config)
    run = get_forward_backward_func(layout.pp_size, len(chunks) if len(chunks) > 1 else None)
    return run(  # type: ignore[no-any-return]
        forward_step_func=forward_step,
        data_iterator=step._iterators(made),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=made.num_microbatches,
        seq_length=made.width,
        micro_batch_size=made.rows_per_microbatch,
        forward_only=True,
        collect_non_loss_data=True,
        **groups,
    )


def whole_rows(values_T: Tensor, step: PolicyLossStep) -> Tensor:
    """Join the shards of context-parallel ranks and send them from the last stage to all: CPU float [T] on every
    rank.
    """
    layout = step.layout
    values_T = values_T.to(layout.device)
    if layout.cp is not None and layout.last_stage:
        # Each position is held by one rank and 0 elsewhere, so the sum is exact.
        dist.all_reduce(values_T, group=layout.cp)
    if layout.pp is not None:
        dist.broadcast(values_T, src=dist.get_global_rank(layout.pp, layout.pp_size - 1), group=layout.pp)
    return values_T.cpu()
