"""What masks, corrections and gates share: they act on components."""

from __future__ import annotations

from typing import Literal

from megatron_pgloss.spec.component import Component
from megatron_pgloss.spec.kinds import Kind


class Rule(Kind):
    """What is asked of masks, corrections and gates beside: they act on components."""

    on: tuple[str, ...] | None = None
    """Names of the components it acts on; None: as `home` says."""

    @property
    def home(self) -> Literal["actions", "rl", "all"]:
        """The components it acts on by default: those over action tokens, the one named ``rl``, or all."""
        return "actions"

    @property
    def reason(self) -> str:
        """Its short name, in reports."""
        raise NotImplementedError(f"no short name for {type(self).__name__}")

    def acts_on(self, component: Component) -> bool:
        """Whether it acts on ``component``: by its ``on``, or by default."""
        if self.on is not None:
            return component.name in self.on
        return {"all": True, "rl": component.name == "rl", "actions": component.over == "action"}[self.home]

    @property
    def scope(self) -> str:
        """The components it acts on, as text."""
        if self.on is not None:
            return ", ".join(self.on) or "nothing"
        return {"all": "all", "rl": "rl", "actions": "all over actions"}[self.home]
