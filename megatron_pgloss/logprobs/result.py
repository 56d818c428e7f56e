"""`TokenLogprobs`, which a log-prob pass returns and `policy_loss` takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of the targets and, where asked for, statistics of the distributions they come from.

    Every field but ``chosen`` has the shape of the targets: position ``t`` is about ``targets[t]``, the
    token predicted from position ``t``. Units are nats. ``token_logprobs`` and ``linear_token_logprobs``
    return one; you can also build one from log-probs of your own.
    """

    logprob: Tensor
    """float32 (float64 for float64 logits): ``log p(targets[t])``, temperature included."""

    entropy: Tensor | None = None
    """Same shape and dtype: ``-sum_v p_v log p_v``; None where it was not computed."""

    lse: Tensor | None = None
    """Same shape and dtype: ``log sum_v exp(z_v/tau)``, for a z-loss; None where it was not asked for."""

    kl: Tensor | None = None
    """Same shape and dtype: the exact ``KL(p || q)`` to the reference whose logits were given; None where none were."""

    kept: Tensor | None = None
    """Same shape and dtype: the size of the kept set over that of the vocabulary, a constant; None without kept sets.
    """

    outside: Tensor | None = None
    """bool, same shape: the target was not in its token's kept set; None without kept sets."""

    chosen: Tensor | None = None
    """[*shape, k] of the same dtype: log-probs at ``chosen_ids``, -inf where an id is -1; None without ``chosen_ids``.
    """
