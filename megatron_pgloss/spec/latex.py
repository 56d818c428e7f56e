"""From the plain text of a formula to LaTeX: words by a table, fractions, powers and subscripts.

The table holds what formulas share; a kind brings the symbols that are its own. A word that is in neither is set as
text, so that any formula comes out readable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_pgloss.spec.letters import BASES, SHORT_UNIT
from megatron_pgloss.spec.levels import LEVEL
from megatron_pgloss.spec.normalizer import Path

if TYPE_CHECKING:
    from megatron_pgloss.spec.component import Component
    from megatron_pgloss.spec.kinds import Kind
    from megatron_pgloss.spec.loss_spec import LossSpec

_WORDS = {
    "pi": r"\pi_\theta", "old": r"\pi_{\mathrm{old}}", "mu": r"\mu", "ref": r"\pi_{\mathrm{ref}}",
    "pi_v": r"\pi_{\theta,v}", "ref_v": r"\pi_{\mathrm{ref},v}", "V_old": r"V_{\mathrm{old}}", "d_k": "d_k",
    "log": r"\log", "exp": r"\exp", "min": r"\min", "max": r"\max", "H": r"\mathcal{H}", "inf": r"\infty",
    "sg": r"\operatorname{sg}", "clip": r"\operatorname{clip}", "sigmoid": r"\sigma", "tau": r"\tau",
    "mean": r"\operatorname{mean}", "sum": r"\sum", "sum_v": r"\sum_v", "prod": r"\prod",
    "sum_": r"\sum_", "min_": r"\min_",
}  # fmt: skip
_OVER = {"mean": r"\operatorname{mean}", "sum": r"\sum", "prod": r"\prod", "geomean": r"\operatorname{gm}"}
_WORDS |= {
    f"{how}_{unit}": rf"{sign}_{{\mathrm{{{unit}}}}}" for how, sign in _OVER.items() for unit in SHORT_UNIT.values()
}
_SIGNS = {"<=": r"\le ", ">=": r"\ge ", "{": "{", "}": "}", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$"}
_LETTERS = set("AVRrdkmfwctg")
_TOKEN = re.compile(r"[A-Za-z][\w.:]*|\d+(?:\.\d+)?(?:e-?\d+)?|<=|>=|\s+|.")
_FRACTION = re.compile(r"(\([^()]*\)|sg\(\w+\)|[\w.]+(?:\^2)?)/(\([^()]*\)|sg\(\w+\)|[\w.]+)")


def translate(text: str, symbols: Mapping[str, str] = MappingProxyType({})) -> str:
    """A formula in LaTeX (math mode).

    Args:
        symbols: LaTeX of words beside those that all formulas share.
    """
    match = _FRACTION.search(text)
    if match and not match[2].startswith("(pi"):
        top, bottom = (part[1:-1] if part.startswith("(") else part for part in match.groups())
        fraction = rf"\frac{{{translate(top, symbols)}}}{{{translate(bottom, symbols)}}}"
        return translate(text[: match.start()], symbols) + fraction + translate(text[match.end() :], symbols)
    return _power(_words(text, {**_WORDS, **symbols}))


def _words(text: str, symbols: Mapping[str, str]) -> str:
    out: list[str] = []
    words: list[str] = []

    def flush() -> None:
        if words:
            out.append(rf"\;\text{{{' '.join(words)}}}\;")
            words.clear()

    for token in _TOKEN.findall(text):
        if token.isspace():
            continue
        if token[0].isalpha() and token not in symbols and token not in _LETTERS:
            words.append(token.replace("_", r"\_"))
            continue
        flush()
        known = symbols.get(token, _SIGNS.get(token, token))
        # A command and a letter after it, or two words, must not run together.
        out.append(known + (" " if token[0].isalnum() else "") if token != "," else r",\; ")
    flush()
    return re.sub(r" (?=[),\]}^])", "", "".join(out)).strip()


def _power(text: str) -> str:
    text = re.sub(r"\^(-?[\d.]+)", r"^{\1}", text)
    at = text.find("^(")
    if at < 0:
        return text
    depth, end = 0, at + 1
    for end in range(at + 1, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if not depth:
            break
    return _power(f"{text[:at]}^{{{text[at + 2 : end]}}}{text[end + 1 :]}")


def normalizer(path: Path) -> str:
    """The sums and divisors of a path."""
    out, parent = [], None
    for step in path.steps:
        index, unit = LEVEL[step.unit].letter, step.unit
        count = rf"N_{{\mathrm{{{unit}}}}}" if parent is None else rf"n^{{\mathrm{{{unit}}}}}_{{{parent}}}"
        over = "" if step.divisor is None else rf"\frac{{1}}{{{step.divisor.latex(count, unit)}}}"
        inside = index if parent is None else rf"{index}\in {parent}"
        out.append(rf"{over}\sum_{{{inside}}}")
        parent = index
    return " ".join(out)


def latex(spec: LossSpec) -> str:
    """The spec as an ``aligned`` block, with one line per component and one per rule."""
    base = BASES[spec.old]
    lines = [r"\mathcal{L} &= " + " + ".join(rf"{part.coef:g}\,{_name(part)}" for part in spec.components)]
    for part in spec.components:
        symbols = {word: sign for piece in part.parts for word, sign in piece.symbols.items()}
        term = translate(part.formula(base), symbols)
        line = rf"{_name(part)} &= {normalizer(part.path)} \Bigl[ {term} \Bigr]"
        lines.append(line + "".join(rf",\quad {translate(text, symbols)}" for text in part.definitions(base)))
    lines += [rf"&\text{{mask: {_escaped(mask.reason)}}}" for mask in spec.masks]
    for name, rules in (("correction", spec.corrections), ("gate", spec.gates)):
        lines += [rf"&\text{{{name}:}}\ {of_rule(rule, base)}" for rule in rules]
    return "\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}"


def of_rule(rule: Kind, base: str) -> str:
    """The formula of a correction or gate in LaTeX."""
    return translate(rule.formula(base), rule.symbols)


def _name(part: Component) -> str:
    return rf"\mathcal{{L}}_{{\mathrm{{{_escaped(part.name)}}}}}"


def _escaped(text: str) -> str:
    return text.replace("_", r"\_")
