"""Normaliser paths: how a component averages over prompts, episodes, sequences, turns and tokens.

    path    := level (">" level)*          levels strictly descending, the last one is token
    level   := "mean(" unit ")" | "sum(" unit ")" ["/" divisor]
    unit    := a name of `megatron_pgloss.spec.levels`
    divisor := a form of `megatron_pgloss.spec.divisors`

Every path is a per-token weight. Sources of the named ones: token mean, DAPO 2503.14476 eq. 8; sequence mean, GRPO
2402.03300 eq. 3; constant budget, Dr. GRPO 2503.20783 section 3.2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec import divisors
from megatron_pgloss.spec.divisors import Divisor
from megatron_pgloss.spec.levels import UNITS
from megatron_pgloss.spec.words import nearest

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
"""verl's mode names that mean the same in all its versions, and short names; hyphens may be underscores."""
_NORM = "seq-mean-token-sum-norm"
_REFUSED = {
    _NORM: "its default divisor is the padded width, which changes with padding; write "
    "'mean(sequence) > sum(token)/BUDGET' (verl from 0.7.1) or 'sum(sequence) > sum(token)/BUDGET' (up to 0.7.0), or "
    f"'{_NORM}/BUDGET' with BUDGET verl's loss_scale_factor (up to 0.7.0: 'verl<=0.7.0:{_NORM}/BUDGET')",
}
_VERL = re.compile(r"(?:verl(?:(<=|>=|==)\s*([\d.]+))?:)?\s*([\w-]+)(?:\s*/\s*([^>]+))?")
_LONGEST = 512
_LEVEL = re.compile(r"(mean|sum)\((\w+)\)(?:/(.+))?")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a path: the level that it averages or adds up over."""

    operation: Literal["mean", "sum"]
    unit: str
    """Name of the level."""
    divisor: Divisor | None = None
    """The divisor of the sum over it; None: a plain sum."""

    def __str__(self) -> str:
        head = f"{self.operation}({self.unit})"
        return head if self.operation == "mean" or self.divisor is None else f"{head}/{self.divisor}"


@dataclass(frozen=True, slots=True)
class Path:
    """A parsed normaliser: its steps, from the outermost level down to token."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return " > ".join(str(step) for step in self.steps)

    @property
    def units(self) -> tuple[str, ...]:
        """The levels named, outermost first."""
        return tuple(step.unit for step in self.steps)


def parse(text: str) -> Path:
    """Parse a normaliser path or one of its aliases.

    Args:
        text: a path as in the grammar above, a name of `ALIASES`, or verl's name with its version and factor
            (``verl<=0.7.0:seq-mean-token-sum-norm/4096``).

    Raises:
        SpecError: a word is unknown, the levels do not strictly descend, the last level is not token, or a divisor is
            not positive.
    """
    if not isinstance(text, str) or len(text) > _LONGEST:
        got = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
        raise SpecError("a normalizer is a short text", expected=f"at most {_LONGEST} characters", got=got)
    steps = tuple(_step(part.strip(), text) for part in _spelled_out(text.strip()).split(">"))
    order = [UNITS.index(step.unit) for step in steps]
    if order != sorted(set(order)):
        raise SpecError(
            f"normalizer {text!r}: levels must descend",
            expected=" > ".join(UNITS),
            got=text,
            fix="name each unit once, the largest first",
        )
    if steps[-1].unit != "token":
        raise SpecError(
            f"normalizer {text!r} does not end with the token level",
            expected="mean(token) or sum(token) last",
            got=str(steps[-1]),
            fix="add '> mean(token)'",
        )
    return Path(steps)


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


def _step(part: str, whole: str) -> Step:
    match = _LEVEL.fullmatch(re.sub(r"\s+", "", part))
    if match is None or match[2] not in UNITS:
        raise SpecError(
            f"normalizer {whole!r}: cannot read the level {part!r}",
            expected="mean(UNIT) or sum(UNIT)[/divisor], UNIT of " + ", ".join(UNITS),
            got=repr(part),
            fix=_hint(part, match) or "for example 'mean(sequence) > mean(token)', or one of " + ", ".join(ALIASES),
        )
    unit, word = match[2], match[3]
    if match[1] == "mean":
        if word is not None:
            raise SpecError(f"normalizer {whole!r}: a mean takes no divisor", got=part, fix="use sum(...)/...")
        return Step("mean", unit, divisors.COUNT)
    try:
        return Step("sum", unit, None if word is None else divisors.read(word))
    except SpecError as error:
        raise SpecError(f"normalizer {whole!r}: {error.what}", expected=error.expected, got=error.got) from None


def _hint(part: str, match: re.Match[str] | None) -> str | None:
    return nearest(part, [*ALIASES, *_REFUSED]) if match is None else nearest(match[2], list(UNITS))
