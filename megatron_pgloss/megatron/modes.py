"""Which modes the loss supports under Megatron-Core, and which it refuses, with the reason: one table.

A step is checked against it when it is made and at every `begin`, since trainers fill their config late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pgloss.errors import PGLossError, SpecError, UnsupportedError
from megatron_pgloss.megatron import call, conditions, mtp
from megatron_pgloss.megatron.conditions import Setup
from megatron_pgloss.megatron.outputs import reads_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A mode that would be wrong, silently or not."""

    mode: str
    found: Callable[[Setup], object]
    """True where a step is in this mode; a text where there is more to say about what was found."""
    reason: str
    fix: str
    error: type[PGLossError] = UnsupportedError
    """`SpecError` where what the caller chose contradicts itself on any machine."""


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        mode="a model whose forward does not take what the step hands over",
        found=lambda job: not job.own_forward and call.not_taken_by(job),
        reason="it would fail at the first micro-batch, or run without it, and packed rows without their boundaries",
        fix="PolicyLossStep(forward=FN), where FN(model, micro, inputs) calls the model and returns its output",
    ),
    Refusal(
        mode="a fused head with kept sets",
        found=lambda job: job.fused and job.spec.kept is not None,
        reason="a set is chosen from the logits of the whole vocabulary, which this head does not keep",
        fix="head='given', or kept=None in the spec",
    ),
    Refusal(
        mode="a fused head with a teacher's ids",
        found=lambda job: job.fused and job.spec.chosen,
        reason="this head gives log-probs of the targets alone",
        fix="head='given'",
    ),
    Refusal(
        mode="a fused head with an exact KL",
        found=lambda job: job.fused and job.spec.needs_exact_kl,
        reason="the exact KL reads the logits of two models, and this head makes none",
        fix="head='given'",
        error=SpecError,
    ),
    Refusal(
        mode="head='forward' with a loss that reads more than one token",
        found=lambda job: job.head == "forward" and not job.spec.by_token,
        reason="this mode takes the gradient of each token before the other tokens, or a value, are known",
        fix="head='keep', 'recompute' or 'auto'",
        error=SpecError,
    ),
    Refusal(
        mode="a fused head on another output layer than ColumnParallelLinear",
        found=conditions.fused_on(conditions.other_layer),
        reason="the head computes the layer's GEMM itself, and knows no other layer's",
        fix="head='given'",
    ),
    Refusal(
        mode="a fused head on an output layer with a bias",
        found=conditions.fused_on(lambda job, layer: getattr(layer, "bias", None) is not None),
        reason="it multiplies hidden states by the weight alone",
        fix="head='given', or a model without a bias there",
    ),
    Refusal(
        mode="a fused head on an output layer whose forward was replaced",
        found=conditions.fused_on(conditions.replaced("forward")),
        reason="it reads the layer's weight and runs the GEMM itself, so that what was put there would not be run",
        fix="head='given', or the layer's own forward",
    ),
    Refusal(
        mode="a fused head on an output layer whose GEMM was replaced",
        found=conditions.fused_on(conditions.replaced("_forward_impl")),
        reason="it runs a GEMM of its own, so that what was put in place of _forward_impl would not be run",
        fix="head='given', or the layer's own _forward_impl",
    ),
    Refusal(
        mode="a fused head on an output layer with hooks",
        found=conditions.fused_on(conditions.hooked),
        reason="the layer is not called, and neither are its hooks",
        fix="head='given', or no hooks there",
    ),
    Refusal(
        mode="a fused head that rounds logits of which the model asks for float32",
        found=conditions.fused_on(conditions.asks_for_float32),
        reason="the step would train one head, and whoever calls the model by itself would get another",
        fix="head_dtype='fp32', or a model without logit_dtype",
        error=SpecError,
    ),
    Refusal(
        mode="a fused head with defer_embedding_wgrad_compute",
        found=conditions.fused_on(lambda job, layer: job.config.defer_embedding_wgrad_compute),
        reason="the head computes its weight's gradient itself, so that Megatron has none to compute later",
        fix="head='given', or defer_embedding_wgrad_compute=False",
    ),
    Refusal(
        mode="a fused head with cpu_offloading",
        found=conditions.fused_on(lambda job, layer: getattr(job.config, "cpu_offloading", False)),
        reason="what the head keeps for backward would be offloaded too, which this package has not verified yet",
        fix="head='given', or cpu_offloading=False",
    ),
    Refusal(
        mode="a critic whose output layer is tied to the embedding",
        found=lambda job: not reads_logprobs(job.spec) and conditions.tied(job),
        reason="Megatron adds the gradients of tied weights, and a value head has a weight of its own",
        fix="build the critic with share_embeddings_and_output_weights=False",
    ),
    Refusal(
        mode="multi-token prediction in a critic",
        found=lambda job: not reads_logprobs(job.spec) and mtp.active(job.config),
        reason="the further tokens would be predicted by the value head",
        fix="mtp_num_layers=None",
    ),
    Refusal(
        mode="no finalize_model_grads_func",
        found=lambda job: job.config.finalize_model_grads_func is None,
        reason="gradients would never be reduced over data-parallel ranks, and never divided in per-token mode",
        fix="config.finalize_model_grads_func = megatron.core.distributed.finalize_model_grads",
    ),
    Refusal(
        mode="overlap_grad_reduce without no_sync_func",
        found=conditions.overlap_without_no_sync,
        reason="gradients would be reduced after the first micro-batch and the later ones lost",
        fix="config.no_sync_func = model.no_sync (a list under virtual pipelining)",
    ),
    Refusal(
        mode="pipeline size 2 with virtual pipelining and batch_p2p_comm",
        found=conditions.swapped_messages,
        reason="Megatron-Core silently swaps the messages of the two directions: gradients are wrong",
        fix="config.batch_p2p_comm = False",
    ),
    Refusal(
        mode="gathered logits",
        found=conditions.gathered,
        reason="the vocabulary is sharded in the log-prob pass; a gathered copy would be counted tp times",
        fix="build the model with parallel_output=True",
    ),
    Refusal(
        mode="calculate_per_token_loss set differently in two configs",
        found=conditions.flags_differ,
        reason="schedule and wrapper would scale by different rules",
        fix="share one config, and set the flag before wrapping",
    ),
    Refusal(
        mode="on_nonfinite='skip' with delayed FP8 scaling",
        found=lambda job: job.skips and conditions.delayed_scaling(job),
        reason="the history of scales takes in a step that is skipped, and cannot be put back",
        fix="on_nonfinite='raise', or fp8_recipe='blockwise' or 'mxfp8'",
    ),
    Refusal(
        mode="full-iteration CUDA graphs",
        found=conditions.full_graph,
        reason="the graph would freeze the first step's normalisers",
        fix="use partial graphs (attn, mlp, ...)",
    ),
    Refusal(
        mode="torch FSDP2",
        found=conditions.wrapped_in("TorchFullyShardedDataParallel"),
        reason="its scale_gradients does nothing, so per-token gradients are never divided; its factor is not readable",
        fix="use DistributedDataParallel with the distributed optimizer",
    ),
    Refusal(
        mode="Megatron-FSDP",
        found=conditions.wrapped_in("FullyShardedDataParallel", "MegatronFSDP"),
        reason="its gradient factor is applied inside NCCL collectives and has not been verified by this package yet",
        fix="use DistributedDataParallel with the distributed optimizer",
    ),
    Refusal(
        mode="hybrid context parallelism",
        found=conditions.flag("hybrid_context_parallel"),
        reason="each rank runs its own number of sub-samples; 0.16.1 multiplies a 2-tuple loss by 0 there, "
        "and later versions have not been verified by this package yet",
        fix="use plain context parallelism",
    ),
    Refusal(
        mode="dynamic context parallelism",
        found=conditions.flag("dynamic_context_parallel"),
        reason="it is hybrid context parallelism by its later name: each rank runs its own number of sub-samples",
        fix="use plain context parallelism",
    ),
    Refusal(
        mode="expert-parallel overlap (combined 1F1B)",
        found=conditions.flag("overlap_moe_expert_parallel_comm"),
        reason="it needs CUDA streams and another calling convention, not verified by this package yet",
        fix="overlap_moe_expert_parallel_comm=False",
    ),
    Refusal(
        mode="multi-token prediction before megatron-core 0.19",
        found=lambda job: mtp.active(job.config) and not mtp.weighable(job.config),
        reason="the model crashes when it is asked for logits, and nothing can set the term's weight for a step",
        fix="megatron-core 0.19, or mtp_num_layers=None during policy updates",
    ),
    Refusal(
        mode="generalised tensor parallelism (gtp_remat)",
        found=conditions.generalised_tensor_parallel,
        reason="its ranks hold different tokens outside the data-parallel group, so counts would miss them",
        fix="gtp size 1",
    ),
)  # fmt: skip

