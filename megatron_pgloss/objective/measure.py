"""The metrics of one component on one micro-batch, as typed sums: one for each row of `METRICS` that the component has.
Nothing here waits for the device. `N` positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.maths import bounded, flags, k3, selected
from megatron_pgloss.maths.topk import log_mass
from megatron_pgloss.metrics import METRICS, Metric
from megatron_pgloss.metrics.metric_table import Kind, Over
from megatron_pgloss.objective.late import Late
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.token_term import Clipped, TokenTerm
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import Component, LossSpec


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What every rank knows of the step before the loss runs."""

    spec: LossSpec
    streams: frozenset[str]
    entropy: bool

    @property
    def kept(self) -> bool:
        """Whether tokens are scored on kept sets."""
        return self.spec.kept is not None

    @property
    def samplers_old(self) -> bool:
        """Whether the base of the ratio and the sampler are two policies, both with log-probs."""
        return "rollout" in self.streams and self.spec.old not in ("policy", "rollout")

    def weighs(self, part: Component) -> bool:
        """Whether a correction weighs the component."""
        return any(rule.weighs and rule.acts_on(part) for rule in self.spec.corrections)

    def rejects(self, part: Component) -> bool:
        """Whether a correction rejects tokens of the component."""
        return any(rule.rejects and rule.acts_on(part) for rule in self.spec.corrections)

    def gated(self, part: Component, kind: str) -> bool:
        """Whether a gate of this kind acts on the component."""
        return any(gate.kind == kind and gate.acts_on(part) for gate in self.spec.gates)


def names(part: Component, spec: LossSpec, streams: frozenset[str], entropy: bool) -> list[str]:
    """The metrics of ``part``, in order: a function of the spec and of what the step carries, equal on all ranks."""
    known = StepFacts(spec, streams, entropy)
    return [f"{part.name}/{row.suffix}" for row in METRICS if row.when(part, known)]


class Measured:
    """What the rows of `METRICS` take their values from; each property is computed once."""

    def __init__(
        self, x: Streams, worth: Tensor, bad_N: Tensor, outcome: TokenTerm, late: Late, micro: MicroBatch
    ) -> None:
        self.x, self.worth, self._bad_N = x, worth, bad_N
        self._outcome, self._late, self._micro = outcome, late, micro
        self._plan = micro.corrected(x.component.name)
        self._over: dict[Over, Among] = {}

    def over(self, which: Over) -> Among:
        """Reductions over the set of tokens with this name."""
        if which not in self._over:
            self._over[which] = Among({
                "members": lambda: self.x.members,
                "kept": lambda: self.x.members | _there(self.x.outside),
                "before": lambda: self._before,
                "applied": lambda: self.x.members if self._late.spares_N is None else self._spared,
                "first": lambda: self._flag("first"),
                "taught": lambda: self.x.members & self._there_Nk.any(1),
            }[which]())  # fmt: skip
        return self._over[which]

    @functools.cached_property
    def faults(self) -> Tensor:
        """How many tokens are broken."""
        return self._bad_N.count_nonzero().double()

    @property
    def first_fault(self) -> Tensor:
        """The place of the first broken token in the streams of this rank; infinity where there is none.

        The first one in the micro-batch is also the first in the streams: an arrangement keeps the order of tokens.
        """
        never = self._bad_N.new_full((), torch.inf, dtype=torch.float64)
        if not self._bad_N.numel():
            return never
        place_N = self._micro.index_N.to(self._bad_N.device, non_blocking=True)
        first = place_N.take(self._bad_N.view(torch.uint8).argmax()).double()
        return torch.where(self.faults > 0, first, never)

    @functools.cached_property
    def log_ratio(self) -> Tensor:
        """log pi - log old of the token."""
        return self.x.token_log_ratio.detach()

    @functools.cached_property
    def ratio(self) -> Tensor:
        """pi/old of the token, in float64: float32 would overflow while the number still tells something."""
        return self.log_ratio.double().exp()

    @functools.cached_property
    def unit_ratio(self) -> Tensor:
        """The component's own ratio."""
        return self.x.ratio.detach().double()

    def k3(self, first: str, second: str) -> Tensor:
        """The k3 estimate of KL(first || second) from tokens that ``first`` drew; the bound holds their log-ratio."""
        return k3(bounded(getattr(self.x, first).detach() - getattr(self.x, second).detach(), self.x.bound))

    @property
    def clipped(self) -> Clipped:
        """Which bound decided each token."""
        assert self._outcome.clipped is not None
        return self._outcome.clipped

    @property
    def held(self) -> Tensor:
        """Where the log-ratio bound took the gradient."""
        return self._none if self._outcome.held_N is None else self._outcome.held_N

    @property
    def gated(self) -> dict[str, Tensor]:
        """Kind of gate to the share of each token's term that it took."""
        return self._late.gated

    @property
    def term(self) -> Tensor:
        """The term before gates and weights."""
        return self._outcome.term_N

    @property
    def kept_fraction(self) -> Tensor:
        """Size of the kept set over the vocabulary's."""
        return torch.ones_like(self.x.logp) if self.x.kept is None else self.x.kept

    @functools.cached_property
    def weight(self) -> Tensor:
        """Product of all importance weights of the token, as they are applied."""
        return self._product("weight", self._late.weight_N)

    @property
    def raw(self) -> Tensor:
        """Product of all importance weights of the token, before they are truncated and divided by their mean."""
        return self._product("raw", self._late.raw_N)

    @property
    def truncated(self) -> Tensor:
        """Where an importance weight was truncated."""
        late_N = self._late.truncated_N
        return self._flag("truncated") if late_N is None else self._flag("truncated") | late_N

    @property
    def chi2(self) -> Tensor:
        """r^2 - 1 of the token's ratio to the sampler."""
        return self._flag("chi2") if self._late.chi2_N is None else self._late.chi2_N

    @property
    def chi2_sequence(self) -> Tensor:
        """r^2 - 1 of the product of the sequence's ratios to the sampler."""
        return self._flag("chi2_sequence") if self._late.chi2_sequence_N is None else self._late.chi2_sequence_N

    @property
    def rejected(self) -> Tensor:
        """Where a correction rejected the token."""
        return ~(self.x.members if self._late.spares_N is None else self._spared)

    @property
    def _there_Nk(self) -> Tensor:
        return self.x.wide(self.x.component.ids) >= 0  # type: ignore[attr-defined]

    @property
    def teacher_mass(self) -> Tensor:
        """Probability that the teacher gives to its listed ids, all together."""
        return log_mass(self.x.wide(self.x.component.logprobs), self._there_Nk).exp()  # type: ignore[attr-defined]

    @property
    def policy_mass(self) -> Tensor:
        """Probability that the policy gives to the teacher's listed ids, all together."""
        return log_mass(self.x.chosen, self._there_Nk).exp()

    @property
    def value_error(self) -> Tensor:
        """(V - returns)^2."""
        return (self.x.value - self.x.stream("returns")).square()

    @property
    def value_clipped(self) -> Tensor:
        """Where the clip of the value decided."""
        assert self._outcome.decided_N is not None
        return self._outcome.decided_N

    @property
    def _none(self) -> Tensor:
        return torch.zeros_like(self.x.members)

    @property
    def _spared(self) -> Tensor:
        assert self._late.spares_N is not None
        return self.x.members & self._late.spares_N

    @functools.cached_property
    def _before(self) -> Tensor:
        # Planned members that are no members here have a broken log-prob, or lie outside their kept set.
        gone_N = self._micro.members(self.x.component.name).reshape(-1) & ~self.x.members
        return self._flag("before") & ~gone_N

    def _flag(self, name: str) -> Tensor:
        assert self._plan is not None
        found: Tensor = getattr(self._plan, name)
        return found.reshape(-1)

    def _product(self, name: str, late_N: Tensor | None) -> Tensor:
        early_N = self._flag(name).double()
        return early_N if late_N is None else early_N * late_N


