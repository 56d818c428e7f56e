"""Divisors: what a level ``sum(unit)/divisor`` of a normaliser divides by. A mean divides by the count itself.

A kind of divisor reads itself, divides and prints itself; grammar, weights, equations and docs ask it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron_pgloss.errors import SpecError

_STEEPEST = 16
"""Exponent at which the power of any int64 count is still a float64: (2^63)^16 = 2^1008."""


@dataclass(frozen=True)
class Divisor:
    """The interface of a divisor. ``count`` is the number of units of its level in one unit of the level above."""

    reads: ClassVar[Literal["count", "average", "nothing"]] = "count"
    """What it is made of: the count of each unit above, the mean of these counts over the step, or nothing."""
    forms: ClassVar[tuple[tuple[str, str], ...]] = ()
    """How it is written, and what it divides by."""
    examples: ClassVar[tuple[str, ...]] = ()
    """Words that it reads; for tests."""

    @classmethod
    def read(cls, word: str) -> Divisor | None:
        """The divisor that ``word`` writes, or None where the word is no form of this kind.

        Raises:
            SpecError: the word is such a form, but its number does not fit.
        """
        raise NotImplementedError(f"{cls.__name__} cannot be read")

    def __str__(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} cannot be written")

    def of(self, count: Any) -> Any:
        """The number to divide by: a float for a float, a tensor for a tensor.

        Args:
            count: what it `reads`, never 0: a float, or float64 [units above].
        """
        raise NotImplementedError(f"{type(self).__name__} cannot divide")

    def plain(self, count: str) -> str:
        """Plain text, with the count's letter."""
        raise NotImplementedError(f"no formula for {type(self).__name__}")

    def latex(self, count: str, unit: str) -> str:
        """LaTeX, with the count's letter and the name of the level."""
        raise NotImplementedError(f"no LaTeX for {type(self).__name__}")


@dataclass(frozen=True)
class Power(Divisor):
    """A power of the count."""

    exponent: float
    forms: ClassVar = (("sqrt", "the square root of the count"), ("pow(a)", "the a-th power of the count"))
    examples: ClassVar = ("sqrt", "pow(0.3)", "pow(-1.5)")

    @classmethod
    def read(cls, word: str) -> Power | None:
        """``sqrt``, or ``pow(a)``."""
        found = re.fullmatch(r"pow\(([^)]+)\)", word)
        if found is None:
            return cls(0.5) if word == "sqrt" else None
        exponent = _number(found[1])
        if abs(exponent) > _STEEPEST:
            raise SpecError("an exponent is too steep", expected=f"between -{_STEEPEST} and {_STEEPEST}", got=word[:64])
        return cls(exponent)

    def __str__(self) -> str:
        return "sqrt" if self.exponent == 0.5 else f"pow({_exact(self.exponent)})"

    def of(self, count: Any) -> Any:
        """``count^exponent``."""
        return count**self.exponent

    def plain(self, count: str) -> str:
        """The root or power of ``count`` as text, such as ``sqrt(n)``."""
        return {1.0: count, 0.5: f"sqrt({count})"}.get(self.exponent, f"{count}^{self.exponent:g}")

    def latex(self, count: str, unit: str) -> str:
        """The root or power of ``count`` in LaTeX."""
        known = {1.0: count, 0.5: rf"\sqrt{{{count}}}"}
        return known.get(self.exponent, rf"({count})^{{{self.exponent:g}}}")


@dataclass(frozen=True)
class Average(Divisor):
    """The mean of the count over the units above, the same for all of them."""

    reads: ClassVar = "average"
    forms: ClassVar = (("avg", "the mean of the count over the step"),)
    examples: ClassVar = ("avg",)

    @classmethod
    def read(cls, word: str) -> Average | None:
        """``avg``."""
        return cls() if word == "avg" else None

    def __str__(self) -> str:
        return "avg"

    def of(self, count: Any) -> Any:
        """The mean itself."""
        return count

    def plain(self, count: str) -> str:
        """The mean as text, such as ``mean of n``."""
        return f"mean of {count}"

    def latex(self, count: str, unit: str) -> str:
        """The mean in LaTeX, an n with a bar."""
        return rf"\overline{{n}}^{{\,\mathrm{{{unit}}}}}"


@dataclass(frozen=True)
class Constant(Divisor):
    """A fixed positive number."""

    number: float
    reads: ClassVar = "nothing"
    forms: ClassVar = (("a number", "that number, which is above 0"),)
    examples: ClassVar = ("4096", "0.25")

    @classmethod
    def read(cls, word: str) -> Constant:
        """A number."""
        number = _number(word)
        if number <= 0:
            raise SpecError("divisor must be positive", expected="> 0", got=word)
        return cls(number)

    def __str__(self) -> str:
        return _exact(self.number)

    def of(self, count: Any) -> Any:
        """The number."""
        return self.number

    def plain(self, count: str) -> str:
        """The number."""
        return f"{self.number:g}"

    def latex(self, count: str, unit: str) -> str:
        """The number."""
        return f"{self.number:g}"


DIVISORS: tuple[type[Divisor], ...] = tuple(sorted(Divisor.__subclasses__(), key=lambda kind: kind is Constant))
"""Every kind of divisor. `Constant` is tried last, because it refuses any word that is no number."""
COUNT = Power(1.0)
"""What a mean divides by."""


def read(word: str) -> Divisor:
    """The divisor that ``word`` writes.

    Raises:
        SpecError: no kind reads it, or it holds a number that does not fit.
    """
    for kind in DIVISORS:
        found = kind.read(word)
        if found is not None:
            return found
    raise AssertionError("the last kind reads or raises")


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        *others, last = [form for kind in (*DIVISORS[-1:], *DIVISORS[:-1]) for form, _ in kind.forms]
        raise SpecError(f"cannot read the divisor {text[:64]!r}", expected=f"{', '.join(others)} or {last}")
    return number


def _exact(number: float) -> str:
    # Exact both ways: the text of a path is what a spec stores.
    return str(int(number)) if number == int(number) else repr(number)
