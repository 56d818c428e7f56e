"""Functions that every preset is made with."""

from __future__ import annotations

from typing import Any

from megatron_pgloss.errors import SpecError
from megatron_pgloss.presets.known import number
from megatron_pgloss.spec import KL, Component, Entropy, LossSpec, PolicyGradient

TOKEN = "mean(token)"
SEQUENCE = "mean(sequence) > mean(token)"


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
        count_rejected: ``False`` takes the tokens that corrections and gates reject out of the denominators of every
            component over action tokens (`megatron_pgloss.spec.Component.count_rejected`); ``True`` leaves the
            components as they are.
        fields: fields of `LossSpec`.

    Raises:
        SpecError: a coefficient is no number, or ``count_rejected`` is no bool.
    """
    parts: list[Component] = [rl]
    if number("the preset", "kl", kl):
        parts.append(KL(estimator=kl_estimator, coef=kl, normalizer=rl.normalizer))
    if number("the preset", "entropy", entropy):
        parts.append(Entropy(coef=entropy, normalizer=rl.normalizer))
    return LossSpec(components=without_rejected((*parts, *more), count_rejected), **fields)


def without_rejected(parts: tuple[Component, ...], count_rejected: bool) -> tuple[Component, ...]:
    """``parts``; with ``count_rejected=False`` those over action tokens do not count rejected tokens."""
    if not isinstance(count_rejected, bool):
        raise SpecError("count_rejected is no bool", expected="True or False", got=repr(count_rejected)[:64])
    if count_rejected:
        return parts
    return tuple(part.replace(count_rejected=False) if part.over == "action" else part for part in parts)


def policy(
    surrogate: Any, *, ratio: Any = "token", normalizer: str = TOKEN, coef: float = 1.0, name: str = "rl", **parts: Any
) -> LossSpec:
    """A spec, made by `build`, of a policy gradient with this surrogate and ratio."""
    rl = PolicyGradient(name=name, surrogate=surrogate, ratio=ratio, coef=coef, normalizer=normalizer)
    return build(rl, **parts)


def also(parts: dict[str, Any], field: str, *rules: Any) -> dict[str, Any]:
    """``parts`` with ``rules`` in front of the caller's own in ``field`` (gates, masks or corrections)."""
    return {**parts, field: (*rules, *listed(parts, field))}


def listed(parts: dict[str, Any], field: str) -> tuple[Any, ...]:
    """The caller's own rules in ``field``."""
    given = parts.get(field, ())
    if not isinstance(given, list | tuple):
        raise SpecError(f"{field} is no list", expected=f"{field}=[...]", got=type(given).__name__)
    return tuple(given)
