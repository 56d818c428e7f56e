"""The weight of one token under a component's normaliser, as a formula and in words."""

from __future__ import annotations

from megatron_pgloss.spec.component import Component
from megatron_pgloss.spec.levels import LEVEL
from megatron_pgloss.spec.normalizer import Path, Step

_WHOLE = "the step"


def weight(path: Path) -> str:
    """The weight of a token: ``1`` over the product of the divisors of its levels.

    ``N_unit`` counts units of the whole step; ``n_unit(parent)`` those inside the token's own parent.
    """
    factors = [step.divisor.plain(count) for step, _, count in _counts(path) if step.divisor is not None]
    return "1" if not factors else f"1 / {factors[0]}" if len(factors) == 1 else f"1 / ({' * '.join(factors)})"


def _counts(path: Path) -> list[tuple[Step, str | None, str]]:
    """The steps of a path, each with the level above it and the letter of its count."""
    found: list[tuple[Step, str | None, str]] = []
    parent: str | None = None
    for step in path.steps:
        found.append((step, parent, f"N_{step.unit}" if parent is None else f"n_{step.unit}({parent})"))
        parent = step.unit
    return found


def words(part: Component) -> list[str]:
    """One line for the weight, one for each count in it, one for what is counted."""
    lines = [f"a token weighs {weight(part.path)}"]
    for step, parent, count in _counts(part.path):
        if step.divisor is None or step.divisor.reads == "nothing":
            continue
        inside = _WHOLE if parent is None else f"the token's {parent}"
        what = f"{LEVEL[step.unit].plural} of {inside} {_held(part)}"
        if step.unit == "token":
            what = f"counted tokens of {inside}"
        if step.unit == "token" and part.divide_by == "weights":
            what = f"sum of the user's {part.name} weights over the counted tokens of {inside}"
        if step.divisor.reads == "average":
            what += f"; its mean over the {'step' if parent is None else LEVEL[parent].plural} is what divides"
        lines.append(f"{count}: {what}, on all ranks together")
    lines.append(f"counted: {_counted(part)}")
    return lines


def _held(part: Component) -> str:
    return "with a counted token" if part.units == "counted" else "(with or without a counted token)"


def _counted(part: Component) -> str:
    rejected = (
        "; what a correction or gate rejects stays counted"
        if part.count_rejected
        else ", without those that a correction or gate rejected"
    )
    if part.count == "members":
        return f"the tokens that {part.name} trains on, after masks{rejected}"
    if part.count == "observations":
        return f"all observations, trained or not{rejected}"
    return f"tokens where the batch's mask {part.count!r} is true{rejected}"
