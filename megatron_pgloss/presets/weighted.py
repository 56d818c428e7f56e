"""Other recipes: a weighted log-prob, the ratio in a trust region, a quadratic penalty, labels, a teacher, a critic."""

from __future__ import annotations

from typing import Any, Literal

from megatron_pgloss.errors import SpecError
from megatron_pgloss.presets.build import SEQUENCE, TOKEN, also, build, policy
from megatron_pgloss.presets.known import BESIDE, FIELDS, preset
from megatron_pgloss.spec import (
    CISPO,
    DRO,
    KL,
    NLL,
    REAL,
    SAPO,
    TOPR,
    VESPO,
    Distill,
    DropZeroAdvantage,
    KeepPositiveAdvantage,
    KLGate,
    LossSpec,
    PolicyGradient,
    Ratio,
    Reinforce,
    SecondMomentGate,
    TVGate,
    Unclipped,
    Value,
)
from megatron_pgloss.spec.numbers import Bound


@preset(fixes=("ratio",))
def reinforce(*, normalizer: str = TOKEN, coef: float = 1.0, **parts: Any) -> LossSpec:
    """``-A log pi``, on-policy (Williams 1992, eq. 4).

    Args:
        normalizer: the normaliser of the policy gradient and of the terms over the same tokens.
        coef: coefficient of the policy gradient.
        parts: ``kl`` and ``entropy`` (coefficients, 0 is off); ``kl_estimator``; ``count_rejected``, whether the tokens
            that corrections and gates reject stay counted in the denominators (verl: ``False``); any field of
            `LossSpec`.
    """
    return policy(Reinforce(), ratio="none", normalizer=normalizer, coef=coef, **{"old": "policy", **parts})


@preset(reinforce)
def gpg(**parts: Any) -> LossSpec:
    """`reinforce` without the tokens of zero advantage, in numerator and count alike, which gives the paper's factor
    for groups without a signal (GPG 2504.02546).
    """
    return reinforce(**also(parts, "masks", DropZeroAdvantage()))


@preset()
def cispo(
    *,
    high: Bound = 4.0,
    low: Bound | None = None,
    bound: Literal["relative", "absolute"] = "relative",
    normalizer: str = TOKEN,
    **parts: Any,
) -> LossSpec:
    """The clipped ratio as a constant weight (CISPO, MiniMax-M1 2506.13585 eq. 4 and 5).

    The weight is cut at ``1 + high`` (5 by default) with ``bound="relative"``, at ``high`` itself with ``"absolute"``.
    It has a lower bound only where ``low`` is given.
    """
    return policy(CISPO(low=low, high=high, bound=bound), normalizer=normalizer, **parts)


@preset()
def aipo(*, cap: float = 4.0, normalizer: str = TOKEN, **parts: Any) -> LossSpec:
    """``min(pi/mu, cap)`` as a constant weight (AIPO, LlamaRL 2505.24034)."""
    surrogate = CISPO(high=cap, bound="absolute")
    return policy(surrogate, normalizer=normalizer, **{"old": "rollout", **parts})


@preset()
def topr(*, ratio: Any = "sequence_sum", normalizer: str = "mean(sequence) > sum(token)", **parts: Any) -> LossSpec:
    """``-A log pi`` for positive answers, weighted by ``min(pi/mu, 1)`` of the whole answer for negative ones (TOPR
    2503.14286).
    """
    return policy(TOPR(), ratio=ratio, normalizer=normalizer, **{"old": "rollout", **parts})


@preset(fixes=("ratio",))
def vespo(
    *,
    k_positive: float = 2.0,
    lam_positive: float = 3.0,
    k_negative: float = 3.0,
    lam_negative: float = 2.0,
    normalizer: str = TOKEN,
    **parts: Any,
) -> LossSpec:
    """A gamma-shaped weight of the whole sequence's pi/mu (VESPO 2602.10693)."""
    surrogate = VESPO(
        k_positive=k_positive, lam_positive=lam_positive, k_negative=k_negative, lam_negative=lam_negative
    )
    return policy(surrogate, ratio="sequence_sum", normalizer=normalizer, **{"old": "rollout", **parts})


