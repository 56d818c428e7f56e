"""`Kept`: the set of tokens that a sampler could draw from at each position, as the log-prob pass takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

TopPOf = Literal["top_k", "top_k_min_p", "all"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """The sampler's kept set K of every token, as recorded ids or as the rules to recompute it from the logits.

    With u = z/tau and p = softmax(u), a token v passes

    - top-k if u_v is at least the k-th largest u;
    - top-p if the tokens strictly likelier than v hold a share below top_p of the probability of the set that
      ``top_p_of`` names;
    - min-p if u_v >= max u + log(min_p).

    All ties at a threshold are kept. K holds the tokens that pass every rule that is given, never one with a logit of
    -inf.
    """

    ids: Tensor | None = None
    """int64 [..., k] with the targets' leading shape, -1 where a token has fewer than k ids; a token without ids has
    the whole vocabulary.
    """
    top_k: int | Tensor | None = None
    """A number or int64 [...]; 0 or less turns the rule off."""
    top_p: float | Tensor | None = None
    """A number or float32/64 [...]; 1 or more turns the rule off."""
    min_p: float | Tensor | None = None
    """A number or float32/64 [...]; 0 or less turns the rule off."""
    top_p_of: TopPOf = "top_k"
    """The set whose probability top-p takes a share of: what top-k left, what top-k and min-p left, or the whole
    vocabulary. Apart from this, the order in which a sampler applies the rules makes no difference."""
    add_target: bool = False
    """Whether a target outside K joins it; else its log-prob is -inf."""
