"""The ratio axis: which statistic of pi/old, over which tokens, and which part of it carries the gradient.

With d_t = log pi_t - log old_t, a ratio is ``r = exp(s)`` of a statistic s:

| short name | s | gradient of log r |
|---|---|---|
| ``token`` | d_t | of log pi_t |
| ``none`` | 0 | of log pi_t (on-policy: exactly 1, gradient intact) |
| ``sequence``, ``turn`` | mean of d over the unit (GSPO 2507.18071 eq. 7) | of the mean |
| ``sequence_token``, ``turn_token`` | the same | of log pi_t, the mean held fixed (GSPO-token, eq. 14) |
| ``sequence_sum``, ``turn_sum`` | sum of d over the unit | of log pi_t, the sum held fixed |
| ``prefix`` | sum of d up to and including t | of log pi_t, the rest held fixed |
| ``prefix_min`` | d_t + min of d before t (MinPRO 2601.22718) | of log pi_t, the rest held fixed |

``Ratio(level="episode")`` and ``"prompt"`` have means and sums alike, over all rows of the unit that are there (no
fault ended them). These may lie in any micro-batch and on any rank, so that a statistics pass takes the statistic, from
the policy at the start of the step; the gradient through it is that of the whole step's loss.

Unit statistics run over the unit's action tokens as sampled, whatever masks and gates say; ``over="members"`` takes
those that the component trains on. Every s is bounded by ``log_ratio_bound`` before exp; the d that it is made of are
not. ``prefix_min`` is written from MinPRO's abstract; its equation was not at hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.functions import Function
from megatron_pgloss.spec.kinds import Kind, one_of
from megatron_pgloss.spec.letters import SHORT_UNIT
from megatron_pgloss.spec.levels import Unit
from megatron_pgloss.spec.words import nearest

__all__ = ["CustomRatio", "Ratio"]


class RatioKind(Kind):
    """The family of ratios. The ``formula`` of a kind is the logarithm of its ratio."""

    def written_out(self, base: str) -> str:
        """The ratio itself as text."""
        return f"exp({self.formula(base)})"


class Ratio(RatioKind):
    """One ratio, spelled out; see the table of short names above."""

    kind: Literal["ratio"] = "ratio"
    level: Literal["token", Unit] = "sequence"
    """The unit whose tokens enter; ``token`` is the token's own and takes no statistic."""
    statistic: Literal["mean", "sum", "prefix", "prefix_min"] = "mean"
    gradient: Literal["through", "token"] = "through"
    """``through``: the statistic is differentiated. ``token``: its value is held fixed and the token's own log-prob
    carries the gradient: ``r = sg(exp(s)) * pi_t / sg(pi_t)``."""
    over: Literal["sampled", "members"] = "sampled"

    @model_validator(mode="after")
    def _sensible(self) -> Ratio:
        if self.level == "token" and (self.statistic, self.over) != ("mean", "sampled"):
            raise SpecError(
                f"Ratio: statistic {self.statistic!r} over {self.over!r} of a single token",
                expected="level='sequence', 'turn', 'episode' or 'prompt'",
                fix="ratio='token'",
            )
        if self.straddles and self.statistic not in ("mean", "sum"):
            raise SpecError(
                f"Ratio: the rows of a unit at level {self.level!r} have no order, so it has no prefix",
                expected="statistic='mean' or 'sum'", got=repr(self.statistic), fix="level='sequence'",
            )  # fmt: skip
        if self.statistic == "prefix_min" and self.gradient == "through":
            raise SpecError(
                "Ratio: a running minimum is not differentiated", expected="gradient='token'", fix="ratio='prefix_min'"
            )
        return self

    @property
    def statistic_unit(self) -> str | None:
        """The ratio's level; None where that is the token itself."""
        return None if self.level == "token" else self.level

    def formula(self, base: str = "old") -> str:
        """The logarithm of the ratio, in one line."""
        if self.level == "token":
            return f"log pi - log {base}"
        text = self._statistic(base)
        return text if self.gradient == "through" else f"sg({text}) + log pi - log sg(pi)"

    def written_out(self, base: str) -> str:
        """The ratio itself, in one line."""
        if self.level == "token":
            return f"pi/{base}"
        inner = f"exp({self._statistic(base)})"
        return inner if self.gradient == "through" else f"sg({inner}) pi/sg(pi)"

    def _statistic(self, base: str) -> str:
        of, short = f"(log pi - log {base})", SHORT_UNIT[self.level]
        members = " over members" if self.over == "members" else ""
        if self.statistic in ("mean", "sum"):
            return f"{self.statistic}_{short}{members} {of}"
        if self.statistic == "prefix":
            return f"sum_{{k <= t, {short}}}{members} {of}"
        return f"log pi - log {base} + min_{{k < t, {short}}}{members} {of}"


class CustomRatio(Function, RatioKind):
    """A ratio of the user's own: ``fn(x) -> [T]``, the logarithm of the ratio, bounded before exp.

    Args (positional allowed):
        fn: the function; reads ``x.log_ratio`` (the token's own) and unit statistics.
    """

    kind: Literal["custom"] = "custom"
    example: ClassVar[Mapping[str, Any]] = {"fn": math.exp}

    @property
    def reads(self) -> tuple[str, ...]:
        """The streams that ``needs`` names."""
        return self.needed

    def formula(self, base: str = "old") -> str:
        """The function's name."""
        return self.to_import_path()


if TYPE_CHECKING:
    AnyRatio = RatioKind
else:
    AnyRatio = one_of(RatioKind)

SHORT: dict[str, Ratio | None] = {
    "token": Ratio(level="token"),
    "none": None,
    "sequence": Ratio(),
    "turn": Ratio(level="turn"),
    "sequence_token": Ratio(gradient="token"),
    "turn_token": Ratio(level="turn", gradient="token"),
    "sequence_sum": Ratio(statistic="sum", gradient="token"),
    "turn_sum": Ratio(level="turn", statistic="sum", gradient="token"),
    "prefix": Ratio(statistic="prefix", gradient="token"),
    "prefix_min": Ratio(statistic="prefix_min", gradient="token"),
}
"""Short names; ``none`` has no statistic at all."""


def canonical(given: Any) -> Any:
    """The short name of a ratio that has one; anything else as it is.

    Raises:
        SpecError: ``given`` is a word that is none of the short names.
    """
    if isinstance(given, str) and given not in SHORT:
        raise SpecError(
            f"no ratio {given!r}", expected=", ".join(SHORT) + " or a Ratio", fix=nearest(given, list(SHORT))
        )
    if isinstance(given, dict) and given.get("kind") != "custom":
        given = Ratio(**given)
    for name, ratio in SHORT.items():
        if isinstance(given, Ratio) and given == ratio:
            return name
    return given
