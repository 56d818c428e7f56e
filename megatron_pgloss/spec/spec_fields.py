"""The fields of a spec, and properties that follow from these fields alone."""

from __future__ import annotations

from typing import Literal

from megatron_pgloss.spec.base import Part
from megatron_pgloss.spec.components import AnyComponent
from megatron_pgloss.spec.corrections import Correction
from megatron_pgloss.spec.gates import AnyGate
from megatron_pgloss.spec.kept_set import KeptSet
from megatron_pgloss.spec.masks import Mask
from megatron_pgloss.spec.numbers import Positive
from megatron_pgloss.spec.roles import RoleTable

Old = Literal["given", "policy", "record", "rollout", "interpolate"]


class SpecFields(Part):
    """What a `LossSpec` holds: the type that functions which check, print or ask a spec take."""

    components: tuple[AnyComponent, ...]
    """At least one component; names are unique."""
    old: Old = "given"
    """The source of the ratio's base:

    - ``given``: the batch's old stream.
    - ``policy``: the policy itself, held fixed. The ratio is exactly 1, and a batch may be used for one update.
    - ``record``: the policy itself in a row's first update; in later ones, the log-probs that the row had in its first.
    - ``rollout``: the sampler's stream, so that there are two policies and not three.
    - ``interpolate``: a point between the sampler's log-prob and the policy's, by how many versions ago the token was
      sampled (`megatron_pgloss.rules.corrections.interpolation`).
    """
    corrections: tuple[Correction, ...] = ()
    gates: tuple[AnyGate, ...] = ()
    masks: tuple[Mask, ...] = ()
    kept: KeptSet | None = None
    """The policy's tokens scored on the sets that the sampler drew from; None: on the whole vocabulary."""
    roles: RoleTable = RoleTable()
    empty_sequences: Literal["refuse", "exclude"] = "refuse"
    """What becomes of a sequence without a member of any component before rules: an error names it (``refuse``), or it
    is left out and reported (``exclude``)."""
    log_ratio_bound: Positive = 20.0
    """Log-ratios are bounded to plus or minus this before exp; the gradient beyond is 0 and counted."""

    @property
    def names(self) -> tuple[str, ...]:
        """Component names in order."""
        return tuple(component.name for component in self.components)

    @property
    def chosen(self) -> str | None:
        """Name of the stream of ids at which a component reads the policy's log-probs, or None:
        ``token_logprobs(..., chosen_ids=micro.wide(spec.chosen))``.
        """
        return next((part.chosen_ids for part in self.components if part.chosen_ids is not None), None)

    @property
    def straddling(self) -> tuple[int, ...]:
        """Indices of the plan-time corrections over prompts or episodes, whose rows may lie on any rank."""
        return tuple(i for i, rule in enumerate(self.corrections) if rule.straddles and not self.is_late(rule))

    def is_late(self, rule: Correction) -> bool:
        """Whether ``rule`` reads the current policy and so acts inside the loss."""
        return rule.ratio_of is not None and (rule.ratio_of == "policy" or self.old == "interpolate")
