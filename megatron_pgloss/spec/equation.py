"""A spec as an equation in plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_pgloss.spec import formulas
from megatron_pgloss.spec.rules import UserMask

if TYPE_CHECKING:
    from megatron_pgloss.spec.loss_spec import LossSpec


def equation(spec: LossSpec) -> str:
    """One line per component, then the rules."""
    lines = ["L = " + " + ".join(f"{part.coef:g} {part.name}" for part in spec.components)]
    for part in spec.components:
        counted = "" if part.count == "members" else f", counting {part.count}"
        every = "" if part.units == "counted" else ", all units"
        weights = "" if part.divide_by == "tokens" else ", dividing by weights"
        kept = "" if part.rejected == "original" else ", without rejected"
        term = ", ".join((text := formulas.component(part, spec.old))[:1] + text[1])
        lines.append(f"  {part.name} = [{part.normalizer}{counted}{every}{weights}{kept}] of {term}")
    for mask in spec.masks:
        lines.append(f"  mask: {mask.reason} on {_on(mask.on, everything=isinstance(mask, UserMask))}")
    if spec.kept is not None:
        lines.append(f"  kept: {spec.kept.formula}")
    for rule in spec.corrections:
        on = ("rl",) if rule.on is None and rule.weighs else rule.on
        lines.append(f"  correction: {rule.formula} on {_on(on)}")
    for gate in spec.gates:
        lines.append(f"  gate: {formulas.gate(gate, spec.old)} on {_on(gate.on)}")
    if spec.roles.ce is not None:
        lines.append("  roles: ce times " + ", ".join(f"{value:g} on {role}" for role, value in spec.roles.ce.items()))
    if spec.empty_sequences != "refuse":
        lines.append("  sequences without a member of any component are left out")
    lines.append(f"  old = {spec.old}; log-ratios bounded to +-{spec.log_ratio_bound:g}")
    return "\n".join(lines)


def _on(names: tuple[str, ...] | None, everything: bool = False) -> str:
    if names is not None:
        return ", ".join(names) if names else "nothing"
    return "all" if everything else "all over actions"
