"""What masks, corrections and gates share: they act on components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_pgloss.spec.component import Component
from megatron_pgloss.spec.kinds import Kind


class Rule(Kind):
    """The base class of masks, corrections and gates, which act on components."""

    on: tuple[str, ...] | None = None
    """Names of the components it acts on; None: those that `home` names."""

    @property
    def home(self) -> Literal["actions", "policy gradients", "all"]:
        """The components it acts on by default: those over action tokens, the policy gradients, or all."""
        return "actions"

    @property
    def reason(self) -> str:
        """Its short name, in reports."""
        raise NotImplementedError(f"no short name for {type(self).__name__}")

    def acts_on(self, component: Component) -> bool:
        """Whether it acts on ``component``: by its ``on``, or by default."""
        if self.on is not None:
            return component.name in self.on
        if self.home == "policy gradients":
            return component.kind == "policy_gradient"
        return self.home == "all" or component.over == "action"

    def scope(self, components: Sequence[Component]) -> str:
        """The components of a spec that it acts on, as text."""
        if self.on is None and self.home != "policy gradients":
            return {"all": "all", "actions": "all over actions"}[self.home]
        return ", ".join(component.name for component in components if self.acts_on(component)) or "nothing"
