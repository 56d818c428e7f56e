"""The oracle's gates: a constant factor per token from the policy as it stands; 0 where a token is dropped.

pi, old and mu are probabilities of the sampled token. A token exactly on a bound is kept. Shapes: T all tokens of the
step; M the members of the component.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.verify.oracle.ratios import log_ratio_T, statistic_of
from megatron_pgloss.verify.oracle.scene import Scene
from megatron_pgloss.verify.oracle.step import choice, setting
from megatron_pgloss.verify.oracle.terms import TermStreams, resolved

Rule = Mapping[str, Any]


def gate_factor(scene: Scene) -> Tensor:
    """Product of all gates on the component, float64 [M]."""
    factor_M = torch.ones(len(scene.index_M), dtype=torch.float64)
    for gate in setting(scene.spec, "gates", []):
        kind = choice(gate.get("kind"), list(KINDS), "gate")
        if scene.acts_here(gate, scene.component["kind"] == "policy_gradient"):
            factor_M = factor_M * KINDS[kind](gate, scene).to(torch.float64)
    return factor_M


def _base(gate: Rule, scene: Scene, default: str = "rollout") -> Tensor:
    """Log-probs of what the policy is compared with, [M]."""
    return scene.constant(choice(setting(gate, "base", default), ["old", "rollout"], "base of a gate"))


def _tv(gate: Rule, scene: Scene) -> Tensor:
    """Dropped where pi - base leaves [-low, high]: on the side that A pushes to, or on either."""
    gap_M = scene.logp().detach().exp() - _base(gate, scene).exp()
    low, high = (float(setting(gate, side, math.inf)) for side in ("low", "high"))
    above_M, below_M = gap_M > high, gap_M < -low
    if choice(setting(gate, "sides", "advantage"), ["advantage", "both"], "sides") == "both":
        return ~(above_M | below_M)
    advantage_M = scene.constant("advantages")
    down_M = advantage_M < 0
    if choice(setting(gate, "zero", "passes"), ["passes", "low"], "way with A = 0") == "low":
        down_M = advantage_M <= 0
    return ~((advantage_M > 0) & above_M | down_M & below_M)


def _binary_kl(gate: Rule, scene: Scene) -> Tensor:
    """Dropped where KL(Bernoulli(base) || Bernoulli(pi)) is too large and A pushes further away."""
    p_M, b_M = scene.logp().detach().exp(), _base(gate, scene).exp()
    kl_M = b_M * (b_M / p_M).log() + (1 - b_M) * ((1 - b_M) / (1 - p_M)).log()
    advantage_M = scene.constant("advantages")
    away_M = (advantage_M > 0) & (p_M > b_M) | (advantage_M < 0) & (p_M < b_M)
    return ~(away_M & (kl_M > float(setting(gate, "threshold", 0.05))))


def _ratio_band(gate: Rule, scene: Scene) -> Tensor:
    """Kept where log low <= log pi - log base <= log high."""
    d_M = scene.logp().detach() - _base(gate, scene)
    return (d_M >= math.log(setting(gate, "low", 0.2))) & (d_M <= math.log(setting(gate, "high", 5.0)))


def _opsm(gate: Rule, scene: Scene) -> Tensor:
    """Dropped where A < 0 and the mean of log base - log pi over the unit is too large."""
    base = choice(setting(gate, "base", "rollout"), ["old", "rollout"], "base of a gate")
    d_T, vote_T = scene.log_ratio_to(scene.constant_T(base))
    unit = choice(setting(gate, "unit", "sequence"), ["sequence", "turn", "episode", "prompt"], "unit")
    mean_M = statistic_of(-d_T.detach(), vote_T, unit, "mean", scene)[scene.index_M]
    return ~((scene.constant("advantages") < 0) & (mean_M > float(gate["threshold"])))


def _entropy(gate: Rule, scene: Scene) -> Tensor:
    """The share of members with the largest entropies is kept, rounded up."""
    entropy_M = scene.of_members(scene.entropy_T, "entropy").detach()
    if not len(entropy_M):
        return torch.ones(0)
    number = math.ceil(round(float(setting(gate, "share", 0.2)) * len(entropy_M), 9))
    return entropy_M >= entropy_M.sort(descending=True).values[number - 1]


def _second_moment(gate: Rule, scene: Scene) -> Tensor:
    """Of the tokens that the loss pulls outwards, those of largest d^2 are dropped until the mean of the others is at
    most the threshold.
    """
    d_M = scene.logp().detach() - _base(gate, scene, "old")
    advantage_M = scene.constant("advantages")
    out_M = (advantage_M > 0) & (d_M > 0) | (advantage_M < 0) & (d_M < 0)
    left = sorted(out_M.nonzero().squeeze(1).tolist(), key=lambda k: float(d_M[k].square()))
    keep_M = torch.ones_like(out_M)
    while left and float(d_M[left].square().mean()) > float(setting(gate, "threshold", 0.04)):
        keep_M[left.pop()] = False
    return keep_M


def _covariance(gate: Rule, scene: Scene) -> Tensor:
    """The gate by c = (A - mean A)(log pi - mean log pi). It selects the share of members with the largest c (top), or
    draws as many from those with c inside a band (band), and drops or keeps only these.
    """
    logp_M, advantage_M = scene.logp().detach(), scene.constant("advantages")
    product_M = (advantage_M - _mean(advantage_M)) * (logp_M - _mean(logp_M))
    number = max(int(float(setting(gate, "share", 2e-4)) * len(product_M)), 1)
    chosen_M = torch.zeros_like(product_M, dtype=torch.bool)
    if not len(product_M):
        return chosen_M
    if choice(setting(gate, "select", "band"), ["band", "top"], "selection") == "top":
        chosen_M = product_M >= product_M.sort(descending=True).values[number - 1]  # equal ones go together
    else:
        low, high = float(setting(gate, "low", 1.0)), float(setting(gate, "high", 5.0))
        inside = ((product_M >= low) & (product_M <= high)).nonzero().squeeze(1).tolist()
        where, seed = [scene.step.where[t] for t in scene.index_M.tolist()], int(setting(gate, "seed", 0))
        inside.sort(key=lambda m: _draw(scene.step.rows[where[m][0]]["name"], where[m][1] - 1, seed))
        chosen_M[inside[:number]] = True
    dropped = choice(setting(gate, "effect", "drop"), ["drop", "keep"], "effect") == "drop"
    return ~chosen_M if dropped else chosen_M


def _mean(values_M: Tensor) -> float:
    """The mean, correctly rounded: by a rounded sum, tokens of equal c would not be equal."""
    return float(sum(map(Fraction, values_M.tolist()), Fraction(0)) / max(len(values_M), 1))


def _draw(name: Any, position: int, seed: int) -> int:
    """63 bits for one position of one row, by its name: splitmix64 started at a hash of seed and name."""
    state = int.from_bytes(hashlib.blake2b(repr((seed, name)).encode(), digest_size=8).digest(), "big")
    state = (state + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ state >> shift) * factor % 2**64
    return (state ^ state >> 31) >> 1


def _custom(gate: Rule, scene: Scene) -> Tensor:
    """A user's own: bool keeps, a float multiplies; held fixed. On a policy gradient it sees the component's ratio."""
    axis_T: Tensor | None = None
    part = scene.component
    if part["kind"] == "policy_gradient" and part["surrogate"]["kind"] not in ("reinforce", "nll"):
        axis_T = log_ratio_T(scene)
    with torch.no_grad():
        factor_T = resolved(gate["fn"])(TermStreams.of(scene, axis_T, setting(gate, "statistics", ())))
    return factor_T.detach()[scene.index_M]


KINDS: dict[str, Callable[[Rule, Scene], Tensor]] = {
    "tv": _tv,
    "binary_kl": _binary_kl,
    "ratio_band": _ratio_band,
    "opsm": _opsm,
    "entropy_quantile": _entropy,
    "second_moment": _second_moment,
    "covariance": _covariance,
    "custom": _custom,
}
