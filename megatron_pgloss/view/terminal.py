"""Token rows in the terminal: the same marks as on the page, in columns of one token each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pgloss.spec.words import closed
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
    told,
)
from megatron_pgloss.view.optional import require
from megatron_pgloss.view.palette import MINUS, PLUS, role_colours
from megatron_pgloss.view.text import is_line_end, printable, visible

_HOW = "under each token: signs of its components with weights (○ none, a letter: the reason), advantage, log-prob"


@dataclass(frozen=True, slots=True)
class _Column:
    """One token, or the label of a run of tokens, as lines of (text, style) of one width."""

    lines: Sequence[tuple[str, str]]
    width: int
    glued: bool = False
    """Whether it stays on one line with the column after it."""
    ends: bool = False
    """Whether the column after it starts a new line."""

    def at(self, level: int) -> tuple[str, str]:
        """Line ``level``, padded to the column's width; blank below its last line."""
        text, style = self.lines[level] if level < len(self.lines) else ("", "")
        return require("rich.cells", "the terminal view").set_cell_size(text, self.width), style


@closed
def token_terminal(
    rows: Sequence[TokenRow],
    console: Any = None,
    *,
    title: str | None = None,
    legend: Mapping[str, str] | None = None,
) -> None:
    """Print ``rows`` with rich, a column per token: text, marks and weights, advantage, log-prob.

    A token is filled with its role's colour where a component trains it and only tinted where none
    does; roles and authors are also written out, so that nothing is lost without colour. The
    console decides about colour: none where ``NO_COLOR`` is set or the output is not a terminal.

    Args:
        rows: the sequences, in the order to show them.
        console: a ``rich.console.Console``; None: one on standard output.
        title: heading.
        legend: explanations by name of a role, a component or a reason, as for `token_page`.

    Raises:
        UnsupportedError: rich is not installed.
        DataError: there is no row.
    """
    consoles = require("rich.console", "the terminal view")
    screen = consoles.Console() if console is None else console
    summary = summarize(rows)
    colours = role_colours(summary.roles)
    if title:
        screen.print(_text((title, "bold")))
    _print_legend(screen, summary, colours, legend or {})
    for prompt, episodes in by_prompt(rows).items():
        screen.print()
        screen.print(_text(("prompt ", "dim"), (prompt, "bold")))
        for episode, parts in episodes.items():
            for part in parts:
                _print_row(screen, episode, part, summary, colours)


def _text(*parts: tuple[str, str]) -> Any:
    # Built from parts, never parsed: a token such as "[/bold]" must not be read as markup.
    return require("rich.text", "the terminal view").Text.assemble(*((printable(text), style) for text, style in parts))


def _print_legend(screen: Any, summary: Summary, colours: Mapping[str, str], explain: Mapping[str, str]) -> None:
    table = require("rich.table", "the legend").Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "name", "tokens", "weights", ""):
        table.add_column(heading, justify="right" if heading in ("tokens", "weights") else "left")

    def add(mark: tuple[str, str], name: str, tokens: int, weight: str, style: str = "") -> None:
        texts = (
            (name, style),
            (f"{tokens:,}", style),
            (weight, style),
            (explain.get(name, ""), "dim"),
        )
        table.add_row(_text(mark), *(_text(text) for text in texts))

    for name, total in summary.components.items():
        add((summary.signs[name], ""), name, total.tokens, number(total.weight))
    for role, count in summary.roles.items():
        add(("  ", f"on {colours[role]}"), role, count, "")
    for reason, count in summary.reasons.items():
        add((f"○{summary.letters[reason]}", "dim"), reason, count, "", "dim")
    screen.print(table)
    screen.print(_text((_HOW, "dim")))


def _print_row(screen: Any, episode: str, row: TokenRow, summary: Summary, colours: Mapping[str, str]) -> None:
    facts = [(f"  {name} {value}", "") for name, value in row.header.items()]
    tail = (f"  {row.sample}, {told(row)}", "dim")
    screen.print()
    screen.print(_text(("  episode ", "dim"), (str(episode), "bold"), *facts, tail))
    for line in _wrapped(list(_columns(row, summary, colours)), screen.width - 2):
        for level in range(max(len(column.lines) for column in line)):
            cells = [column.at(level) for column in line]
            if any(text.strip() for text, _ in cells):
                spaced = [piece for cell in cells for piece in ((" ", ""), cell)]
                screen.print(_text((" ", ""), *spaced), no_wrap=True, overflow="crop")


def _columns(row: TokenRow, summary: Summary, colours: Mapping[str, str]) -> Iterator[_Column]:
    for role, author, run in segments(row):
        label = [(printable(role), f"bold {colours[role]}"), (printable(author), "dim")]
        yield _Column(label, _width(label), glued=True)
        for _, cell in run:
            lines = _token_lines(cell, summary, colours[role])
            yield _Column(lines, _width(lines), ends=is_line_end(cell.text))


def _token_lines(cell: TokenCell, summary: Summary, colour: str) -> list[tuple[str, str]]:
    letter = summary.letters[cell.reason] if cell.reason else ""
    marks = [f"{signs}{weight}" for signs, weight in membership(cell, summary)] or ["○"]
    logprob = "" if cell.logprob is None else f"{cell.logprob:.2f}".replace("-", "−")
    return [
        (visible(cell.text), f"black on {colour}" if cell.members else colour),
        (" ".join(marks) + letter, "" if cell.members else "dim"),
        _advantage(cell.advantage),
        (logprob, "dim"),
    ]


def _advantage(value: float | None) -> tuple[str, str]:
    if value is None:
        return "", ""
    return signed(value), PLUS if value > 0 else MINUS if value < 0 else "dim"


def _width(lines: Sequence[tuple[str, str]]) -> int:
    cell_len = require("rich.cells", "the terminal view").cell_len
    return int(max(cell_len(text) for text, _ in lines))


def _wrapped(columns: Sequence[_Column], width: int) -> Iterator[list[_Column]]:
    """Columns packed into lines of at most ``width`` cells; only a single column may be wider."""
    line: list[_Column] = []
    used = 0
    for index, column in enumerate(columns):
        needed = column.width + 1 + (columns[index + 1].width + 1 if column.glued else 0)
        if line and used + needed > width and not line[-1].glued:
            yield line
            line, used = [], 0
        line.append(column)
        used += column.width + 1
        if column.ends:
            yield line
            line, used = [], 0
    if line:
        yield line
