"""What acts on a term inside the loss: gates on the current policy, and corrections that read it. `N` positions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import Asked, selected
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.rules import Verdict, corrections, gates
from megatron_pgloss.rules.corrections import Evidence
from megatron_pgloss.rules.verdict import both
from megatron_pgloss.spec import Component, LossSpec
from megatron_pgloss.spec.corrections import Correction


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """What gates and late corrections do to the term of every token."""

    passes_N: Tensor | None
    """bool [N]; None: nothing can be dropped."""
    factor_N: Tensor | None
    """float [N], constant; None: 1."""
    gated: dict[str, Tensor]
    """Kind of gate to float [N], the share of each token's term that it took: 1 where it dropped the token, 0 where the
    token passed, 1 minus the factor for a soft gate."""
    weight_N: Tensor | None
    """float64 [N]: the product of late importance weights, for metrics."""
    raw_N: Tensor | None
    """float64 [N]: the same before truncation."""
    truncated_N: Tensor | None
    """bool [N]: where one of them was truncated."""
    chi2_N: Tensor | None
    """float64 [N]: ``r^2 - 1`` of the token's ratio to the sampler; None: no late correction weighs."""
    chi2_sequence_N: Tensor | None
    """float64 [N]: the same of the product over the token's sequence."""
    spares_N: Tensor | None
    """bool [N]: which tokens the late corrections leave; None: none of them rejects."""

    def act(self, term_N: Tensor) -> Tensor:
        """The term as it enters the sum: 0 with gradient 0 where dropped."""
        if self.passes_N is not None:
            term_N = selected(self.passes_N, term_N)
        return term_N if self.factor_N is None else term_N * self.factor_N


def check_decided(part: Component, micro: MicroBatch) -> None:
    """Refuse a loss whose statistics pass has not been made.

    Raises:
        DataError: the spec decides something over the whole step, and the plan has had no statistics pass.
    """
    if micro.shared.needs_statistics_pass:
        raise DataError(
            "this loss needs what a statistics pass decides over the whole step (a gate, a mean weight, the loss of a "
            "group, or denominators without rejected tokens), and the plan has had none",
            expected="a statistics pass after the plan",
            where=f"component {part.name!r}",
            fix="plan = pg.statistics_pass(plan, log-probs of every micro-batch); PolicyLossStep.begin runs it itself",
        )


def gate_key(i: int) -> Hashable:
    """The key under which the streams have the statistic that the spec's gate ``i`` asks for."""
    return ("gate", i)


def correction_key(i: int) -> Hashable:
    """The key under which the streams have the statistic that the spec's correction ``i`` asks for."""
    return ("correction", i)


def rules(part: Component, spec: LossSpec) -> list[tuple[int, Correction]]:
    """The corrections on ``part`` that act inside the loss, with their place in the spec."""
    return [(i, rule) for i, rule in enumerate(spec.corrections) if spec.is_late(rule) and rule.acts_on(part)]


def evidence(rule: Correction, x: Streams) -> Evidence:
    """What a correction inside the loss looks at; the same for all that read the ratio of the same log-probs."""
    if rule.ratio_of not in x.evidence:
        log_N = ((x.old if rule.ratio_of == "old" else x.logp).detach() - x.rollout).double()
        units = {name: x._units(name) for name in ("sequence", "turn")}
        voters_N = x._voters("sampled", log_N)
        x.evidence[rule.ratio_of] = Evidence(units=units, voters_N=voters_N, bound=x.bound, log_N=log_N)
    return x.evidence[rule.ratio_of]


def asked(rule: Correction, x: Streams) -> Asked | None:
    """The statistic over units that a correction inside the loss takes, or None."""
    return corrections.asked(rule, evidence(rule, x))


def _log_ratio(rule: Correction, x: Streams) -> Tensor:
    return _known(evidence(rule, x).log_N)


CHI2 = "chi2"
"""The key under which the streams have the sequence's log-ratio to the sampler, where a late correction weighs."""


def asked_chi2(part: Component, x: Streams, spec: LossSpec) -> Asked | None:
    """The statistic behind the metric ``is_chi2_sequence``: a sequence's log-ratio to the sampler, as the last late
    correction that weighs reads it; None where none weighs.
    """
    weighing = [rule for _, rule in rules(part, spec) if rule.weighs]
    return x.ask("sum", _log_ratio(weighing[-1], x), over="members") if weighing else None


def corrected(part: Component, x: Streams, spec: LossSpec) -> list[tuple[int, Correction, Verdict]]:
    """What each correction that acts inside the loss says; also for the statistics pass. Call `links.settle` first."""
    return [
        (i, rule, corrections.judged(rule, evidence(rule, x), x.answers.get(correction_key(i))))
        for i, rule in rules(part, spec)
    ]


def late(part: Component, x: Streams, micro: MicroBatch, spec: LossSpec) -> Late:
    """Gates and late corrections of ``part``."""
    passes_N: Tensor | None = None
    factor_N: Tensor | None = None
    gated: dict[str, Tensor] = {}
    for i, gate in enumerate(spec.gates):
        if not gate.acts_on(part):
            continue
        decided = micro.gate(part.name, i)
        said = gates.apply(gate, x, gate_key(i)) if decided is None else Verdict(passes=decided.reshape(-1))
        passes_N, factor_N = both(passes_N, said.passes), both(factor_N, said.weight)
        taken_N = (~said.passes).to(x.logp.dtype) if said.passes is not None else 1 - _known(said.weight)
        before = gated.get(gate.kind)
        gated[gate.kind] = taken_N if before is None else torch.maximum(before, taken_N)
    spares_N: Tensor | None = None
    weight_N: Tensor | None = None
    raw_N: Tensor | None = None
    truncated_N: Tensor | None = None
    chi2_N: Tensor | None = None
    chi2_sequence_N: Tensor | None = None
    for i, rule, said in corrected(part, x, spec):
        spares_N, raw_N = both(spares_N, said.passes), both(raw_N, said.raw)
        if said.truncated is not None:
            truncated_N = said.truncated if truncated_N is None else truncated_N | said.truncated
        if said.weight is not None:
            chi2_N = (2 * _log_ratio(rule, x).clamp(-x.bound, x.bound)).expm1()
            chi2_sequence_N = (2 * x.answer(CHI2).clamp(-x.bound, x.bound)).expm1()
            mean = micro.mean_weight(part.name, i) if rule.normalizes else 1.0
            weight_N = both(weight_N, said.weight if mean == 1.0 else said.weight / mean)
    if weight_N is not None:
        factor_N = both(factor_N, weight_N.to(x.logp.dtype))
    return Late(
        passes_N=both(passes_N, spares_N), factor_N=factor_N, gated=gated, weight_N=weight_N, raw_N=raw_N,
        truncated_N=truncated_N, chi2_N=chi2_N, chi2_sequence_N=chi2_sequence_N, spares_N=spares_N,
    )  # fmt: skip


def _known(value_N: Tensor | None) -> Tensor:
    assert value_N is not None
    return value_N