@preset()
def sapo(
    *, tau_positive: float = 1.0, tau_negative: float = 1.05, normalizer: str = SEQUENCE, **parts: Any
) -> LossSpec:
    """A soft gate in place of the clip (SAPO 2511.20347)."""
    return policy(SAPO(tau_positive=tau_positive, tau_negative=tau_negative), normalizer=normalizer, **parts)


@preset()
def dro(*, beta: float = 0.1, normalizer: str = TOKEN, **parts: Any) -> LossSpec:
    """Policy gradient with a quadratic penalty on each token's log-ratio (DRO 2405.19107, at token level)."""
    return policy(DRO(beta=beta), normalizer=normalizer, **parts)


@preset(fixes=("ratio",))
def kimi(*, beta: float = 0.1, normalizer: str = SEQUENCE, **parts: Any) -> LossSpec:
    """`dro` on the log-ratio of the whole sequence (Kimi k1.5 2501.12599)."""
    ratio = Ratio(statistic="sum", gradient="through")
    return policy(DRO(beta=beta), ratio=ratio, normalizer=normalizer, **parts)


@preset(fixes=("ratio",))
def real(
    *, tau: float = 0.5, form: Literal["group", "binary"] = "group", normalizer: str | None = None, **parts: Any
) -> LossSpec:
    """Rewards as labels: the rollouts of a prompt are classified against an anchor (REAL 2602.05630).

    ``form="binary"`` classifies each rollout by itself. The default ``normalizer`` is the mean over prompts of the
    group's loss, or the mean over rollouts of theirs.
    """
    default = "mean(prompt) > sum(sequence) > mean(token)" if form == "group" else SEQUENCE
    return policy(REAL(tau=tau, form=form), ratio="sequence", normalizer=normalizer or default, **parts)


@preset()
def dppo_tv(*, low: float = 0.2, high: float = 0.2, normalizer: str = TOKEN, **parts: Any) -> LossSpec:
    """pi/mu inside a total-variation trust region of the sampled token (DPPO-TV 2602.04879)."""
    parts = also({"old": "rollout", **parts}, "gates", TVGate(low=low, high=high))
    return policy(Unclipped(), normalizer=normalizer, **parts)


@preset()
def dppo_kl(*, threshold: float = 0.05, normalizer: str = TOKEN, **parts: Any) -> LossSpec:
    """pi/mu inside a binary-KL trust region of the sampled token (DPPO-KL 2602.04879)."""
    parts = also({"old": "rollout", **parts}, "gates", KLGate(threshold=threshold))
    return policy(Unclipped(), normalizer=normalizer, **parts)


@preset()
def prime_dppo(
    *,
    low: float = 0.2,
    high: float = 0.2,
    kl_tau: float = 1e-3,
    zero_advantage: Literal["drop", "keep"] = "drop",
    normalizer: str = TOKEN,
    **parts: Any,
) -> LossSpec:
    """prime-rl's rl loss until August 2026: `dppo_tv` with a drift term ``kl_tau (log pi - log mu)^2`` on all tokens,
    also on those that the gate drops.

    ``zero_advantage="drop"`` takes tokens with advantage 0 out of both terms and their counts, as prime-rl's
    orchestrator does.
    """
    return _prime(TVGate(low=low, high=high, zero="low"), kl_tau, zero_advantage, normalizer, parts)


@preset()
def prime_ipo(
    *,
    eps: float = 0.1,
    kl_tau: float = 1e-3,
    zero_advantage: Literal["drop", "keep"] = "drop",
    normalizer: str = TOKEN,
    **parts: Any,
) -> LossSpec:
    """prime-rl's IPO: as `prime_dppo`, but a token is dropped where ``|pi - mu| > eps`` whatever its advantage.

    prime-rl's defaults changed: 0.1 and 1e-3 when the loss was added, 0.3 and 0 from September 2026.
    """
    return _prime(TVGate(low=eps, high=eps, sides="both"), kl_tau, zero_advantage, normalizer, parts)


