"""A spec as TOML: tables of strings, numbers, booleans, lists and one level of arrays of tables.

Reading is the standard library's `tomllib`; it has no writer, and a spec needs only this much of the format.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from megatron_pgloss.errors import SpecError

LONGEST = 2**20
"""Most bytes of a file that is read as a spec; a long spec has some thousands."""


def read(source: str | Path) -> tuple[dict[str, Any], str | None]:
    """The data of a TOML file, or of TOML text (anything that holds a line break or ``=``), and the file's name.

    Raises:
        SpecError: the file does not exist, is too long, is not text, or is not TOML.
    """
    text, place = str(source), None
    if not isinstance(source, str) or ("\n" not in text and "=" not in text):
        text, place = _text(Path(source)), f"file {str(source)!r}"
    elif len(text) > LONGEST:
        raise SpecError("TOML text is too long for a spec", expected=f"at most {LONGEST} characters", got=len(text))
    try:
        return tomllib.loads(text), place
    except (ValueError, RecursionError) as error:
        # A ValueError that is none of TOML's own: a number of thousands of digits.
        said = "its tables are nested too deeply" if isinstance(error, RecursionError) else error
        raise SpecError(f"not TOML: {said}", where=place) from error


def _text(path: Path) -> str:
    if not path.is_file():
        raise SpecError("no such spec file", got=str(path))
    with path.open("rb") as file:
        found = file.read(LONGEST + 1)
    if len(found) > LONGEST:
        raise SpecError("the file is too long for a spec", expected=f"at most {LONGEST} bytes", where=str(path))
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"not TOML: {error}", expected="text in UTF-8", where=str(path)) from error


def dumps(data: dict[str, Any]) -> str:
    """TOML text of nested dicts; keys whose value is None are left out (TOML has no null)."""
    lines: list[str] = []
    _table(data, "", lines)
    return "\n".join(lines).strip() + "\n"


def _table(data: dict[str, Any], path: str, lines: list[str]) -> None:
    present = {key: value for key, value in data.items() if value is not None}
    for key, value in present.items():
        if not isinstance(value, dict) and not _is_tables(value):
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in present.items():
        name = f"{path}{_key(key)}"
        if isinstance(value, dict):
            lines += ["", f"[{name}]"]
            _table(value, f"{name}.", lines)
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{name}]]"]
                _table(item, f"{name}.", lines)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for surrogate pairs (so no ASCII form) and DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    return "[" + ", ".join(_value(item) for item in value) + "]"
