"""Write the parts of docs/ that are made from the code: tables, and the outputs of a page's examples.

    python tools/make_docs.py            # rewrite the pages
    python tools/make_docs.py --check    # change nothing; exit 1 and name the pages that are out of date

In a page, a table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. The output of a ``python`` block stands
in the ``text`` block after it, under ``<!-- prints -->``. The blocks of a page share one namespace and one working
folder.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import megatron_pgloss as pg
from megatron_pgloss import presets
from megatron_pgloss.cli import _elsewhere, _example, _flags
from megatron_pgloss.metrics import METRICS
from megatron_pgloss.rollouts import STREAMS
from megatron_pgloss.spec import FAMILIES, division, kinds, parse
from megatron_pgloss.spec.divisors import DIVISORS

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BLOCK = re.compile(
    r"<!--- invisible-code-block: python\n(?P<hidden>.*?)-->"
    r"|```python\n(?P<code>.*?)```(?P<prints>\n\n<!-- prints -->\n```text\n(?:(?!```).)*```)?",
    re.DOTALL,
)


def rows(header: str, cells: list[tuple[str, ...]]) -> str:
    """A Markdown table; ``header`` has its columns between bars."""
    columns = [name.strip() for name in header.split("|")]
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", r"\|") for cell in row] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def metrics() -> str:
    """All metrics, with their denominators and their values on the first step."""
    cells = [
        (f"`{row.suffix}`", row.kind, row.meaning, row.divided_by or "-", row.first_step) for row in METRICS
    ]  # fmt: skip
    return rows("metric | kind | what it is | divided by | first on-policy step", cells)


def preset_table() -> str:
    """One line per preset, with its source."""
    cells = []
    for name, preset in presets.PRESETS.items():
        spec = _build(name)
        reads = ", ".join(spec.readers) or "-"
        call = f"`{name}({', '.join(preset.example)})`"
        parts = ", ".join(f"{part.coef:g} {part.name}" for part in spec.components)
        source = f"{preset.source}, {preset.equation}"
        cells.append((call, parts, f"`{spec.components[0].normalizer}`", f"`{spec.old}`", reads, source))
    return rows("preset | components | normaliser of rl | old | streams it reads | source", cells)


def equations() -> str:
    """Every preset as it prints itself."""
    return "".join(
        f"`{name}({', '.join(f'{key}={value!r}' for key, value in preset.example.items())})`\n\n```text\n{_build(name)}"
        "\n```\n\n"
        for name, preset in presets.PRESETS.items()
    )


def keywords() -> str:
    """The keywords of its own that each preset takes, with their defaults."""
    cells = []
    for name, preset in presets.PRESETS.items():
        found = inspect.signature(preset.build).parameters.values()
        own = [item for item in found if item.kind is not item.VAR_KEYWORD]
        shown = [item.name if item.default is item.empty else f"{item.name}={item.default!r}" for item in own]
        first = " ".join((inspect.getdoc(preset.build) or "").split("\n\n")[0].split())
        cells.append((f"`{name}`", ", ".join(f"`{text}`" for text in shown) or "-", first.replace("``", "`")))
    return rows("preset | its own keywords | what it is", cells)


def elsewhere() -> str:
    """The flags that give each preset in other libraries, with the known differences."""
    cells = []
    for name, known in _elsewhere.ELSEWHERE.items():
        for library, (template, differs) in known.items():
            flags = _flags.flags(_build(name), name, library, template)
            cells.append((f"`{name}`", library, f"`{flags}`", differs or "-"))
    always = [(library, text) for library, text in _elsewhere.ALWAYS.items()]
    return rows("preset | library | flags | differs", cells) + "\n" + rows("library | always", always)


def normalizers() -> str:
    """The usual normalisers: their weight, the weights of the example's two rollouts, and their names elsewhere."""
    cells = []
    for path, said in _elsewhere.PATHS.items():
        ((short, long),) = _example.shares(presets.reinforce(normalizer=path)).values()
        same = [mode.split(":") for mode, (text, _) in _elsewhere.MODES.items() if text.replace("{}", "4096") == path]
        known = [said] if said else []
        known += [f"{library} `{mode}`" for library, mode in same]
        numbers = (f"{short.token:.6g}", f"{long.token:.6g}")
        cells.append((f"`{path}`", division.weight(parse(path)), *numbers, "; ".join(known)))
    return rows("written | a token weighs | of the 100 | of the 1,000 | known as", cells)


def terminations() -> str:
    """The effects of each termination of a rollout."""
    then = {"zero": "0", "value": "V(last)", "leaves": "nothing: it leaves"}
    cells = [
        (f"`{state.value}`", effect.masks, "yes" if effect.votes else "never", then[effect.bootstrap])
        for state, effect in pg.advantages.EFFECTS.items()
    ]
    return rows("state | tokens that leave | votes in its group | GAE goes on with", cells)


def advantages() -> str:
    """The functions of `pg.advantages`."""
    cells = []
    for name in pg.advantages.__all__:
        value = getattr(pg.advantages, name)
        if inspect.isfunction(value):
            first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
            cells.append((f"`{name}`", first.replace("``", "`")))
    return rows("function | what it does", cells)