def _prime(gate: TVGate, kl_tau: float, zero_advantage: str, normalizer: str, parts: dict[str, Any]) -> LossSpec:
    if zero_advantage not in ("drop", "keep"):
        raise SpecError(f"zero_advantage={zero_advantage!r}", expected="'drop' or 'keep'")
    drift = _drift(kl_tau, normalizer)
    parts = also({"old": "rollout", **parts}, "gates", gate)
    if zero_advantage == "drop":
        parts = also(parts, "masks", DropZeroAdvantage(on=("rl", *(part.name for part in drift))))
    return policy(Unclipped(), normalizer=normalizer, more=drift, **parts)


def _drift(kl_tau: float, normalizer: str) -> tuple[KL, ...]:
    # kl_tau d^2 is 2 kl_tau k2.
    return (KL(name="drift", estimator="k2", to="rollout", coef=2 * kl_tau, normalizer=normalizer),) if kl_tau else ()


@preset()
def m2po(*, threshold: float = 0.04, normalizer: str = TOKEN, **parts: Any) -> LossSpec:
    """The unclipped ratio, without the tokens that keep its second moment above a threshold (M2PO 2510.01161). Needs
    the statistics pass.
    """
    return policy(Unclipped(), normalizer=normalizer, **also(parts, "gates", SecondMomentGate(threshold=threshold)))


@preset(takes=BESIDE)
def distill(
    *, drop: float | None = 0.2, kl_tau: float = 1e-3, normalizer: str = TOKEN, coef: float = 1.0, **parts: Any
) -> LossSpec:
    """prime-rl's ``ref_kl``: distillation from the reference by policy gradient on pi/mu, without tokens that lost more
    than ``drop`` of their probability, and a drift term ``kl_tau (log pi - log mu)^2``. Reads no advantages.
    """
    rl = PolicyGradient(name="distill", surrogate=Distill(), coef=coef, normalizer=normalizer)
    gate = TVGate(low=drop, high=None, sides="both", on=("distill",))
    parts = {"old": "rollout", **parts}
    return build(rl, more=_drift(kl_tau, normalizer), **(parts if drop is None else also(parts, "gates", gate)))


@preset(takes=BESIDE)
def opd(*, normalizer: str = TOKEN, coef: float = 1.0, **parts: Any) -> LossSpec:
    """On-policy distillation: a policy gradient with ``sg(log ref - log pi)`` as the advantage of each token and a
    ratio of exactly 1 (Thinking Machines, "On-policy distillation", 2025). Reads no advantages.
    """
    rl = PolicyGradient(name="distill", surrogate=Distill(), ratio="none", coef=coef, normalizer=normalizer)
    return build(rl, **{"old": "policy", **parts})


@preset(takes=BESIDE)
def nll(*, positive: bool = False, normalizer: str = TOKEN, coef: float = 1.0, **parts: Any) -> LossSpec:
    """``-log pi`` of the policy's own tokens; ``positive=True`` takes only those with a positive advantage, in
    numerator and count (VAPO 2504.05118).
    """
    rl = PolicyGradient(name="nll", surrogate=NLL(), ratio="none", coef=coef, normalizer=normalizer)
    return build(rl, **(also(parts, "masks", KeepPositiveAdvantage(on=("nll",))) if positive else parts))


@preset(takes=FIELDS)
def critic(
    *,
    clip: float | None = 0.2,
    normalizer: str = TOKEN,
    coef: float = 1.0,
    count_rejected: bool = True,
    **fields: Any,
) -> LossSpec:
    """The step of a value head: the clipped value loss (PPO 1707.06347), for ``policy_loss(None, micro, value=V)``."""
    value = Value(clip=clip, coef=coef, normalizer=normalizer, count_rejected=count_rejected)
    return LossSpec(components=(value,), **fields)
