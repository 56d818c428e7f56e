"""Every part of a spec as one line of plain text with its numbers; `megatron_pgloss.spec.latex` turns it into LaTeX.

Letters: pi policy, old base of the ratio, mu sampler, ref reference, A advantage, r ratio, d log-ratio, H entropy, V
value, R return, sg stop-gradient. A part comes as its expression and the definitions that the expression needs.
"""

from __future__ import annotations

from typing import Any

from megatron_pgloss.spec.components import (
    KL,
    Component,
    CrossEntropy,
    Entropy,
    PolicyGradient,
    Term,
    TopKDistill,
    Value,
)
from megatron_pgloss.spec.functions import Function
from megatron_pgloss.spec.gates import (
    CovarianceGate,
    EntropyGate,
    KLGate,
    RatioGate,
    SecondMomentGate,
    SequenceGate,
    TVGate,
)
from megatron_pgloss.spec.ratios import Ratio
from megatron_pgloss.spec.surrogates import (
    CISPO,
    DRO,
    FIPO,
    GMPO,
    NLL,
    REAL,
    SAPO,
    TOPR,
    VESPO,
    Clip,
    Distill,
    Reinforce,
    Unclipped,
)

Text = tuple[str, tuple[str, ...]]
"""An expression, and definitions of what it names."""
BASES = {"given": "old", "rollout": "mu", "policy": "sg(pi)", "record": "old", "interpolate": "old"}


def component(part: Component, old: str) -> Text:
    """The term of a component, to be minimised."""
    base = BASES[old]
    if isinstance(part, PolicyGradient):
        return _policy(part, base)
    if isinstance(part, KL):
        return _kl(part, base)
    if isinstance(part, Entropy):
        return "-H(pi)", ()
    if isinstance(part, CrossEntropy):
        return "-log pi on observations", ()
    if isinstance(part, TopKDistill):
        p, q = ("pi_v", "q_v") if part.tail == "drop" else ("pi_v/pi_K", "q_v/q_K")
        first, second = (q, p) if part.direction == "forward" else (p, q)
        return f"sum_{{v in K}} {first} (log {first} - log {second})", (f"K = {part.ids}, log q_v = {part.logprobs}",)
    if isinstance(part, Value):
        if part.clip is None:
            return "(V - R)^2 / 2", ()
        c = f"{part.clip:g}"
        return f"max((V - R)^2, (clip(V, V_old - {c}, V_old + {c}) - R)^2) / 2", ()
    if isinstance(part, Term):
        return f"{part.to_import_path()} on {part.on}s", ()
    raise NotImplementedError(f"no formula for {type(part).__name__}")


def _policy(part: PolicyGradient, base: str) -> Text:
    surrogate = part.surrogate
    text, more = _surrogate(surrogate)
    if "ratio" not in surrogate.reads:
        return text, more
    if isinstance(surrogate, GMPO | DRO | REAL):
        return text, (*more, f"d = {_log_ratio(part, base)}")
    if isinstance(surrogate, FIPO):
        more = (*more, f"d = {_log_ratio(part, base)}")
    return text, (*more, f"r = {_ratio(part, base)}")


def _ratio(part: PolicyGradient, base: str) -> str:
    axis = part.axis
    if axis is None:
        return "pi/sg(pi)"
    if isinstance(axis, Function):
        return f"exp({axis.to_import_path()})"
    if axis.level == "token":
        return f"pi/{base}"
    inner = f"exp({_statistic(axis, base)})"
    return inner if axis.gradient == "through" else f"sg({inner}) pi/sg(pi)"


def _log_ratio(part: PolicyGradient, base: str) -> str:
    axis = part.axis
    if isinstance(axis, Ratio) and axis.level != "token":
        text = _statistic(axis, base)
        return text if axis.gradient == "through" else f"sg({text}) + log pi - log sg(pi)"
    if isinstance(axis, Function):
        return axis.to_import_path()
    return f"log pi - log {base if axis is not None else 'sg(pi)'}"


def _statistic(axis: Ratio, base: str) -> str:
    of = f"(log pi - log {base})"
    members = " over members" if axis.over == "members" else ""
    short = {"sequence": "seq", "turn": "turn", "token": "token"}[axis.level]
    if axis.statistic in ("mean", "sum"):
        return f"{axis.statistic}_{short}{members} {of}"
    if axis.statistic == "prefix":
        return f"sum_{{k <= t, {short}}}{members} {of}"
    return f"log pi - log {base} + min_{{k < t, {short}}}{members} {of}"


def _bounds(low: Any, high: Any, center: float = 1.0) -> str:
    def side(bound: Any, sign: int) -> str:
        if isinstance(bound, str):
            return f"{center:g} {'+' if sign > 0 else '-'} {bound}" if center else f"{'' if sign > 0 else '-'}{bound}"
        return f"{center + sign * bound:g}"

    return f"{side(low, -1)}, {side(high, 1)}"


def _clipped(low: Any, high: Any, dual: float | None, delta: float | None) -> str:
    first = "r" if delta is None else f"min(r, {delta:g})"
    inner = f"min({first} A, clip(r, {_bounds(low, high)}) A)"
    return f"-{inner}" if dual is None else f"-({inner}, at least {dual:g} A where A < 0)"


