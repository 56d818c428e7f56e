"""Corrections on log-ratios: one function for frozen log-probs at plan time and for the policy's inside the loss.

`N` positions; whole rows at plan time, a shard of a micro-batch in the loss. Units come as `UnitSums`, which know
packing and context parallelism. Everything here is constant: no gradient passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.maths.segments import UnitSums
from megatron_pgloss.spec import Correction, IcePop, RatioMask, Reject, Staleness, TruncatedIS, Veto

Told = tuple[Tensor | None, Tensor | None]
"""A correction's weight, float64 [N], or None where it does not weigh; and which tokens pass, bool [N], or None where
it does not reject."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """What a correction by a ratio looks at."""

    log_N: Tensor
    """float64 [N]: ``log of - log mu``, unbounded; finite where it is read (voters and members)."""
    units: Mapping[str, UnitSums]
    """``sequence`` and ``turn``."""
    voters_N: Tensor
    """bool [N]: the action tokens as sampled; statistics of a unit run over them."""
    bound: float
    """Log-ratios are clipped to plus or minus this before exp."""


def apply(rule: Correction, log_ratio_N: Tensor, units: Mapping[str, UnitSums], voters_N: Tensor, bound: float) -> Told:
    """Weight and verdict of one correction.

    Args:
        rule: any correction that reads a ratio; `Staleness` reads versions (see `stale`).
        log_ratio_N: float [N]; this and the others as in `Ratios`.

    Returns:
        Weight and verdict; a position without voters in its unit has weight 1 and passes.
    """
    # Detached: corrections are constants of the term.
    return APPLY[rule.kind](rule, Ratios(log_ratio_N.detach().double(), units, voters_N, bound))


def _truncated_is(rule: TruncatedIS, x: Ratios) -> Told:
    weight_N = raw_weight(rule, x.log_N, x.units, x.voters_N, x.bound).clamp(rule.low, rule.high)
    if rule.normalize == "sequence":
        mean_N, told_N = _joined(weight_N, x.units["sequence"], "mean", x.voters_N)
        weight_N = torch.where(told_N, weight_N / torch.where(told_N, mean_N, 1), 1)
    return weight_N, None


def _icepop(rule: IcePop, x: Ratios) -> Told:
    passes_N = (x.log_N >= math.log(rule.low)) & (x.log_N <= math.log(rule.high))
    return (x.log_N.clamp(-x.bound, x.bound).exp() if rule.weight else None), passes_N


def _ratio_mask(rule: RatioMask, x: Ratios) -> Told:
    how = "mean" if rule.mean == "geometric" else "sum"
    joined_N, told_N = _joined(x.log_N, x.units[rule.unit], how, x.voters_N)
    return None, ~told_N | ((joined_N >= math.log(rule.low)) & (joined_N <= math.log(rule.high)))


def _veto(rule: Veto, x: Ratios) -> Told:
    caught_N = x.log_N < math.log(rule.low)
    if rule.high is not None:
        caught_N = caught_N | (x.log_N > math.log(rule.high))
    return None, x.units[rule.unit].total(caught_N.double(), x.voters_N) == 0


def raw_weight(
    rule: TruncatedIS, log_N: Tensor, units: Mapping[str, UnitSums], voters_N: Tensor, bound: float
) -> Tensor:
    """The importance weight before it is clipped to ``[low, high]``, float64 [N]."""
    log_N = log_N.detach().double()
    if rule.statistic_unit is not None:
        log_N, _ = _joined(log_N, units[rule.statistic_unit], rule.joined_by, voters_N)
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


def _reject(rule: Reject, x: Ratios) -> Told:
    # Tokens are samples of mu, so d = log mu - log of, and k3 = exp(-d) + d - 1 = r - 1 - log r.
    if rule.estimator == "k1":
        value_N = -x.log_N
    elif rule.estimator == "k2":
        value_N = x.log_N.square() / 2
    else:
        near_N = x.log_N.clamp(-x.bound, x.bound)
        value_N = near_N.expm1() - near_N
    told_N = torch.ones_like(x.voters_N)
    if rule.unit != "token":
        value_N, told_N = _joined(value_N, x.units[rule.unit], rule.statistic, x.voters_N)
    inside_N = value_N <= rule.high
    if rule.low is not None:
        inside_N = inside_N & (value_N >= rule.low)
    return None, ~told_N | inside_N


APPLY: dict[str, Callable[[Any, Ratios], Told]] = {
    "truncated_is": _truncated_is,
    "icepop": _icepop,
    "ratio_mask": _ratio_mask,
    "reject": _reject,
    "veto": _veto,
}
"""Kind of correction by a ratio to its function."""


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
