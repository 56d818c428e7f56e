"""The gradient through a ratio over a prompt or episode. `T` tokens of this rank's rows.

The rows of an episode e may lie in any micro-batch and on any rank, and so may the terms that its statistic
``s_e = 1/n sum_k d_k`` moves. From a statistics pass each rank knows ``G_e = dL/ds_e``, the derivative of the loss of
the whole job. In every micro-batch s_e is then a constant, and each of the episode's tokens adds
``G_e/n (log pi - sg(log pi))``, whose value is 0 and whose gradient is that of the loss through s_e.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_pgloss.maths import Asked
from megatron_pgloss.objective.links import settle
from megatron_pgloss.objective.loss import acted_on
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.surrogates import SURROGATES
from megatron_pgloss.planning import Plan
from megatron_pgloss.spec import Component, PolicyGradient, Ratio


def with_slopes(plan: Plan, logp_T: Tensor, entropy_T: Tensor | None) -> Plan:
    """``plan`` with the slope of every component whose ratio over a prompt or episode is differentiated. Where there is
    such a component, it is a collective of the data-parallel ranks: one gather.

    Args:
        plan: with the findings of a statistics pass: weights, gates and corrections as the loss will apply them.
        logp_T: float [T], log-probs of the policy at the start of the step.
        entropy_T: its entropy there; None where the spec does not read it.
    """
    assert plan.spec is not None
    axes = {part.name: axis for part in plan.spec.components if (axis := through(part)) is not None}
    if not axes:
        return plan
    micro, logp_T = plan.whole(), logp_T.detach()
    streams = [Streams(micro, plan.spec.component(name), plan.spec, logp_T, entropy_T) for name in axes]
    asked: list[Asked] = []
    with torch.enable_grad():
        settle(streams, micro, plan.spec, leaves=True)
        for x, axis in zip(streams, axes.values(), strict=True):
            assert x.axis is not None
            assert isinstance(x.component, PolicyGradient)
            made = SURROGATES[x.component.surrogate.kind](x, x.component.surrogate)
            _, (_, worth, _) = acted_on(made, x, micro, plan.spec)
            found = torch.autograd.grad(worth, x.axis, allow_unused=True)[0] if worth.requires_grad else None
            by_ratio_T = torch.zeros_like(x.axis) if found is None else found
            rows, voters_T = x._units("sequence"), x._voters(axis.over, x.token_log_ratio)
            asked += [
                rows.asked_total(by_ratio_T.double(), torch.ones_like(voters_T)),
                rows.asked_total(voters_T.double(), voters_T),
            ]
    answers = plan.job_rows.answers(asked, [axis.level for axis in axes.values() for _ in range(2)])
    answers = answers or [one.finish(one.part) for one in asked]  # a rank without rows
    there_T = plan.job_rows.there_S[micro.seq_N]
    tables = dict(plan.components)
    for i, (x, (name, axis)) in enumerate(zip(streams, axes.items(), strict=True)):
        by_unit_T, number_T = answers[2 * i : 2 * i + 2]
        if axis.statistic == "mean":
            by_unit_T = by_unit_T / number_T.clamp(min=1)
        voters_T = there_T & x._voters(axis.over, x.token_log_ratio)
        slope_T = torch.where(voters_T, by_unit_T, 0).to(tables[name].weight_T.dtype)
        tables[name] = replace(tables[name], slope_T=slope_T)
    return replace(plan, components=tables)


def through(part: Component) -> Ratio | None:
    """The ratio of ``part`` if it is over a prompt or episode and is differentiated, else None."""
    axis = part.axis if isinstance(part, PolicyGradient) and part.has_ratio else None
    return axis if isinstance(axis, Ratio) and axis.straddles and axis.gradient == "through" else None