def _there(mask_N: Tensor | None) -> Tensor:
    assert mask_N is not None
    return mask_N


def measure(part: Component, found: Measured, known: StepFacts) -> dict[str, Metric]:
    """All metrics that `names` lists."""
    out: dict[str, Metric] = {}
    with torch.no_grad():
        for row in METRICS:
            if row.when(part, known):
                value = row.value(found)
                if row.over:
                    metric = found.over(row.over).metric(row.kind, value)
                else:
                    metric = Metric(row.kind, value.detach().double())
                out[f"{part.name}/{row.suffix}"] = metric
    return out


class Among:
    """Reductions over one set of tokens, bool [N]; the size of the set is counted once."""

    def __init__(self, mask_N: Tensor) -> None:
        self.mask_N = mask_N
        self._number: Tensor | None = None
        self._flags: dict[torch.dtype, Tensor] = {}
        self._outside: dict[torch.dtype, Tensor] = {}

    def metric(self, kind: Kind, value_N: Tensor) -> Metric:
        """The reduction of this kind; the mean of a bool is a share."""
        if kind == "mean":
            return self.share(value_N) if value_N.dtype == torch.bool else self.mean(value_N)
        return self.least(value_N) if kind == "min" else self.most(value_N)

    @property
    def number(self) -> Tensor:
        """Tokens of the set, 0-d float64."""
        if self._number is None:
            self._number = self.mask_N.count_nonzero().double()
        return self._number

    def mean(self, value_N: Tensor) -> Metric:
        """Mean of ``value_N`` over the set; summed in float64."""
        return Metric("mean", self._picked(value_N).double().sum(), self.number)

    def share(self, flag_N: Tensor) -> Metric:
        """Share of the set where ``flag_N`` is true."""
        return Metric("mean", (flag_N & self.mask_N).count_nonzero().double(), self.number)

    def least(self, value_N: Tensor) -> Metric:
        """Smallest value of the set; plus infinity where it is empty."""
        return Metric("min", -self._most(-value_N))

    def most(self, value_N: Tensor) -> Metric:
        """Largest value of the set; minus infinity where it is empty."""
        return Metric("max", self._most(value_N))

    def _picked(self, value_N: Tensor) -> Tensor:
        dtype = value_N.dtype
        if dtype not in self._flags:
            self._flags[dtype] = flags(self.mask_N, dtype)
        return selected(self._flags[dtype], value_N.detach())

    def _most(self, value_N: Tensor) -> Tensor:
        if not value_N.numel():
            return value_N.new_full((), -torch.inf, dtype=torch.float64)
        picked_N = self._picked(value_N)
        if value_N.dtype not in self._outside:
            self._outside[value_N.dtype] = 1 - self._flags[value_N.dtype].reciprocal()  # 0 inside, -inf outside
        return (picked_N + self._outside[value_N.dtype]).amax().double()
