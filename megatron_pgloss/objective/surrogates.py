"""Surrogates: streams of a component to its policy-gradient term. Everything is elementwise on `[N]`.

One function per kind, ``(x, part) -> (term, clipped)``, in the table `SURROGATES`; the formulas stand in
`megatron_pgloss.spec.surrogates`. Branches are chosen before exp, so that a clipped token has gradient exactly 0 and an
unbounded one never meets ``0 * inf``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pgloss.maths import bounded, flags, selected
from megatron_pgloss.objective.grouped import group_streams
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.users import checked
from megatron_pgloss.spec import CISPO, DRO, FIPO, GMPO, REAL, SAPO, TOPR, VESPO, Clip, Surrogate


@dataclass(frozen=True, slots=True)
class Clipped:
    """Which bound decided each token, bool [N]."""

    low_N: Tensor
    high_N: Tensor
    dual_N: Tensor

    @property
    def any_N(self) -> Tensor:
        """bool [N]: some bound."""
        return self.low_N | self.high_N | self.dual_N


Term = tuple[Tensor, Clipped | None]


def reinforce(x: Streams, part: Any) -> Term:
    """``-A log pi``."""
    return -x.advantage * x.logp, None


def unclipped(x: Streams, part: Any) -> Term:
    """``-r A``."""
    return -x.advantage * x.ratio, None


def clip(x: Streams, part: Clip) -> Term:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``, with a cap for A < 0 where ``dual`` or ``delta``."""
    low, high = x.number(part.low), x.number(part.high)
    cap: Any = part.dual if part.delta is None else part.delta
    if part.delta is not None and isinstance(high, Tensor):
        cap = (1 + high).clamp(min=part.delta)  # where a token's upper bound is above delta, that bound is its cap
    return _clip(x.log_ratio, x.advantage, low, high, cap)


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


def _weighed(x: Streams, weight_N: Tensor, low_N: Tensor, high_N: Tensor) -> Term:
    """``-sg(w) A log pi``, and where the weight stood at a bound."""
    term_N = -weight_N.detach() * x.advantage * x.logp
    return term_N, Clipped(low_N, high_N, torch.zeros_like(low_N))


def _either(x: Streams, first_N: Tensor, one: float, other: float) -> Tensor:
    # torch.where of two Python numbers would give float32, whatever the dtype of the streams is.
    return torch.where(first_N, x.logp.new_tensor(one), x.logp.new_tensor(other))


def cispo(x: Streams, part: CISPO) -> Term:
    """The ratio clipped and held fixed."""
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


def topr(x: Streams, part: TOPR) -> Term:
    """The ratio clipped by bounds of each sign and held fixed."""
    ratio_N, up_N = x.ratio.detach(), x.advantage > 0
    low_N = torch.where(up_N, ratio_N < part.positive[0], ratio_N < part.negative[0])
    high_N = torch.where(up_N, ratio_N > part.positive[1], ratio_N > part.negative[1])
    weight_N = torch.where(up_N, ratio_N.clamp(*part.positive), ratio_N.clamp(*part.negative))
    return _weighed(x, weight_N, low_N, high_N)


def vespo(x: Streams, part: VESPO) -> Term:
    """``phi(r)`` held fixed; its logarithm is formed first."""
    log_N, up_N = x.log_ratio.detach(), x.advantage >= 0
    k_N = _either(x, up_N, part.k_positive, part.k_negative)
    lam_N = _either(x, up_N, part.lam_positive, part.lam_negative)
    weight_N = (k_N * log_N - lam_N * log_N.expm1()).exp()
    return -weight_N * x.advantage * x.logp, None


def sapo(x: Streams, part: SAPO) -> Term:
    """``-(4/tau) sigmoid(tau (r - 1)) A``."""
    tau_N = _either(x, x.advantage > 0, part.tau_positive, part.tau_negative)
    # expm1 keeps the digits of r - 1 near r = 1.
    return -x.advantage * torch.sigmoid(tau_N * x.log_ratio.expm1()) * 4 / tau_N, None


def gmpo(x: Streams, part: GMPO) -> Term:
    """``-A exp(mean of clipped d)`` over the unit."""
    d_N, advantage_N = x.token_log_ratio, x.stream("advantages")
    low, high = x.number(part.low), x.number(part.high)
    raw_N = d_N.detach()
    high_N, low_N = (advantage_N > 0) & (raw_N > high), (advantage_N < 0) & (raw_N < -low)
    m_N = torch.where(high_N, high, torch.where(low_N, -low, torch.where(advantage_N == 0, 0, d_N)))
    # An advantage that is no number has no sign: its token does not vote.
    m_N = torch.where(advantage_N.isfinite(), m_N, torch.nan)
    mean_N = bounded(x.unit_mean(m_N, part.unit), x.bound)
    return -x.advantage * mean_N.exp(), Clipped(low_N, high_N, torch.zeros_like(low_N))


def dro(x: Streams, part: DRO) -> Term:
    """``-A d + beta/2 d^2``."""
    d_N = x.log_ratio
    return -x.advantage * d_N + part.beta / 2 * d_N.square(), None


def fipo(x: Streams, part: FIPO) -> Term:
    """The clipped surrogate times the influence of what follows."""
    d_N, advantage_N = x.token_log_ratio.detach(), x.advantage
    counted_N = d_N if part.delta is None else torch.where(d_N.exp() > part.delta, 0, d_N)
    future_N = x.discounted_sum(counted_N, 2 ** (-1 / part.half_life))
    least = 1 - part.reach if part.both else 1.0
    influence_N = bounded(future_N, x.bound).exp().clamp(least, 1 + part.reach)
    if part.safe_ratio is not None:
        risky_N = (advantage_N < 0) & (d_N.exp() > part.safe_ratio)
        influence_N = torch.where(risky_N, influence_N.clamp(0.8, 1.0), influence_N)
    term_N, which = _clip(x.log_ratio, advantage_N, x.number(part.low), x.number(part.high), part.delta)
    return influence_N * term_N, which


def real(x: Streams, part: REAL) -> Term:
    """``softplus(-sign(A) s / tau)``; 0 without a label. By group, what the statistics pass found of it."""
    if part.form == "group":
        value_N, slope_N = (x.stream(name) for name in group_streams(x.component.name))
        return value_N + slope_N * (x.log_ratio - x.log_ratio.detach()), None
    label_N = x.advantage.sign()
    return torch.where(label_N == 0, 0, F.softplus(-label_N * x.log_ratio / part.tau)), None


def distill(x: Streams, part: Any) -> Term:
    """``-sg(log ref - log pi) r``."""
    return -bounded(x.ref - x.logp.detach(), x.bound) * x.ratio, None


def nll(x: Streams, part: Any) -> Term:
    """``-log pi``."""
    return -x.logp, None


def custom(x: Streams, part: Surrogate) -> Term:
    """What the user's function gives."""
    return checked(part.fn(x), x, f"surrogate {part.to_import_path()}"), None


SURROGATES: dict[str, Callable[[Streams, Any], Term]] = {
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
