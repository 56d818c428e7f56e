"""How a stranger adds a rule: a gate, a correction, a mask."""

from __future__ import annotations

from support.changes import API, KINDS, ORACLE, Change, Forgotten, pieces_of_kind, public_name
from support.changes import PACKAGE as P

_FORMULA = '''    def formula(self, base: str = "old") -> str:
        """In one line."""
'''

_GATES, _PASSES, _ORACLE_GATES = f"{P}/spec/gates.py", f"{P}/rules/gates.py", f"{P}/verify/oracle/gates.py"
_RARE_DOC = '    """Drops tokens that the sampler drew with a probability below ``floor`` (made for a test)."""\n\n'
_RARE_EXAMPLE = '    example: ClassVar[Mapping[str, Any]] = {"floor": 0.1}\n'
_RARE_READS = '''    @property
    def reads(self) -> tuple[str, ...]:
        """The sampler's log-probs."""
        return ("rollout",)

'''
_RARE_FORMULA = _FORMULA + '        return f"drop the token where mu < {self.floor:g}"\n'
_RARE = (
    "class RareGate(GateKind):\n" + _RARE_DOC + '    kind: Literal["rare"] = "rare"\n    floor: Probability\n'
    + _RARE_EXAMPLE + "\n" + _RARE_READS + _RARE_FORMULA + "\n\n"
)  # fmt: skip
_RARE_PASSES = """def _rare(gate: Any, x: GateStreams, key: Hashable) -> Tensor:
    return x.rollout.exp() >= gate.floor


"""
_RARE_JUDGED = '''def _rare(gate: Rule, scene: Scene) -> Tensor:
    """Dropped where mu < floor."""
    return scene.constant("rollout").exp() >= float(gate["floor"])


'''
_RARE_METRIC = '    _gate("rare", "the data\'s own", "a gate on rare tokens"),\n'
_METRICS = f"{P}/metrics/metric_table.py"
GATE = Change(
    goal=3,
    edits=(
        (_GATES, "class RatioGate(", _RARE),
        (_GATES, '"RatioGate", ', '"RareGate", '),
        (_PASSES, "def _opsm(", _RARE_PASSES),
        (_PASSES, '    "ratio_band": _ratio_band,', '    "rare": _rare,\n'),
        (_METRICS, '    _gate("ratio_band", ', _RARE_METRIC),
        (_ORACLE_GATES, "def _opsm(", _RARE_JUDGED),
        (_ORACLE_GATES, '    "ratio_band": _ratio_band,', '    "rare": _rare,\n'),
        (API, "RatioGate ", "RareGate "),
    ),
    pages=("objectives.md", "metrics.md"),
    forgotten=(
        *pieces_of_kind(
            "RareGate", "gates", _GATES,
            docstring=_RARE_DOC,
            example=_RARE_EXAMPLE,
            formula=_RARE_FORMULA,
            name_in_all='"RareGate", ',
            reads=_RARE_READS,
        ),
        *pieces_of_kind(
            "RareGate", "gates", _PASSES,
            row_of_arithmetic=('    "rare": _rare,\n', "PASSES"),
        ),
        *pieces_of_kind(
            "RareGate", "gates", _ORACLE_GATES,
            oracle='    "rare": _rare,\n',
        ),
        Forgotten(piece="metric", file=_METRICS, cut=_RARE_METRIC, test=f"{KINDS}::test_a_gate_has_a_metric[RareGate]",
                  says="RareGate has no row gate_rare in metrics/metric_table.py"),
        Forgotten(piece="right formula", file=_PASSES, cut="x.rollout.exp() >= gate", put="x.logp.exp() >= gate",
                  test=f"{ORACLE}::test_every_gate[RareGate-True]", says="AssertionError"),
        public_name("RareGate"),
    ),
)  # fmt: skip

