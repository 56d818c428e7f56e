"""`Kept`: what a sampler could draw from at each token, handed to the log-prob pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

TopPOf = Literal["top_k", "top_k_min_p", "all"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """The sampler's kept set K of every token: recorded ids, or the numbers to recompute it from the logits with.

    Recomputed, with u = z/tau and p = softmax(u) and every tie at a threshold kept:

    - top-k: u_v is at least the k-th largest;
    - top-p: of the mass of what ``top_p_of`` names, the share that is strictly likelier than v is below top_p;
    - min-p: u_v >= max u + log(min_p).

    K is all of those that are given, and never holds a column of -inf.
    """

    ids: Tensor | None = None
    """int64 [..., k], the targets' leading shape, -1 for none; a token without any has the whole vocabulary."""
    top_k: int | Tensor | None = None
    """A number or int64 [...]; 0 or less: off."""
    top_p: float | Tensor | None = None
    """A number or float32/64 [...]; 1 or more: off."""
    min_p: float | Tensor | None = None
    """A number or float32/64 [...]; 0 or less: off."""
    top_p_of: TopPOf = "top_k"
    """What top-p's share is of: what top-k left, what top-k and min-p left, or the whole vocabulary. All else is the
    same in any order."""
    add_target: bool = False
    """Whether a target outside K joins it; else its log-prob is -inf."""
