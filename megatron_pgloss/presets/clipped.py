"""Recipes around the clipped surrogate. `reinforce` explains the keywords that all presets share."""

from __future__ import annotations

from typing import Any, Literal

from megatron_pgloss.errors import SpecError
from megatron_pgloss.presets.build import SEQUENCE, TOKEN, also, listed, policy
from megatron_pgloss.presets.known import preset
from megatron_pgloss.spec import (
    FIPO,
    GMPO,
    KL,
    Clip,
    CovarianceGate,
    CrossEntropy,
    DropTruncated,
    EntropyGate,
    IcePop,
    LossSpec,
    SequenceGate,
    Unclipped,
)
from megatron_pgloss.spec.numbers import Bound


@preset()
def ppo(
    *,
    low: Bound = 0.2,
    high: Bound = 0.2,
    dual: float | None = None,
    delta: float | None = None,
    normalizer: str = TOKEN,
    **parts: Any,
) -> LossSpec:
    """Clipped surrogate, dual clip off (PPO 1707.06347 eq. 7). Keywords as in `reinforce`."""
    return policy(Clip(low=low, high=high, dual=dual, delta=delta), normalizer=normalizer, **parts)


@preset(ppo)
def lite_ppo(**parts: Any) -> LossSpec:
    """`ppo` under the token mean (2508.08221). The rest of the recipe is in the advantages: the mean of the group and
    the standard deviation of the batch (`megatron_pgloss.advantages`).
    """
    return ppo(**parts)


@preset(ppo)
def grpo(*, kl: float = 0.04, normalizer: str = SEQUENCE, **parts: Any) -> LossSpec:
    """Clipped surrogate, k3 KL to the reference, mean per sequence (GRPO 2402.03300 eq. 3 and 4).

    ``kl=0`` drops the term and the need for ref log-probs.
    """
    return ppo(kl=kl, normalizer=normalizer, **parts)


@preset(ppo)
def dr_grpo(budget: float, *, normalizer: str | None = None, **parts: Any) -> LossSpec:
    """Clipped surrogate divided by a constant token budget (Dr. GRPO 2503.20783 section 3.2)."""
    return ppo(normalizer=normalizer or f"mean(sequence) > sum(token)/{budget!r}", **parts)


@preset(ppo)
def dapo(*, high: Bound = 0.28, overlong: Literal["drop"] | None = None, **parts: Any) -> LossSpec:
    """Clip-higher with the mean over all tokens (DAPO 2503.14476 eq. 8 to 10).

    ``overlong="drop"`` takes truncated sequences out of numerator and counts.
    """
    if overlong not in (None, "drop"):
        raise SpecError(f"dapo: overlong={overlong!r}", expected="'drop' or None")
    if overlong == "drop":
        parts["masks"] = (*listed(parts, "masks"), DropTruncated())
    return ppo(high=high, **parts)


@preset(ppo)
def echo(
    variant: Literal["paper", "prime_rl"] = "paper", *, ce: float | None = None, normalizer: str = TOKEN, **parts: Any
) -> LossSpec:
    """`ppo`, plus cross entropy on the environment's answers (ECHO 2605.24517).

    Args:
        variant: ``paper``: cross entropy averaged over all observations of a sequence, then over all sequences, with
            coefficient 0.05; ``prime_rl``: averaged over its own member tokens, with coefficient 0.1.
        ce: coefficient of the cross entropy; None: that of the variant.
    """
    if variant == "paper":
        target = CrossEntropy(coef=0.05 if ce is None else ce, normalizer=SEQUENCE, count="observations", units="all")
    elif variant == "prime_rl":
        target = CrossEntropy(coef=0.1 if ce is None else ce, normalizer=TOKEN)
    else:
        raise SpecError(f"echo: variant={variant!r}", expected="'paper' or 'prime_rl'")
    return ppo(normalizer=normalizer, more=(target, *parts.pop("more", ())), **parts)


@preset(fixes=("ratio",))
def gspo(
    *,
    low: Bound = 3e-4,
    high: Bound = 4e-4,
    unit: Literal["sequence", "turn"] = "sequence",
    normalizer: str = SEQUENCE,
    **parts: Any,
) -> LossSpec:
    """The clipped ratio of a sequence, with the gradient through the mean of its tokens (GSPO 2507.18071 eq. 5 to 7).

    ``unit="turn"``: one ratio per turn. With ``normalizer="mean(token)"`` each sequence weighs by its length.
    """
    return policy(Clip(low=low, high=high), ratio=unit, normalizer=normalizer, **parts)


