"""The changes of CONTRIBUTING.md's "How to add ...", as a stranger would make them, for ``test_recipes.py``.

A `Change` is text that is put in front of an anchor of a file. A `Forgotten` piece is text taken out of the whole
change again, the test that must go red, and what it must say.
"""

from __future__ import annotations

from support.recipes.rules import CORRECTION, GATE, MASK
from support.recipes.surrogate import SURROGATE
from support.recipes.tables import DIVISOR, LEVEL, METRIC, MODE, STREAM

CHANGES = {
    "surrogate": SURROGATE, "gate": GATE, "correction": CORRECTION, "mask": MASK, "divisor": DIVISOR, "level": LEVEL,
    "metric": METRIC, "stream": STREAM, "refused mode": MODE,
}  # fmt: skip
