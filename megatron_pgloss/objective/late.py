"""What acts on a term inside the loss: gates on the current policy, and corrections that read it. `N` positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import selected
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.rules import corrections, gates
from megatron_pgloss.spec import Component, LossSpec, TruncatedIS


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """The numerator's factor of every token."""

    passes_N: Tensor | None
    """bool [N]; None: nothing can be dropped."""
    factor_N: Tensor | None
    """float [N], constant; None: 1."""
    gated: dict[str, Tensor]
    """Kind of gate to what it took of each token: 1 dropped, 0 passed, in between for a soft one. float [N]."""
    weight_N: Tensor | None
    """float64 [N]: the product of late importance weights, for metrics."""
    truncated_N: Tensor | None
    """bool [N]: where one of them was clipped."""
    rejected_N: Tensor | None
    """bool [N]: where a late correction rejects."""

    def act(self, term_N: Tensor) -> Tensor:
        """The term as it enters the sum: 0 with gradient 0 where dropped."""
        if self.passes_N is not None:
            term_N = selected(self.passes_N, term_N)
        return term_N if self.factor_N is None else term_N * self.factor_N


def check_decided(part: Component, micro: MicroBatch) -> None:
    """Refuse a loss that knows less than it needs.

    Raises:
        DataError: something is decided over the whole step, and the step was planned without a statistics pass.
    """
    if micro.plan.needs_statistics_pass:
        raise DataError(
            "this loss is decided over the whole step (a gate, a mean weight, the loss of a group, or denominators "
            "without what is rejected), which was planned without it",
            expected="a statistics pass after the plan",
            where=f"component {part.name!r}",
            fix="plan = pg.statistics_pass(plan, log-probs of every micro-batch); PolicyLossStep.begin runs it itself",
        )


def late(part: Component, x: Streams, micro: MicroBatch, spec: LossSpec) -> Late:
    """Gates and late corrections of ``part``."""
    passes_N: Tensor | None = None
    factor_N: Tensor | None = None
    gated: dict[str, Tensor] = {}
    for i, gate in enumerate(spec.gates):
        if not gate.acts_on(part):
            continue
        verdict_N = _verdict(i, part, x, micro, spec)
        if verdict_N.dtype == torch.bool:
            passes_N = verdict_N if passes_N is None else passes_N & verdict_N
            taken_N = (~verdict_N).to(x.logp.dtype)
        else:
            factor_N = verdict_N if factor_N is None else factor_N * verdict_N
            taken_N = 1 - verdict_N
        before = gated.get(gate.kind)
        gated[gate.kind] = taken_N if before is None else torch.maximum(before, taken_N)
    weight_N, truncated_N, spares_N = _corrections(part, x, micro, spec)
    if spares_N is not None:
        passes_N = spares_N if passes_N is None else passes_N & spares_N
    if weight_N is not None:
        factor_N = weight_N.to(x.logp.dtype) if factor_N is None else factor_N * weight_N.to(x.logp.dtype)
    rejected_N = None if spares_N is None else ~spares_N
    return Late(
        passes_N=passes_N, factor_N=factor_N, gated=gated, weight_N=weight_N, truncated_N=truncated_N,
        rejected_N=rejected_N,
    )  # fmt: skip


def _verdict(i: int, part: Component, x: Streams, micro: MicroBatch, spec: LossSpec) -> Tensor:
    gate = spec.gates[i]
    decided = micro.stream(f"gate/{i}/{part.name}")
    if decided is not None:
        return decided.reshape(-1)
    return gates.passes(gate, x)


def _corrections(
    part: Component, x: Streams, micro: MicroBatch, spec: LossSpec
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    weight_N: Tensor | None = None
    truncated_N: Tensor | None = None
    passes_N: Tensor | None = None
    rules = spec.corrections_on(part, late=True)
    if not rules:
        return None, None, None
    units = {name: x._units(name) for name in micro.units}
    for rule in rules:
        log_N = (x.old if rule.ratio_of == "old" else x.logp).detach() - x.rollout
        voters_N = x._voters("sampled", log_N)
        one_N, spares_N = corrections.apply(rule, log_N, units, voters_N, x.bound)
        if spares_N is not None:
            passes_N = spares_N if passes_N is None else passes_N & spares_N
        if one_N is None:
            continue
        if isinstance(rule, TruncatedIS):
            raw_N = corrections.raw_weight(rule, log_N, units, voters_N, x.bound)
            cut_N = (raw_N > rule.high) | (raw_N < rule.low)
            truncated_N = cut_N if truncated_N is None else truncated_N | cut_N
            if rule.normalizes:
                one_N = one_N / micro.plan.constants[f"is_mean/{spec.corrections.index(rule)}/{part.name}"]
        weight_N = one_N if weight_N is None else weight_N * one_N
    return weight_N, truncated_N, passes_N
