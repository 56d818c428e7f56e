"""Scoring rollouts through Megatron's own schedule, forward-only. `T` tokens of this rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_pgloss.megatron import outputs
from megatron_pgloss.megatron.call import Boundaries
from megatron_pgloss.megatron.runtime import Runtime
from megatron_pgloss.planning import MicroBatch, Plan
from megatron_pgloss.planning.carried import Carried
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.scoring import decided, gather_tokens, into_batches

SCORED = ("old", "ref", "rollout", "values")
"""Streams that a scoring pass sets."""


def score(
    runtime: Runtime, made: Plan, batches: Sequence[TokenBatch], chunks: list[Any], into: str
) -> list[TokenBatch]:
    """Log-probs of every target or values by ``chunks``' weights into stream ``into`` of the batches, on every rank."""
    if into == "values":

        def values(micro: MicroBatch, output: Any) -> list[Tensor]:
            return [outputs.values(micro, output, beside=False)]

        return into_batches(batches, whole_pass(runtime, made, chunks, values, outputs.for_values)[0], into)
    return into_batches(batches, whole_pass(runtime, made, chunks, _logprobs(runtime, entropy=False))[0], into)


def statistics_pass(runtime: Runtime, made: Plan) -> Plan:
    """``made`` with everything decided that needs the whole step, from one forward-only pass over it."""
    entropy = runtime.spec.needs_entropy
    streams = whole_pass(runtime, made, runtime.chunks, _logprobs(runtime, entropy=entropy), streams=1 + entropy)
    return decided(made, lambda: (streams[0], streams[1] if entropy else None))


def reference_logits(runtime: Runtime, made: Plan, chunks: list[Any]) -> list[Tensor]:
    """The reference's logits ``[b, s, V/tp]`` of each of ``made``'s micro-batches; ``[]`` before the last stage."""

    def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        output = outputs.for_logprobs(runtime.run_model(next(data_iterator), model))
        return output, lambda logits, non_loss_data=True: logits

    return _frozen(runtime, made, forward_step, chunks)


def _logprobs(runtime: Runtime, *, entropy: bool) -> Callable[[MicroBatch, Any], list[Tensor]]:
    def read(micro: MicroBatch, output: Any) -> list[Tensor]:
        scored = runtime.logprobs(micro, output, entropy=entropy)
        return [part for part in (scored.logprob, scored.entropy) if part is not None]

    return read


def whole_pass(
    runtime: Runtime,
    made: Plan,
    chunks: list[Any],
    read: Callable[[MicroBatch, Any], list[Tensor]],
    part: Callable[[Any], Any] = outputs.for_logprobs,
    streams: int = 1,
) -> list[Tensor]:
    """Run ``made``'s micro-batches forward-only, in eval mode, and join what is read of them to this rank's whole rows.

    Args:
        read: streams ``[b, s]`` of a micro-batch, from the model's output.
        part: of the output, where a model gives several.
        streams: how many ``read`` gives.

    Returns:
        CPU float [T] of each stream, on every rank.
    """
    micros: list[MicroBatch] = []

    def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        micro = next(data_iterator)
        return part(runtime.run_model(micro, model)), lambda output, non_loss_data=True: keep(micro, output)

    def keep(micro: MicroBatch, output: Any) -> list[Tensor]:
        micros.append(micro)
        return read(micro, output)

    scores = _frozen(runtime, made, forward_step, chunks)
    total = 0 if made.batch is None else made.batch.tokens_T.numel()
    dtype = runtime.logprob_dtype
    found = [
        gather_tokens(((micro, one[i]) for micro, one in zip(micros, scores, strict=True)), total, dtype)
        for i in range(streams)
    ]
    return list(whole_rows(torch.stack(found), runtime))


def _frozen(runtime: Runtime, made: Plan, forward_step: Any, chunks: list[Any]) -> list[Any]:
    """`run_forward` in eval mode and without a graph."""
    training = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        # Dropout off, and router statistics untouched: a train-mode pass would count tokens twice.
        chunk.eval()
    try:
        # Megatron's forward-only schedules leave autograd on: without this every graph would be built and kept.
        with torch.no_grad():
            return run_forward(runtime, made, forward_step, chunks)
    finally:
        # Module by module: a part may be frozen in eval mode by its owner.
        for module, was in training:
            module.training = was


def settle(runtime: Runtime, made: Plan) -> None:
    """With ``old="record"``, after an update: give the rows in their first update whole rows of the log-probs that the
    loss saw, on every rank. Nothing where a replica has no such row.
    """
    recorder = made.ledger.recorder
    if recorder is None or recorder.batch is None or not recorder.wanted:
        return
    values_T = torch.zeros(recorder.batch.tokens_T.numel(), dtype=runtime.logprob_dtype)
    if runtime.layout.last_stage:
        values_T = recorder.laid_out()[0].to(values_T.dtype)
    recorder.settle(whole_rows(values_T, runtime))


def run_forward(runtime: Runtime, made: Plan, forward_step: Any, chunks: list[Any]) -> list[Any]:
    """What the loss function returned per micro-batch on the last stage; ``[]`` on the others.

    Raises:
        DataError: packed rows were run without their boundaries on some rank (on every rank alike).
    """
    layout, groups = runtime.layout, {}
    if layout.collection is not None:
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        groups = {"pg_collection": layout.collection}
        if layout.pp_size > 1:
            groups["p2p_communicator"] = P2PCommunicator(layout.pp, runtime.config)
    run = get_forward_backward_func(layout.pp_size, len(chunks) if len(chunks) > 1 else None)
    boundaries = Boundaries()
    found: list[Any] = run(
        forward_step_func=forward_step,
        data_iterator=runtime.iterators(made, boundaries),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=made.num_microbatches,
        seq_length=made.width,
        micro_batch_size=made.rows_per_microbatch,
        forward_only=True,
        collect_non_loss_data=True,
        **groups,
    )
    if runtime.may_miss_boundaries:
        with Carried() as here:
            if (error := runtime.unread(made, boundaries)) is not None:
                raise error
        here.gather(layout.ranks)
    return found


def whole_rows(values_T: Tensor, runtime: Runtime) -> Tensor:
    """Join the shards of context-parallel ranks and send them from the last stage to all: CPU float [..., T] on every
    rank.
    """
    layout = runtime.layout
    values_T = values_T.to(layout.device)
    if layout.cp is not None and layout.last_stage:
        # Each position is held by one rank and 0 elsewhere, so the sum is exact.
        dist.all_reduce(values_T, group=layout.cp)
    if layout.pp is not None:
        dist.broadcast(values_T, src=dist.get_global_rank(layout.pp, layout.pp_size - 1), group=layout.pp)
    return values_T.cpu()
