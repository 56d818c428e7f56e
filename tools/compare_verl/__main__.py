"""Compare every mode and loss that verl 0.9.1 and this package have under one name, on random batches, in float64.

    PYTHONPATH=.:tools python -m compare_verl [--write docs/verl.md | --check docs/verl.md]

The script needs verl (tools/compare_verl.sh installs it without its GPU stack). It prints the table, and fails if two
sides that should be equal are not, or if a difference that the table explains no longer exists.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

from compare_verl.pairs import Data, Row
from compare_verl.rows import ROWS

EQUAL = 1e-10


def measure(row: Row) -> tuple[float, float]:
    """Largest relative difference of value and gradient over three batches."""
    torch.manual_seed(0)  # verl's clip_cov draws from the process's own state
    worst = [0.0, 0.0]
    for seed in range(3):
        data = Data.draw(seed, **row.data)
        (value, grad), (own_value, own_grad) = row.pair(data)
        worst[0] = max(worst[0], abs(value - own_value) / max(abs(value), 1e-6))
        worst[1] = max(worst[1], float((grad - own_grad).abs().max() / grad.abs().max().clamp(min=1e-12)))
    return worst[0], worst[1]


def verdict(row: Row, value: float, gradient: float) -> str | None:
    """The way in which the row breaks its claim, or None."""
    if row.same == "both" and max(value, gradient) > EQUAL:
        return "should be equal"
    if row.same == "gradient" and (gradient > EQUAL or value < EQUAL):
        return "should differ in value alone"
    if row.same == "no" and gradient < EQUAL:
        return "should differ, and does not"
    return None


def shown(difference: float) -> str:
    """``equal``, or the difference with one digit, which is the same on most machines."""
    return "equal" if difference <= EQUAL else f"{difference:.0%}" if difference >= 0.01 else f"{difference:.0e}"


def _words(text: str) -> str:
    """The table without the sizes of its differences, which another processor rounds differently."""
    return re.sub(r"\| (\d+%|\de-\d\d) (?=\|)", "| differs ", text)


HEADER = """# verl and this package, side by side

This page is made by `tools/compare_verl.sh`. Both libraries run on the same random batches (float64, 7 rows of up to 12
tokens, holes in the masks, one row masked whole), verl 0.9.1 on the whole batch, this package in three micro-batches.
"equal" means equal to 1e-10 of the largest entry. Other cells have the largest relative difference, which is deliberate
and explained.

| verl | here | value | gradient | difference |
|---|---|---|---|---|
"""


def main(argv: list[str] | None = None) -> int:
    """Print the table; write or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    args = parser.parse_args(argv)
    lines, wrong = [], []
    for row in ROWS:
        value, gradient = measure(row)
        problem = verdict(row, value, gradient)
        if problem:
            wrong.append(f"{row.verl}: {problem} (value {value:.1e}, gradient {gradient:.1e})")
        lines.append(f"| {row.verl} | {row.here} | {shown(value)} | {shown(gradient)} | {row.note} |")
    text = HEADER + "\n".join(lines) + "\n"
    print(text)
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    if args.check and _words(args.check.read_text(encoding="utf-8")) != _words(text):
        wrong.append(f"{args.check} is not what was printed: run tools/compare_verl.sh --write {args.check}")
    print(*wrong, sep="\n", file=sys.stderr)
    equal = sum(row.same == "both" for row in ROWS)
    print(f"verl: {len(ROWS)} comparisons, {equal} equal, {len(ROWS) - equal} differ as explained, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
