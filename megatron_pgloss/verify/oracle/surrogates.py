"""The oracle's surrogates: the term of each member, from its ratio r and its advantage A, as the papers write it.

sg[.] is a stop-gradient. Shapes: T all tokens of the step; M the members of a component.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import SpecError
from megatron_pgloss.verify.oracle.ratios import log_ratio, log_ratio_T, ratio, ratio_axis, statistic_of
from megatron_pgloss.verify.oracle.scene import Scene
from megatron_pgloss.verify.oracle.step import choice, setting
from megatron_pgloss.verify.oracle.terms import call

INFINITE = float("inf")
Surrogate = Mapping[str, Any]


def policy_gradient(scene: Scene) -> Tensor:
    """The term of the component's surrogate, float64 [M], to be minimised."""
    surrogate = scene.component["surrogate"]
    kind = choice(surrogate["kind"], list(KINDS), "surrogate")
    level, statistic, _, _ = ratio_axis(scene.component)
    if kind in ("gmpo", "fipo") and (level, statistic) != ("token", "mean"):
        raise SpecError(f"{kind} forms its own statistic of token ratios", got=scene.component["ratio"])
    return KINDS[kind](surrogate, scene)


def clip_bounds(surrogate: Surrogate, scene: Scene) -> tuple[Any, Any, float]:
    """(low, high, cap of the ratio for A < 0) of a clip; the cap is infinite where there is none.

    ``delta`` caps r before the minimum. For A > 0 the clip at 1 + high, which lies below delta, decides anyway; for
    A < 0 the minimum of r A and clip(r) A takes the larger ratio, so the cap holds there. That is ``dual``.
    """
    caps = [float(surrogate[name]) for name in ("dual", "delta") if surrogate.get(name) is not None]
    if len(caps) > 1:
        raise SpecError("dual and delta are one cap", got=caps)
    low, high = scene.number(setting(surrogate, "low", 0.2)), scene.number(setting(surrogate, "high", 0.2))
    return low, high, caps[0] if caps else INFINITE


def _reinforce(surrogate: Surrogate, scene: Scene) -> Tensor:
    return -scene.constant("advantages") * scene.logp()


def _unclipped(surrogate: Surrogate, scene: Scene) -> Tensor:
    return -ratio(scene) * scene.constant("advantages")


def _clip(surrogate: Surrogate, scene: Scene) -> Tensor:
    low, high, cap = clip_bounds(surrogate, scene)
    return _clipped(ratio(scene), scene.constant("advantages"), low, high, cap)


def _clipped(ratio_M: Tensor, advantage_M: Tensor, low: Any, high: Any, cap: float) -> Tensor:
    """-min(r A, clip(r, 1-low, 1+high) A), for A < 0 at most -cap A. Exactly on a bound r is free: both sides of the
    minimum are equal there, and its derivative is that of r A.
    """
    edges_M = torch.zeros_like(ratio_M)
    held_M = torch.minimum(torch.maximum(ratio_M, edges_M + (1 - low)), edges_M + (1 + high)).detach()
    gain_M, flat_M = ratio_M * advantage_M, held_M * advantage_M
    gain_M = torch.where(flat_M < gain_M, flat_M, gain_M)
    if cap < INFINITE:
        least_M = cap * advantage_M
        gain_M = torch.where((advantage_M < 0) & (gain_M < least_M), least_M, gain_M)
    return -gain_M


def _cispo(surrogate: Surrogate, scene: Scene) -> Tensor:
    """-sg[clip(r, lower, upper)] A log pi."""
    relative = choice(setting(surrogate, "bound", "relative"), ["relative", "absolute"], "bound") == "relative"
    weight_M = ratio(scene).detach()
    if surrogate.get("low") is not None:
        low = scene.number(surrogate["low"])
        weight_M = torch.maximum(weight_M, torch.zeros_like(weight_M) + (1 - low if relative else low))
    high = scene.number(surrogate["high"])
    weight_M = torch.minimum(weight_M, torch.zeros_like(weight_M) + (1 + high if relative else high))
    return -weight_M * scene.constant("advantages") * scene.logp()


