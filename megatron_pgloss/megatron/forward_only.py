"""Scoring rollouts through Megatron's own schedule, forward-only. `T` tokens of this rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_pgloss.errors import Caught, DataError
from megatron_pgloss.megatron import outputs
from megatron_pgloss.megatron.call import Boundaries
from megatron_pgloss.megatron.runtime import Runtime, as_chunks
from megatron_pgloss.planning import MicroBatch, Plan
from megatron_pgloss.planning.carried import Carried
from megatron_pgloss.rollouts import TokenBatch, broken
from megatron_pgloss.scoring import decided, gather_tokens, into_batches
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.words import nearest

SCORED = ("old", "ref", "rollout", "values")
"""Streams that a scoring pass sets, beside those of the references that the spec names."""


def score(
    runtime: Runtime,
    batches: Sequence[TokenBatch],
    model: Any,
    into: str,
    under: AbstractContextManager[Any] | None,
) -> list[TokenBatch]:
    """The batches with stream ``into`` by ``model`` (None: the step's own): log-probs of every target, or values. The
    result is there on every rank. A collective.

    Args:
        under: a context that is entered for the pass.

    Raises:
        DataError: the spec reads no stream ``into``, or entering the context failed on a rank; on every rank.
    """
    with ExitStack() as stack:
        with Caught() as here:
            _check_into(into, runtime.spec)
            if under is not None:
                stack.enter_context(under)
        if here.error is not None:
            batches = [broken(here.error)]  # raised by the plan, on every rank
        made = runtime.make_plan(batches, None, agreed={"into": into})
        chunks = runtime.chunks if model is None else as_chunks(model)
        if into == "values":

            def values(micro: MicroBatch, output: Any) -> list[Tensor]:
                return [outputs.values(micro, output, beside=False)]

            return into_batches(batches, whole_pass(runtime, made, chunks, values, outputs.for_values)[0], into)
        return into_batches(batches, whole_pass(runtime, made, chunks, _logprobs(runtime, entropy=False))[0], into)


def _check_into(into: str, spec: LossSpec) -> None:
    known = (*SCORED, *(name for name in spec.references if name not in SCORED))
    if into not in known:
        fix = nearest(str(into), known) or f"a component that reads it, as KL(to={into!r})"
        raise DataError(f"score(into={into!r})", expected=" | ".join(known), fix=fix)


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
        read: a function that makes streams ``[b, s]`` of a micro-batch from the model's output.
        part: a function that takes from the model's output the part that ``read`` reads.
        streams: the number of streams that ``read`` gives.

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
        # Eval mode turns dropout off and leaves router statistics alone: a train-mode pass would count tokens twice.
        chunk.eval()
    try:
        # Megatron's forward-only schedules leave autograd on: without this every graph would be built and kept.
        with torch.no_grad():
            return run_forward(runtime, made, forward_step, chunks)
    finally:
        # Each module gets its own mode back, because the trainer may keep a part of the model in eval mode.
        for module, was in training:
            module.training = was


def settle(runtime: Runtime, made: Plan) -> None:
    """Record the log-probs that the loss saw, for rows in their first update, after an update with ``old="record"``:
    whole rows, on every rank. It does nothing where a replica has no such row.
    """
    recorder = made.ledger.recorder
    if recorder is None or recorder.batch is None or not recorder.wanted:
        return
    values_T = torch.zeros(recorder.batch.tokens_T.numel(), dtype=runtime.logprob_dtype)
    if runtime.layout.last_stage:
        values_T = recorder.laid_out()[0].to(values_T.dtype)
    recorder.settle(whole_rows(values_T, runtime))


def run_forward(runtime: Runtime, made: Plan, forward_step: Any, chunks: list[Any]) -> list[Any]:
    """Run ``made``'s micro-batches through Megatron's schedule, forward-only.

    Returns:
        What the loss function returned for each micro-batch, on the last stage; ``[]`` on the others.

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
