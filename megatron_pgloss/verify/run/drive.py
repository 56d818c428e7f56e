"""Build a layout's model, and run the package's step on it through Megatron's own schedule."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_pgloss.spec import LossSpec
from megatron_pgloss.verify.data.batches import batches_of
from megatron_pgloss.verify.data.rows import Row
from megatron_pgloss.verify.layouts.models import build_gpt, build_hybrid, destroy_parallel, init_parallel
from megatron_pgloss.verify.layouts.reshard import full_gradients
from megatron_pgloss.verify.layouts.scenario import Scenario
from megatron_pgloss.verify.layouts.weights import deterministic_weights

WEIGHT_SEED = 3
BUILDERS: dict[str, Callable[..., list[torch.nn.Module]]] = {"gpt": build_gpt, "hybrid": build_hybrid}
"""Kind of model to the function that builds it."""


def build(layout: Scenario, **changes: Any) -> tuple[list[Any], Any]:
    """Set up a layout's process groups and build its model, with the harness's weights. `leave` ends it. A collective.

    Returns:
        The model's chunks as a trainer hands them to the schedule, and this rank's sizes and ranks
        (`megatron_pgloss.verify.layouts.parallel.Axes`).
    """
    _keep_imports()
    where = init_parallel(tp=layout.tp, pp=layout.pp, vpp=layout.vpp, cp=layout.cp, ep=layout.ep)
    chunks: list[Any] = BUILDERS[layout.kind](**(layout.config | changes))
    deterministic_weights(chunks, seed=WEIGHT_SEED)
    if layout.loss_scale != 1:
        chunks[0].config.grad_scale_func = lambda loss: loss * layout.loss_scale
    return chunks, where


def leave(chunks: list[Any]) -> None:
    """End a layout, so that the next can begin in the same world. A collective."""
    chunks.clear()
    destroy_parallel()
    gc.collect()  # a model refers to itself in circles, and keeps its process groups and their threads alive


@functools.cache
def _keep_imports() -> None:
    """Exempt imported objects from garbage collection, once before the first model: each collection would walk them
    all.
    """
    gc.collect()
    gc.freeze()


def run_schedule(step: Any, chunks: list[Any], forward_only: bool = False, **more: Any) -> Any:
    """Set gradients to 0 and run Megatron's own schedule over the step's micro-batches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
    given = dict(
        forward_step_func=step.forward_step,
        data_iterator=step.data_iterator(),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=step.num_microbatches,
        seq_length=step.seq_length,
        micro_batch_size=step.micro_batch_size,
        forward_only=forward_only,
    )
    with step.watch.schedule():
        return get_forward_backward_func()(**(given | more))


def make_step(layout: Scenario, chunks: list[Any], spec: LossSpec, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Make the layout's `PolicyLossStep`, and the further arguments that the schedule takes on this layout."""
    from megatron_pgloss.megatron import PolicyLossStep

    more: dict[str, Any] = {}
    if layout.collection:
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.use_mpu_process_groups()
        options["pg_collection"] = more["pg_collection"] = groups
        if layout.pp > 1:
            more["p2p_communicator"] = P2PCommunicator(groups.pp, chunks[0].config)
    model = chunks if len(chunks) > 1 else chunks[0]
    return PolicyLossStep(spec, model, split=layout.split, **(layout.step_options | options)), more


def one_step(
    layout: Scenario, chunks: list[Any], where: Any, spec: LossSpec, rows: Sequence[Row], **options: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor], Any]:
    """Run one whole step: plan, schedule, finish. A collective.

    Returns:
        Metrics, every parameter's whole gradient (float64, on CPU), and the plan.
    """
    step, more = make_step(layout, chunks, spec, **options)
    plan = step.begin(batches_of(layout, where, spec, rows))
    metrics = step.finish(run_schedule(step, chunks, **more))
    return metrics, full_gradients(chunks), plan
