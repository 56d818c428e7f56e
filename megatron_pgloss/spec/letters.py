"""How formulas write what several of them share: bases, bounds and units.

Letters: pi policy, old base of the ratio, mu sampler, ref reference, A advantage, r ratio, d log-ratio, H entropy, V
value, R return, sg stop-gradient.
"""

from __future__ import annotations

from typing import Any

from megatron_pgloss.spec.levels import UNITS

BASES = {"given": "old", "rollout": "mu", "policy": "sg(pi)", "record": "old", "interpolate": "old"}
"""Source of ``old`` to the letter of the ratio's base."""
SHORT_UNIT = {name: "seq" if name == "sequence" else name for name in UNITS}


def letter(policy: str, base: str) -> str:
    """The letter of ``old`` or ``rollout`` where the ratio's base is ``base``; any other policy is written by name."""
    return {"old": base, "rollout": "mu"}.get(policy, policy)


def interval(low: Any, high: Any, center: float = 1.0) -> str:
    """``center - low, center + high`` as text; a bound may be the name of a stream."""

    def side(bound: Any, sign: int) -> str:
        if isinstance(bound, str):
            return f"{center:g} {'+' if sign > 0 else '-'} {bound}" if center else f"{'' if sign > 0 else '-'}{bound}"
        return f"{center + sign * bound:g}"

    return f"{side(low, -1)}, {side(high, 1)}"


def shown(bound: Any) -> str:
    """A bound as it is: a number, or the name of a stream."""
    return bound if isinstance(bound, str) else f"{bound:g}"
