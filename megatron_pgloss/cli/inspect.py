"""``inspect``: every token of a step's rows, the components that train it, weight and advantage, or why none does.

``pgloss inspect step.jsonl`` · ``pgloss inspect step.jsonl --html step.html``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_pgloss.errors import DataError
from megatron_pgloss.view import read_rows, token_page, token_terminal
from megatron_pgloss.view.cells import TokenRow, live_first


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "inspect",
        help="show every token of a step: role, author, membership, weight, advantage, reason",
        description="Reads what megatron_pgloss.view.write_rows(rows_of_plan(plan), FILE) wrote. Rows with an "
        "advantage other than 0 come first.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="token rows, by view.write_rows")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write one HTML page instead of printing")
    parser.add_argument("--rows", type=_count, metavar="N", help="at most N rows; default 8 printed, all on the page")
    parser.add_argument("--find", metavar="TEXT", help="only rows whose sample, prompt, episode or text holds TEXT")
    parser.add_argument("--title", default=None, help="heading; default: the file's name")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def run(args: argparse.Namespace) -> int:
    """Show the rows; 0."""
    found = [row for row in read_rows(args.file) if args.find is None or _holds(row, args.find)]
    if not found:
        raise DataError("no row to show", got=f"{args.file}" + (f" with {args.find!r}" if args.find else ""))
    title = args.title or args.file.name
    rows = live_first(found)[: args.rows or (None if args.html else 8)]
    if args.html:
        print(token_page(rows, args.html, title=title))
        return 0
    token_terminal(rows, title=title)
    if len(rows) < len(found):
        print(f"{len(found) - len(rows)} more rows: --rows, --find or --html", file=sys.stderr)
    return 0


def _holds(row: TokenRow, text: str) -> bool:
    return any(text in part for part in (row.sample, row.prompt, row.episode, "".join(c.text for c in row.tokens)))