def _topr(surrogate: Surrogate, scene: Scene) -> Tensor:
    """-sg[clip(r, a, b)] A log pi, with (a, b) by the sign of A."""
    ratio_M, advantage_M = ratio(scene).detach(), scene.constant("advantages")
    good, bad = setting(surrogate, "positive", (1.0, 1.0)), setting(surrogate, "negative", (0.0, 1.0))
    weight_M = torch.where(advantage_M > 0, ratio_M.clamp(*good), ratio_M.clamp(*bad))
    return -weight_M * advantage_M * scene.logp()


def _sapo(surrogate: Surrogate, scene: Scene) -> Tensor:
    """-(4 / tau) A / (1 + exp(-tau (r - 1)))."""
    advantage_M = scene.constant("advantages")
    good, bad = float(setting(surrogate, "tau_positive", 1.0)), float(setting(surrogate, "tau_negative", 1.05))
    tau_M = torch.full_like(advantage_M, bad).masked_fill(advantage_M > 0, good)
    y_M = tau_M * (ratio(scene) - 1)
    # 1 / (1 + exp(-y)), written so that autograd's s (1 - s) keeps its digits where s is nearly 1.
    return -(4 / tau_M) * torch.where(y_M > 0, 1 - torch.sigmoid(-y_M), torch.sigmoid(y_M)) * advantage_M


def _vespo(surrogate: Surrogate, scene: Scene) -> Tensor:
    """-sg[r^k exp(lam (1 - r))] A log pi."""
    advantage_M, ratio_M = scene.constant("advantages"), ratio(scene).detach()

    def phi(side: str, k: float, lam: float) -> Tensor:
        k, lam = float(setting(surrogate, f"k_{side}", k)), float(setting(surrogate, f"lam_{side}", lam))
        return ratio_M**k * (lam * (1 - ratio_M)).exp()

    weight_M = torch.where(advantage_M >= 0, phi("positive", 2.0, 3.0), phi("negative", 3.0, 2.0))
    return -weight_M * advantage_M * scene.logp()


def _gmpo(surrogate: Surrogate, scene: Scene) -> Tensor:
    """-A exp(mean over the unit of m), m = min(d, high) where A > 0, max(d, -low) where A < 0, 0 where A = 0; d exactly
    on its bound is free.
    """
    d_T, vote_T = scene.log_ratio_to(scene.constant_T("old"))
    advantage_T = scene.constant_T("advantages")
    m_T = torch.zeros_like(d_T)
    for side, sign in (("high", 1), ("low", -1)):
        given = setting(surrogate, side, 0.4)
        limit_T = scene.constant_T(given) if isinstance(given, str) else torch.full_like(d_T, float(given))
        index = ((sign * advantage_T > 0) & (vote_T | scene.member_T)).nonzero().squeeze(1)
        free = sign * d_T[index] <= limit_T[index]
        m_T = m_T.index_put((index,), torch.where(free, d_T[index], sign * limit_T[index]))
    vote_T = vote_T & (advantage_T.isfinite() | scene.member_T)
    unit = choice(setting(surrogate, "unit", "sequence"), ["sequence", "turn"], "unit")
    mean_M = statistic_of(m_T, vote_T, unit, "mean", scene)[scene.index_M]
    return -scene.constant("advantages") * scene.bounded(mean_M).exp()


def _dro(surrogate: Surrogate, scene: Scene) -> Tensor:
    """-A d + beta/2 d^2."""
    d_M = log_ratio(scene)
    return -scene.constant("advantages") * d_M + float(setting(surrogate, "beta", 0.1)) / 2 * d_M.square()


