"""Per-token losses of the oracle, from their formulas, over the members of one component.

Shapes: T all tokens of the step; M the members of a component, selected before any arithmetic.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.verify.oracle_data import DEFAULT_BOUND, Step, choice, setting
from megatron_pgloss.verify.oracle_sets import domain


@dataclass(frozen=True)
class Scene:
    """What a component's loss is computed from: streams [T], the spec, the component's members."""

    step: Step
    spec: Mapping[str, Any]
    logp_T: Tensor
    entropy_T: Tensor | None
    member_T: Tensor

    @property
    def index_M(self) -> Tensor:
        """Positions of the members in [T]."""
        return self.member_T.nonzero().squeeze(1)

    @property
    def bound(self) -> float:
        """Largest log-ratio in absolute value; beyond it the ratio is constant."""
        return float(setting(self.spec, "log_ratio_bound", DEFAULT_BOUND))

    def logp(self) -> Tensor:
        """Log-probs of the policy, float64 [M]."""
        return self.step.finite(self.logp_T[self.index_M], self.index_M, "log-prob")

    def entropy(self) -> Tensor:
        """Entropies of the policy, float64 [M]."""
        if self.entropy_T is None:
            raise DataError("an entropy is needed and none was given")
        return self.step.finite(self.entropy_T[self.index_M], self.index_M, "entropy")

    def constant_T(self, name: str) -> Tensor:
        """A frozen stream, float64 [T]; ``old`` comes from where the spec says."""
        if name == "old":
            source = choice(setting(self.spec, "old", "given"), ["given", "policy", "rollout"], "source of old")
            if source == "policy":
                return self.logp_T.detach()  # the policy as it stands, held fixed
            name = "old" if source == "given" else "rollout"
        return self.step.stream(choice(name, ["old", "rollout", "ref", "advantages"], "stream"))

    def constant(self, name: str) -> Tensor:
        """The same over the members, float64 [M]."""
        return self.step.finite(self.constant_T(name)[self.index_M], self.index_M, name)

    def bounded(self, log_ratio: Tensor) -> Tensor:
        """Log-ratio within +-bound, of gradient 0 beyond."""
        return log_ratio.clamp(-self.bound, self.bound)


def token_loss(component: Mapping[str, Any], scene: Scene) -> Tensor:
    """l of one component over its members, float64 [M], to be minimised."""
    kind = component["kind"]
    if kind == "policy_gradient":
        return _policy_gradient(component, scene)
    if kind == "kl":
        return _kl(component, scene)
    if kind == "entropy":
        return -scene.entropy()  # a bonus: the loss falls as the entropy rises
    if kind == "cross_entropy":
        return -scene.logp()
    return _term(component, scene)


def log_ratio(component: Mapping[str, Any], scene: Scene) -> Tensor:
    """log(pi / old), raw, float64 [M]; for ratio="none" 0 with gradient 1."""
    logp_M = scene.logp()
    level = choice(setting(component, "ratio", "token"), ["token", "none"], "ratio")
    return logp_M - (logp_M.detach() if level == "none" else scene.constant("old"))


def clip_bounds(component: Mapping[str, Any]) -> tuple[float, float, float | None]:
    """(low, high, dual) of a clip surrogate."""
    surrogate = component["surrogate"]
    if surrogate.get("delta") is not None:
        raise SpecError("the oracle knows no delta in clip", got=surrogate["delta"])
    dual = surrogate.get("dual")
    return float(surrogate["low"]), float(surrogate["high"]), None if dual is None else float(dual)


def _policy_gradient(component: Mapping[str, Any], scene: Scene) -> Tensor:
    """reinforce: -A logp. clip: -min(r A, clip(r, 1-low, 1+high) A), for A < 0 at most -dual A."""
    advantage_M = scene.constant("advantages")
    if choice(component["surrogate"]["kind"], ["clip", "reinforce"], "surrogate") == "reinforce":
        return -advantage_M * scene.logp()
    low, high, dual = clip_bounds(component)
    ratio_M = scene.bounded(log_ratio(component, scene)).exp()
    gain_M = torch.minimum(ratio_M * advantage_M, ratio_M.clamp(1 - low, 1 + high) * advantage_M)
    if dual is not None:
        gain_M = torch.where(advantage_M < 0, torch.maximum(gain_M, dual * advantage_M), gain_M)
    return -gain_M


def _kl(component: Mapping[str, Any], scene: Scene) -> Tensor:
    """With d = logp - base: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1, as they stand."""
    choice(setting(component, "gradient", "plain"), ["plain"], "KL gradient")
    base = choice(setting(component, "to", "ref"), ["ref", "old", "rollout"], "base of a KL")
    estimator = choice(setting(component, "estimator", "k3"), ["k1", "k2", "k3"], "KL estimator")
    d_M = scene.bounded(scene.logp() - scene.constant(base))
    if estimator == "k1":
        return d_M
    return d_M.square() / 2 if estimator == "k2" else (-d_M).exp() + d_M - 1


def correction_weight(name: str, component: Mapping[str, Any], scene: Scene) -> Tensor:
    """Product of the corrections that act on a component, a constant, float64 [M].

    Truncated importance sampling: min(exp(old - rollout), high), with the policy in place of old
    for of="policy". It acts on policy-gradient components unless it names others.
    """
    weight_M = torch.ones(len(scene.index_M), dtype=torch.float64)
    for correction in setting(scene.spec, "corrections", []):
        choice(correction.get("kind"), ["truncated_is"], "correction")
        choice(setting(correction, "level", "token"), ["token"], "level of a correction")
        if correction.get("low") is not None:
            raise SpecError("the oracle truncates importance weights from above alone", got=correction["low"])
        on = correction.get("on")
        if (component["kind"] != "policy_gradient") if on is None else (name not in on):
            continue
        of = choice(setting(correction, "of", "old"), ["old", "policy"], "ratio of a correction")
        top_M = scene.constant("old") if of == "old" else scene.logp().detach()  # weights carry no gradient
        raw_M = scene.bounded(top_M - scene.constant("rollout")).exp()
        weight_M = weight_M * raw_M.clamp(max=float(correction["high"]))
    return weight_M


def _term(component: Mapping[str, Any], scene: Scene) -> Tensor:
    named = component["fn"]
    if isinstance(named, str):
        module, _, attribute = named.partition(":")
        named = getattr(importlib.import_module(module), attribute)
    fn: Callable[[TermStreams], Tensor] = named
    loss_T = fn(TermStreams(scene, domain(component, scene.step)))
    if loss_T.shape != scene.member_T.shape:
        raise DataError(
            "a term returns one loss per token",
            expected=tuple(scene.member_T.shape),
            got=tuple(loss_T.shape),
        )
    return loss_T[scene.index_M]


@dataclass(frozen=True)
class TermStreams:
    """What a user's term sees: whole-step streams [T].

    Outside the members a value reads 0 if it is not finite, or about neither an action nor a token
    of the component's domain; finite values of tokens that a mask took stay, for the statistics.
    Unit statistics run over a unit's action tokens as sampled, whatever the masks say.
    """

    scene: Scene
    domain_T: Tensor

    def _clean(self, value_T: Tensor, what: str) -> Tensor:
        scene = self.scene
        scene.step.finite(value_T[scene.index_M], scene.index_M, what)
        usable_T = (self.domain_T | scene.step.flags("action")) & torch.isfinite(value_T.detach())
        return torch.where(usable_T, value_T, torch.zeros_like(value_T))

    @property
    def members(self) -> Tensor:
        """Bool [T]."""
        return self.scene.member_T

    @property
    def logp(self) -> Tensor:
        """Log-probs of the policy, with gradient."""
        return self._clean(self.scene.logp_T, "log-prob")

    @property
    def entropy(self) -> Tensor:
        """Entropies of the policy, with gradient."""
        if self.scene.entropy_T is None:
            raise DataError("a term reads the entropy and none was given")
        return self._clean(self.scene.entropy_T, "entropy")

    @property
    def old(self) -> Tensor:
        """Log-probs at the start of the update, from where the spec says."""
        return self._clean(self.scene.constant_T("old"), "old")

    @property
    def rollout(self) -> Tensor:
        """Log-probs the sampler reported."""
        return self._clean(self.scene.constant_T("rollout"), "rollout")

    @property
    def ref(self) -> Tensor:
        """Log-probs of the reference."""
        return self._clean(self.scene.constant_T("ref"), "ref")

    @property
    def advantage(self) -> Tensor:
        """Advantages."""
        return self._clean(self.scene.constant_T("advantages"), "advantages")

    @property
    def log_ratio(self) -> Tensor:
        """log(pi / old), bounded."""
        return self.scene.bounded(self.logp - self.old)

    @property
    def ratio(self) -> Tensor:
        """pi / old."""
        return self.log_ratio.exp()

    def unit_sum(self, value_T: Tensor, unit: str) -> Tensor:
        """Sum over each unit's action tokens, given to each token of the unit; 0 in no unit."""
        return self._per_unit(value_T, unit, mean=False)

    def unit_mean(self, value_T: Tensor, unit: str) -> Tensor:
        """Mean over each unit's action tokens, given to each token of the unit; 0 if none."""
        return self._per_unit(value_T, unit, mean=True)

    def prefix_sum(self, value_T: Tensor) -> Tensor:
        """Running sum over the action tokens of each sequence, this token included."""
        action_T = self.scene.step.flags("action")
        kept_T = torch.where(action_T, value_T, torch.zeros_like(value_T))
        return torch.cat([part.cumsum(0) for part in self.scene.step.split(kept_T)])

    def _per_unit(self, value_T: Tensor, unit: str, mean: bool) -> Tensor:
        action = self.scene.step.flags("action").tolist()
        tokens: dict[Hashable, list[int]] = {}
        keys = self.scene.step.keys(unit)
        for t, key in enumerate(keys):
            tokens.setdefault(key, []).extend([t] if action[t] else [])
        tokens[None] = []
        order = {key: i for i, key in enumerate(tokens)}
        sums = [value_T[group].sum() / (len(group) if mean and group else 1) for group in tokens.values()]
        return torch.stack(sums)[[order[key] for key in keys]]
