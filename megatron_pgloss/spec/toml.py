"""Writing a spec as TOML: tables of strings, numbers, booleans, lists and one level of arrays of tables.

Reading is the standard library's `tomllib`; it has no writer, and a spec needs only this much of the format.
"""

from __future__ import annotations

import json
import re
from typing import Any


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