def _fipo(surrogate: Surrogate, scene: Scene) -> Tensor:
    """sg[f_t] times the clipped term, f_t the bounded influence of the tokens from t on."""
    d_T, vote_T = scene.log_ratio_to(scene.constant_T("old"))
    advantage_M, d_M = scene.constant("advantages"), d_T[scene.index_M]
    low, high = scene.number(setting(surrogate, "low", 0.2)), scene.number(setting(surrogate, "high", 0.28))
    cap = float(setting(surrogate, "delta", INFINITE))
    gamma, reach = 0.5 ** (1 / float(setting(surrogate, "half_life", 32.0))), float(setting(surrogate, "reach", 0.2))
    future = [0.0] * len(d_T)
    values = d_T.detach().exp().tolist()
    for voters, whole in scene.step.units("sequence", vote_T):
        for t in whole:
            counted = [k for k in voters if k >= t and values[k] <= cap]
            future[t] = sum(gamma ** (k - t) * float(d_T[k].detach()) for k in counted)
    bottom = 1 - reach if surrogate.get("both") else 1.0
    future_M = scene.bounded(torch.tensor(future, dtype=torch.float64)[scene.index_M])
    f_M = future_M.exp().clamp(bottom, 1 + reach)
    safe = surrogate.get("safe_ratio")
    if safe is not None:
        risky_M = (advantage_M < 0) & (d_M.detach().exp() > float(safe))
        f_M = torch.where(risky_M, f_M.clamp(0.8, 1.0), f_M)
    return f_M * _clipped(scene.bounded(d_M).exp(), advantage_M, low, high, cap)


def _real(surrogate: Surrogate, scene: Scene) -> Tensor:
    """log(1 + exp(-sign(A) s / tau)); nothing where A = 0."""
    advantage_M, s_M = scene.constant("advantages"), scene.bounded(log_ratio(scene))
    if choice(setting(surrogate, "form", "binary"), ["binary", "group"], "form of REAL") == "group":
        return _real_group(float(setting(surrogate, "tau", 0.5)), scene, advantage_M, s_M)
    term_M = torch.log1p(torch.exp(-advantage_M.sign() * s_M / float(setting(surrogate, "tau", 0.5))))
    return torch.where(advantage_M == 0, torch.zeros_like(term_M), term_M)


def _real_group(tau: float, scene: Scene, advantage_M: Tensor, s_M: Tensor) -> Tensor:
    """Per prompt and label L = log(1 + sum over its sequences of exp(-label s / tau)). A sequence has an even share of
    L and the slope of L by its own s, so that a weight of its tokens is a weight of both.
    """
    sequence, prompt = scene.step.keys("sequence"), scene.step.keys("prompt")
    members: dict[Any, list[int]] = {}
    for m, t in enumerate(scene.index_M.tolist()):
        members.setdefault(sequence[t], []).append(m)
    groups: dict[Any, list[list[int]]] = {}
    for mine in members.values():
        label = float(advantage_M[mine].mean().sign())
        if label:
            groups.setdefault((prompt[int(scene.index_M[mine[0]])], label), []).append(mine)
    term_M = torch.zeros_like(s_M)
    for (_, label), some in groups.items():
        s_K = torch.stack([s_M[mine].mean() for mine in some]).detach().requires_grad_()
        with torch.enable_grad():
            loss = torch.log1p((-label * s_K / tau).exp().sum())
            (slope_K,) = torch.autograd.grad(loss, s_K)
        for k, mine in enumerate(some):
            moving_M = slope_K[k] * (s_M[mine] - s_M[mine].detach())
            term_M = term_M.index_put((torch.tensor(mine),), loss.detach() / len(some) + moving_M)
    return term_M


def _distill(surrogate: Surrogate, scene: Scene) -> Tensor:
    """-sg[log ref - log pi] r, ref being the teacher by its name."""
    teacher = str(setting(surrogate, "to", "ref"))
    above_M = (scene.constant(teacher) - scene.logp()).detach()  # the teacher's advantage is a constant
    return -above_M * ratio(scene)


def _nll(surrogate: Surrogate, scene: Scene) -> Tensor:
    return -scene.logp()


def _custom(surrogate: Surrogate, scene: Scene) -> Tensor:
    """A user's own function of the streams, which sees the component's ratio."""
    return call(surrogate, scene, log_ratio_T(scene))[scene.index_M]


KINDS: dict[str, Callable[[Surrogate, Scene], Tensor]] = {
    "reinforce": _reinforce,
    "unclipped": _unclipped,
    "clip": _clip,
    "cispo": _cispo,
    "topr": _topr,
    "sapo": _sapo,
    "vespo": _vespo,
    "gmpo": _gmpo,
    "dro": _dro,
    "fipo": _fipo,
    "real": _real,
    "distill": _distill,
    "nll": _nll,
    "custom": _custom,
}
