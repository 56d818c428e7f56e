"""Surrogates of several tokens at once: a unit's, those that follow, or all rollouts of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.functions import StreamName
from megatron_pgloss.spec.letters import SHORT_UNIT, interval
from megatron_pgloss.spec.numbers import AboveOne, BelowOne, Bound, Flag, Positive
from megatron_pgloss.spec.ratios import Ratio
from megatron_pgloss.spec.surrogates.moving import clipped
from megatron_pgloss.spec.surrogates.surrogate import Home, SurrogateKind

__all__ = ["FIPO", "GMPO", "REAL"]


class GMPO(SurrogateKind):
    """Geometric mean of clipped token ratios: ``l = -A exp(mean over the unit of m)``, ``m = min(d, high)`` where A > 0
    and ``max(d, -low)`` where A < 0, 0 where A = 0 (2507.20673; bounds in log space). Takes token ratios.
    """

    kind: Literal["gmpo"] = "gmpo"
    low: Bound = 0.4
    high: Bound = 0.4
    unit: Literal["sequence", "turn"] = "sequence"
    letters: ClassVar[tuple[str, ...]] = ("d",)
    bounds: ClassVar[bool] = True
    token_ratio_only: ClassVar[bool] = True

    @property
    def statistic_unit(self) -> str:
        """The unit of its mean."""
        return self.unit

    @property
    def statistic_reads(self) -> tuple[str, ...]:
        """The ratios, and the sign of every token's advantage."""
        return ("ratio", "advantages")

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return f"-A exp(mean_{SHORT_UNIT[self.unit]} m)"

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """What m is."""
        low, high = interval(self.low, self.high, 0.0).split(", ")
        return (f"m = min(d, {high}) where A > 0, max(d, {low}) where A < 0",)


class FIPO(SurrogateKind):
    """Clipped surrogate times a constant influence of the tokens that follow: ``l = sg(f_t) l_clip``, ``f_t = clip(exp(
    sum_{k >= t} gamma^(k - t) d_k), 1, 1 + reach)``, ``gamma = 2^(-1/half_life)`` (2603.19835). Takes token ratios.

    k runs over the action tokens of the sequence, k - t counts positions; tokens with ``r > delta`` leave the sum.
    """

    kind: Literal["fipo"] = "fipo"
    low: BelowOne | StreamName = 0.2
    high: Bound = 0.28
    delta: AboveOne | None = None
    """Cap of the ratio where A < 0; tokens with a ratio above it do not enter the sum of f."""
    half_life: Positive = 32.0
    reach: Positive = 0.2
    both: Flag = False
    """Whether f may fall to 1 - reach as well."""
    safe_ratio: AboveOne | None = None
    """Ratio above which f is also clipped to [0.8, 1] where A < 0; None: nowhere."""
    letters: ClassVar[tuple[str, ...]] = ("d", "r")
    bounds: ClassVar[bool] = True
    token_ratio_only: ClassVar[bool] = True

    @property
    def statistic_unit(self) -> str:
        """The sequence, from each token on."""
        return "sequence"

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return f"sg(f) ({clipped(self.low, self.high, None, self.delta)})"

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """What f is, and how fast it fades."""
        reach = f"{1 - self.reach if self.both else 1:g}, {1 + self.reach:g}"
        far = "" if self.delta is None else f" without r > {self.delta:g}"
        safe = () if self.safe_ratio is None else (f"f in [0.8, 1] where A < 0 and r > {self.safe_ratio:g}",)
        return (
            f"f = clip(exp(sum_{{k >= t}} g^(k - t) d_k{far}), {reach})", f"g^{self.half_life:g} = 1/2", *safe,
        )  # fmt: skip


class REAL(SurrogateKind):
    """Rewards as labels (2602.05630). s is the mean log-ratio of the sequence (``ratio="sequence"``), and the sign of A
    is its label; a sequence of A = 0 has none, and its term is 0.

    ``form="binary"``: ``l = softplus(-sign(A) s / tau)`` (its cross-entropy form), a term per sequence, the same at
    each of its tokens: it goes with ``mean(sequence) > mean(token)``.

    ``form="group"`` classifies the sequences of a prompt against an anchor of logit 0:
    ``L = log(1 + sum_{A > 0} exp(-s / tau)) + log(1 + sum_{A < 0} exp(s / tau))``. Each sequence carries an even share
    of the value of the logarithm that it stands in, and the derivative of L by its own s. So
    ``mean(prompt) > sum(sequence) > mean(token)`` gives the mean of L over prompts, and weights and gates act on value
    and gradient alike. The group is all of the prompt's sequences in the step, which takes a statistics pass. The label
    of a sequence is then the sign of its mean advantage over the tokens trained.
    """

    kind: Literal["real"] = "real"
    tau: Positive = 0.5
    form: Literal["binary", "group"] = "binary"
    letters: ClassVar[tuple[str, ...]] = ("d",)
    symbols: ClassVar[Mapping[str, str]] = {
        "softplus": r"\operatorname{softplus}", "sign": r"\operatorname{sign}", "sum_j": r"\sum_j", "d_j": "d_j",
        "n": "n",
    }  # fmt: skip

    @property
    def needs_statistics_pass(self) -> bool:
        """Whether it reads all sequences of a prompt at once."""
        return self.form == "group"

    def check_home(self, component: Home) -> None:
        """The group form takes one log-ratio of each sequence, and weighs all sequences of a prompt alike."""
        if self.form != "group":
            return
        axis, path = component.axis, component.path
        if not isinstance(axis, Ratio) or axis.level != "sequence" or axis.statistic not in ("mean", "sum"):
            raise SpecError("REAL(form='group') takes one log-ratio of each sequence", got=f"ratio={component.ratio!r}",
                            expected="a mean or sum over the sequence", fix="ratio='sequence'")  # fmt: skip
        if path.units != ("prompt", "sequence", "token") or path.steps[-1].operation != "mean":
            raise SpecError("REAL(form='group') weighs all sequences of a prompt alike", got=component.normalizer,
                            expected="prompt > sequence > mean(token)",
                            fix="'mean(prompt) > sum(sequence) > mean(token)'")  # fmt: skip

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        if self.form == "binary":
            return f"softplus(-sign(A) d / {self.tau:g})"
        return f"log(1 + sum_j exp(-sign(A) d_j / {self.tau:g})) / n"

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """What n and d_j are, in the group form."""
        share = "n = sequences of the prompt with this sign of A, each d_j one of them"
        return (share,) if self.form == "group" else ()
