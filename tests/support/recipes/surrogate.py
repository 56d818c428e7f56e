"""How a stranger adds a surrogate."""

from __future__ import annotations

from support.changes import API, ORACLE, Change, Forgotten, pieces_of_kind, public_name
from support.changes import PACKAGE as P

_MOVING, _ARITHMETIC = f"{P}/spec/surrogates/moving.py", f"{P}/objective/surrogates.py"
_ORACLE = f"{P}/verify/oracle/surrogates.py"
_FORMULA = '''    def formula(self, base: str = "old") -> str:
        """In one line."""
'''
_LAM = '    symbols: ClassVar[Mapping[str, str]] = {"lam": r"\\lambda"}\n'
_EXAMPLE = '    example: ClassVar[Mapping[str, Any]] = {"lam": 0.5}\n'
_SOFT_DOC = '    """The ratio under a logarithm: ``l = -A log(1 + lam r)`` (made for a test)."""\n\n'
_SOFT_FORMULA = _FORMULA + '        return "-A log(1 + lam r)"\n\n'
_SOFT_LETTERS = '''    def definitions(self, base: str = "old") -> tuple[str, ...]:
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
        (_ORACLE, "def _clip(", _SOFT_JUDGED),
        (_ORACLE, '    "clip": _clip,', '    "softened": _softened,\n'),
        (API, "Unclipped UnsupportedError", "Softened "),
    ),
    pages=("objectives.md",),
    forgotten=(
        *pieces_of_kind(
            "Softened", "surrogates", _MOVING,
            docstring=_SOFT_DOC,
            example=_EXAMPLE,
            formula=_SOFT_FORMULA,
            LaTeX_of_a_letter=(_LAM, "['lam']"),
            name_in_all='"Softened", ',
        ),
        *pieces_of_kind(
            "Softened", "surrogates", _ARITHMETIC,
            row_of_arithmetic=('    "softened": softened,\n', "SURROGATES"),
        ),
        *pieces_of_kind(
            "Softened", "surrogates", _ORACLE,
            oracle='    "softened": _softened,\n',
        ),
        Forgotten(piece="held_N", file=_ARITHMETIC, cut="log1p(), held_N=_held(x, x.log_ratio))", put="log1p())",
                  test=f"{ORACLE}::test_every_surrogate_says_what_the_bound_took[Softened]",
                  says="Softened: held_N is not where the bound took the gradient"),
        Forgotten(piece="right formula", file=_ARITHMETIC, cut="(part.lam * x.ratio).log1p()", put="x.ratio.log1p()",
                  test=_OF_EVERY_RATIO, says="AssertionError"),
        public_name("Softened"),
    ),
)  # fmt: skip
