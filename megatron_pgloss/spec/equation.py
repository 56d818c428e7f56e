"""A spec as an equation in plain text."""

from __future__ import annotations

from megatron_pgloss.spec.letters import BASES
from megatron_pgloss.spec.spec_fields import SpecFields


def equation(spec: SpecFields) -> str:
    """One line per component, then the rules."""
    base = BASES[spec.old]
    lines = ["L = " + " + ".join(f"{part.coef:g} {part.name}" for part in spec.components)]
    for part in spec.components:
        counted = "" if part.count == "members" else f", counting {part.count}"
        every = "" if part.units == "counted" else ", all units"
        weights = "" if part.divide_by == "tokens" else ", dividing by weights"
        rejected = "" if part.count_rejected else ", without rejected"
        term = ", ".join((part.formula(base), *part.definitions(base)))
        lines.append(f"  {part.name} = [{part.normalizer}{counted}{every}{weights}{rejected}] of {term}")
    lines += [f"  mask: {mask.reason} on {mask.scope(spec.components)}" for mask in spec.masks]
    if spec.kept is not None:
        lines.append(f"  kept: {spec.kept.formula()}")
    lines += [f"  correction: {rule.formula(base)} on {rule.scope(spec.components)}" for rule in spec.corrections]
    lines += [f"  gate: {gate.formula(base)} on {gate.scope(spec.components)}" for gate in spec.gates]
    if spec.roles.ce is not None:
        lines.append("  roles: ce times " + ", ".join(f"{value:g} on {role}" for role, value in spec.roles.ce.items()))
    if spec.empty_sequences != "refuse":
        lines.append("  sequences without a member of any component are left out")
    lines.append(f"  old = {spec.old}; log-ratios bounded to +-{spec.log_ratio_bound:g}")
    return "\n".join(lines)
