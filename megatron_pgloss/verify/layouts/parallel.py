"""Set up and tear down Megatron's parallel state, so that one world can visit one layout after another."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from megatron_pgloss.errors import LayoutError
from megatron_pgloss.megatron.cpu import enable_cpu
from megatron_pgloss.megatron.job_store import world_timeout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Sizes of the layout's parallel dimensions, and this process's rank in each.

    ``dp`` does not include context parallelism. The global rank counts tp fastest, then cp, ep, dp and pp.
    """

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    dp_rank: int

    @property
    def is_first_stage(self) -> bool:
        """Whether this pipeline rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this pipeline rank holds the output layer, and so computes logits."""
        return self.pp_rank == self.pp - 1


def init_parallel(
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    seed: int = 1234,
    **more: Any,
) -> Axes:
    """Set up Megatron's ``parallel_state`` for one layout; the data-parallel size is what the other sizes leave of the
    world.

    ``torch.distributed`` must be initialised. Without CUDA, ``enable_cpu`` is called first. One world may visit
    many layouts, with ``destroy_parallel`` between them.

    Args:
        tp, pp, vpp, cp, ep: sizes of the tensor, pipeline, virtual pipeline, context and expert dimensions.
        etp: tensor parallelism inside experts; default ``tp``.
        seed: for Megatron's random states.
        more: passed to ``initialize_model_parallel``, by its own names; Megatron's groups get the world's timeout, not
            the 30 minutes that Megatron gives them, whatever the world has.
    """
    if not torch.cuda.is_available():
        enable_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        raise LayoutError(
            "init_parallel needs torch.distributed", fix="call torch.distributed.init_process_group first"
        )
    if dist.get_world_size() % (tp * pp * cp):
        raise LayoutError(
            "the layout does not fit the world",
            expected=f"a world divisible by tp * pp * cp = {tp * pp * cp}",
            got=dist.get_world_size(),
        )
    more.setdefault("distributed_timeout_minutes", world_timeout().total_seconds() / 60)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp and vpp > 1 else None,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=more.pop("create_gloo_process_groups", False),
        **more,
    )
    model_parallel_cuda_manual_seed(seed)
    return axes()


def axes() -> Axes:
    """This process's sizes and ranks, read from ``parallel_state``."""
    from megatron.core import parallel_state as ps

    return Axes(
        tp=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_world_size(),
        vpp=ps.get_virtual_pipeline_model_parallel_world_size() or 1,
        cp=ps.get_context_parallel_world_size(),
        ep=ps.get_expert_model_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_world_size(),
        dp=ps.get_data_parallel_world_size(with_context_parallel=False),
        tp_rank=ps.get_tensor_model_parallel_rank(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        cp_rank=ps.get_context_parallel_rank(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        dp_rank=ps.get_data_parallel_rank(with_context_parallel=False),
    )


def destroy_parallel() -> None:
    """End this layout and close its process groups, so that the next can be set up in the same world.

    Every rank calls this. It waits for all of them, because a group must not close while a peer still uses it.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    # Megatron drops its references to the groups without closing them, and each open gloo group keeps two threads:
    # sixty layouts would leave thousands of threads.
    groups = [group for group in getattr(parallel_state, "_global_process_group_list", None) or [] if group]
    parallel_state.destroy_model_parallel()
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    # The logging trackers of MoE and MTP losses are sized by the first model they see, and keep its process groups.
    if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker()._metrics.clear()
    MTPLossLoggingHelper.tracker.clear()
