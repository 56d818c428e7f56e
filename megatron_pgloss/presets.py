"""Named recipes as specs. Unnamed parts are off; every part is a keyword.

``normalizer=`` sets the policy-gradient term and the terms over the same tokens, never cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec import (
    KL,
    Clip,
    CrossEntropy,
    DropTruncated,
    Entropy,
    LossSpec,
    PolicyGradient,
    Reinforce,
)
from megatron_pgloss.spec.base import nearest, unknown_key

_KEYWORDS = ("normalizer", "coef", "low", "high", "dual", "kl", "kl_estimator", "entropy")


def _build(
    rl: PolicyGradient,
    *,
    kl: float = 0.0,
    kl_estimator: str = "k3",
    entropy: float = 0.0,
    more: tuple[Any, ...] = (),
    **fields: Any,
) -> LossSpec:
    unknown = [name for name in fields if name not in LossSpec.model_fields or name == "components"]
    if unknown:
        raise unknown_key("the preset", unknown[0], [*_KEYWORDS, *(set(LossSpec.model_fields) - {"components"})])
    parts: list[Any] = [rl]
    if kl:
        parts.append(KL(estimator=kl_estimator, coef=kl, normalizer=rl.normalizer))
    if entropy:
        parts.append(Entropy(coef=entropy, normalizer=rl.normalizer))
    return LossSpec(components=(*parts, *more), **fields)


def reinforce(*, normalizer: str = "mean(token)", coef: float = 1.0, **parts: Any) -> LossSpec:
    """``-A log pi``, on-policy (Williams 1992, eq. 4).

    Args:
        normalizer: path for rl and the terms over the same tokens.
        coef: coefficient of rl.
        parts: ``kl``, ``kl_estimator``, ``entropy`` (coefficients, 0 is off) and any field of `LossSpec`.
    """
    rl = PolicyGradient(surrogate=Reinforce(), ratio="none", coef=coef, normalizer=normalizer)
    return _build(rl, **{"old": "policy", **parts})


def ppo(
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    normalizer: str = "mean(token)",
    coef: float = 1.0,
    **parts: Any,
) -> LossSpec:
    """Clipped surrogate, dual clip off (PPO 1707.06347 eq. 7). Keywords as in `reinforce`."""
    surrogate = Clip(low=low, high=high, dual=dual)
    return _build(PolicyGradient(surrogate=surrogate, coef=coef, normalizer=normalizer), **parts)


def grpo(*, kl: float = 0.04, normalizer: str = "mean(sequence) > mean(token)", **parts: Any) -> LossSpec:
    """Clipped surrogate, k3 KL to the reference, mean per sequence (GRPO 2402.03300 eq. 3 and 4).

    ``kl=0`` drops the term and the need for ref log-probs.
    """
    return ppo(kl=kl, normalizer=normalizer, **parts)


def dr_grpo(budget: float, *, normalizer: str | None = None, **parts: Any) -> LossSpec:
    """Clipped surrogate divided by a constant token budget (Dr. GRPO 2503.20783 section 3.2)."""
    return ppo(normalizer=normalizer or f"mean(sequence) > sum(token)/{budget!r}", **parts)


def dapo(*, low: float = 0.2, high: float = 0.28, overlong: Literal["drop"] | None = None, **parts: Any) -> LossSpec:
    """Clip-higher with the mean over all tokens (DAPO 2503.14476 eq. 8 to 10).

    ``overlong="drop"`` takes truncated sequences out of numerator and counts.
    """
    if overlong not in (None, "drop"):
        raise SpecError(f"dapo: overlong={overlong!r}", expected="'drop' or None")
    if overlong == "drop":
        parts["masks"] = (*parts.get("masks", ()), DropTruncated())
    return ppo(low=low, high=high, **parts)


def echo(
    variant: Literal["paper", "prime_rl"] = "paper",
    *,
    ce: float | None = None,
    normalizer: str = "mean(token)",
    **parts: Any,
) -> LossSpec:
    """As `grpo` without KL, plus cross entropy on what the environment answered (ECHO 2605.24517).

    Args:
        variant: ``paper``: ce over all observations of a sequence, then over all sequences, 0.05;
            ``prime_rl``: mean over its own member tokens, 0.1.
        ce: coefficient of the cross entropy; None is the variant's own.
    """
    if variant == "paper":
        target = CrossEntropy(
            coef=0.05 if ce is None else ce,
            normalizer="mean(sequence) > mean(token)",
            count="observations",
            units="all",
        )
    elif variant == "prime_rl":
        target = CrossEntropy(coef=0.1 if ce is None else ce, normalizer="mean(token)")
    else:
        raise SpecError(f"echo: variant={variant!r}", expected="'paper' or 'prime_rl'")
    return ppo(normalizer=normalizer, more=(target,), **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A row of the preset table."""

    build: Callable[..., LossSpec]
    source: str
    equation: str


PRESETS: dict[str, Preset] = {
    "reinforce": Preset(build=reinforce, source="Williams 1992", equation="eq. 4"),
    "ppo": Preset(build=ppo, source="arXiv 1707.06347", equation="eq. 7"),
    "grpo": Preset(build=grpo, source="arXiv 2402.03300", equation="eq. 3 and 4"),
    "dr_grpo": Preset(build=dr_grpo, source="arXiv 2503.20783", equation="section 3.2"),
    "dapo": Preset(build=dapo, source="arXiv 2503.14476", equation="eq. 8 to 10"),
    "echo": Preset(build=echo, source="arXiv 2605.24517", equation="the observation term"),
}


def get(name: str, **parts: Any) -> LossSpec:
    """The preset called ``name`` with its parts as keywords.

    Raises:
        SpecError: no such preset; the nearest name is given.
    """
    if name not in PRESETS:
        raise SpecError(f"no preset {name!r}", expected=", ".join(PRESETS), fix=nearest(name, list(PRESETS)))
    return PRESETS[name].build(**parts)
