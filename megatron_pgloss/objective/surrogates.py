"""Surrogates: from the streams of a component to its policy-gradient term. Everything is elementwise on `[N]`.

One function per kind, ``(x, part) -> TokenTerm``, in the table `SURROGATES`; the formulas stand in
`megatron_pgloss.spec.surrogates`. Branches are chosen before exp, so that a clipped token has gradient exactly 0 and an
unbounded one never meets ``0 * inf``. A log-ratio is bounded where it is exponentiated (`Streams.ratio`,
`Streams.bounded`), and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pgloss.maths import Asked, flags, selected, sloped
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.token_term import Clipped, TokenTerm
from megatron_pgloss.objective.users import checked
from megatron_pgloss.spec import CISPO, DRO, FIPO, GMPO, REAL, SAPO, TOPR, VESPO, Clip, Distill, Surrogate
from megatron_pgloss.spec.surrogates import AnySurrogate

KEY = "surrogate"
"""The key under which the streams have the surrogate's own statistic."""


def reinforce(x: Streams, part: Any) -> TokenTerm:
    """``-A log pi``."""
    return TokenTerm(-x.advantage * x.logp)


def unclipped(x: Streams, part: Any) -> TokenTerm:
    """``-r A``."""
    return TokenTerm(-x.advantage * x.ratio, held_N=_held(x, x.log_ratio))


