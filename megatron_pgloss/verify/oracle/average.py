"""The oracle's normalisers: nested sums and means over groups of tokens, done as the words say.

No per-token weight is computed here: tokens are grouped by unit, groups are averaged, averages of
groups are averaged. The package turns the same words into weights, another way altogether, which is
what makes this a check of it.

Shapes: T all tokens of the step.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from megatron_pgloss.errors import SpecError
from megatron_pgloss.verify.oracle.step import LEVELS

_LEVEL = re.compile(rf"(mean|sum)\(({'|'.join(LEVELS)})\)(?:/(.+))?")
_POWER = re.compile(r"pow\((.+)\)")


@dataclass(frozen=True)
class Level:
    """One level of a path: how its units are put together.

    ``power`` is the exponent of the level's own count in the divisor (1 for a mean, 0 for a plain
    sum), ``constant`` a fixed divisor, ``batch_mean`` asks for the count's mean over the batch.
    """

    unit: str
    power: float = 0.0
    constant: float = 1.0
    batch_mean: bool = False


def parse_path(text: str) -> list[Level]:
    """Read ``mean(prompt) > sum(sequence)/sqrt > mean(token)`` and the like, or raise SpecError."""
    levels = [_parse_level(part, text) for part in re.sub(r"\s", "", text).split(">")]
    depths = [LEVELS.index(level.unit) for level in levels]
    if levels[-1].unit != "token" or any(b <= a for a, b in pairwise(depths)):
        raise SpecError(
            "a normaliser descends strictly and ends with token",
            expected=" > ".join(LEVELS),
            got=text,
        )
    return levels


def _parse_level(part: str, text: str) -> Level:
    match = _LEVEL.fullmatch(part)
    if match is None or (match[1] == "mean" and match[3]):
        raise SpecError(
            "not a level of a normaliser",
            expected="mean(unit) or sum(unit)[/divisor]",
            got=part,
            where=text,
        )
    kind, unit, divisor = match.groups()
    if kind == "mean":
        return Level(unit, power=1.0)
    if divisor is None:
        return Level(unit)
    if divisor == "avg":
        return Level(unit, batch_mean=True)
    if divisor == "sqrt":
        return Level(unit, power=0.5)
    power = _POWER.fullmatch(divisor)
    try:
        number = float(power[1] if power else divisor)
    except ValueError:
        number = float("nan")
    if power and abs(number) < float("inf"):
        return Level(unit, power=number)
    if not power and 0 < number < float("inf"):
        return Level(unit, constant=number)
    raise SpecError("not a divisor", expected="number > 0, sqrt, pow(a) or avg", got=divisor, where=text)


@dataclass
class NestedAverage:
    """The average of one component, as a function of its per-token values.

    Args:
        path: the levels, outermost first.
        keys: per level of the path, each token's unit; None for a token that is in no such unit.
        present: tokens of the data, in the component or not; they say which units exist.
        members: tokens whose value enters the sum; one that is in no unit of some level does not.
        counts: per token what it adds to its unit's token count: 0 if not counted, 1, or its user
            weight; 0 as well for a token that is in no unit of some level.
        every_unit: also count the units that hold no counted token.
    """

    path: Sequence[Level]
    keys: Mapping[str, Sequence[Hashable | None]]
    present: Sequence[int]
    members: frozenset[int]
    counts: Sequence[float]
    every_unit: bool
    _sizes: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take out what lies in no unit of the path, and note the counts that ``/avg`` needs."""
        units = [level.unit for level in self.path]
        inside = {t for t in self.present if all(self.keys[unit][t] is not None for unit in units)}
        self.members = self.members & inside
        self.counts = [count if t in inside else 0 for t, count in enumerate(self.counts)]
        self._measure(0, self.present)

    def __call__(self, value_T: Tensor) -> Tensor:
        """0-d average of ``value_T`` [T]; where nothing is left, a 0 that is part of the graph."""
        return value_T[:0].sum() + self._reduce(0, self.present, value_T)

    def size(self, group: Sequence[int]) -> float:
        """The token count of a group."""
        return sum(self.counts[t] for t in group)

    def units(self, unit: str, group: Sequence[int]) -> list[list[int]]:
        """The units of ``group`` that count, each as its tokens."""
        found: dict[Hashable, list[int]] = {}
        for t in group:
            key = self.keys[unit][t]
            if key is not None:
                found.setdefault(key, []).append(t)
        return [tokens for tokens in found.values() if self.every_unit or self.size(tokens) > 0]

    def _measure(self, depth: int, group: Sequence[int]) -> None:
        """Note the level's own count of this group, and of every group below."""
        if self.path[depth].unit == "token":
            self._sizes.setdefault(depth, []).append(self.size(group))
            return
        children = self.units(self.path[depth].unit, group)
        self._sizes.setdefault(depth, []).append(float(len(children)))
        for child in children:
            self._measure(depth + 1, child)

    def _reduce(self, depth: int, group: Sequence[int], value_T: Tensor) -> Tensor:
        level = self.path[depth]
        if level.unit == "token":
            own = self.size(group)
            total = value_T[[t for t in group if t in self.members]].sum()
        else:
            children = self.units(level.unit, group)
            own = float(len(children))
            total = value_T.new_zeros(())
            for child in children:
                total = total + self._reduce(depth + 1, child, value_T)
        if own == 0:
            return torch.zeros_like(total)  # an empty unit is worth 0: there is no 0 / 0 here
        if level.batch_mean:
            return total / (sum(self._sizes[depth]) / len(self._sizes[depth]))
        return total / (level.constant * own**level.power)
