"""What the oracle computes a component's loss from: whole-step streams, the spec, the component's members.

Shapes: T all tokens of the step; M the members of a component, selected before any arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.verify.oracle.step import DEFAULT_BOUND, Step, choice, setting

STREAMS = ("old", "rollout", "ref", "advantages", "values", "returns")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The streams of one component.

    Attributes:
        step: the rows.
        spec: the whole spec.
        component: the component.
        name: its name.
        logp_T: log-probs of the policy, with gradient.
        entropy_T, value_T, kl_T: further outputs of the model, with gradient; None where they were not given.
        member_T: bool, the tokens that are trained after masks and the corrections of frozen log-probs; corrections of
            the policy and gates act later.
        version: number of the current policy, for ``interpolate`` and staleness.
    """

    step: Step
    spec: Mapping[str, Any]
    component: Mapping[str, Any]
    name: str
    logp_T: Tensor
    entropy_T: Tensor | None
    value_T: Tensor | None
    kl_T: Tensor | None
    member_T: Tensor
    version: int | None
    chosen: Sequence[Sequence[Tensor]] | None = None
    """Per row and token the policy's log-probs [k] at the row's ``teacher_ids``; for ``topk_distill``."""

    @property
    def index_M(self) -> Tensor:
        """Positions of the members in [T]."""
        return self.member_T.nonzero().squeeze(1)

    @property
    def bound(self) -> float:
        """Largest log-ratio in absolute value; beyond it the ratio is constant."""
        return float(setting(self.spec, "log_ratio_bound", DEFAULT_BOUND))

    def of_members(self, stream_T: Tensor | None, what: str) -> Tensor:
        """A stream over the members, [M]; DataError where it is missing or not finite."""
        if stream_T is None:
            raise DataError(f"{what} is needed and none was given")
        return self.step.finite(stream_T[self.index_M], self.index_M, what)

    def logp(self) -> Tensor:
        """Log-probs of the policy, float64 [M]."""
        return self.of_members(self.logp_T, "log-prob")

    def constant_T(self, name: str) -> Tensor:
        """A frozen stream, float64 [T], or a stream of the user's own; ``old`` comes from where the spec says."""
        if name == "old":
            return self._old()
        return self.step.stream(name)

    def _old(self) -> Tensor:
        known = ["given", "policy", "record", "rollout", "interpolate"]
        source = choice(setting(self.spec, "old", "given"), known, "source of old")
        if source in ("given", "rollout"):
            return self.step.stream("old" if source == "given" else "rollout")
        policy_T = self.logp_T.detach()  # the policy as it stands, held fixed
        if source == "policy":
            return policy_T
        if source == "record":  # what an earlier update of the same rows noted down; before the first, the policy
            recorded_T = self.step.stream("recorded")
            return torch.where(recorded_T.isnan(), policy_T, recorded_T)
        rollout_T, age_T = self.step.stream("rollout"), self.age()
        # From the sampler's version (0) to the current one (1) on a straight line, one version before the end.
        # What nobody sampled has no version: there old is the sampler's log-prob.
        sampled_T = self.step.flags("action") & (age_T > 1)
        share_T = torch.where(sampled_T, (age_T - 1) / age_T.clamp(min=1), torch.zeros_like(age_T))
        return rollout_T + share_T * (policy_T - rollout_T)

    def age(self) -> Tensor:
        """How many versions ago each token was sampled, float64 [T]; NaN where nothing says so."""
        if self.version is None:
            raise DataError("the spec reads versions: say which is the current one")
        return self.version - self.step.stream("version")

    def constant(self, name: str) -> Tensor:
        """The constant stream ``name`` over the members, float64 [M]."""
        return self.of_members(self.constant_T(name), name)

    def number(self, value: Any) -> Tensor | float:
        """A parameter that is a number, or the name of a stream: then float64 [M]."""
        return self.constant(value) if isinstance(value, str) else float(value)

    def bounded(self, log_ratio: Tensor) -> Tensor:
        """A log-ratio that stands in an exp, within +-bound; of gradient 0 beyond, not yet at the bound itself."""
        return log_ratio.clamp(-self.bound, self.bound)

    def acts_here(self, rule: Mapping[str, Any], by_default: bool) -> bool:
        """Whether a rule acts on this component: by its ``on``, or as the rule does by default."""
        on = rule.get("on")
        return by_default if on is None else self.name in on

    def log_ratio_to(self, base_T: Tensor) -> tuple[Tensor, Tensor]:
        """``log pi - base`` [T], raw, and who votes in its unit statistics: the actions as sampled where it is finite.

        Outside voters and members it reads 0; the members must have a finite value.
        """
        self.of_members(self.logp_T, "log-prob")
        self.of_members(base_T, "old")
        finite_T = self.logp_T.detach().isfinite() & base_T.isfinite()
        vote_T = finite_T & self.step.flags("action")
        index = (vote_T | self.member_T).nonzero().squeeze(1)
        ratio_T = torch.zeros_like(self.logp_T).index_put((index,), self.logp_T[index] - base_T[index])
        return ratio_T, vote_T
