"""Who is divided by what: the weight of one token under a component's normaliser, as a formula and in words."""

from __future__ import annotations

from megatron_pgloss.spec.components import Component
from megatron_pgloss.spec.normalizer import Path

_WHOLE = "the step"
_PLURAL = {unit: f"{unit}s" for unit in ("prompt", "episode", "sequence", "turn", "token")}


def weight(path: Path) -> str:
    """The weight of a token: ``1`` over the product of its levels' divisors.

    ``N_unit`` counts units of the whole step; ``n_unit(parent)`` those inside the token's own parent.
    """
    factors, parent = [], None
    for level in path.levels:
        count = f"N_{level.unit}" if parent is None else f"n_{level.unit}({parent})"
        if level.average:
            factors.append(f"mean of {count}")
        elif level.power is not None:
            factors.append({1.0: count, 0.5: f"sqrt({count})"}.get(level.power, f"{count}^{level.power:g}"))
        elif level.divisor is not None:
            factors.append(f"{level.divisor:g}")
        parent = level.unit
    return "1" if not factors else f"1 / {factors[0]}" if len(factors) == 1 else f"1 / ({' * '.join(factors)})"


def words(part: Component) -> list[str]:
    """One line for the weight, one for each count in it, one for what is counted."""
    lines, parent = [f"a token weighs {weight(part.path)}"], None
    for level in part.path.levels:
        name = f"N_{level.unit}" if parent is None else f"n_{level.unit}({parent})"
        inside = _WHOLE if parent is None else f"the token's {parent}"
        if level.power is not None or level.average:
            what = f"{_PLURAL[level.unit]} of {inside} {_held(part)}"
            if level.unit == "token":
                what = f"counted tokens of {inside}"
            if level.unit == "token" and part.divide_by == "weights":
                what = f"sum of the user's {part.name} weights over the counted tokens of {inside}"
            if level.average:
                what += f"; its mean over the {'step' if parent is None else _PLURAL[parent]} is what divides"
            lines.append(f"{name}: {what}, on all ranks together")
        parent = level.unit
    lines.append(f"counted: {_counted(part)}")
    return lines


def _held(part: Component) -> str:
    return "with a counted token" if part.units == "counted" else "(with or without a counted token)"


def _counted(part: Component) -> str:
    kept = "" if part.rejected == "original" else ", without those that a correction or gate rejected"
    stays = "" if part.rejected == "kept" else "; what a correction or gate rejects stays counted"
    if part.count == "members":
        return f"the tokens that {part.name} trains on, after masks{kept}{stays}"
    if part.count == "observations":
        return f"all observations, trained or not{kept}{stays}"
    return f"tokens where the batch's mask {part.count!r} is true{kept}{stays}"
