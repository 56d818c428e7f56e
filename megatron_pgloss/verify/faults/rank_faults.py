"""Faults that need several ranks: Megatron's factors, context and tensor parallelism, packing, metrics over ranks.

`N` positions of a micro-batch or of its shard. Each replacement is close to a mistake that some trainer had; none
raises on one rank alone.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from megatron_pgloss.verify.faults.fault import (
    AUXILIARY,
    AVERAGING,
    CP,
    DP,
    EVERYWHERE,
    EXPERTS,
    LEARNED,
    PACKED,
    PADDED_VOCABULARY,
    PER_TOKEN,
    PP,
    SUMMED,
    TP,
    Fault,
    Place,
)


def _one(right: Any, at: Place) -> Any:
    return lambda *args, **kwargs: 1.0


def _cp_twice(right: Any, at: Place) -> Any:
    return lambda *args: right(*args) * at.cp


def _unscaled_buffers(right: Any, at: Place) -> Any:
    def wrong(chunk: Any) -> Any:
        return [
            (SimpleNamespace(gradient_scaling_factor=1.0, grad_data=buffer.grad_data), expert)
            for buffer, expert in right(chunk)
        ]

    return wrong


def _not_divided(right: Any, at: Place) -> Any:
    return lambda config, layout, count, **more: right(config, layout, count, **more) * count


def _dense_group(right: Any, at: Place) -> Any:
    return lambda chunk: at.dp * at.cp


def _without_cp(right: Any, at: Place) -> Any:
    return lambda self: self.dp_size


def _own_routed(right: Any, at: Place) -> Any:
    return lambda made, layout, **more: right(made, layout, **more) // at.dp


def _shared_scale(right: Any, at: Place) -> Any:
    def wrong(self: Any, batches: Any, **more: Any) -> Any:
        made = right(self, batches, **more)
        # A factor of the policy loss is applied through Megatron's loss scale, which scales every loss of the model.
        self.config.grad_scale_func = lambda loss: loss * 3
        self.wrapper_factor *= 3
        return made

    return wrong


def _view(right: Any, at: Place) -> Any:
    def wrong(self: Any, data_iterator: Any, model: Any, *more: Any, **named: Any) -> Any:
        output, loss_func = right(self, data_iterator, model, *more, **named)

        def loss(logits: Any, **named: Any) -> Any:
            value, *rest = loss_func(logits, **named)
            first, _ = torch.stack([value, value.detach()])  # unpacking gives views
            return first, *rest

        return output, loss

    return wrong


def _alias(right: Any, at: Place) -> Any:
    def wrong(self: Any, micro: Any) -> Any:
        right_loss = right(self, micro)

        def loss(logits: Any, **named: Any) -> Any:
            value, *count, report = right_loss(logits, **named)
            name = next(iter(report))  # a component's own loss
            value = value + (report[name][0] - value.detach())
            return value, *count, {**report, name: value.detach().expand(2)}

        return loss

    return wrong


def _rolled(right: Any, at: Place) -> Any:
    return lambda self: self.input_ids.roll(-1, dims=-1)


def _along_the_row(right: Any, at: Place) -> Any:
    return lambda self: torch.arange(self.shape[1], device=self.device).expand(self.shape)


def _contiguous(right: Any, at: Place) -> Any:
    def wrong(length: int, rank: int, size: int) -> Any:
        position_K, chunk_K = right(length, rank, size)
        return torch.arange(len(position_K)) + rank * len(position_K), chunk_K

    return wrong


def _cut_as_one(right: Any, at: Place) -> Any:
    def wrong(micro: Any, rank: int, size: int, group: Any) -> Any:
        if micro.cu_seqlens is None:
            return right(micro, rank, size, group)
        part = right(replace(micro, cu_seqlens=None), rank, size, group)
        return replace(part, cu_seqlens=micro.cu_seqlens)

    return wrong


def _one_document(right: Any, at: Place) -> Any:
    def wrong(self: Any, micro: Any, model: Any) -> Any:
        if micro.cu_seqlens is None:
            return right(self, micro, model)
        return right(self, replace(micro, cu_seqlens=micro.cu_seqlens[[0, -1]]), model)

    return wrong


def _not_reduced(right: Any, at: Place) -> Any:
    return lambda part, group: part


def _not_reduced_backward(right: Any, at: Place) -> Any:
    return lambda ctx, *grads: (grads[0].clone(), None)


def _prefix_of_shard(right: Any, at: Place) -> Any:
    def wrong(self: Any, values_N: Any, voters_N: Any) -> Any:
        whole_N = right(self, values_N, voters_N)
        return whole_N if self.chunks == 1 else right(type(self)(self.unit_N, self.units), values_N, voters_N)

    return wrong


def _shard_missing(right: Any, at: Place) -> Any:
    return lambda lse_RT, entropy_RT, lse_T: right(lse_RT[: max(at.tp - 1, 1)], entropy_RT[: max(at.tp - 1, 1)], lse_T)


def _other_shard(right: Any, at: Place) -> Any:
    return lambda self: (self.size - 1 - self.rank) * self.columns


def _padding_in_softmax(right: Any, at: Place) -> Any:
    return lambda columns, group, vocab_size, padded_vocab=None: right(columns, group, None, padded_vocab)


def _everyone_speaks(right: Any, at: Place) -> Any:
    return lambda self: self.last_stage


_FACTORS, _STEP = "megatron_pgloss.megatron.factors", "megatron_pgloss.megatron.step:PolicyLossStep"
_RUNTIME = "megatron_pgloss.megatron.runtime:Runtime"
_CONTEXT, _MICRO = "megatron_pgloss.megatron.context_parallel", "megatron_pgloss.planning.microbatch:MicroBatch"
_SEGMENTS, _LOGPROBS = "megatron_pgloss.maths.segments", "megatron_pgloss.logprobs"

RANK_FAULTS = (
    Fault(
        name="cp factor dropped", target=f"{_FACTORS}:schedule_factor", make=_one,
        imitates="the schedule's multiplication by cp is not undone", shows=CP & ~PER_TOKEN,
    ),
    Fault(
        name="cp factor twice", target=f"{_FACTORS}:wrapper_factor", make=_cp_twice,
        imitates="cp is undone in the loss and once more for the wrapper", shows=CP,
    ),
    Fault(
        name="DDP factor dropped", target=f"{_FACTORS}:grad_buffers", make=_unscaled_buffers,
        imitates="the wrapper's 1/(dp cp) is not undone", shows=SUMMED & ~PER_TOKEN & (EXPERTS | ~AVERAGING),
    ),
    Fault(
        name="schedule of another form", target=f"{_FACTORS}:_drive", make=_not_divided,
        imitates="a Megatron release that no longer divides by the number of micro-batches", shows=EVERYWHERE,
    ),
    Fault(
        name="per-token 1/n not undone", target=f"{_FACTORS}:per_token_factor", make=_one,
        imitates="finalize_model_grads divides by the tokens, after the loss did", shows=PER_TOKEN,
    ),
    Fault(
        name="tokens of this rank alone", target="megatron_pgloss.megatron.counting:_total", make=_own_routed,
        imitates="the per-token count is not summed over data-parallel ranks", shows=PER_TOKEN & DP,
    ),
    Fault(
        name="experts scaled as dense layers", target=f"{_FACTORS}:_expert_size", make=_dense_group,
        imitates="one divisor for dense and expert gradients", shows=EXPERTS & AVERAGING,
    ),
    Fault(
        name="dp mean without cp", target="megatron_pgloss.megatron.layout:Layout.dp_cp_size", make=_without_cp,
        imitates="the averaging collective is taken to run over dp alone", shows=AVERAGING & CP,
    ),
    Fault(
        name="aux shares the scale", target=f"{_STEP}.begin", make=_shared_scale,
        imitates="the policy's factor travels as a loss scale, and MoE losses take it too", shows=AUXILIARY,
    ),
    Fault(
        name="loss view returned", target=f"{_STEP}.forward_step", make=_view,
        imitates="the returned scalar is a view, which the schedule changes in place", shows=~PER_TOKEN,
        skip=PP, why="Megatron asserts against views on the last stage alone; the other stages would wait for it",
    ),
    Fault(
        name="metrics alias the loss", target=f"{_STEP}.loss_func", make=_alias,
        imitates="the report shares its storage with the loss, which the schedule scales in place", shows=~PER_TOKEN,
    ),
    Fault(
        name="roll after the CP split", target=f"{_MICRO}.targets", make=_rolled,
        imitates="labels are the shard's own tokens moved by one", shows=CP,
    ),
    Fault(
        name="positions along the row", target=f"{_MICRO}.position_ids", make=_along_the_row,
        imitates="position ids are not reset at a document's start", shows=PACKED & LEARNED,
    ),
    Fault(
        name="contiguous shards", target=f"{_CONTEXT}:zigzag", make=_contiguous,
        imitates="a CP rank takes one run of tokens where attention expects two chunks", shows=CP,
    ),
    Fault(
        name="packed row cut as one", target=f"{_CONTEXT}:shard", make=_cut_as_one,
        imitates="CP cuts the packed row, not each document", shows=CP & PACKED,
    ),
    Fault(
        name="documents not kept apart", target=f"{_RUNTIME}.run_model", make=_one_document,
        imitates="attention crosses the borders of packed documents", shows=PACKED,
    ),
    Fault(
        name="unit sums of a shard", target=f"{_SEGMENTS}:sum_over_ranks", make=_not_reduced,
        imitates="a sequence's statistic sees this CP rank's tokens alone", shows=CP,
    ),
    Fault(
        name="unit sums without backward", target=f"{_SEGMENTS}:_SumOverRanks.backward", make=_not_reduced_backward,
        imitates="an all-reduce whose backward is the identity", shows=CP,
    ),
    Fault(
        name="running sum of a shard", target=f"{_SEGMENTS}:UnitSums.asked_prefix", make=_prefix_of_shard,
        imitates="a running sum begins anew on each CP rank", shows=CP,
    ),
    Fault(
        name="entropy misses a shard", target=f"{_LOGPROBS}.vocab.merge:_entropy", make=_shard_missing,
        imitates="the last vocabulary shard is left out of the merge", shows=TP,
    ),
    Fault(
        name="target from another shard", target=f"{_LOGPROBS}.vocab.shard:VocabShard.start", make=_other_shard,
        imitates="a vocabulary offset of the wrong tensor-parallel rank", shows=TP,
    ),
    Fault(
        name="padded vocabulary in the softmax", target=f"{_LOGPROBS}.vocab.shard:find_shard", make=_padding_in_softmax,
        imitates="columns that are no tokens take probability", shows=PADDED_VOCABULARY,
    ),
    Fault(
        name="metrics of every TP rank", target="megatron_pgloss.megatron.layout:Layout.speaks", make=_everyone_speaks,
        imitates="sums of metrics count each tensor-parallel rank", shows=TP,
    ),
)  # fmt: skip
