"""Colours that stay apart in the common kinds of colour blindness (hues of Okabe and Ito, 2008).

A role is never shown by colour alone: each run of tokens is labelled with its role and author in
words.
"""

from __future__ import annotations

from collections.abc import Iterable

PLUS = "#0072B2"
"""Colour of a positive advantage."""
MINUS = "#D55E00"
"""Colour of a negative advantage."""

_KNOWN = {
    "system": "#8A8F98",
    "user": "#56B4E9",
    "assistant": "#009E73",
    "tool": "#E69F00",
    "environment": "#CC79A7",
}
_SPARE = ("#B8A800", "#7A68B3", "#0072B2", "#D55E00", "#8C6D4F")
CURVES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def role_colours(roles: Iterable[str]) -> dict[str, str]:
    """A colour per role: the usual roles keep theirs, others take the spare ones in turn."""
    out: dict[str, str] = {}
    for role in roles:
        spare = [colour for colour in _SPARE if colour not in out.values()] or list(_SPARE)
        out[role] = _KNOWN.get(role, spare[0])
    return out
