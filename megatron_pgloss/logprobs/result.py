"""What a log-prob pass returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of the targets and, where asked for, entropies of their distributions.

    Both have the shape of the targets: position ``t`` is about ``targets[t]``, the token predicted
    from position ``t``. Units are nats. ``token_logprobs`` fills it; log-probs of your own may be
    put in it as well.
    """

    logprob: Tensor
    """float32 (float64 for float64 logits): ``log p(targets[t])``, temperature included."""

    entropy: Tensor | None = None
    """Same shape and dtype: ``-sum_v p_v log p_v``; None where it was not computed."""

    lse: Tensor | None = None
    """Same shape and dtype: ``log sum_v exp(z_v/tau)``, for a z-loss; None where it was not asked for."""

    kl: Tensor | None = None
    """Same shape and dtype: the exact ``KL(p || q)`` to the reference whose logits were given; None without."""

    kept: Tensor | None = None
    """Same shape and dtype: the size of the kept set over the vocabulary's, a constant. None: no sets."""

    outside: Tensor | None = None
    """bool, same shape: targets that were not in their kept set; None without sets."""

    chosen: Tensor | None = None
    """[*shape, k] of the same dtype: log-probs at the ids that were chosen, -inf where an id is -1; None without."""
