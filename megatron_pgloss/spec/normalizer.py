"""Normaliser paths: how a component averages over prompts, episodes, sequences, turns and tokens.

    path    := level (">" level)*          levels strictly descending, the last one is token
    level   := "mean(" unit ")" | "sum(" unit ")" ["/" divisor]
    unit    := prompt | episode | sequence | turn | token
    divisor := number > 0 | "sqrt" | "pow(a)" | "avg"

Every path is a per-token weight (design: the one idea). Sources of the named ones: token mean, DAPO 2503.14476
eq. 8; sequence mean, GRPO 2402.03300 eq. 3; constant budget, Dr. GRPO 2503.20783 section 3.2.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import nearest

Unit = Literal["prompt", "episode", "sequence", "turn", "token"]
UNITS: tuple[Unit, ...] = ("prompt", "episode", "sequence", "turn", "token")

ALIASES = {
    "token-mean": "mean(token)",
    "seq-mean-token-mean": "mean(sequence) > mean(token)",
    "seq-mean-token-sum": "mean(sequence) > sum(token)",
    "token-sum": "sum(token)",
    "sequence-mean": "mean(sequence) > mean(token)",
    "turn-mean": "mean(turn) > mean(token)",
    "episode-mean": "mean(episode) > mean(token)",
    "prompt-mean": "mean(prompt) > mean(token)",
}
"""verl's mode names, the same in all its versions, and short names; underscores do as well."""
_NORM = "seq-mean-token-sum-norm"
_REFUSED = {
    _NORM: "its default divisor is the padded width, which changes with padding; write "
    "'mean(sequence) > sum(token)/BUDGET' (verl from 0.7.1) or 'sum(sequence) > sum(token)/BUDGET' (up to 0.7.0), or "
    f"'{_NORM}/BUDGET' with BUDGET verl's loss_scale_factor (up to 0.7.0: 'verl<=0.7.0:{_NORM}/BUDGET')",
}
_VERL = re.compile(r"(?:verl(?:(<=|>=|==)\s*([\d.]+))?:)?\s*([\w-]+)(?:\s*/\s*([^>]+))?")
_LEVEL = re.compile(r"(mean|sum)\((\w+)\)(?:/(.+))?")
_POW = re.compile(r"pow\(([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Level:
    """One step of a path."""

    operation: Literal["mean", "sum"]
    unit: Unit
    divisor: float | None = None
    """A fixed positive number, for ``sum(unit)/number``."""
    power: float | None = None
    """Exponent of the level's own count: 0.5 for ``sqrt``, ``a`` for ``pow(a)``, 1 for a mean."""
    average: bool = False
    """Divide by the count's mean over the batch (``avg``)."""

    def __str__(self) -> str:
        head = f"{self.operation}({self.unit})"
        if self.operation == "mean":
            return head
        if self.average:
            return f"{head}/avg"
        if self.power is not None:
            return f"{head}/sqrt" if self.power == 0.5 else f"{head}/pow({_show(self.power)})"
        return head if self.divisor is None else f"{head}/{_show(self.divisor)}"


def _show(number: float) -> str:
    # Exact both ways: the text of a path is what a spec stores.
    return str(int(number)) if number == int(number) else repr(number)


@dataclass(frozen=True, slots=True)
class Path:
    """A parsed normaliser: levels from the outermost down to token."""

    levels: tuple[Level, ...]

    def __str__(self) -> str:
        return " > ".join(str(level) for level in self.levels)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units named, outermost first."""
        return tuple(level.unit for level in self.levels)


def parse(text: str) -> Path:
    """Parse a normaliser path or one of its aliases.

    Args:
        text: a path as in the grammar above, a name of `ALIASES`, or verl's name with its version and factor
            (``verl<=0.7.0:seq-mean-token-sum-norm/4096``).

    Raises:
        SpecError: unknown word, levels not strictly descending, last level not token, divisor not positive.
    """
    levels = tuple(_level(part.strip(), text) for part in _spelled_out(text.strip()).split(">"))
    order = [UNITS.index(level.unit) for level in levels]
    if order != sorted(set(order)):
        raise SpecError(
            f"normalizer {text!r}: levels must descend",
            expected=" > ".join(UNITS),
            got=text,
            fix="name each unit once, the largest first",
        )
    if levels[-1].unit != "token":
        raise SpecError(
            f"normalizer {text!r} does not end with the token level",
            expected="mean(token) or sum(token) last",
            got=str(levels[-1]),
            fix="add '> mean(token)'",
        )
    return Path(levels)


def _spelled_out(name: str) -> str:
    """The path that a name stands for; anything else as it is."""
    found = _VERL.fullmatch(name)
    if found is None:
        return name
    relation, version, mode, factor = found.groups()
    mode = mode.replace("_", "-")
    if mode in _REFUSED and factor is None:
        raise SpecError(f"normalizer {name!r} is refused", fix=_REFUSED[mode])
    if mode == _NORM:
        # Until 0.7.0 the sum over sequences was not divided by their number.
        early = version is not None and relation != ">=" and _version(version, name) < (0, 7, 1)
        return f"{'sum' if early else 'mean'}(sequence) > sum(token)/{factor}"
    return name if factor is not None else ALIASES.get(mode, name)


def _version(text: str, whole: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        raise SpecError(f"normalizer {whole!r}: cannot read the version {text!r}", expected="for example 0.7.0")
    return tuple(int(part) for part in text.split("."))


def _level(part: str, whole: str) -> Level:
    match = _LEVEL.fullmatch(re.sub(r"\s+", "", part))
    if match is None or match[2] not in UNITS:
        raise SpecError(
            f"normalizer {whole!r}: cannot read the level {part!r}",
            expected="mean(UNIT) or sum(UNIT)[/divisor], UNIT of " + ", ".join(UNITS),
            got=repr(part),
            fix=_hint(part, match) or "for example 'mean(sequence) > mean(token)', or one of " + ", ".join(ALIASES),
        )
    operation, unit, divisor = match[1], match[2], match[3]
    if operation == "mean":
        if divisor is not None:
            raise SpecError(f"normalizer {whole!r}: a mean takes no divisor", got=part, fix="use sum(...)/...")
        return Level("mean", unit, power=1.0)  # type: ignore[arg-type]
    if divisor is None:
        return Level("sum", unit)  # type: ignore[arg-type]
    if divisor == "avg":
        return Level("sum", unit, average=True)  # type: ignore[arg-type]
    if divisor == "sqrt":
        return Level("sum", unit, power=0.5)  # type: ignore[arg-type]
    power = _POW.fullmatch(divisor)
    number = _number(power[1] if power else divisor, whole)
    if power:
        return Level("sum", unit, power=number)  # type: ignore[arg-type]
    if number <= 0:
        raise SpecError(f"normalizer {whole!r}: divisor must be positive", expected="> 0", got=divisor)
    return Level("sum", unit, divisor=number)  # type: ignore[arg-type]


def _hint(part: str, match: re.Match[str] | None) -> str | None:
    return nearest(part, [*ALIASES, *_REFUSED]) if match is None else nearest(match[2], list(UNITS))


def _number(text: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(
            f"normalizer {whole!r}: cannot read the divisor {text!r}", expected="a number, sqrt, pow(a) or avg"
        )
    return number