SUPPORTED: tuple[tuple[str, str], ...] = (
    ("tensor, sequence, pipeline, virtual pipeline, context, expert and data parallelism", "tests/test_layouts.py"),
    ("calculate_per_token_loss on and off", "tests/test_layouts.py"),
    ("distributed optimizer", "tests/test_layouts.py"),
    ("overlap_grad_reduce with no_sync_func", "tests/test_layouts.py"),
    ("average_in_collective", "tests/test_layouts.py"),
    ("activation recompute", "tests/test_layouts.py"),
    ("loss scale (grad_scale_func)", "tests/test_layouts.py"),
    ("variable_seq_lengths", "tests/test_layouts.py"),
    ("bf16 and fp16 through Float16Module", "tests/test_precision.py"),
    ("multi-token prediction on megatron-core 0.19", "tests/test_own_losses.py"),
    ("MoE with auxiliary losses, if no micro-batch is empty (or allowed by name)", "tests/test_own_losses.py"),
)
"""Mode, and the test that shows it."""


def refuse(job: Setup) -> None:
    """Raise for the first refused mode that the step is in.

    Raises:
        UnsupportedError, SpecError: with the reason and what to set instead.
    """
    for row in REFUSED:
        if found := row.found(job):
            got = found if isinstance(found, str) else None
            raise row.error(f"{row.mode} is refused: {row.reason}", got=got, fix=row.fix)
