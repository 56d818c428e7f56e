"""What a plan knows of one component's tokens, and what a statistics pass adds to it. `T` tokens of this rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """What the plan-time corrections made of a component's tokens; the component's metrics report it."""

    before: Tensor
    """bool: the tokens after the masks, before any rejection."""
    first: Tensor
    """bool: the first such token of each sequence, which stands for it in means over sequences."""
    weight: Tensor
    """float: the product of the importance weights as applied, divided by their mean where they are normalised."""
    raw: Tensor
    """float: the same product before truncation and division."""
    truncated: Tensor
    """bool: where one of them was truncated."""
    chi2: Tensor
    """float: ``r^2 - 1`` of the token's ratio to the sampler, 0 where no plan-time correction weighs."""
    chi2_sequence: Tensor
    """float: the same of the product of the ratios of all ``before`` tokens of its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerm:
    """Value and slope, at every token, of a surrogate over a whole group of rollouts (`megatron_pgloss.spec.REAL`)."""

    value: Tensor
    slope: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What a statistics pass found about one component."""

    gates: dict[int, Tensor] = field(default_factory=dict)
    """Index of a gate in the spec to bool [T]: the tokens that pass it."""
    group: GroupTerm | None = None
    rejected_T: Tensor | None = None
    """bool [T]: what gates and late corrections reject, where the component says ``count_rejected=False``."""
    means: dict[int, float] = field(default_factory=dict)
    """Index of a normalised correction in the spec to the mean of its weights over the job."""
    thresholds: dict[int, dict[str, float]] = field(default_factory=dict)
    """Index of a gate in the spec to what it compares with, by name; the same numbers on every rank."""
    told: dict[Hashable, Tensor] = field(default_factory=dict)
    """Statistics over prompts and episodes by who asks (`megatron_pgloss.objective.links`), float64 [T] or [T, 2]."""

    @property
    def numbers(self) -> tuple[object, ...]:
        """What all ranks must have found alike."""
        return sorted(self.means.items()), sorted((i, sorted(some.items())) for i, some in self.thresholds.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentTable:
    """One component's tokens on this rank, target-aligned, and its constants."""

    weight_T: Tensor
    """float [T]: ``u * w`` without the coefficient; 0 outside the members."""
    member_T: Tensor
    """bool [T]: the tokens that are trained."""
    corrected: Corrected | None = None
    """[T] each; None where no correction acts on the component."""
    gates: dict[int, Tensor] = field(default_factory=dict)
    """Index of a gate in the spec to bool [T]: the tokens that pass, where a statistics pass decided it."""
    group: GroupTerm | None = None
    """[T] each; None unless a statistics pass found the term of a surrogate over whole groups."""
    means: dict[int, float] = field(default_factory=dict)
    """Index of a normalised correction in the spec to the mean of its weights, the same on every rank."""
    thresholds: dict[int, dict[str, float]] = field(default_factory=dict)
    """Index of a gate in the spec to the threshold that a statistics pass found, by name."""
    told: dict[Hashable, Tensor] = field(default_factory=dict)
    """Statistics over prompts and episodes, of the policy at the start of the step, by who asks: float64 [T] or
    [T, 2]."""
    slope_T: Tensor | None = None
    """float [T]: the derivative, by the token's log-prob, of the component's whole loss of the job through its ratio
    over a prompt or episode; None where there is no such ratio."""

    def with_finding(self, found: Decided) -> ComponentTable:
        """The table with the findings of a statistics pass added."""
        return replace(
            self, gates={**self.gates, **found.gates}, group=found.group or self.group,
            means={**self.means, **found.means}, thresholds={**self.thresholds, **found.thresholds},
            told={**self.told, **found.told},
        )  # fmt: skip


def with_findings(tables: Mapping[str, ComponentTable], found: Mapping[str, Decided]) -> dict[str, ComponentTable]:
    """Every component's table with what a statistics pass found about it."""
    return {name: table.with_finding(found.get(name, Decided())) for name, table in tables.items()}
