"""The changes of CONTRIBUTING.md's "How to add ...", as a stranger would make them, for ``test_recipes.py``.

A `Change` is text that is put in front of an anchor of a file. A `Forgotten` piece is text taken out of the whole
change again, the test that must go red, and what it must say.
"""

from __future__ import annotations

from support.changes import PACKAGE as P
from support.changes import Change, Forgotten

KINDS, DOCS, ORACLE = "tests/test_kinds.py", "tests/test_docs_tables.py", "tests/test_objectives_oracle.py"


def _kind(name: str, family: str, file: str, **cuts: tuple[str, str, str, str]) -> tuple[Forgotten, ...]:
    """Forgotten pieces of the class of a kind: (what is cut, what stays instead, test of `KINDS`, what it says)."""
    return tuple(
        Forgotten(piece=piece.replace("_", " "), file=file, cut=cut, put=put, says=says,
                  test=f"{KINDS}::{test}[{family} {name}]")
        for piece, (cut, put, test, says) in cuts.items()
    )  # fmt: skip


_MOVING, _ARITHMETIC = f"{P}/spec/surrogates/moving.py", f"{P}/objective/surrogates.py"
_SOFT_ORACLE, _MASKS = f"{P}/verify/oracle/surrogates.py", f"{P}/spec/masks.py"
_SETS, _DIVISORS, _AVERAGE = (f"{P}/verify/oracle/sets.py", f"{P}/spec/divisors.py", f"{P}/verify/oracle/average.py")
_METRICS, _STREAMS = f"{P}/metrics/metric_table.py", f"{P}/rollouts/streams.py"
_MODES, _API = f"{P}/megatron/modes.py", "tests/test_api.py"
_FORMULA = '''    def formula(self, base: str = "old") -> str:
        """In one line."""
'''
_LAM = '    symbols: ClassVar[Mapping[str, str]] = {"lam": r"\\lambda"}\n'
_EXAMPLE = '    example: ClassVar[Mapping[str, Any]] = {"lam": 0.5}\n'
_SOFT_DOC = '    """The ratio under a logarithm: ``l = -A log(1 + lam r)`` (made for a test)."""\n\n'
_SOFT_FORMULA = _FORMULA + '        return "-A log(1 + lam r)"\n\n    def definitions'
_SOFT_LETTERS = '''(self, base: str = "old") -> tuple[str, ...]:
        """lam."""
        return (f"lam = {self.lam:g}",)


'''
_SOFT = (
    "class Softened(SurrogateKind):\n" + _SOFT_DOC + '    kind: Literal["softened"] = "softened"\n    lam: Positive\n'
    + _LAM + _EXAMPLE + "\n" + _SOFT_FORMULA + _SOFT_LETTERS
)  # fmt: skip
_SOFT_TERM = '''def softened(x: Streams, part: Any) -> TokenTerm:
    """``-A log(1 + lam r)``."""
    return TokenTerm(-x.advantage * (part.lam * x.ratio).log1p(), held_N=_held(x, x.log_ratio))


'''
_SOFT_JUDGED = '''def _softened(surrogate: Surrogate, scene: Scene) -> Tensor:
    """-A log(1 + lam r)."""
    return -scene.constant("advantages") * (1 + float(surrogate["lam"]) * ratio(scene)).log()


'''
_OF_EVERY_RATIO = f"{ORACLE}::test_every_surrogate_of_every_ratio[Softened-token]"

