"""What a user's own function sees in the oracle: streams of the whole step and statistics over its units.

Shapes: T all tokens of the step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.verify.oracle.scene import Scene
from megatron_pgloss.verify.oracle.sets import domain
from megatron_pgloss.verify.oracle.step import choice, setting

HOWS = {"mean": "unit_mean", "sum": "unit_sum", "prefix": "prefix_sum"}


def resolved(named: Any) -> Callable[[TermStreams], Tensor]:
    """The function itself, or the one that ``"pkg.mod:name"`` names."""
    if isinstance(named, str):
        module, _, attribute = named.partition(":")
        named = getattr(importlib.import_module(module), attribute)
    return named  # type: ignore[no-any-return]


def call(part: Mapping[str, Any], scene: Scene, axis_T: Tensor | None = None) -> Tensor:
    """What the user's function of ``part`` gives, float64 [T].

    Args:
        part: with ``fn``, and ``statistics`` where it declares some.
        axis_T: the log-ratio it is to see, if not the token's own.
    """
    found_T = resolved(part["fn"])(TermStreams.of(scene, axis_T, setting(part, "statistics", ())))
    if found_T.shape != scene.member_T.shape:
        raise DataError(
            "a function of the user's own returns one number per token",
            expected=tuple(scene.member_T.shape),
            got=tuple(found_T.shape),
        )
    return found_T


@dataclass(frozen=True)
class TermStreams:
    """What a user's term sees: whole-step streams [T].

    Outside the members a value reads 0 if it is not finite, or about neither an action nor a token
    of the component's domain; finite values of tokens that a mask took stay, for the statistics.
    Unit statistics run over a unit's action tokens as sampled, whatever the masks say.
    """

    scene: Scene
    domain_T: Tensor
    axis_T: Tensor | None = None
    declared: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, scene: Scene, axis_T: Tensor | None = None, declared: Sequence[Mapping[str, Any]] = ()) -> TermStreams:
        """The streams of a component, for a function that declares these statistics."""
        return cls(scene, domain(scene.component, scene.step), axis_T, declared)

    def statistic(self, name: str) -> Tensor:
        """The statistic that the function declares under this name."""
        (found,) = [entry for entry in self.declared if entry["name"] == name]
        of, how = setting(found, "of", "log_ratio"), choice(setting(found, "how", "mean"), list(HOWS), "statistic")
        value_T = getattr(self, of) if hasattr(type(self), of) else self.stream(of)
        unit, over = setting(found, "unit", "sequence"), setting(found, "over", "sampled")
        return getattr(self, HOWS[how])(value_T, unit, over)  # type: ignore[no-any-return]

    def _clean(self, value_T: Tensor, what: str) -> Tensor:
        scene = self.scene
        scene.of_members(value_T, what)
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
    def value(self) -> Tensor:
        """Values of the critic, with gradient."""
        if self.scene.value_T is None:
            raise DataError("a term reads the value and none was given")
        return self._clean(self.scene.value_T, "value")

    def stream(self, name: str) -> Tensor:
        """A constant stream of the batch, by its name."""
        return self._clean(self.scene.constant_T(name), name)

    @property
    def old(self) -> Tensor:
        """Log-probs at the start of the update, from where the spec says."""
        return self.stream("old")

    @property
    def rollout(self) -> Tensor:
        """Log-probs the sampler reported."""
        return self.stream("rollout")

    @property
    def ref(self) -> Tensor:
        """Log-probs of the reference."""
        return self.stream("ref")

    @property
    def advantage(self) -> Tensor:
        """Advantages."""
        return self.stream("advantages")

    @property
    def log_ratio(self) -> Tensor:
        """log(pi / old); in a surrogate that of the component's ratio."""
        return self.logp - self.old if self.axis_T is None else self.axis_T

    @property
    def ratio(self) -> Tensor:
        """pi / old, its logarithm held by the bound."""
        return self.scene.bounded(self.log_ratio).exp()

    def unit_sum(self, value_T: Tensor, unit: str = "sequence", over: str = "sampled") -> Tensor:
        """Sum over each unit's action tokens, given to each token of the unit; 0 in no unit."""
        return self._per_unit(value_T, unit, over, mean=False)

    def unit_mean(self, value_T: Tensor, unit: str = "sequence", over: str = "sampled") -> Tensor:
        """Mean over each unit's action tokens, given to each token of the unit; 0 if none."""
        return self._per_unit(value_T, unit, over, mean=True)

    def prefix_sum(self, value_T: Tensor, unit: str = "sequence", over: str = "sampled") -> Tensor:
        """Running sum over the action tokens of each unit, this token included; 0 in no unit."""
        votes_T = self.scene.member_T if over == "members" else self.scene.step.flags("action")
        sums: dict[Hashable, Tensor] = {None: value_T.new_zeros(())}
        found = []
        for t, key in enumerate(self.scene.step.keys(unit)):
            if key is not None:
                sums[key] = sums.get(key, value_T.new_zeros(())) + (value_T[t] if votes_T[t] else 0)
            found.append(sums[key])
        return torch.stack(found) if found else value_T

    def _per_unit(self, value_T: Tensor, unit: str, over: str, mean: bool) -> Tensor:
        votes_T = self.scene.member_T if over == "members" else self.scene.step.flags("action")
        votes = votes_T.tolist()
        tokens: dict[Hashable, list[int]] = {}
        keys = self.scene.step.keys(unit)
        for t, key in enumerate(keys):
            tokens.setdefault(key, []).extend([t] if votes[t] else [])
        tokens[None] = []
        order = {key: i for i, key in enumerate(tokens)}
        sums = [value_T[group].sum() / (len(group) if mean and group else 1) for group in tokens.values()]
        return torch.stack(sums)[[order[key] for key in keys]]
