"""Gates on single tokens and units: which tokens pass, from streams ``x`` of any extent. `N` positions. Everything here
is constant: no gradient passes.

``x`` gives ``logp``, ``old``, ``rollout``, ``advantage`` float [N]: the streams of a micro-batch inside the loss, or
those of whole rows in the statistics pass. A gate over a unit says in `ASKS` which statistic it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths.segments import Asked, How
from megatron_pgloss.rules.verdict import Verdict
from megatron_pgloss.spec import AnyGate, Gate, KLGate, RatioGate, SequenceGate, TVGate
from megatron_pgloss.spec.functions import Function

_CEILING = 60.0
"""Log-probs are clamped to at most this before exp, so that a stray number becomes a large one and not infinity."""


class GateStreams(Protocol):
    """What a gate reads."""

    logp: Tensor

    @property
    def old(self) -> Tensor:
        """Log-prob of the base of the ratio."""

    @property
    def rollout(self) -> Tensor:
        """The sampler's log-prob."""

    @property
    def advantage(self) -> Tensor:
        """Advantage."""

    def ask(self, how: How, value_N: Tensor, unit: str = "sequence") -> Asked:
        """A statistic over the unit's action tokens as sampled."""

    def answer(self, key: Hashable) -> Tensor:
        """The answer to what was asked under this key."""

    def call(self, key: Hashable, part: Function) -> Any:
        """What the user's function of ``part`` returns."""


def asked(gate: AnyGate, x: GateStreams) -> Asked | None:
    """The statistic over units that the gate takes, or None."""
    with torch.no_grad():
        return ASKS[gate.kind](gate, x) if gate.kind in ASKS else None


def apply(gate: AnyGate, x: GateStreams, key: Hashable) -> Verdict:
    """The verdict of a gate: which tokens pass, or a weight from a user's gate.

    Args:
        gate: any gate but those that need the statistics pass.
        key: the key under which ``x`` has the answer to what the gate `asked`.

    Raises:
        DataError: a user's gate returned something else than one bool or number per position.
    """
    with torch.no_grad():  # a gate decides and is not differentiated
        found_N = PASSES[gate.kind](gate, x, key)
    return Verdict(passes=found_N) if found_N.dtype == torch.bool else Verdict(weight=found_N)


def _ratio_band(gate: RatioGate, x: GateStreams, key: Hashable) -> Tensor:
    log_N = x.logp - _base(gate, x)
    return (log_N >= math.log(gate.low)) & (log_N <= math.log(gate.high))


def _gap(gate: SequenceGate, x: GateStreams) -> Asked:
    return x.ask("mean", _base(gate, x) - x.logp, gate.unit)


def _opsm(gate: SequenceGate, x: GateStreams, key: Hashable) -> Tensor:
    return ~((x.advantage < 0) & (x.answer(key) > gate.threshold))


def _base(gate: Any, x: GateStreams) -> Tensor:
    return x.old if gate.base == "old" else x.rollout


def _probability(log_N: Tensor) -> Tensor:
    return log_N.clamp(max=_CEILING).exp()


def _total_variation(gate: TVGate, x: GateStreams, key: Hashable) -> Tensor:
    shift_N = _probability(x.logp) - _probability(_base(gate, x))
    over_N = shift_N > gate.high if gate.high is not None else torch.zeros_like(shift_N, dtype=torch.bool)
    under_N = shift_N < -gate.low if gate.low is not None else torch.zeros_like(over_N)
    if gate.sides == "both":
        return ~(over_N | under_N)
    down_N = x.advantage < 0 if gate.zero == "passes" else x.advantage <= 0
    return ~(((x.advantage > 0) & over_N) | (down_N & under_N))


def _binary_kl(gate: KLGate, x: GateStreams, key: Hashable) -> Tensor:
    log_pi_N, log_b_N = x.logp.clamp(max=0), _base(gate, x).clamp(max=0)
    b_N, rest_pi_N, rest_b_N = log_b_N.exp(), -log_pi_N.expm1(), -log_b_N.expm1()
    # (1 - b) log((1 - b)/(1 - pi)): 0 where b = 1, infinite where only pi = 1.
    some_N = rest_b_N > 0
    ratio_N = torch.where(some_N, rest_b_N, 1).log() - torch.where(some_N, rest_pi_N, 1).log()
    divergence_N = b_N * (log_b_N - log_pi_N) + torch.where(some_N, rest_b_N * ratio_N, 0)
    outward_N = ((x.advantage > 0) & (log_pi_N > log_b_N)) | ((x.advantage < 0) & (log_pi_N < log_b_N))
    return ~(outward_N & (divergence_N > gate.threshold))


def _user(gate: Gate, x: GateStreams, key: Hashable) -> Tensor:
    value_N = x.call(key, gate)
    fits = isinstance(value_N, Tensor) and value_N.shape == x.logp.shape
    if not fits or not (value_N.dtype == torch.bool or value_N.is_floating_point()):
        got = f"{value_N.dtype} {list(value_N.shape)}" if isinstance(value_N, Tensor) else type(value_N).__name__
        raise DataError(
            f"gate {gate.to_import_path()} must return one bool or factor per position",
            expected=f"bool or float {list(x.logp.shape)}",
            got=got,
        )
    found_N: Tensor = value_N.detach()
    return found_N


ASKS: dict[str, Callable[[Any, GateStreams], Asked]] = {"opsm": _gap}
"""Kind of gate over a unit to the statistic that it takes."""
PASSES: dict[str, Callable[[Any, GateStreams, Hashable], Tensor]] = {
    "tv": _total_variation,
    "binary_kl": _binary_kl,
    "ratio_band": _ratio_band,
    "opsm": _opsm,
    "custom": _user,
}
"""Kind of gate to its function; gates of the statistics pass are decided in `megatron_pgloss.objective.decisions`."""