_CORRECTIONS, _APPLY = f"{P}/spec/corrections.py", f"{P}/rules/corrections.py"
_ORACLE_RULES = f"{P}/verify/oracle/rules.py"
_MIXED_DOC = '    """The importance weight, mixed with 1: ``1 - share + share r`` (made for a test)."""\n\n'
_MIXED_EXAMPLE = '    example: ClassVar[Mapping[str, Any]] = {"share": 0.5}\n'
_MIXED_WEIGHS = '''    @property
    def weighs(self) -> bool:
        """It rejects nothing."""
        return True

'''
_MIXED_REASON = '''    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "mixed IS"

'''
_MIXED_FORMULA = _FORMULA + '        return f"times ({1 - self.share:g} + {self.share:g} {self._r})"\n'
_MIXED = (
    "class MixedIS(RatioCorrection):\n" + _MIXED_DOC + '    kind: Literal["mixed_is"] = "mixed_is"\n    share: Share\n'
    + _MIXED_EXAMPLE + "\n" + _MIXED_WEIGHS + _MIXED_REASON + _MIXED_FORMULA + "\n\n"
)  # fmt: skip
_MIXED_APPLY = """def _mixed(rule: Any, joined: Joined, x: Evidence) -> Verdict:
    weight_N = 1 - rule.share + rule.share * joined.value_N.clamp(-x.bound, x.bound).exp()
    return Verdict(weight=weight_N, raw=weight_N)


"""
_MIXED_ACTS = """    if kind == "mixed_is":
        return scene.acts_here(rule, scene.component["kind"] == "policy_gradient")
"""
_MIXED_JUDGED = """    if rule["kind"] == "mixed_is":
        share = float(rule["share"])
        return (1 - share) + share * scene.bounded(_log_ratio(rule, scene)[0]).exp()
"""
CORRECTION = Change(
    goal=2,
    edits=(
        (_CORRECTIONS, "class RatioMask(", _MIXED),
        (_CORRECTIONS, '"RatioMask", ', '"MixedIS", '),
        (_CORRECTIONS, 'Positive\n\n__all__ = ["IcePop"', "Share, "),
        (_APPLY, "def _masked(", _MIXED_APPLY),
        (_APPLY, '    "ratio_mask": (', '    "mixed_is": (_log_ratio, _mixed),\n'),
        (_ORACLE_RULES, '"icepop", "ratio_mask", ', '"mixed_is", '),
        (_ORACLE_RULES, '    if kind == "truncated_is" or (kind', _MIXED_ACTS),
        (_ORACLE_RULES, '    if rule["kind"] != "truncated_is":', _MIXED_JUDGED),
        (_ORACLE_RULES, '    if kind == "truncated_is":\n', '    if kind == "mixed_is":\n        return keep_T\n'),
        (API, "NLL NonFiniteError", "MixedIS "),
    ),
    pages=("conventions.md",),
    forgotten=(
        *pieces_of_kind(
            "MixedIS", "corrections", _CORRECTIONS,
            docstring=_MIXED_DOC,
            example=_MIXED_EXAMPLE,
            formula=_MIXED_FORMULA,
            short_name=_MIXED_REASON,
            name_in_all='"MixedIS", ',
        ),
        *pieces_of_kind(
            "MixedIS", "corrections", _APPLY,
            row_of_arithmetic=('    "mixed_is": (_log_ratio, _mixed),\n', "APPLY"),
        ),
        *pieces_of_kind(
            "MixedIS", "corrections", _ORACLE_RULES,
            oracle='"mixed_is", ',
        ),
        Forgotten(piece="weighs", file=_CORRECTIONS, cut=_MIXED_WEIGHS, says="MixedIS: weighs is not whether",
                  test=f"{KINDS}::test_a_correction_weighs_and_rejects_as_it_says[MixedIS]"),
        Forgotten(piece="right formula", file=_APPLY, cut="1 - rule.share + rule.share", put="rule.share",
                  test=f"{ORACLE}::test_every_correction[MixedIS-True-old]", says="AssertionError"),
        Forgotten(piece="oracle's weight", file=_ORACLE_RULES, cut=_MIXED_JUDGED,
                  test=f"{ORACLE}::test_every_correction[MixedIS-True-old]", says="AssertionError"),
        public_name("MixedIS"),
    ),
)  # fmt: skip

_MASKS, _SETS = f"{P}/spec/masks.py", f"{P}/verify/oracle/sets.py"
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
        (API, "DropTruncated ", "DropNegative "),
    ),
    pages=("conventions.md",),
    forgotten=(
        *pieces_of_kind(
            "DropNegative", "masks", _MASKS,
            docstring=_DROP_DOC,
            formula=_DROP_FORMULA,
            short_name=_DROP_REASON,
            name_in_all='"DropNegative", ',
            reads=_DROP_READS,
        ),
        *pieces_of_kind(
            "DropNegative", "masks", f"{P}/rules/masks.py",
            row_of_arithmetic=('    "drop_negative": negative,\n', "TAKEN"),
        ),
        *pieces_of_kind(
            "DropNegative", "masks", _SETS,
            oracle='"drop_negative", ',
        ),
        Forgotten(piece="right tokens", file=f"{P}/rules/masks.py", cut='["advantages"] < 0',
                  put='["advantages"] <= 0.3', test=_TAKES, says="AssertionError"),
        Forgotten(piece="oracle's tokens", file=_SETS, test=_TAKES, says="AssertionError",
                  cut='    if kind == "drop_negative":\n        negative_T = step.stream("advantages") < 0\n'
                  '        return negative_T if on is not None else negative_T & step.flags("action")\n'),
        public_name("DropNegative"),
    ),
)  # fmt: skip