SURROGATE = Change(
    goal=4,
    edits=(
        (_MOVING, "class Clip(", _SOFT),
        (_MOVING, '"Unclipped"]', '"Softened", '),
        (_MOVING, "from typing import Any, ClassVar", "from collections.abc import Mapping\n"),
        (_ARITHMETIC, "def clip(", _SOFT_TERM),
        (_ARITHMETIC, '    "clip": clip,', '    "softened": softened,\n'),
        (_SOFT_ORACLE, "def _clip(", _SOFT_JUDGED),
        (_SOFT_ORACLE, '    "clip": _clip,', '    "softened": _softened,\n'),
        (_API, "Unclipped UnsupportedError", "Softened "),
    ),
    pages=("objectives.md",),
    forgotten=(
        *_kind(
            "Softened", "surrogates", _MOVING,
            docstring=(_SOFT_DOC, "", "test_a_kind_says_what_it_is", "Softened has no docstring"),
            example=(_EXAMPLE, "", "test_a_kind_says_what_it_is", "Softened has no example"),
            formula=(_SOFT_FORMULA, "    def definitions", "test_a_kind_says_what_it_is", "Softened has no formula"),
            LaTeX_of_a_letter=(_LAM, "", "test_a_kind_has_latex", "Softened has no LaTeX for ['lam']: give it symbols"),
            name_in_all=('"Softened", ', "", "test_a_kind_has_a_place_in_the_package", "Softened is not in __all__ of"),
        ),
        *_kind(
            "Softened", "surrogates", _ARITHMETIC,
            row_of_arithmetic=('    "softened": softened,\n', "", "test_a_kind_has_arithmetic",
                               "Softened has no arithmetic in objective/surrogates.py: SURROGATES"),
        ),
        *_kind(
            "Softened", "surrogates", _SOFT_ORACLE,
            oracle=('    "softened": _softened,\n', "", "test_the_oracle_knows_a_kind",
                    "Softened has no entry in the oracle, verify/oracle/surrogates.py"),
        ),
        Forgotten(piece="held_N", file=_ARITHMETIC, cut="log1p(), held_N=_held(x, x.log_ratio))", put="log1p())",
                  test=f"{ORACLE}::test_every_surrogate_says_what_the_bound_took[Softened]",
                  says="Softened: held_N is not where the bound took the gradient"),
        Forgotten(piece="right formula", file=_ARITHMETIC, cut="(part.lam * x.ratio).log1p()", put="x.ratio.log1p()",
                  test=_OF_EVERY_RATIO, says="AssertionError"),
        Forgotten(piece="public name of the test", file=_API, cut="Softened ",
                  test=f"{_API}::test_public_api_is_frozen", says="Softened"),
    ),
)  # fmt: skip

_FORMS = '    forms: ClassVar = (("log", "the logarithm of one more than the count"),)\n'
_EXAMPLES = '    examples: ClassVar = ("log",)\n'
_READ = '''    @classmethod
    def read(cls, word: str) -> Logarithm | None:
        """``log``."""
        return cls() if word == "log" else None

'''
_STR = """    def __str__(self) -> str:
        return "log"

"""
_OF = '''    def of(self, count: Any) -> Any:
        """``log(1 + count)``."""
        return math.log1p(count) if isinstance(count, float) else count.log1p()

'''
_PLAIN = '''    def plain(self, count: str) -> str:
        """As in ``log(1 + n)``."""
        return f"log(1 + {count})"

'''
_TEX = '''    def latex(self, count: str, unit: str) -> str:
        """As in the logarithm of 1 + n."""
        return rf"\\log(1 + {count})"


'''
_DIVIDES = f"{KINDS}::test_a_divisor_reads_prints_and_divides[log]"


def _divisor(piece: str, cut: str, says: str, test: str = _DIVIDES) -> Forgotten:
    return Forgotten(piece=piece, file=_DIVISORS, cut=cut, test=test, says=says)


