"""Which modes of Megatron-Core the loss supports, and which it refuses, with the reason: one table, checked at
start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pgloss.errors import UnsupportedError
from megatron_pgloss.megatron import mtp
from megatron_pgloss.megatron.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the checks look at."""

    config: Any
    """The model's TransformerConfig."""
    chunks: Sequence[Any]
    """Model chunks as handed to the schedule, wrapped."""
    bare: Sequence[Any]
    """The same, unwrapped."""
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A mode that would be wrong, silently or not."""

    mode: str
    found: Callable[[Job], bool]
    reason: str
    fix: str


def _flag(name: str) -> Callable[[Job], bool]:
    return lambda job: bool(getattr(job.config, name, False))


def _full_graph(job: Job) -> bool:
    scope = str(getattr(job.config, "cuda_graph_scope", "")) + str(getattr(job.config, "cuda_graph_modules", ""))
    whole = getattr(job.config, "cuda_graph_impl", "none") == "full_iteration" or "full_iteration" in scope
    return whole and "full_iteration_inference" not in scope


def in_chain(model: Any, *names: str) -> bool:
    """Whether ``model``, or anything it wraps, is of a class so named; their modules need not be importable."""
    while model is not None:
        if type(model).__name__ in names:
            return True
        model = getattr(model, "module", None)
    return False


def _wrapped_in(*names: str) -> Callable[[Job], bool]:
    return lambda job: any(in_chain(chunk, *names) for chunk in job.chunks)


def _overlap_without_no_sync(job: Job) -> bool:
    overlap = any(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False) for chunk in job.chunks)
    return overlap and job.config.no_sync_func is None


def _swapped_messages(job: Job) -> bool:
    return job.layout.pp_size == 2 and len(job.chunks) > 1 and bool(job.config.batch_p2p_comm)


def _gathered(job: Job) -> bool:
    return job.layout.tp_size > 1 and any(getattr(model, "parallel_output", True) is False for model in job.bare)


def _flags_differ(job: Job) -> bool:
    want = bool(job.config.calculate_per_token_loss)
    return any(bool(model.config.calculate_per_token_loss) != want for model in (*job.bare, *job.chunks))


def _gtp(job: Job) -> bool:
    group = getattr(job.layout.collection, "gtp_remat", None) if job.layout.collection is not None else None
    return group is not None and group.size() > 1


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        mode="no finalize_model_grads_func",
        found=lambda job: job.config.finalize_model_grads_func is None,
        reason="data-parallel ranks would never be reduced, and per-token gradients never divided",
        fix="config.finalize_model_grads_func = megatron.core.distributed.finalize_model_grads",
    ),
    Refusal(
        mode="overlap_grad_reduce without no_sync_func",
        found=_overlap_without_no_sync,
        reason="gradients would be reduced after the first micro-batch and the later ones lost",
        fix="config.no_sync_func = model.no_sync (a list under virtual pipelining)",
    ),
    Refusal(
        mode="pipeline size 2 with virtual pipelining and batch_p2p_comm",
        found=_swapped_messages,
        reason="Megatron-Core silently swaps the messages of the two directions: gradients are wrong",
        fix="config.batch_p2p_comm = False",
    ),
    Refusal(
        mode="gathered logits",
        found=_gathered,
        reason="the vocabulary is sharded in the log-prob pass; a gathered copy would be counted tp times",
        fix="build the model with parallel_output=True",
    ),
    Refusal(
        mode="calculate_per_token_loss set differently in two configs",
        found=_flags_differ,
        reason="schedule and wrapper would scale by different rules",
        fix="share one config, and set the flag before wrapping",
    ),
    Refusal(
        mode="full-iteration CUDA graphs",
        found=_full_graph,
        reason="the graph would freeze the first step's normalisers",
        fix="use partial graphs (attn, mlp, ...)",
    ),
    Refusal(
        mode="torch FSDP2",
        found=_wrapped_in("TorchFullyShardedDataParallel"),
        reason="its scale_gradients does nothing, so per-token gradients are never divided; its factor is not readable",
        fix="use DistributedDataParallel with the distributed optimizer",
    ),
    Refusal(
        mode="Megatron-FSDP",
        found=_wrapped_in("FullyShardedDataParallel", "MegatronFSDP"),
        reason="its gradient factor is applied inside NCCL collectives and has not been verified by this package yet",
        fix="use DistributedDataParallel with the distributed optimizer",
    ),
    Refusal(
        mode="hybrid context parallelism",
        found=_flag("hybrid_context_parallel"),
        reason="each rank runs its own number of sub-samples; 0.16.1 multiplies a 2-tuple loss by 0 there, "
        "and later versions have not been verified by this package yet",
        fix="use plain context parallelism",
    ),
    Refusal(
        mode="expert-parallel overlap (combined 1F1B)",
        found=_flag("overlap_moe_expert_parallel_comm"),
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
        found=_gtp,
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


def refuse(job: Job) -> None:
    """Raise for the first refused mode the job is in.

    Raises:
        UnsupportedError: with the reason and what to set instead.
    """
    for row in REFUSED:
        if row.found(job):
            raise UnsupportedError(f"{row.mode} is refused: {row.reason}", fix=row.fix)
