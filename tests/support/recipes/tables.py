"""How a stranger adds a row to a table: a divisor, a level, a metric, a token stream, a refused mode."""

from __future__ import annotations

from support.changes import LEVELS, Change, Forgotten
from support.changes import PACKAGE as P

_DIVISORS, _AVERAGE = f"{P}/spec/divisors.py", f"{P}/verify/oracle/average.py"
_METRICS, _STREAMS = f"{P}/metrics/metric_table.py", f"{P}/rollouts/streams.py"
_MODES = f"{P}/megatron/modes.py"
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
_DIVIDES = f"{LEVELS}::test_a_divisor_reads_prints_and_divides[log]"


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
        _divisor("forms", _FORMS, "Logarithm has no forms", f"{LEVELS}::test_every_kind_of_divisor_is_shown"),
        _divisor("examples", _EXAMPLES, "Logarithm has no examples", f"{LEVELS}::test_every_kind_of_divisor_is_shown"),
        _divisor("read", _READ, "Logarithm cannot be read"),
        _divisor("str", _STR, "Logarithm cannot be written"),
        _divisor("of", _OF, "Logarithm cannot divide"),
        _divisor("plain", _PLAIN, "no formula for Logarithm"),
        _divisor("latex", _TEX, "no LaTeX for Logarithm"),
        Forgotten(piece="oracle", file=_AVERAGE, cut='    if divisor == "log":\n        return Level(unit, log=True)\n',
                  test=_DIVIDES, says="Logarithm has no entry in the oracle, verify/oracle/average.py"),
    ),
)  # fmt: skip

_ROWS, _UNITS, _STEP = f"{P}/spec/levels.py", f"{P}/planning/units.py", f"{P}/verify/oracle/step.py"
_LEVEL = '    Level("run", "runs", "r"),\n'
_RUNS = '''def runs_of(batch: TokenBatch, turn_T: Tensor) -> tuple[Tensor, int, Tensor]:
    """Unbroken runs of action tokens of one turn."""
    in_T = batch.action_T & (turn_T >= 0)
    begins_T = in_T.clone()
    begins_T[1:] &= ~in_T[:-1] | (turn_T.diff() != 0)
    return torch.where(in_T, begins_T.cumsum(0) - 1, -1), int(begins_T.sum()), turn_T[begins_T]


'''
_RUNS_JUDGED = """        if level == "run":
            found: list[Hashable | None] = []
            number, before = 0, None
            for (i, k), turn in zip(self.where, self.keys("turn"), strict=True):
                here = turn if self.rows[i]["action"][k] else None
                number += here is not None and here != before
                found.append(None if here is None else number)
                before = here
            return found
"""
_SAME_LEVELS, _AVERAGES = (
    f"{LEVELS}::test_levels_are_those_of_the_oracle_and_of_the_docs",
    f"{LEVELS}::test_a_level_is_found_and_averaged_over[run]",
)
LEVEL = Change(
    goal=2,
    edits=(
        (_ROWS, '    Level("token", ', _LEVEL),
        (_UNITS, "FIND: dict", _RUNS),
        (_UNITS, '    "turn": turns_of,', '    "run": runs_of,\n'),
        (_STEP, '"token")\nDEFAULT_BOUND', '"run", '),
        (_STEP, '        if level == "token":', _RUNS_JUDGED),
        ("docs/normalization.md", "token\ndivisor :=", "run | "),
    ),
    pages=("normalization.md",),
    forgotten=(
        Forgotten(piece="row", file=_ROWS, cut=_LEVEL, test=_SAME_LEVELS, says="the oracle has other levels"),
        Forgotten(piece="letter of its own", file=_ROWS, cut='"runs", "r"', put='"runs", "j"', test=_SAME_LEVELS,
                  says="two levels have one letter"),
        Forgotten(piece="units", file=_UNITS, cut='    "run": runs_of,\n', test=_AVERAGES,
                  says="run is not found in a batch: it has no row in FIND of planning/units.py"),
        Forgotten(piece="right units", file=_UNITS, cut=" | (turn_T.diff() != 0)", test=_AVERAGES,
                  says="run: the oracle averages over other units"),
        Forgotten(piece="oracle", file=_STEP, cut='"run", ', test=_SAME_LEVELS, says="the oracle has other levels"),
        Forgotten(piece="oracle's units", file=_STEP, cut=_RUNS_JUDGED, test=_AVERAGES,
                  says="run has no units in the oracle, verify/oracle/step.py: keys"),
        Forgotten(piece="docs", file="docs/normalization.md", cut="run | ", test=_SAME_LEVELS,
                  says="docs/normalization.md has other levels"),
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
