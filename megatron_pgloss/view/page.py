"""Token rows as one self-contained HTML page: no network, no library, readable without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_pgloss.view.cells import (
    Summary,
    TokenCell,
    TokenRow,
    by_prompt,
    membership,
    number,
    segments,
    signed,
    summarize,
)
from megatron_pgloss.view.file import write
from megatron_pgloss.view.optional import require
from megatron_pgloss.view.palette import MINUS, PLUS, role_colours
from megatron_pgloss.view.text import is_line_end, pieces, printable, visible

_TEMPLATES = Path(__file__).parent
# A colour too faint to tell its sign says nothing: small advantages start here.
_FAINTEST = 0.2


def token_page(
    rows: Sequence[TokenRow],
    path: str | Path,
    *,
    title: str,
    subtitle: str | None = None,
    legend: Mapping[str, str] | None = None,
) -> Path:
    """Write ``rows`` as one static HTML page and return its path.

    Each token is coloured by its role and labelled, per unbroken run, with role and author. Under
    it stand the signs of the components that train it with their weights (an open circle where none
    does), the letter of the reason that keeps it out, and its advantage, which also colours the bar
    below it. Pointing at a token shows every field. Rows are grouped by prompt, then by episode.

    Args:
        rows: the sequences, in the order to show them.
        path: the file to write; its folder is made where it is missing.
        title: heading of the page.
        subtitle: one line below it.
        legend: explanations by name of a role, a component or a reason, shown beside it in the
            legend; names that do not occur in ``rows`` are left out.

    Raises:
        UnsupportedError: jinja2 is not installed.
        DataError: there is no row.
    """
    jinja2 = require("jinja2", "the HTML page")
    summary = summarize(rows)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        finalize=lambda value: printable(value) if type(value) is str else value,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    colours = role_colours(summary.roles)
    classes = {role: f"r{index}" for index, role in enumerate(colours)}
    page = environment.get_template("page.html.j2").render(
        title=title,
        subtitle=subtitle,
        summary=summary,
        explain=legend or {},
        number=number,
        signed=signed,
        plus=PLUS,
        minus=MINUS,
        roles=[(role, classes[role], colours[role], summary.roles[role]) for role in colours],
        prompts=[
            (
                prompt,
                [(episode, [_row(row, summary, classes) for row in rows]) for episode, rows in episodes.items()],
            )
            for prompt, episodes in by_prompt(rows).items()
        ],
    )
    return write(path, page.encode("utf-8"))


def _row(row: TokenRow, summary: Summary, classes: Mapping[str, str]) -> dict[str, Any]:
    runs = [
        {
            "role": role,
            "author": author,
            "class": classes[role],
            "cells": [_cell(cell, position, summary) for position, cell in run],
        }
        for role, author, run in segments(row)
    ]
    trained = sum(bool(cell.members) for cell in row.tokens)
    return {
        "sample": row.sample,
        "header": row.header,
        "tokens": len(row.tokens),
        "trained": trained,
        "runs": runs,
    }


def _cell(cell: TokenCell, position: int, summary: Summary) -> dict[str, Any]:
    return {
        "pieces": pieces(cell.text),
        "in": bool(cell.members),
        "marks": membership(cell, summary),
        "letter": summary.letters[cell.reason] if cell.reason else "",
        "advantage": "" if cell.advantage is None else signed(cell.advantage),
        "sign": _sign(cell.advantage),
        "strength": _strength(cell.advantage, summary.largest_advantage),
        "tip": _tip(cell, position, summary),
        "break": is_line_end(cell.text),
    }


def _sign(advantage: float | None) -> str:
    if advantage is None or not advantage or math.isnan(advantage):
        return "none" if advantage is None else "zero"
    return "plus" if advantage > 0 else "minus"


def _strength(advantage: float | None, largest: float) -> str:
    """Opacity of the advantage bar: |A| on a linear scale whose end is the largest of the page."""
    if not advantage or not largest or not math.isfinite(advantage):
        return "1"
    return f"{max(abs(advantage) / largest, _FAINTEST):.2f}"


def _tip(cell: TokenCell, position: int, summary: Summary) -> list[tuple[str, str]]:
    """Every field of a token as (name, value), in the order to show them."""
    lines = [
        ("token", visible(cell.text)),
        ("position", str(position)),
        ("role", cell.role),
        ("author", cell.author),
    ]
    for name, (member, weight) in cell.components.items():
        state = f"trained, weight {number(weight)}" if member else "not trained"
        lines.append((f"{summary.signs[name] if member else '○'} {name}", state))
    if cell.advantage is not None:
        lines.append(("advantage", f"{cell.advantage:+.4g}".replace("-", "−")))
    if cell.logprob is not None:
        shown = f"{cell.logprob:.4f}".replace("-", "−")
        lines.append(("log-prob", shown + _probability(cell.logprob)))
    if cell.reason:
        lines.append(("reason", f"{summary.letters[cell.reason]}: {cell.reason}"))
    return lines


def _probability(logprob: float) -> str:
    # A log-prob above 0 is a fault of the data: shown as it is, without a probability.
    return f"  (p = {number(math.exp(logprob))})" if logprob <= 0 else ""
