"""What a rule says about every token, whichever component it acts on. `N` positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The one answer of masks, corrections and gates, wherever they are applied. Constant: no gradient passes."""

    passes: Tensor | None = None
    """bool [N]; None where the rule does not reject."""
    weight: Tensor | None = None
    """float [N], a factor of the term, before it is divided by its mean; None where the rule does not weigh."""
    raw: Tensor | None = None
    """float [N]: the weight before it was truncated; None where the rule does not weigh, or weighs without a ratio."""
    truncated: Tensor | None = None
    """bool [N]: where the weight was truncated; None where nothing truncates it."""


def both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """``one * other``, which is ``one & other`` of two bools; None says nothing, and leaves the other as it is."""
    if one is None or other is None:
        return other if one is None else one
    return one * other
