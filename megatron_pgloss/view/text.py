"""Text made visible: white space, control characters and halves of characters get a glyph."""

from __future__ import annotations

import unicodedata

_GLYPHS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡", "": "∅"}
# Control, format (zero width, bidirectional overrides), surrogate, private, unassigned, line and
# paragraph separators and odd spaces: invisible, or able to disturb the text around them.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def _glyph(character: str) -> str | None:
    if character in _GLYPHS:
        return _GLYPHS[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    return f"u+{ord(character):04x}" if unicodedata.category(character) in _HIDDEN else None


def pieces(text: str) -> list[tuple[str, bool]]:
    """``text`` cut into (shown, is a stand-in) pieces; an empty text is one stand-in."""
    if not text:
        return [(_GLYPHS[""], True)]
    out: list[tuple[str, bool]] = []
    for character in text:
        glyph = _glyph(character)
        shown, stands_in = (character, False) if glyph is None else (glyph, True)
        if out and out[-1][1] == stands_in:
            out[-1] = (out[-1][0] + shown, stands_in)
        else:
            out.append((shown, stands_in))
    return out


def printable(text: object) -> str:
    """``str(text)`` on one line, safe to print: as `visible`, but spaces stay spaces.

    Names and headers come from data as tokens do: an escape sequence in them must not reach the
    terminal, and a line break must not reach a tooltip.
    """
    line = str(text)
    if line.isprintable():  # no category of _HIDDEN occurs, nor DEL
        return line
    return "".join(shown if shown == " " else _glyph(shown) or shown for shown in line)


def visible(text: str) -> str:
    """``text`` with every invisible character replaced by its glyph."""
    return "".join(shown for shown, _ in pieces(text))


def is_line_end(text: str) -> bool:
    """Whether what follows should start a new line."""
    return text.endswith("\n")