DIVISOR = Change(
    goal=1,
    edits=(
        (_DIVISORS, "@dataclass(frozen=True)\nclass Constant(",
         '@dataclass(frozen=True)\nclass Logarithm(Divisor):\n    """The logarithm of one more than the count."""\n\n'
         + _FORMS + _EXAMPLES + "\n" + _READ + _STR + _OF + _PLAIN + _TEX),
        (_AVERAGE, '    if divisor == "avg":', '    if divisor == "log":\n        return Level(unit, log=True)\n'),
        (_AVERAGE, "    batch_mean: bool = False", "    log: bool = False\n"),
        (_AVERAGE, "        if level.batch_mean:",
         "        if level.log:\n            return total / math.log1p(own)\n"),
        (_AVERAGE, "import re\n", "import math\n"),
    ),
    pages=("normalization.md",),
    forgotten=(
        _divisor("forms", _FORMS, "Logarithm has no forms", f"{KINDS}::test_every_kind_of_divisor_is_shown"),
        _divisor("examples", _EXAMPLES, "Logarithm has no examples", f"{KINDS}::test_every_kind_of_divisor_is_shown"),
        _divisor("read", _READ, "Logarithm cannot be read"),
        _divisor("str", _STR, "Logarithm cannot be written"),
        _divisor("of", _OF, "Logarithm cannot divide"),
        _divisor("plain", _PLAIN, "no formula for Logarithm"),
        _divisor("latex", _TEX, "no LaTeX for Logarithm"),
        Forgotten(piece="oracle", file=_AVERAGE, cut='    if divisor == "log":\n        return Level(unit, log=True)\n',
                  test=_DIVIDES, says="Logarithm has no entry in the oracle, verify/oracle/average.py"),
    ),
)  # fmt: skip

_BY_HAND = '        "rl/k2_old": (sum(x * x for x in d) + 625) / 8,\n'
METRIC = Change(
    goal=1,
    edits=((_METRICS, '    _row("ratio_min",',
            '    _row("k2_old", "0", "half the squared log-ratio", _ratio, lambda m: m.log_ratio.square() / 2),\n'),
           ("tests/test_metrics.py", '        "rl/k3_rollout_old"', _BY_HAND)),
    pages=("metrics.md",),
    forgotten=(
        Forgotten(piece="numbers by hand", file="tests/test_metrics.py", cut=_BY_HAND,
                  test="tests/test_metrics.py::test_every_metric_by_hand", says="rl/k2_old"),
    ),
)  # fmt: skip

_DROP_DOC = '    """Take tokens whose advantage is negative out of components (made for a test)."""\n\n'
_DROP_READS = '''    @property
    def reads(self) -> tuple[str, ...]:
        """The advantages, for their sign."""
        return ("advantages",)

'''
_DROP_REASON = '''    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "negative advantage"

'''
_DROP_FORMULA = _FORMULA + '        return "drop tokens where A < 0"\n'
_DROP_BODY = '    kind: Literal["drop_negative"] = "drop_negative"\n\n'
_DROP = "class DropNegative(MaskKind):\n" + _DROP_DOC + _DROP_BODY + _DROP_READS + _DROP_REASON + _DROP_FORMULA + "\n\n"
_TAKES = f"{ORACLE}::test_every_mask[DropNegative]"
MASK = Change(
    goal=2,
    edits=(
        (_MASKS, "class KeepPositiveAdvantage(", _DROP),
        (_MASKS, '"DropTruncated",', '"DropNegative", '),
        (f"{P}/rules/masks.py", "def not_positive(",
         'def negative(batch: TokenBatch, mask: Any) -> Tensor:\n    """Tokens whose advantage is below 0."""\n'
         '    return batch.streams["advantages"] < 0\n\n\n'),
        (f"{P}/rules/masks.py", '    "drop_zero_advantage": zero', '    "drop_negative": negative,\n'),
        (_SETS, '"drop_zero_advantage", "keep', '"drop_negative", '),
        (_SETS, '    if kind == "keep_positive_advantage":',
         '    if kind == "drop_negative":\n        negative_T = step.stream("advantages") < 0\n'
         '        return negative_T if on is not None else negative_T & step.flags("action")\n'),
        (_API, "DropTruncated ", "DropNegative "),
    ),
    pages=("conventions.md",),
    forgotten=(
        *_kind(
            "DropNegative", "masks", _MASKS,
            docstring=(_DROP_DOC, "", "test_a_kind_says_what_it_is", "DropNegative has no docstring"),
            formula=(_DROP_FORMULA, "", "test_a_kind_says_what_it_is", "DropNegative has no formula"),
            short_name=(_DROP_REASON, "", "test_a_kind_says_what_it_is", "DropNegative has no short name (reason)"),
            name_in_all=('"DropNegative", ', "", "test_a_kind_has_a_place_in_the_package", "is not in __all__"),
            reads=(_DROP_READS, "", "test_a_kind_reads_what_it_says", "DropNegative reads what its reads do not name"),
        ),
        *_kind(
            "DropNegative", "masks", f"{P}/rules/masks.py",
            row_of_arithmetic=('    "drop_negative": negative,\n', "", "test_a_kind_has_arithmetic",
                               "DropNegative has no arithmetic in rules/masks.py: TAKEN"),
        ),
        *_kind(
            "DropNegative", "masks", _SETS,
            oracle=('"drop_negative", ', "", "test_the_oracle_knows_a_kind",
                    "DropNegative has no entry in the oracle, verify/oracle/sets.py"),
        ),
        Forgotten(piece="right tokens", file=f"{P}/rules/masks.py", cut='["advantages"] < 0',
                  put='["advantages"] <= 0.3', test=_TAKES, says="AssertionError"),
        Forgotten(piece="oracle's tokens", file=_SETS, test=_TAKES, says="AssertionError",
                  cut='    if kind == "drop_negative":\n        negative_T = step.stream("advantages") < 0\n'
                  '        return negative_T if on is not None else negative_T & step.flags("action")\n'),
        Forgotten(piece="public name of the test", file=_API, cut="DropNegative ",
                  test=f"{_API}::test_public_api_is_frozen", says="DropNegative"),
    ),
)  # fmt: skip

