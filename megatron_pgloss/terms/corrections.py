"""Corrections on log-ratios: one function for frozen log-probs at plan time and for the policy's inside the loss.

`N` positions; whole rows at plan time, a shard of a micro-batch in the loss. Units come as `UnitSums`, which know
packing and context parallelism. Everything here is constant: no gradient passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_pgloss.spec import Correction, IcePop, RatioMask, Reject, Staleness, TruncatedIS, Veto
from megatron_pgloss.terms.segments import UnitSums

LEVELS = {
    "sequence": ("sequence", "sum"),
    "turn": ("turn", "sum"),
    "geometric": ("sequence", "mean"),
    "turn_geometric": ("turn", "mean"),
}
"""Level of an importance weight to its unit and how the unit's log-ratios are put together."""


def apply(
    rule: Correction, log_ratio_N: Tensor, units: Mapping[str, UnitSums], voters_N: Tensor, bound: float
) -> tuple[Tensor | None, Tensor | None]:
    """Weight and verdict of one correction.

    Args:
        rule: any correction but `Staleness`, which reads versions (see `stale`).
        log_ratio_N: float [N], ``log of - log mu``, unbounded; finite where it is read (voters and members).
        units: ``sequence`` and ``turn``.
        voters_N: bool [N]: the action tokens as sampled; what statistics of a unit run over.
        bound: log-ratios are clipped to plus or minus this before exp.

    Returns:
        ``(weight, kept)``: float64 [N], or None where the rule does not weigh; bool [N], or None where it does not
        reject. A position without voters in its unit has weight 1 and is kept.
    """
    log_N = log_ratio_N.detach().double()  # corrections are constants of the term
    if isinstance(rule, TruncatedIS):
        return raw_weight(rule, log_N, units, voters_N, bound).clamp(rule.low, rule.high), None
    if isinstance(rule, IcePop):
        kept_N = (log_N >= math.log(rule.low)) & (log_N <= math.log(rule.high))
        return (log_N.clamp(-bound, bound).exp() if rule.weight else None), kept_N
    if isinstance(rule, RatioMask):
        how = "mean" if rule.mean == "geometric" else "sum"
        joined_N, told_N = _joined(log_N, units[rule.unit], how, voters_N)
        return None, ~told_N | ((joined_N >= math.log(rule.low)) & (joined_N <= math.log(rule.high)))
    if isinstance(rule, Reject):
        return None, _estimate(rule, log_N, units, voters_N, bound)
    assert isinstance(rule, Veto)
    caught_N = log_N < math.log(rule.low)
    if rule.high is not None:
        caught_N = caught_N | (log_N > math.log(rule.high))
    return None, units[rule.unit].total(caught_N.double(), voters_N) == 0


def raw_weight(
    rule: TruncatedIS, log_N: Tensor, units: Mapping[str, UnitSums], voters_N: Tensor, bound: float
) -> Tensor:
    """The importance weight before it is clipped to ``[low, high]``, float64 [N]."""
    log_N = log_N.detach().double()
    if rule.level != "token":
        unit, how = LEVELS[rule.level]
        log_N, _ = _joined(log_N, units[unit], how, voters_N)
    return log_N.clamp(-bound, bound).exp()


def _joined(values_N: Tensor, unit: UnitSums, how: str, voters_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, sum or max over the voters of each position's unit (0 without voters), and whether it has any."""
    if how == "max":
        top_N = unit.largest(values_N, voters_N)
        told_N = (unit.unit_N >= 0) & (top_N > -torch.inf)
        return torch.where(told_N, top_N, 0), told_N
    total_U, count_U = unit.sums(values_N, voters_N)
    if how == "mean":
        total_U = total_U / torch.where(count_U > 0, count_U, 1)
    return unit.spread(total_U), unit.spread(count_U) > 0


def _estimate(rule: Reject, log_N: Tensor, units: Mapping[str, UnitSums], voters_N: Tensor, bound: float) -> Tensor:
    # Tokens are samples of mu, so d = log mu - log of, and k3 = exp(-d) + d - 1 = r - 1 - log r.
    if rule.estimator == "k1":
        value_N = -log_N
    elif rule.estimator == "k2":
        value_N = log_N.square() / 2
    else:
        near_N = log_N.clamp(-bound, bound)
        value_N = near_N.expm1() - near_N
    told_N = torch.ones_like(voters_N)
    if rule.unit != "token":
        value_N, told_N = _joined(value_N, units[rule.unit], rule.statistic, voters_N)
    inside_N = value_N <= rule.high
    if rule.low is not None:
        inside_N = inside_N & (value_N >= rule.low)
    return ~told_N | inside_N


def stale(rule: Staleness, lag_N: Tensor, units: Mapping[str, UnitSums], voters_N: Tensor) -> Tensor:
    """Whether each token is recent enough, bool [N].

    Args:
        lag_N: int64 [N]: the current version minus the token's.
    """
    if rule.level == "token":
        return lag_N <= rule.max_lag
    old_N = ((lag_N > rule.max_lag) & voters_N).double()
    return units[rule.level].total(old_N, voters_N) == 0


def interpolation(lag_N: Tensor) -> Tensor:
    """How far ``old`` lies from the sampler's towards the policy's log-prob: ``(lag - 1) / lag``, 0 for lag <= 1.

    The step before the current policy, on the straight line in log space from the version that sampled the token (at 0)
    to the current one (at 1), as in AReaL's log-linear approximation.

    Args:
        lag_N: int64 [N].

    Returns:
        float64 [N] in [0, 1).
    """
    far_N = lag_N > 1
    return torch.where(far_N, (lag_N - 1).double() / torch.where(far_N, lag_N, 1).double(), 0.0)
