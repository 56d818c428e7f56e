"""Surrogates: what a ratio r and an advantage A of a token become, as a term to be minimised.

r is the ratio of the component's ratio axis (`megatron_pgloss.spec.ratios`), sg is the stop-gradient, d = log r. A
parameter that takes ``Bound`` is a number, or the name of a per-token constant stream of the batch
(``streams={"name": [B, L]}``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part
from megatron_pgloss.spec.functions import Function, StreamName

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Distance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Below = Annotated[float, Field(ge=0, lt=1)]
Above1 = Annotated[float, Field(gt=1, allow_inf_nan=False)]


class _Surrogate(Part):
    @property
    def reads(self) -> tuple[str, ...]:
        """What it reads beside log pi: ``ratio`` (and so the base of the ratio), ``advantages``, ``ref``, streams."""
        return ("ratio", "advantages", *self._streams())

    def _streams(self) -> tuple[str, ...]:
        """Per-token streams of the batch that stand for numbers."""
        bounds = (getattr(self, name, None) for name in ("low", "high"))
        return tuple(dict.fromkeys(value for value in bounds if isinstance(value, str)))


class Reinforce(_Surrogate):
    """Plain policy gradient: ``l = -A log pi`` (Williams 1992, eq. 4)."""

    kind: Literal["reinforce"] = "reinforce"

    @property
    def reads(self) -> tuple[str, ...]:
        """Advantages alone."""
        return ("advantages",)


class Unclipped(_Surrogate):
    """The ratio as it is: ``l = -r A`` (PPO 1707.06347 eq. 6); gates make it a trust region (DPPO, IPO)."""

    kind: Literal["unclipped"] = "unclipped"


class Clip(_Surrogate):
    """Clipped surrogate ``l = -min(r A, clip(r, 1-low, 1+high) A)`` (PPO 1707.06347 eq. 7; two bounds: DAPO 2503.14476
    eq. 10).

    With ``dual=c`` and A < 0 the term is ``-max(min(...), c A)`` (1912.09729 eq. 5). With ``delta`` it is ``-min(min(r,
    delta) A, clip(r, ...) A)`` (INTELLECT-2 2505.07291): the same where delta > 1 + high, which it must be.
    """

    kind: Literal["clip"] = "clip"
    low: Below | StreamName = 0.2
    """Distance of the lower ratio bound from 1."""
    high: Distance | StreamName = 0.2
    """Distance of the upper ratio bound from 1."""
    dual: Above1 | None = None
    """Upper ratio bound for A < 0; off unless asked for."""
    delta: Above1 | None = None
    """Cap of the ratio before the minimum; off unless asked for."""

    @model_validator(mode="after")
    def _one_cap(self) -> Clip:
        if self.dual is not None and self.delta is not None:
            raise SpecError("Clip: dual and delta are two names of one cap", fix="give one of them")
        if self.delta is not None and isinstance(self.high, float) and self.delta <= 1 + self.high:
            raise SpecError("Clip: delta lies inside the clip", expected=f"> {1 + self.high:g}", got=self.delta)
        return self


class CISPO(_Surrogate):
    """Clipped importance weight as a constant: ``l = -sg(clip(r, lower, upper)) A log pi`` (MiniMax-M1 2506.13585 eq. 4
    and 5). No token loses its gradient. AIPO (2505.24034) is ``low=None`` with an absolute ``high``.

    ``bound="relative"``: lower = 1 - low, upper = 1 + high (the paper; verl, slime, NeMo-RL, ROLL).
    ``bound="absolute"``: lower = low, upper = high (TRL, ms-swift, Liger).
    """

    kind: Literal["cispo"] = "cispo"
    low: Distance | StreamName | None = None
    """None: no lower bound."""
    high: Distance | StreamName
    bound: Literal["relative", "absolute"] = "relative"

    @model_validator(mode="after")
    def _ordered(self) -> CISPO:
        numbers = isinstance(self.low, float) and isinstance(self.high, float)
        if numbers and self.bound == "absolute" and self.low > self.high:  # type: ignore[operator]
            raise SpecError("CISPO: low lies above high", got=f"{self.low}, {self.high}")
        return self


class TOPR(_Surrogate):
    """Tapered off-policy REINFORCE: ``l = -sg(clip(r, a, b)) A log pi`` with bounds of its own for each sign of A
    (2503.14286, its update rule: 1 where the reward is not negative, else pi/mu of the whole answer held to [0, 1]). By
    default positives weigh 1, negatives ``min(r, 1)``.
    """

    kind: Literal["topr"] = "topr"
    positive: tuple[Distance, Distance] = (1.0, 1.0)
    """(a, b) where A > 0."""
    negative: tuple[Distance, Distance] = (0.0, 1.0)
    """(a, b) where A <= 0."""


class SAPO(_Surrogate):
    """Soft gate in place of a clip: ``l = -(4/tau) sigmoid(tau (r - 1)) A`` (2511.20347): value 2/tau at r = 1,
    slope 1 there, fading on both sides. tau is ``tau_positive`` where A > 0, else ``tau_negative``.
    """

    kind: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05


class VESPO(_Surrogate):
    """Gamma-shaped weight as a constant: ``l = -sg(phi(r)) A log pi``, ``phi(w) = w^k exp(lam (1 - w))`` (2602.10693),
    1 at w = 1. Meant for the ratio of a whole sequence (``ratio="sequence_sum"``).
    """

    kind: Literal["vespo"] = "vespo"
    k_positive: Distance = 2.0
    lam_positive: Distance = 3.0
    """Both where A >= 0."""
    k_negative: Distance = 3.0
    lam_negative: Distance = 2.0


class GMPO(_Surrogate):
    """Geometric mean of clipped token ratios: ``l = -A exp(mean over the unit of m)``, ``m = min(d, high)`` where A > 0
    and ``max(d, -low)`` where A < 0, 0 where A = 0 (2507.20673; bounds in log space). Takes token ratios.
    """

    kind: Literal["gmpo"] = "gmpo"
    low: Distance | StreamName = 0.4
    high: Distance | StreamName = 0.4
    unit: Literal["sequence", "turn"] = "sequence"


class DRO(_Surrogate):
    """Quadratic penalty on the log-ratio: ``l = -A d + beta/2 d^2`` (DRO 2405.19107, expanded; token level).

    Kimi k1.5 (2501.12599) is the same over a whole sequence, ``Ratio(statistic="sum")`` under a sequence mean.
    The gradient of d is that of log pi: ``-A log pi`` in place of ``-A d`` is another value and the same gradient.
    """

    kind: Literal["dro"] = "dro"
    beta: Distance = 0.1


class FIPO(_Surrogate):
    """Clipped surrogate times a constant influence of the tokens that follow: ``l = sg(f_t) l_clip``, ``f_t = clip(exp(
    sum_{k >= t} gamma^(k - t) d_k), 1, 1 + reach)``, ``gamma = 2^(-1/half_life)`` (2603.19835). Takes token ratios.

    k runs over the action tokens of the sequence, k - t counts positions; tokens with ``r > delta`` leave the sum.
    """

    kind: Literal["fipo"] = "fipo"
    low: Below | StreamName = 0.2
    high: Distance | StreamName = 0.28
    delta: Above1 | None = None
    """Cap of the ratio where A < 0, and of what enters the sum."""
    half_life: Positive = 32.0
    reach: Positive = 0.2
    both: bool = False
    """Let f fall to 1 - reach too."""
    safe_ratio: Above1 | None = None
    """Where A < 0 and r is above it, f is clipped to [0.8, 1] besides."""


class REAL(_Surrogate):
    """Rewards as labels (2602.05630), s the mean log-ratio of the sequence (``ratio="sequence"``), the sign of A its
    label; A = 0 has none and gives 0.

    ``form="binary"``: ``l = softplus(-sign(A) s / tau)`` (its cross-entropy form), a term per sequence, the same at
    each of its tokens: it goes with ``mean(sequence) > mean(token)``.

    ``form="group"`` classifies the sequences of a prompt against an anchor of logit 0:
    ``L = log(1 + sum_{A > 0} exp(-s / tau)) + log(1 + sum_{A < 0} exp(s / tau))``. A sequence has an even share of its
    logarithm's value and the slope of L by its own s, so that ``mean(prompt) > sum(sequence) > mean(token)`` gives the
    mean of L over prompts; weights and gates act on both alike. The group is that of the whole step: it takes a
    statistics pass. A sequence's label is the sign of its mean advantage over the tokens trained.
    """

    kind: Literal["real"] = "real"
    tau: Positive = 0.5
    form: Literal["binary", "group"] = "binary"


class Distill(_Surrogate):
    """On-policy distillation by policy gradient: ``l = -sg(log ref - log pi) r``: the advantage of a token is what the
    reference (the teacher) gives it above the policy. Reads no advantages.

    prime-rl's ``ref_kl`` is this with ``old="rollout"``, a gate that drops tokens with pi - mu < -0.2, and a k2 drift
    term (`megatron_pgloss.presets.distill`).
    """

    kind: Literal["distill"] = "distill"

    @property
    def reads(self) -> tuple[str, ...]:
        """The ratio and the reference."""
        return ("ratio", "ref")


class NLL(_Surrogate):
    """Negative log-likelihood of the policy's own tokens: ``l = -log pi`` (VAPO 2504.05118 on successful ones, by
    `megatron_pgloss.KeepPositiveAdvantage`). Reads no advantages.
    """

    kind: Literal["nll"] = "nll"

    @property
    def reads(self) -> tuple[str, ...]:
        """Nothing."""
        return ()


class Surrogate(Function, _Surrogate):
    """A surrogate of the user's own: ``fn(x) -> [T]``, the term to be minimised.

    Args (positional allowed):
        fn: the function, or ``"pkg.mod:name"`` (the form that TOML can hold). ``x.ratio`` and ``x.log_ratio`` are those
            of the component's ratio axis.

    ``needs`` as in `Term`; advantages and the base of the ratio are taken to be read.
    """

    kind: Literal["custom"] = "custom"

    def __init__(self, fn: Any = None, /, **data: Any) -> None:
        super().__init__(**({} if fn is None else {"fn": fn}), **data)


AnySurrogate = Annotated[
    Reinforce | Unclipped | Clip | CISPO | TOPR | SAPO | VESPO | GMPO | DRO | FIPO | REAL | Distill | NLL | Surrogate,
    Field(discriminator="kind"),
]
TOKEN_RATIO_ONLY = (GMPO, FIPO)
"""Surrogates that form their own statistic of the token ratios."""