def clip(x: Streams, part: Clip) -> TokenTerm:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``, with a cap of r for A < 0 where ``dual`` or ``delta`` is given."""
    low, high = x.number(part.low), x.number(part.high)
    cap: Any = part.dual if part.delta is None else part.delta
    if part.delta is not None and isinstance(high, Tensor):
        cap = (1 + high).clamp(min=part.delta)  # where a token's upper bound is above delta, that bound is its cap
    return _clipped(x, x.advantage, low, high, cap)


def _held(x: Streams, log_N: Tensor) -> Tensor:
    """bool [N]: where the log-ratio bound holds ``exp(log_N)``, and the advantage beside it is not 0."""
    return x.beyond(log_N) & (x.advantage != 0)


def _clipped(x: Streams, advantage_N: Tensor, low: Any, high: Any, cap: Any) -> TokenTerm:
    term_N, which = _clip(x.bounded(x.log_ratio), advantage_N, low, high, cap)
    return TokenTerm(term_N, which, _held(x, x.log_ratio) & ~which.any_N)


def _clip(log_ratio_N: Tensor, advantage_N: Tensor, low: Any, high: Any, cap: Any) -> tuple[Tensor, Clipped]:
    ratio_N = log_ratio_N.detach().exp()  # the choice of branch is not differentiated
    high_N = (advantage_N > 0) & (ratio_N > 1 + high)
    low_N = (advantage_N < 0) & (ratio_N < 1 - low)
    dual_N = (advantage_N < 0) & (ratio_N > cap) if cap is not None else torch.zeros_like(low_N)
    which = Clipped(low_N, high_N, dual_N)
    upper, lower = (side if isinstance(side, Tensor) else ratio_N.new_tensor(side) for side in (1 + high, 1 - low))
    held_N = torch.where(high_N, upper, lower)
    if cap is not None:
        held_N = torch.where(dual_N, cap, held_N)
    free = flags(~which.any_N, log_ratio_N.dtype)
    factor_N = selected(free, selected(free, log_ratio_N).exp()) + selected(which.any_N, held_N)
    return -advantage_N * factor_N, which


def _weighed(x: Streams, weight_N: Tensor, low_N: Tensor, high_N: Tensor) -> TokenTerm:
    """``-sg(w) A log pi``, and where the weight stood at a bound."""
    term_N = -weight_N.detach() * x.advantage * x.logp
    return TokenTerm(term_N, Clipped(low_N, high_N, torch.zeros_like(low_N)))


def _either(x: Streams, first_N: Tensor, one: float, other: float) -> Tensor:
    # torch.where of two Python numbers would give float32, whatever the dtype of the streams is.
    return torch.where(first_N, x.logp.new_tensor(one), x.logp.new_tensor(other))


def cispo(x: Streams, part: CISPO) -> TokenTerm:
    """``-sg(clip(r)) A log pi``."""
    ratio_N = x.ratio.detach()
    relative = part.bound == "relative"
    high = x.number(part.high)
    upper = 1 + high if relative else high
    high_N, low_N = ratio_N > upper, torch.zeros_like(ratio_N, dtype=torch.bool)
    weight_N = torch.where(high_N, upper, ratio_N)
    if part.low is not None:
        low = x.number(part.low)
        lower = 1 - low if relative else low
        low_N = ratio_N < lower
        weight_N = torch.where(low_N, lower, weight_N)
    return _weighed(x, weight_N, low_N, high_N)


def topr(x: Streams, part: TOPR) -> TokenTerm:
    """``-sg(clip(r)) A log pi``, with bounds of its own for each sign of A."""
    ratio_N, up_N = x.ratio.detach(), x.advantage > 0
    low_N = torch.where(up_N, ratio_N < part.positive[0], ratio_N < part.negative[0])
    high_N = torch.where(up_N, ratio_N > part.positive[1], ratio_N > part.negative[1])
    weight_N = torch.where(up_N, ratio_N.clamp(*part.positive), ratio_N.clamp(*part.negative))
    return _weighed(x, weight_N, low_N, high_N)


def vespo(x: Streams, part: VESPO) -> TokenTerm:
    """``-sg(phi(r)) A log pi``; the logarithm of phi is formed first."""
    log_N, up_N = x.bounded(x.log_ratio.detach()), x.advantage >= 0
    k_N = _either(x, up_N, part.k_positive, part.k_negative)
    lam_N = _either(x, up_N, part.lam_positive, part.lam_negative)
    weight_N = (k_N * log_N - lam_N * log_N.expm1()).exp()
    return TokenTerm(-weight_N * x.advantage * x.logp)


def sapo(x: Streams, part: SAPO) -> TokenTerm:
    """``-(4/tau) sigmoid(tau (r - 1)) A``."""
    tau_N = _either(x, x.advantage > 0, part.tau_positive, part.tau_negative)
    log_N = x.bounded(x.log_ratio)
    # expm1 keeps the digits of r - 1 near r = 1; its own derivative, result + 1, loses those of a small r.
    inner_N = tau_N * log_N.detach().expm1()
    value_N = -x.advantage * torch.sigmoid(inner_N) * 4 / tau_N
    slope_N = -4 * x.advantage * torch.sigmoid(inner_N) * torch.sigmoid(-inner_N) * log_N.detach().exp()
    return TokenTerm(sloped(value_N, slope_N, log_N), held_N=_held(x, x.log_ratio))


def _gmpo_clipped(x: Streams, part: GMPO) -> tuple[Tensor, Clipped]:
    d_N, advantage_N = x.token_log_ratio, x.stream("advantages")
    low, high = x.number(part.low), x.number(part.high)
    raw_N = d_N.detach()
    high_N, low_N = (advantage_N > 0) & (raw_N > high), (advantage_N < 0) & (raw_N < -low)
    m_N = torch.where(high_N, high, torch.where(low_N, -low, torch.where(advantage_N == 0, 0, d_N)))
    # An advantage that is no number has no sign, and an infinite d is no ratio: such a token does not vote.
    m_N = torch.where(advantage_N.isfinite() & raw_N.isfinite(), m_N, torch.nan)
    return m_N, Clipped(low_N, high_N, torch.zeros_like(low_N))


def gmpo(x: Streams, part: GMPO) -> TokenTerm:
    """``-A exp(mean of clipped d)`` over the unit."""
    mean_N, which = x.answer(KEY), _gmpo_clipped(x, part)[1]
    return TokenTerm(-x.advantage * x.bounded(mean_N).exp(), which, _held(x, mean_N))


def dro(x: Streams, part: DRO) -> TokenTerm:
    """``-A d + beta/2 d^2``."""
    d_N = x.log_ratio
    return TokenTerm(-x.advantage * d_N + part.beta / 2 * d_N.square())


def _fipo_future(x: Streams, part: FIPO) -> Asked:
    d_N = x.token_log_ratio.detach()
    counted_N = d_N if part.delta is None else torch.where(d_N.exp() > part.delta, 0, d_N)
    return x.ask_discounted_sum(counted_N, 2 ** (-1 / part.half_life))


def fipo(x: Streams, part: FIPO) -> TokenTerm:
    """The clipped surrogate times the influence of the tokens that follow."""
    d_N, advantage_N, future_N = x.token_log_ratio.detach(), x.advantage, x.answer(KEY)
    least = 1 - part.reach if part.both else 1.0
    influence_N = x.bounded(future_N).exp().clamp(least, 1 + part.reach)
    if part.safe_ratio is not None:
        risky_N = (advantage_N < 0) & (d_N.exp() > part.safe_ratio)
        influence_N = torch.where(risky_N, influence_N.clamp(0.8, 1.0), influence_N)
    found = _clipped(x, advantage_N, x.number(part.low), x.number(part.high), part.delta)
    return TokenTerm(influence_N * found.term_N, found.clipped, found.held_N)


def real(x: Streams, part: REAL) -> TokenTerm:
    """``softplus(-sign(A) s / tau)``, 0 where A = 0; in the group form, by value and slope from the statistics pass.

    softplus(-z) is written as -logsigmoid(z): torch's softplus is linear beyond 20, which is off by e^-20.
    """
    if part.form == "group":
        value_N, slope_N = x.group_term
        s_N = x.bounded(x.log_ratio)
        return TokenTerm(value_N + slope_N * (s_N - s_N.detach()), held_N=x.beyond(x.log_ratio) & (slope_N != 0))
    label_N = x.advantage.sign()
    term_N = torch.where(label_N == 0, 0, -F.logsigmoid(label_N * x.bounded(x.log_ratio) / part.tau))
    return TokenTerm(term_N, held_N=_held(x, x.log_ratio))


def distill(x: Streams, part: Distill) -> TokenTerm:
    """``-sg(log ref - log pi) r``."""
    above_N = x.policy(part.to) - x.logp.detach()
    return TokenTerm(-above_N * x.ratio, held_N=x.beyond(x.log_ratio) & (above_N != 0))


def nll(x: Streams, part: Any) -> TokenTerm:
    """``-log pi``."""
    return TokenTerm(-x.logp)


def custom(x: Streams, part: Surrogate) -> TokenTerm:
    """The term that the user's function returns."""
    x.ratio_was_read = False
    term_N = checked(x.call(KEY, part), x, f"surrogate {part.to_import_path()}")
    return TokenTerm(term_N, held_N=x.beyond(x.log_ratio) if x.ratio_was_read else None)


def asked(part: AnySurrogate, x: Streams) -> Asked | None:
    """The statistic over units that the surrogate takes beside that of the ratio, or None."""
    return ASKS[part.kind](x, part) if part.kind in ASKS else None


ASKS: dict[str, Callable[[Streams, Any], Asked]] = {
    "gmpo": lambda x, part: x.ask("mean", _gmpo_clipped(x, part)[0], part.unit),
    "fipo": _fipo_future,
}
"""Kind of surrogate with a statistic of its own to what it asks for; the answer is under `KEY`."""
SURROGATES: dict[str, Callable[[Streams, Any], TokenTerm]] = {
    "reinforce": reinforce,
    "unclipped": unclipped,
    "clip": clip,
    "cispo": cispo,
    "topr": topr,
    "vespo": vespo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dro": dro,
    "fipo": fipo,
    "real": real,
    "distill": distill,
    "nll": nll,
    "custom": custom,
}
"""Kind of surrogate to its function."""
