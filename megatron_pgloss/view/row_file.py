"""Token rows in a file of JSON lines: a header, then one row per line. It is plain text, so reading it runs no code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_pgloss.errors import DataError
from megatron_pgloss.spec.words import closed
from megatron_pgloss.view.cells import TokenCell, TokenRow
from megatron_pgloss.view.file import write

FORMAT = "megatron_pgloss token rows"
VERSION = 1
LONGEST = 2**26
"""Most characters of one line: a row of a million tokens has some 5e7."""


@closed
def write_rows(rows: Sequence[TokenRow], path: str | Path) -> Path:
    """Write ``rows`` for ``pgloss inspect`` and return the path."""
    names = list(dict.fromkeys(name for row in rows for cell in row.tokens for name in cell.components))
    lines = [json.dumps({"format": FORMAT, "version": VERSION, "components": names})]
    lines += [json.dumps(_plain(row, names), separators=(",", ":")) for row in rows]
    return write(path, ("\n".join(lines) + "\n").encode("ascii"))


@closed
def read_rows(path: str | Path) -> Iterator[TokenRow]:
    """The rows of a file, one at a time.

    Raises:
        DataError: there is no such file, it has another format or version, or a line is no row.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError("no such file of token rows", got=str(path))
    with file.open(encoding="utf-8", errors="replace") as lines:
        names: list[str] = []
        for number in range(1, 2**40):
            line = lines.readline(LONGEST + 1)
            where = f"{path}, line {number}"
            if not line and number > 1:
                return
            if len(line) > LONGEST:
                raise DataError("a line is too long for a row", expected=f"at most {LONGEST} characters", where=where)
            try:
                found = json.loads(line)
                if number == 1:
                    names = _header(found, where)
                else:
                    yield _row(found, names)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                if isinstance(error, DataError):
                    raise
                fix = "write it with megatron_pgloss.view.write_rows"
                raise DataError(f"this is no token row ({type(error).__name__})", where=where, fix=fix) from error


def _header(found: Any, where: str) -> list[str]:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError("this is no file of token rows", expected=FORMAT, where=where)
    if found.get("version") != VERSION:
        raise DataError("token rows of another version", expected=VERSION, got=found.get("version"), where=where)
    return [_text(name) for name in found["components"]]


def _plain(row: TokenRow, names: Sequence[str]) -> dict[str, Any]:
    return {
        "sample": str(row.sample), "prompt": str(row.prompt), "episode": str(row.episode),
        "header": {str(name): str(value) for name, value in row.header.items()},
        "tokens": [
            [cell.text, cell.role, cell.author,
             [[names.index(name), weight] for name, (member, weight) in cell.components.items() if member],
             [names.index(name) for name, (member, _) in cell.components.items() if not member],
             cell.advantage, cell.logprob, cell.reason]
            for cell in row.tokens
        ],
    }  # fmt: skip


def _row(found: dict[str, Any], names: Sequence[str]) -> TokenRow:
    cells = tuple(_cell(item, names) for item in found["tokens"])
    header = {_text(name): _text(value) for name, value in found["header"].items()}
    return TokenRow(_text(found["sample"]), _text(found["prompt"]), _text(found["episode"]), header, cells)


def _cell(item: Any, names: Sequence[str]) -> TokenCell:
    text, role, author, trained, others, advantage, logprob, reason = item
    components = {names[_place(at, names)]: (True, _number(weight)) for at, weight in trained}
    components |= {names[_place(at, names)]: (False, 0.0) for at in others}
    ordered = {name: components[name] for name in names if name in components}
    numbers = [None if value is None else _number(value) for value in (advantage, logprob)]
    return TokenCell(
        _text(text), _text(role), _text(author), ordered, numbers[0], numbers[1],
        None if reason is None else _text(reason),
    )  # fmt: skip


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return float(value)


def _place(value: Any, names: Sequence[str]) -> int:
    if type(value) is not int or not 0 <= value < len(names):
        raise ValueError("no such component")
    return value
