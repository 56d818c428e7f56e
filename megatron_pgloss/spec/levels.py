"""The levels that normalisers and statistics name, from the outermost to the token; each contains the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Level:
    """A level, whose units are counted and averaged over."""

    name: str
    plural: str
    letter: str
    """Its index in LaTeX."""
    keyed: bool = False
    """Whether a unit may lie on several ranks, which then know it by a key; else a unit lies in one row."""


LEVELS = (
    Level("prompt", "prompts", "p", keyed=True),
    Level("episode", "episodes", "e", keyed=True),
    Level("sequence", "sequences", "i"),
    Level("turn", "turns", "j"),
    Level("token", "tokens", "t"),
)
UNITS = tuple(level.name for level in LEVELS)
"""Names of the levels."""
KEYED = tuple(level.name for level in LEVELS if level.keyed)
IN_ROWS = tuple(level.name for level in LEVELS if not level.keyed)
INSIDE = IN_ROWS[1:-1]
"""Levels between the sequence and the token: `megatron_pgloss.planning.units` finds their units in every row."""
LEVEL = {level.name: level for level in LEVELS}
Unit = Literal["prompt", "episode", "sequence", "turn"]
"""A level above the token, over whose tokens a statistic may run."""
