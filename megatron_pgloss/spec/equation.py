"""A spec as an equation in plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_pgloss.spec.components import KL, Clip, Component, CrossEntropy, Entropy, PolicyGradient, Term
from megatron_pgloss.spec.rules import DropTruncated

if TYPE_CHECKING:
    from megatron_pgloss.spec.loss_spec import LossSpec


def equation(spec: LossSpec) -> str:
    """One line per component, then the rules."""
    lines = ["L = " + " + ".join(f"{part.coef:g} {part.name}" for part in spec.components)]
    for part in spec.components:
        counted = "" if part.count == "members" else f", counting {part.count}"
        every = "" if part.units == "counted" else ", all units"
        lines.append(f"  {part.name} = [{part.normalizer}{counted}{every}] of {_term(part, spec.old)}")
    for mask in spec.masks:
        everywhere = "all over actions" if isinstance(mask, DropTruncated) else "all"
        lines.append(f"  mask: {mask.reason} on {', '.join(mask.on) if mask.on else everywhere}")
    for rule in spec.corrections:
        lines.append(f"  correction: times min(old/mu, {rule.high:g}) on {', '.join(rule.on)}")
    lines.append(f"  old = {spec.old}; log-ratios bounded to +-{spec.log_ratio_bound:g}")
    return "\n".join(lines)


def _term(part: Component, old: str) -> str:
    base = {"given": "old", "rollout": "mu", "policy": "sg(pi)"}[old]
    if isinstance(part, PolicyGradient):
        ratio = f"pi/{base}" if part.ratio == "token" else "pi/sg(pi)"
        if not isinstance(part.surrogate, Clip):
            return "-A log pi"
        bounds = f"{1 - part.surrogate.low:g}, {1 + part.surrogate.high:g}"
        inner = f"min(r A, clip(r, {bounds}) A)"
        if part.surrogate.dual is not None:
            inner = f"({inner}, at least {part.surrogate.dual:g} A where A < 0)"
        return f"-{inner}, r = {ratio}"
    if isinstance(part, KL):
        value = {"k1": "d", "k2": "d^2/2", "k3": "exp(-d) + d - 1"}[part.estimator]
        return f"{value}, d = log pi - log {base if part.to == 'old' else part.to}"
    if isinstance(part, Entropy):
        return "-H(pi)"
    if isinstance(part, CrossEntropy):
        return "-log pi on observations"
    assert isinstance(part, Term)
    return f"{part.to_import_path()} on {part.on}s"
