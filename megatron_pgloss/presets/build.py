"""What every preset is made with."""

from __future__ import annotations

from typing import Any

from megatron_pgloss.spec import KL, Component, Entropy, LossSpec, PolicyGradient
from megatron_pgloss.spec.base import unknown_key

TOKEN = "mean(token)"
SEQUENCE = "mean(sequence) > mean(token)"
_KEYWORDS = ("normalizer", "coef", "low", "high", "dual", "kl", "kl_estimator", "entropy", "count_rejected")


def build(
    rl: PolicyGradient,
    *,
    kl: float = 0.0,
    kl_estimator: str = "k3",
    entropy: float = 0.0,
    count_rejected: bool = True,
    more: tuple[Any, ...] = (),
    **fields: Any,
) -> LossSpec:
    """A spec of ``rl``, KL and entropy over the same tokens where their coefficients are not 0, and ``more``.

    Args:
        count_rejected: ``False`` takes what corrections and gates reject out of the denominators of every component
            over action tokens (`megatron_pgloss.spec.Component.count_rejected`); ``True`` leaves them as they are.
        fields: fields of `LossSpec`.

    Raises:
        SpecError: a keyword that is neither.
    """
    unknown = [name for name in fields if name not in LossSpec.model_fields or name == "components"]
    if unknown:
        raise unknown_key("the preset", unknown[0], [*_KEYWORDS, *(set(LossSpec.model_fields) - {"components"})])
    parts: list[Component] = [rl]
    if kl:
        parts.append(KL(estimator=kl_estimator, coef=kl, normalizer=rl.normalizer))
    if entropy:
        parts.append(Entropy(coef=entropy, normalizer=rl.normalizer))
    return LossSpec(components=without_rejected((*parts, *more), count_rejected), **fields)


def without_rejected(parts: tuple[Component, ...], count_rejected: bool) -> tuple[Component, ...]:
    """``parts``; unless ``count_rejected``, those over action tokens no longer count what is rejected."""
    if count_rejected:
        return parts
    return tuple(part.replace(count_rejected=False) if part.over == "action" else part for part in parts)


def policy(
    surrogate: Any, *, ratio: Any = "token", normalizer: str = TOKEN, coef: float = 1.0, name: str = "rl", **parts: Any
) -> LossSpec:
    """`build` of a policy gradient with this surrogate and ratio."""
    rl = PolicyGradient(name=name, surrogate=surrogate, ratio=ratio, coef=coef, normalizer=normalizer)
    return build(rl, **parts)


def also(parts: dict[str, Any], field: str, *rules: Any) -> dict[str, Any]:
    """``parts`` with ``rules`` in front of the caller's own in ``field`` (gates, masks or corrections)."""
    return {**parts, field: (*rules, *parts.get(field, ()))}