_ROW = """    scores: Annotated[Floats | None, StreamSpec(
        name="score", dtype="float", fill=0.5, help="how well the token was judged",
    )]
"""
_CASE = '    "score": ([9.0, 1.0, 2.0, 9.0, 3.0], [1.0, 2.0, 0.5, 3.0, 0.5]),\n'
_TABLE = "tests/test_stream_table.py"
STREAM = Change(
    goal=1,
    edits=(
        (_STREAMS, "    kept_sets: Annotated[", _ROW),
        (_TABLE, '    "temperature": (', _CASE),
        (f"{P}/verify/oracle/scene.py", '"values", "returns")', '"score", '),
    ),
    pages=("conventions.md",),
    forgotten=(
        Forgotten(piece="case by hand", file=_TABLE, cut=_CASE, says="['score'] == []",
                  test=f"{_TABLE}::test_every_stream_of_the_table_has_a_case"),
        Forgotten(piece="oracle", file=f"{P}/verify/oracle/scene.py", cut='"score", ', says="['score'] == []",
                  test=f"{_TABLE}::test_the_oracle_s_own_list_is_the_table_s"),
        Forgotten(piece="row", file=_STREAMS, cut=_ROW, says="['score'] == []",
                  test=f"{_TABLE}::test_every_stream_of_the_table_has_a_case"),
    ),
)  # fmt: skip

_MODE = """    Refusal(
        mode="residual connections in float32",
        found=conditions.flag("fp32_residual_connection"),
        reason="it is refused by a test",
        fix="fp32_residual_connection=False",
    ),
"""
_MODE_CASE = '    "residual connections in float32": (Job(), setting(fp32_residual_connection=True)),\n'
_REFUSALS = "tests/test_refusals.py"
MODE = Change(
    goal=1,
    edits=(
        (_MODES, '    Refusal(\n        mode="torch FSDP2",', _MODE),
        (_REFUSALS, '    "torch FSDP2": (', _MODE_CASE),
    ),
    pages=("megatron.md",),
    forgotten=(
        Forgotten(piece="case", file=_REFUSALS, cut=_MODE_CASE, says="residual connections in float32",
                  test=f"{_REFUSALS}::test_every_row_of_the_table_has_a_case"),
        Forgotten(piece="row", file=_MODES, cut=_MODE, says="residual connections in float32",
                  test=f"{_REFUSALS}::test_every_row_of_the_table_has_a_case"),
    ),
)  # fmt: skip
CHANGES = {
    "surrogate": SURROGATE, "divisor": DIVISOR, "metric": METRIC, "mask": MASK, "stream": STREAM, "refused mode": MODE,
}  # fmt: skip
