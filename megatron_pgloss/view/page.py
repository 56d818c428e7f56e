"""Token rows as one self-contained HTML page: no network, no library, readable without scripts.

A page of 100,000 tokens has to open at once. A token is its text in an element with a class; the facts that it shares
with other tokens (marks, weights, reason, bar) stand once in a table of kinds, from which style rules are made and
tooltips are filled. Prompts with nothing to learn are closed, and the browser does not lay out what is closed.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_pgloss.spec.words import closed
from megatron_pgloss.view.cells import (
    Summary,
    TokenCell,
    TokenRow,
    by_prompt,
    live_first,
    membership,
    number,
    segments,
    signed,
    summarize,
    told,
)
from megatron_pgloss.view.file import write
from megatron_pgloss.view.optional import require
from megatron_pgloss.view.palette import MINUS, PLUS, role_colours
from megatron_pgloss.view.text import is_line_end, pieces, printable

_TEMPLATES = Path(__file__).parent
# The least opacity of an advantage's bar: a fainter colour would not tell the sign.
_FAINTEST = 0.2
_OPEN = 4_000
"""How many tokens of live prompts are open when the page opens."""


@closed
def token_page(
    rows: Sequence[TokenRow],
    path: str | Path,
    *,
    title: str,
    subtitle: str | None = None,
    legend: Mapping[str, str] | None = None,
    limit: int = 500_000,
) -> Path:
    """Write ``rows`` as one static HTML page and return its path.

    Each token is coloured by its role and labelled, per unbroken run, with role and author. Under
    it stand the signs of the components that train it with their weights (an open circle where none
    does), the letter of the reason that keeps it out, and its advantage, which also colours the bar
    below it. Pointing at a token shows every field. Rows are grouped by prompt, then by episode;
    prompts with a token whose advantage is not 0 come first, the others are marked and closed. The
    page searches, filters and jumps. A file or link at ``path`` is replaced.

    Args:
        rows: the sequences.
        path: the file to write; its folder is made where it is missing.
        title: heading of the page.
        subtitle: one line below it.
        legend: explanations by name of a role, a component or a reason, shown beside it in the
            legend; names that do not occur in ``rows`` are left out.
        limit: most tokens on the page; further rows are left out, and the page says how many.

    Raises:
        UnsupportedError: jinja2 is not installed.
        DataError: there is no row.
    """
    jinja2 = require("jinja2", "the HTML page")
    summary = summarize(rows)
    shown = _within(live_first(rows), limit)
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
    kinds = _Kinds(summary)
    prompts = [_prompt(name, episodes, kinds, classes) for name, episodes in by_prompt(shown).items()]
    opened = 0
    for prompt in prompts:
        prompt["open"] = prompt["live"] and (opened == 0 or opened + prompt["tokens"] <= _OPEN)
        opened += prompt["tokens"] if prompt["open"] else 0
    if prompts and not opened:
        prompts[0]["open"] = True
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
        prompts=[{**prompt, "rows": jinja2.utils.markupsafe.Markup(prompt["rows"])} for prompt in prompts],
        silent=sum(not prompt["live"] for prompt in prompts),
        left_out=len(rows) - len(shown),
        rules=jinja2.utils.markupsafe.Markup(kinds.rules()),
        kinds=jinja2.utils.markupsafe.Markup(kinds.table()),
    )
    return write(path, page.encode("utf-8"))


def _within(rows: Sequence[TokenRow], limit: int) -> list[TokenRow]:
    """As many of the first rows as have at most ``limit`` tokens together, but at least one row."""
    total = 0
    found: list[TokenRow] = []
    for row in rows:
        total += len(row.tokens)
        if found and total > limit:
            break
        found.append(row)
    return found


def _prompt(
    name: str, episodes: Mapping[str, Sequence[TokenRow]], kinds: _Kinds, classes: Mapping[str, str]
) -> dict[str, Any]:
    rows = [row for several in episodes.values() for row in several]
    return {
        "name": name,
        "episodes": len(episodes),
        "tokens": sum(len(row.tokens) for row in rows),
        "live": any(row.live for row in rows),
        "silent": any(row.trained for row in rows) and not any(row.live for row in rows),
        "rows": "".join(
            piece
            for episode, several in episodes.items()
            for place, row in enumerate(several)
            for piece in _row(row, episode, (place, len(several)), kinds, classes)
        ),
    }


def _escaped(text: object) -> str:
    return html.escape(printable(text))


def _row(
    row: TokenRow, episode: str, place: tuple[int, int], kinds: _Kinds, classes: Mapping[str, str]
) -> Iterator[str]:
    """The markup of one row, in pieces."""
    which = f'<span class="quiet"> · sequence {place[0] + 1} of {place[1]}</span>' if place[1] > 1 else ""
    facts = "".join(
        f'<span class="fact"><em>{_escaped(name)}</em> {_escaped(value)}</span> ' for name, value in row.header.items()
    )
    yield f'<article class="{"live" if row.live else "still"}"><div class="head"><h3>episode {_escaped(episode)}{which}'
    yield f'</h3> {facts}<span class="quiet end">{_escaped(row.sample)} · {told(row)}</span></div>\n<div class="row">'
    for role, author, run in segments(row):
        yield f'<span class="run {classes[role]}"><span class="who"><b>{_escaped(role)}</b>'
        yield f"<small>{_escaped(author)}</small></span>"
        for _, cell in run:
            yield _token(cell, kinds)
        yield "</span>"
    yield "</div></article>\n"


def _token(cell: TokenCell, kinds: _Kinds) -> str:
    shown = ((html.escape(part), stands_in) for part, stands_in in pieces(cell.text))
    text = "".join(f"<i>{part}</i>" if stands_in else part for part, stands_in in shown)
    more = "" if cell.advantage is None else f' data-a="{signed(cell.advantage)}"'
    if cell.advantage is not None and signed(cell.advantage) != (exact := _advantage(cell.advantage)):
        more += f' data-x="{exact}"'
    if cell.logprob is not None:
        more += f' data-l="{cell.logprob:.4f}"'
    return f'<span class="t k{kinds.of(cell)}"{more}><b>{text}</b></span>{"<br>" if is_line_end(cell.text) else ""}'


class _Kinds:
    """The kinds of tokens, numbered by first appearance. Tokens of a kind have the same role and author, components
    with weights, reason, and sign and strength of the bar.
    """

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self.numbers: dict[str, int] = {}
        self.cells: list[TokenCell] = []

    def of(self, cell: TokenCell) -> int:
        """The number of the token's kind."""
        # Kinds are compared by their text, because NaN is not equal to itself.
        text = repr((cell.role, cell.author, tuple(cell.components.items()), cell.reason, self._bar(cell)))
        if text not in self.numbers:
            self.numbers[text] = len(self.cells)
            self.cells.append(cell)
        return self.numbers[text]

    def _bar(self, cell: TokenCell) -> tuple[str, str]:
        """The sign of the advantage, and the bar's opacity: |A| over the largest of the page, to one decimal."""
        advantage, largest = cell.advantage, self.summary.largest_advantage
        if advantage is None or math.isnan(advantage):
            return "none" if advantage is None else "zero", "1"
        if not advantage:
            return "zero", "1"
        share = abs(advantage) / largest if largest and math.isfinite(advantage) else 1.0
        return "plus" if advantage > 0 else "minus", f"{max(round(share, 1), _FAINTEST):.1f}"

    def rules(self) -> str:
        """A style rule for each kind, which writes the marks under its tokens: signs and numbers, no text of the
        data.
        """
        found = []
        for place, cell in enumerate(self.cells):
            letter = self.summary.letters[cell.reason] if cell.reason else ""
            marks = [f"{signs} {weight}" for signs, weight in membership(cell, self.summary)] or ["○"]
            marks[-1] += f" {letter}" if letter else ""
            under = '"' + "\\a ".join(marks) + '"'
            if cell.advantage is not None:
                under += ' "\\a " attr(data-a)'
            sign, strength = self._bar(cell)
            fill = "--in:var(--fill);--text:var(--ink);" if cell.members else ""
            bar = f"--bar:var(--{sign});--strength:{strength}"
            found.append(f".k{place}{{{fill}{bar}}}.k{place}::after{{content:{under}}}")
        return "\n".join(found)

    def table(self) -> str:
        """The facts of each kind for the tooltips, as JSON in which no text of the data can end the script element."""
        text = json.dumps([self._facts(cell) for cell in self.cells], separators=(",", ":"))
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

    def _facts(self, cell: TokenCell) -> list[tuple[str, str]]:
        lines = [("role", printable(cell.role)), ("author", printable(cell.author))]
        for name, (member, weight) in cell.components.items():
            state = f"trained, weight {number(weight)}" if member else "not trained"
            lines.append((f"{self.summary.signs[name] if member else '○'} {printable(name)}", state))
        if cell.reason:
            lines.append(("reason", f"{self.summary.letters[cell.reason]}: {printable(cell.reason)}"))
        return lines


def _advantage(value: float) -> str:
    return f"{value:+.4g}".replace("-", "−")
