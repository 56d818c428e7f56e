"""``explain``: what a preset or a TOML file trains, what every token is divided by, and its names in other libraries.

``python -m megatron_pgloss explain dapo`` · ``explain loss.toml`` · ``explain --compare verl:token-mean trl:dapo``
"""

from __future__ import annotations

import argparse
import ast
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_pgloss import presets
from megatron_pgloss.cli import _elsewhere, _example, _flags, _functions
from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec import LossSpec, PolicyGradient, division, parse
from megatron_pgloss.spec.functions import Functions
from megatron_pgloss.spec.latex import latex
from megatron_pgloss.spec.words import nearest


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "explain",
        help="print a loss as an equation, with its denominators, its inputs and its names in other libraries",
        description="Prints the equation (plain and LaTeX), what each token is divided by, the streams it reads and "
        "who reads them, the paper, and the flags that give the same thing in verl, TRL, slime, NeMo-RL and prime-rl.",
    )
    parser.add_argument("what", nargs="?", metavar="PRESET|FILE.toml", help="a preset's name or a file; none: a list")
    parser.add_argument(
        "--set", action="append", default=[], dest="parts", metavar="NAME=VALUE",
        help="a keyword of the preset, for example --set budget=4096 --set normalizer='mean(token)'; may be repeated",
    )  # fmt: skip
    _functions.add(parser)
    parser.add_argument(
        "--compare", nargs="+", metavar="NAME",
        help="print the example's weights side by side: LIBRARY:MODE (with @CONSTANT where it has one), presets, files "
        "or normaliser paths",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print, and return 0."""
    functions = _functions.offered(args.functions)
    if args.compare:
        given = [] if args.what is None else [(args.what, resolve(args.what, keywords(args.parts), functions)[1])]
        print(compare(args.compare, functions, given))
    elif args.what is None:
        print(listing())
    else:
        name, spec = resolve(args.what, keywords(args.parts), functions)
        print(explain(spec, name))
    return 0


def listing() -> str:
    """All presets with their sources, and the modes that can be compared."""
    rows = [f"  {name:13} {row.source}, {row.equation}" for name, row in presets.PRESETS.items()]
    modes = textwrap.fill(", ".join(_elsewhere.MODES), 110, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(["presets:", *rows, "to compare, beside presets, files and paths:", modes])


def keywords(pairs: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` as a preset's keywords: numbers, booleans, None, lists; anything else is text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise SpecError(f"--set {pair!r}", expected="NAME=VALUE")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def resolve(what: str, parts: dict[str, Any], functions: Functions | None = None) -> tuple[str | None, LossSpec]:
    """A preset's name and spec, or None and the spec of a file.

    Raises:
        SpecError: ``what`` is neither a preset nor a file; the error gives the nearest name.
    """
    if what in presets.PRESETS:
        row = presets.PRESETS[what]
        return what, row.build(**{**row.example, **parts})
    if what.endswith(".toml") or Path(what).is_file():
        if parts:
            raise SpecError("--set changes presets, not files", fix="edit the file")
        return None, LossSpec.from_toml(Path(what), functions=functions)
    raise SpecError(
        f"no preset and no file {what!r}",
        expected=", ".join(presets.PRESETS) + ", or a .toml file",
        fix=nearest(what, list(presets.PRESETS)),
    )


def explain(spec: LossSpec, name: str | None = None) -> str:
    """Everything about a spec, as text; ``name`` is that of the preset it was made from, if any."""
    parts = []
    if name is not None:
        row = presets.PRESETS[name]
        default = row.build(**row.example)
        changed = "" if spec == default else ", changed"
        used = ", ".join(f"{key}={value!r}" for key, value in row.example.items())
        parts.append(f"{name}({used}){changed}: {row.source}, {row.equation}")
    parts.append(_section("equation", str(spec)))
    parts.append(_section("LaTeX", latex(spec)))
    parts.append(_section("who is divided by what", "\n".join(_division(spec))))
    parts.append(_section("reads", "\n".join(reads(spec))))
    parts.append(_section("example", f"{_example.TEXT}\n{example(spec)}"))
    parts += [_section("worth knowing", "\n".join(notes))] if (notes := remarks(spec)) else []
    known = name or _flags.preset_of(spec)
    if known is not None:
        title = "elsewhere" if name is not None else f"elsewhere (this is {known})"
        parts.append(_section(title, "\n".join(_flags.lines(spec, known))))
    return "\n\n".join(parts)


def _section(title: str, text: str) -> str:
    return f"{title}\n{textwrap.indent(text, '  ')}"


def _division(spec: LossSpec) -> list[str]:
    lines = []
    for part in spec.components:
        lines.append(f"{part.name}: {part.normalizer}")
        lines += [f"  {line}" for line in division.words(part)]
    return lines


def reads(spec: LossSpec) -> list[str]:
    """Streams of the batch with their readers, and what the log-prob pass must compute."""
    lines = [f"{stream}: {', '.join(who)}" for stream, who in spec.readers.items()]
    lines += [f"versions: {', '.join(spec.version_readers)}"] if spec.version_readers else []
    lines += ["entropy of the policy, from the log-prob pass"] if spec.needs_entropy else []
    lines += ["exact KL, from the log-prob pass with ref_logits"] if spec.needs_exact_kl else []
    lines += ["a statistics pass over the whole step, before the loss"] if spec.needs_statistics_pass else []
    return lines or ["the policy's log-probs alone"]


def example(spec: LossSpec) -> str:
    """Coefficient times weight of a token, and of all tokens, in both rollouts of the example."""
    short, long = _example.LENGTHS
    lines = [
        f"{'':12}{f'rollout of {short}':>14}{'all its tokens':>16}{f'rollout of {long}':>18}{'all its tokens':>16}"
    ]
    for name, (one, two) in _example.shares(spec).items():
        lines.append(f"{name:12}{one.token:>14.6g}{one.total:>16.6g}{two.token:>18.6g}{two.total:>16.6g}")
    return "\n".join(lines)


def remarks(spec: LossSpec) -> list[str]:
    """Notes on consequences of the spec that are easily overlooked."""
    notes = []
    for part in spec.components:
        axis = part.axis if isinstance(part, PolicyGradient) else None
        level = getattr(axis, "level", "token")
        if level != "token" and not any(unit in part.path.units for unit in ("sequence", "turn", level)):
            notes.append(
                f"{part.name}: one ratio per {level} under {part.normalizer}: legal, but each {level} counts by its "
                f"length; 'mean(sequence) > mean(token)' weighs all alike"
            )
        if isinstance(part, PolicyGradient) and part.count_rejected and spec.gates:
            notes.append(f"{part.name}: what gates drop stays in the denominator (count_rejected=True)")
    if spec.old in ("policy", "record"):
        notes.append("the first update on a batch has a ratio of exactly 1: bounds on it do not act")
    return notes


def compare(names: list[str], functions: Functions | None = None, given: Sequence[tuple[str, LossSpec]] = ()) -> str:
    """The example's policy-gradient weights under every name, side by side.

    Args:
        names: modes, presets, files and paths.
        functions: the functions that a file may name.
        given: pairs (name, spec) that are shown before ``names``.

    Raises:
        SpecError: a name is no mode, preset, file or normaliser path.
    """
    rows = [(name, spec, "") for name, spec in given] + [(name, *_named(name, functions)) for name in names]
    width = max(len("weight of a token"), *(len(name) for name, _, _ in rows)) + 2
    short, long = _example.LENGTHS
    lines = [f"{_example.TEXT}\n"]
    lines.append(f"{'':{width}}{f'rollout of {short}':>16}{f'rollout of {long}':>17}{'  long : short':>14}  normaliser")
    notes, found = [], {}
    for name, spec, note in rows:
        part = spec.components[0]
        one, two = _example.shares(spec)[part.name]
        found[name] = (one.token, two.token)
        pull = f"{two.total / one.total:.4g}" if one.total else "-"
        lines.append(f"{name:{width}}{one.token:>16.6g}{two.token:>17.6g}{pull:>14}  {part.normalizer}")
        notes += [f"{name}: {note}"] if note else []
    lines.append("\n'long : short': how much harder the long rollout pulls as a whole")
    if len(found) > 1:
        same = len({tuple(f"{value:.6g}" for value in pair) for pair in found.values()}) == 1
        lines.append("the same weights" if same else "not the same weights")
    return "\n".join([*lines, *notes])


def _named(name: str, functions: Functions | None) -> tuple[LossSpec, str]:
    """The spec of a mode, preset, file or path, and a remark."""
    mode, _, constant = name.partition("@")
    if mode.lower() in _elsewhere.MODES:
        path, note = _elsewhere.MODES[mode.lower()]
        if ("{}" in path) != bool(constant):
            form = f"{mode}@4096" if "{}" in path else mode
            raise SpecError(f"{name!r}: a constant after @ {'is missing' if not constant else 'is not used'}", fix=form)
        return presets.reinforce(normalizer=path.format(constant)), note
    if ":" in mode:
        raise SpecError(
            f"no mode {name!r}", expected=", ".join(_elsewhere.MODES), fix=nearest(mode, list(_elsewhere.MODES))
        )
    if "(" in name:
        return presets.reinforce(normalizer=str(parse(name))), ""
    return resolve(name, {}, functions)[1], ""