def streams() -> str:
    """The table of token streams."""
    kinds = {"float": "float32/64", "log-prob": "float32/64, at most 0", "whole": "int64", "ids": "int64, k a token",
             "flag": "bool"}  # fmt: skip
    shapes = {"token": "[B, L]", "row": "a number, [B] or [B, L]"}
    cells = [
        (
            f"`{row.argument}`", f"`{row.name}`", kinds[row.dtype],
            "[B, L, k]" if row.dtype == "ids" else shapes[row.shape], f"{row.fill!r}", row.read_by,
            "may be absent" if row.optional else "always there", row.help,
        )
        for row in STREAMS
    ]  # fmt: skip
    columns = (
        "keyword | name | type | shape | at a row's end and padding | read by | in a batch | what it is, of a token"
    )
    return rows(columns, cells)


def names() -> str:
    """The public names of `megatron_pgloss`, with the first sentence of each docstring."""
    cells = []
    for name in pg.__all__:
        if name.startswith("_"):
            continue
        text = inspect.getdoc(getattr(pg, name)) or ""
        first = " ".join(text.split("\n\n")[0].split())
        cells.append((f"`{name}`", first))
    return rows("name | what it is", cells)


def _what(kind: type) -> str:
    """The docstring of a kind, without its arguments."""
    return " ".join((inspect.getdoc(kind) or "").split("Args (positional")[0].split()).replace("``", "`")


def _terms(family: str) -> str:
    """Every kind of a family of terms: its class, its ``kind``, an example as it prints itself, its docstring."""
    cells = []
    for kind in kinds(FAMILIES[family]):
        part = kind(**kind.example)
        text = ", ".join((part.formula(), *part.definitions()))
        cells.append((f"`{kind.__name__}`", f"`{part.kind}`", f"`{text}`", _what(kind)))
    return rows("part | kind | prints as | formula and source", cells)


def components() -> str:
    """All components."""
    return _terms("components")


def surrogates() -> str:
    """All surrogates."""
    return _terms("surrogates")


def gates() -> str:
    """All gates."""
    return _terms("gates")


def _rules(family: str) -> str:
    """Every kind of a family of rules, with where it acts by default."""
    cells = []
    for kind in kinds(FAMILIES[family]):
        rule = kind(**kind.example)
        given = kind.example.get("on") is not None
        homes = {"actions": "all over actions"}
        scope = "as `on=` says" if given else homes.get(rule.home, rule.home)
        cells.append((f"`{kind.__name__}`", f"`{rule.kind}`", f"`{rule.formula()}`", _what(kind), scope))
    return rows("rule | kind | prints as | what it does | acts on", cells)


def masks() -> str:
    """All masks."""
    return _rules("masks")


def corrections() -> str:
    """All corrections."""
    return _rules("corrections")


def divisors() -> str:
    """All forms of a divisor."""
    return rows("divisor | divides by", [form for kind in DIVISORS for form in kind.forms])


def _build(name: str):
    return presets.get(name, **presets.PRESETS[name].example)


def supported() -> str:
    """Modes of Megatron-Core that work, each with the test that shows it."""
    from megatron_pgloss.megatron.modes import SUPPORTED

    return rows("supported | shown by", [(mode, f"`{test}`") for mode, test in SUPPORTED])


def refused() -> str:
    """Modes that raise at start-up."""
    from megatron_pgloss.megatron.modes import REFUSED

    return rows("refused | why | instead", [(row.mode, row.reason, row.fix) for row in REFUSED])


def faults() -> str:
    """The faults that ``verify --self-test`` puts in."""
    from megatron_pgloss.verify.faults import FAULTS

    cells = [
        (one.name, one.imitates, f"`{one.target.removeprefix('megatron_pgloss.')}`", one.shows.words) for one in FAULTS
    ]
    return rows("fault | what it imitates | function patched | shows where", cells)


def kill_matrix() -> str:
    """What tools/kill_matrix.py found when it was last run."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import kill_matrix

    return kill_matrix.markdown(json.loads(kill_matrix.JSON.read_text(encoding="utf-8")))


TABLES: dict[str, Callable[[], str]] = {
    "faults": faults,
    "keywords": keywords,
    "kill_matrix": kill_matrix,
    "elsewhere": elsewhere,
    "normalizers": normalizers,
    "terminations": terminations,
    "advantages": advantages,
    "components": components,
    "streams": streams,
    "surrogates": surrogates,
    "gates": gates,
    "masks": masks,
    "corrections": corrections,
    "divisors": divisors,
    "metrics": metrics,
    "names": names,
    "presets": preset_table,
    "equations": equations,
    "supported": supported,
    "refused": refused,
}


def render(page: Path) -> str:
    """The page's text with its tables and outputs as they are now."""
    text = TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[4]}", page.read_text(encoding="utf-8"))
    namespace: dict[str, object] = {"__name__": "page"}

    def run(found: re.Match[str]) -> str:
        code = found["hidden"] or found["code"]
        line = text.count("\n", 0, found.start()) + 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        if found["prints"] is None:
            if printed.getvalue():
                raise SystemExit(f"{page}:{line}: the block prints, but no `<!-- prints -->` block follows")
            return found[0]
        return f"```python\n{code}```\n\n<!-- prints -->\n```text\n{printed.getvalue().rstrip()}\n```"

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return BLOCK.sub(run, text)


def main(arguments: list[str]) -> int:
    """Rewrite or check all pages."""
    check = "--check" in arguments
    late = []
    for page in sorted(DOCS.glob("**/*.md")):
        text = render(page)
        if text != page.read_text(encoding="utf-8"):
            late.append(page)
            if not check:
                page.write_text(text, encoding="utf-8")
    what = "out of date, run python tools/make_docs.py" if check else "written"
    for page in late:
        print(f"{page.relative_to(DOCS.parent)}: {what}")
    return int(check and bool(late))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
