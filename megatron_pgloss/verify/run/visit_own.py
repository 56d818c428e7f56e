"""One visit for a loss that Megatron itself adds: its gradient beside our loss must be that beside Megatron's own.

These losses are the MoE auxiliary and z-loss, and multi-token prediction (`megatron_pgloss.verify.run.own_losses`).
Megatron defines them as averages over micro-batches, so the rows of each micro-batch are fixed, and no oracle is asked.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_pgloss.spec import LossSpec, PolicyGradient
from megatron_pgloss.verify.data.batches import batch_of, rows_of_step
from megatron_pgloss.verify.layouts.scenario import Scenario
from megatron_pgloss.verify.run.compare import distance, worst
from megatron_pgloss.verify.run.drive import build, leave, make_step
from megatron_pgloss.verify.run.outcome import Bounds, Outcome
from megatron_pgloss.verify.run.own_losses import own_gradient, upstream_strength

NAMES = {"moe": "MoE auxiliary and z-loss", "mtp": "multi-token prediction"}


def visit_own(layout: Scenario, tolerance: float) -> Outcome:
    """Measure the gradient of Megatron's loss beside ours and beside Megatron's cross entropy. A collective.

    It runs in float64 only, because it takes a difference of gradients.

    Returns:
        The outcome; ``facts["upstream"]`` is the factor by which the installed Megatron-Core changes the configured
        coefficient on this layout, 1 if it is right.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # Megatron keeps the scales of its own losses in the default dtype
    try:
        return _measured(layout, tolerance)
    finally:
        torch.set_default_dtype(before)


def _measured(layout: Scenario, tolerance: float) -> Outcome:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks, where = build(layout, layer_spec="own")
    # Another normaliser for each flag: the loss under test must not depend on it.
    path = "mean(prompt) > mean(episode) > mean(token)" if layout.per_token else "mean(token)"
    step, _ = make_step(layout, chunks, LossSpec(components=[PolicyGradient(normalizer=path)]))
    rows = rows_of_step(0)

    def batches() -> list[Any]:
        pairs = [rows[i : i + 2] for i in range(0, 8, 2)]  # micro-batches of the same two rows on every layout
        mine = [row for pair in pairs[where.dp_rank :: where.dp] for row in pair]
        return [batch_of(mine)] if mine else []

    def run(plan: Any, forward_step: Any, iterators: Any) -> None:
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators, forward_only=False,
            model=chunks if len(chunks) > 1 else chunks[0], num_microbatches=plan.num_microbatches,
            seq_length=plan.width, micro_batch_size=plan.rows_per_microbatch,
        )  # fmt: skip

    theirs = own_gradient(step, batches, run, beside="cross entropy")
    ours = own_gradient(step, batches, run, beside="policy")
    facts = {"upstream": upstream_strength(step) if layout.own == "moe" else 1.0}
    facts["largest"] = max(float(grad.abs().max()) for grad in theirs.values())
    leave(chunks)
    error, parameter = worst(ours, theirs)
    return Outcome(
        layout=layout, spec=NAMES[layout.own], loss_error=0.0, gradient_error=error, parameter=parameter,
        norm_error=distance(ours, theirs), metric_error=0.0, facts=facts,
        bounds=Bounds(loss=tolerance, gradient=tolerance, norm=tolerance, metric=tolerance),
    )  # fmt: skip