def _surrogate(part: Any) -> Text:
    if isinstance(part, Function):
        return part.to_import_path(), ()
    match part:
        case Reinforce():
            return "-A log pi", ()
        case Unclipped():
            return "-r A", ()
        case Clip():
            return _clipped(part.low, part.high, part.dual, part.delta), ()
        case CISPO():
            return f"-sg({_weight(part)}) A log pi", ()
        case TOPR():
            (a, b), (c, e) = part.positive, part.negative
            clip = f"clip(r, {a:g}, {b:g}) where A > 0, clip(r, {c:g}, {e:g}) where A <= 0"
            return "-sg(w) A log pi", (f"w = {clip}",)
        case SAPO():
            tau = f"tau = {part.tau_positive:g} where A > 0, {part.tau_negative:g} where A <= 0"
            return "-(4/tau) sigmoid(tau (r - 1)) A", (tau,)
        case VESPO():
            k = f"k = {part.k_positive:g}, lam = {part.lam_positive:g} where A >= 0"
            return "-sg(r^k exp(lam (1 - r))) A log pi", (
                k, f"k = {part.k_negative:g}, lam = {part.lam_negative:g} where A < 0",
            )  # fmt: skip
        case GMPO():
            low, high = _bounds(part.low, part.high, 0.0).split(", ")
            short = "seq" if part.unit == "sequence" else "turn"
            return f"-A exp(mean_{short} m)", (f"m = min(d, {high}) where A > 0, max(d, {low}) where A < 0",)
        case DRO():
            return f"-A d + {part.beta / 2:g} d^2", ()
        case FIPO():
            reach = f"{1 - part.reach if part.both else 1:g}, {1 + part.reach:g}"
            far = "" if part.delta is None else f" without r > {part.delta:g}"
            sums = f"f = clip(exp(sum_{{k >= t}} g^(k - t) d_k{far}), {reach})"
            half = f"g^{part.half_life:g} = 1/2"
            safe = () if part.safe_ratio is None else (f"f in [0.8, 1] where A < 0 and r > {part.safe_ratio:g}",)
            return f"sg(f) ({_clipped(part.low, part.high, None, part.delta)})", (sums, half, *safe)
        case REAL():
            if part.form == "binary":
                return f"softplus(-sign(A) d / {part.tau:g})", ()
            share = "n = sequences of the prompt with this sign of A, each d_j one of them"
            return f"log(1 + sum_j exp(-sign(A) d_j / {part.tau:g})) / n", (share,)
        case Distill():
            return "-sg(log ref - log pi) r", ()
        case NLL():
            return "-log pi", ()
    raise NotImplementedError(f"no formula for {type(part).__name__}")


def _weight(part: CISPO) -> str:
    if part.bound == "relative":
        high = f"1 + {part.high}" if isinstance(part.high, str) else f"{1 + part.high:g}"
        low = None if part.low is None else f"1 - {part.low}" if isinstance(part.low, str) else f"{1 - part.low:g}"
    else:
        high = part.high if isinstance(part.high, str) else f"{part.high:g}"
        low = None if part.low is None else part.low if isinstance(part.low, str) else f"{part.low:g}"
    return f"min(r, {high})" if low is None else f"clip(r, {low}, {high})"


def _kl(part: KL, base: str) -> Text:
    if part.estimator == "exact":
        return "sum_v pi_v (log pi_v - log ref_v)", ()
    to = {"old": base, "rollout": "mu"}.get(part.to, part.to)
    value = {"k1": "d", "k2": "d^2/2", "k3": "exp(-d) + d - 1", "abs": "|d|"}[part.estimator]
    d = f"d = log pi - log {to}"
    if part.gradient == "k2" and part.estimator != "k2":
        return f"{value}, gradient of d^2/2", (d,)
    if part.gradient == "weighted":
        sampled = "mu" if part.base == "rollout" else base
        return f"r ({value})", (d, f"r = pi/{sampled}")
    return value, (d,)


def gate(part: Any, old: str) -> str:
    """What a gate does, as words with its numbers."""
    if isinstance(part, Function):
        return f"times sg({part.to_import_path()})"
    base = BASES[old] if getattr(part, "base", "old") == "old" else "mu"
    match part:
        case TVGate():
            return _tv(part, base)
        case KLGate():
            outward = f"A > 0 and pi > {base}, or A < 0 and pi < {base}"
            binary = f"KL of ({base}, 1 - {base}) to (pi, 1 - pi) > {part.threshold:g}"
            return f"drop the token where {binary} and ({outward})"
        case RatioGate():
            return f"drop the token where pi/{base} is outside [{part.low:g}, {part.high:g}]"
        case SequenceGate():
            short = "seq" if part.unit == "sequence" else "turn"
            return f"drop the token where A < 0 and mean_{short} (log {base} - log pi) > {part.threshold:g}"
        case EntropyGate():
            return f"keep the {part.share:g} of tokens with the largest H(pi) of the step"
        case SecondMomentGate():
            largest = f"largest (log pi - log {base})^2 first"
            return f"drop outward tokens, {largest}, until its mean over the others is at most {part.threshold:g}"
        case CovarianceGate():
            of = "c = (A - mean A) (log pi - mean log pi)"
            band = f"{of} in [{part.low:g}, {part.high:g}], drawn with seed {part.seed}"
            which = f"largest {of}" if part.select == "top" else band
            share = f"{part.share:g} of the tokens, {which}"
            return f"drop {share}" if part.effect == "drop" else f"keep alone {share}"
    raise NotImplementedError(f"no formula for {type(part).__name__}")


def _tv(part: TVGate, base: str) -> str:
    if part.sides == "both":
        low = "-inf" if part.low is None else f"-{part.low:g}"
        high = "inf" if part.high is None else f"{part.high:g}"
        return f"drop the token where pi - {base} is outside [{low}, {high}]"
    negative = "A <= 0" if part.zero == "low" else "A < 0"
    sides = [] if part.high is None else [f"A > 0 and pi - {base} > {part.high:g}"]
    sides += [] if part.low is None else [f"{negative} and pi - {base} < -{part.low:g}"]
    return "drop the token where " + ", or ".join(sides) if sides else "drop nothing"
