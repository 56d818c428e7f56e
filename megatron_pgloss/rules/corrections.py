"""Corrections by a ratio or by age: one `apply` for frozen log-probs at plan time, for the statistics pass and for the
policy's log-probs inside the loss.

`N` positions; whole rows at plan time, a shard of a micro-batch in the loss. Units come as `UnitSums`, which know
packing and context parallelism. Everything here is constant: no gradient passes. A kind of correction is two functions:
the number of each token that is joined over a unit (the kind's ``statistic_unit`` and ``joined_by`` say over which, and
how), and the verdict on the joined number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.maths.segments import Asked, UnitSums, taken
from megatron_pgloss.rules.verdict import Verdict
from megatron_pgloss.spec import Correction, IcePop, RatioMask, Reject, Staleness, TruncatedIS, Veto


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a correction looks at."""

    units: Mapping[str, UnitSums]
    """``sequence`` and ``turn`` to their units."""
    voters_N: Tensor
    """bool [N]: the action tokens as sampled; statistics of a unit run over them."""
    bound: float
    """Log-ratios are clipped to plus or minus this before exp."""
    log_N: Tensor | None = None
    """float64 [N]: ``log of - log mu``, unbounded; finite where it is read (voters and members)."""
    lag_N: Tensor | None = None
    """int64 [N]: the current version minus the token's, for a rule that reads versions."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What a rule compares: a number of each token, or of its unit."""

    value_N: Tensor
    told_N: Tensor | None
    """bool [N]: where the unit has a voter; None where each token stands for itself."""

    def spared(self, inside_N: Tensor) -> Verdict:
        """The tokens ``inside_N`` pass, and so do all tokens of a unit without a voter."""
        return Verdict(passes=inside_N if self.told_N is None else inside_N | ~self.told_N)


def asked(rule: Correction, x: Evidence) -> Asked | None:
    """The statistic over units that the rule takes, or None. Over prompts or episodes (`Kind.straddles`) it is the part
    of each row.
    """
    if rule.statistic_unit is None:
        return None
    value_N = APPLY[rule.kind][0](rule, x)
    # Of a unit whose rows may lie anywhere this rank has the part of each row.
    unit = "sequence" if rule.straddles else rule.statistic_unit
    return x.units[unit].asked_joined(rule.joined_by, value_N, x.voters_N)


def judged(rule: Correction, x: Evidence, joined_2N: Tensor | None) -> Verdict:
    """What the rule says.

    Args:
        joined_2N: the answer to what the rule `asked`: the joined number, and 1 where the unit has a voter, else 0;
            None where it asked nothing.

    Returns:
        A position without voters in its unit has weight 1 and passes.
    """
    value, judge = APPLY[rule.kind]
    if joined_2N is None:
        return judge(rule, Joined(value(rule, x), None), x)
    return judge(rule, Joined(joined_2N[0], joined_2N[1] > 0), x)


def apply(rule: Correction, x: Evidence) -> Verdict:
    """What the rule says, over units of whole sequences; with a collective of its own under context parallelism."""
    one = asked(rule, x)
    return judged(rule, x, None if one is None else taken([one], x.units["sequence"].group)[0])


def _log_ratio(rule: Any, x: Evidence) -> Tensor:
    assert x.log_N is not None
    return x.log_N


def _ratio_or_weight(rule: TruncatedIS, x: Evidence) -> Tensor:
    log_N = _log_ratio(rule, x)
    if rule.normalize != "sequence":
        return log_N
    return log_N.clamp(-x.bound, x.bound).exp().clamp(rule.low, rule.high)


def _weighed(rule: TruncatedIS, joined: Joined, x: Evidence) -> Verdict:
    by_sequence = rule.normalize == "sequence"
    log_N = _log_ratio(rule, x) if by_sequence else joined.value_N
    raw_N = log_N.clamp(-x.bound, x.bound).exp()
    weight_N = raw_N.clamp(rule.low, rule.high)
    if by_sequence:
        assert joined.told_N is not None
        weight_N = torch.where(joined.told_N, weight_N / torch.where(joined.told_N, joined.value_N, 1), 1)
    return Verdict(weight=weight_N, raw=raw_N, truncated=(raw_N > rule.high) | (raw_N < rule.low))


def _banded(rule: IcePop, joined: Joined, x: Evidence) -> Verdict:
    passes_N = (joined.value_N >= math.log(rule.low)) & (joined.value_N <= math.log(rule.high))
    weight_N = joined.value_N.clamp(-x.bound, x.bound).exp() if rule.weight else None
    return Verdict(passes=passes_N, weight=weight_N, raw=weight_N)


def _masked(rule: RatioMask, joined: Joined, x: Evidence) -> Verdict:
    return joined.spared((joined.value_N >= math.log(rule.low)) & (joined.value_N <= math.log(rule.high)))


def _caught(rule: Veto, x: Evidence) -> Tensor:
    log_N = _log_ratio(rule, x)
    caught_N = log_N < math.log(rule.low)
    if rule.high is not None:
        caught_N = caught_N | (log_N > math.log(rule.high))
    return caught_N.double()


def _too_old(rule: Staleness, x: Evidence) -> Tensor:
    assert x.lag_N is not None
    return (x.lag_N > rule.max_lag).double()


def _none_of_them(rule: Any, joined: Joined, x: Evidence) -> Verdict:
    return Verdict(passes=joined.value_N == 0)


def _estimate(rule: Reject, x: Evidence) -> Tensor:
    # Tokens are samples of mu, so d = log mu - log of, and k3 = exp(-d) + d - 1 = r - 1 - log r.
    log_N = _log_ratio(rule, x)
    if rule.estimator == "k1":
        return -log_N
    if rule.estimator == "k2":
        return log_N.square() / 2
    near_N = log_N.clamp(-x.bound, x.bound)
    return near_N.expm1() - near_N


def _estimated(rule: Reject, joined: Joined, x: Evidence) -> Verdict:
    inside_N = joined.value_N <= rule.high
    if rule.low is not None:
        inside_N = inside_N & (joined.value_N >= rule.low)
    return joined.spared(inside_N)


APPLY: dict[str, tuple[Callable[[Any, Evidence], Tensor], Callable[[Any, Joined, Evidence], Verdict]]] = {
    "truncated_is": (_ratio_or_weight, _weighed),
    "icepop": (_log_ratio, _banded),
    "ratio_mask": (_log_ratio, _masked),
    "reject": (_estimate, _estimated),
    "veto": (_caught, _none_of_them),
    "staleness": (_too_old, _none_of_them),
}
"""Kind of correction to two functions: the number of each token that it joins over its unit, and its verdict on the
joined number."""


def interpolation(lag_N: Tensor) -> Tensor:
    """Where ``old`` lies between the sampler's log-prob (0) and the policy's (1): at ``(lag - 1) / lag``, and at 0 for
    lag <= 1.

    This is the version before the current one, if the log-prob went in a straight line from the version that sampled
    the token to the current version (AReaL's log-linear approximation). A token that nobody sampled (an observation)
    has no version and lag 0: its ``old`` is the sampler's log-prob.

    Args:
        lag_N: int64 [N].

    Returns:
        float64 [N] in [0, 1).
    """
    far_N = lag_N > 1
    return torch.where(far_N, (lag_N - 1).double() / torch.where(far_N, lag_N, 1).double(), 0.0)