@preset(fixes=("ratio",))
def gspo_token(
    *,
    low: Bound = 3e-4,
    high: Bound = 4e-4,
    unit: Literal["sequence", "turn"] = "sequence",
    normalizer: str = SEQUENCE,
    **parts: Any,
) -> LossSpec:
    """`gspo` with the ratio held fixed and the gradient of the token's own log-prob, so that advantages may differ
    within a sequence (GSPO-token, 2507.18071 eq. 13 and 14).
    """
    return policy(Clip(low=low, high=high), ratio=f"{unit}_token", normalizer=normalizer, **parts)


@preset(gspo)
def luspo(*, normalizer: str = "mean(sequence) > sum(token)", **parts: Any) -> LossSpec:
    """`gspo` with every sequence weighed by its length (LUSPO 2602.05261)."""
    return gspo(normalizer=normalizer, **parts)


@preset()
def gmpo(*, low: Bound = 0.4, high: Bound = 0.4, normalizer: str = SEQUENCE, **parts: Any) -> LossSpec:
    """Geometric mean of clipped token ratios (GMPO 2507.20673); bounds in log space."""
    return policy(GMPO(low=low, high=high), normalizer=normalizer, **parts)


@preset()
def fipo(
    *,
    low: Bound = 0.2,
    high: Bound = 0.28,
    half_life: float = 32.0,
    reach: float = 0.2,
    both: bool = False,
    delta: float | None = 10.0,
    safe_ratio: float | None = 4.0,
    normalizer: str = TOKEN,
    **parts: Any,
) -> LossSpec:
    """`dapo` with each token's term times the influence of the tokens that follow it (FIPO 2603.19835)."""
    surrogate = FIPO(
        low=low, high=high, half_life=half_life, reach=reach, both=both, delta=delta, safe_ratio=safe_ratio
    )
    return policy(surrogate, normalizer=normalizer, **parts)


@preset(ppo)
def opsm(threshold: float, *, normalizer: str = SEQUENCE, **parts: Any) -> LossSpec:
    """`ppo` without sequences of negative advantage that the policy has left: those whose mean of log mu - log pi is
    above ``threshold`` (off-policy sequence masking, DeepSeek-V3.2 2512.02556).
    """
    return ppo(normalizer=normalizer, **also(parts, "gates", SequenceGate(threshold=threshold)))


@preset(ppo)
def icepop(
    *,
    low: Bound = 0.2,
    high: Bound = 0.2,
    floor: float = 0.5,
    ceiling: float = 5.0,
    normalizer: str = SEQUENCE,
    **parts: Any,
) -> LossSpec:
    """`ppo` with tokens weighed by old/mu inside ``[floor, ceiling]`` and dropped outside (IcePop, Ring-1T
    2510.18855).
    """
    rule = IcePop(low=floor, high=ceiling)
    return ppo(low=low, high=high, normalizer=normalizer, **also(parts, "corrections", rule))


@preset(dapo)
def high_entropy(*, share: float = 0.2, **parts: Any) -> LossSpec:
    """`dapo` on the ``share`` of tokens with the highest entropy (2506.01939). Needs the statistics pass."""
    return dapo(**also(parts, "gates", EntropyGate(share=share)))


@preset(ppo)
def clip_cov(*, share: float = 2e-4, floor: float = 1.0, ceiling: float = 5.0, seed: int = 0, **parts: Any) -> LossSpec:
    """`ppo` without a few tokens drawn from those of high covariance between advantage and log-prob (Clip-Cov
    2505.22617). Needs the statistics pass.
    """
    gate = CovarianceGate(select="band", share=share, low=floor, high=ceiling, effect="drop", seed=seed)
    return ppo(**also(parts, "gates", gate))


@preset()
def kl_cov(*, share: float = 2e-3, penalty: float = 1.0, normalizer: str = TOKEN, **parts: Any) -> LossSpec:
    """The unclipped ratio, and ``penalty |log pi - log old|`` on the ``share`` of tokens with the highest covariance
    between advantage and log-prob (KL-Cov 2505.22617). Needs the statistics pass.
    """
    drift = KL(name="kl_cov", estimator="abs", to="old", coef=penalty, normalizer=normalizer)
    gate = CovarianceGate(select="top", share=share, effect="keep", on=("kl_cov",))
    return policy(Unclipped(), normalizer=normalizer, more=(drift,), **also(parts, "gates", gate))
