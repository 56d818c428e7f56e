"""What to train: a `LossSpec` and its parts, validated and immutable."""

from megatron_pgloss.spec.components import (
    KL,
    Clip,
    Component,
    CrossEntropy,
    Entropy,
    PolicyGradient,
    Reinforce,
    Term,
)
from megatron_pgloss.spec.loss_spec import LossSpec
from megatron_pgloss.spec.normalizer import ALIASES, UNITS, Level, Path, Unit, parse
from megatron_pgloss.spec.rules import DropTruncated, DropZeroAdvantage, RoleTable, TruncatedIS, UserMask

__all__ = [
    "ALIASES",
    "KL",
    "UNITS",
    "Clip",
    "Component",
    "CrossEntropy",
    "DropTruncated",
    "DropZeroAdvantage",
    "Entropy",
    "Level",
    "LossSpec",
    "Path",
    "PolicyGradient",
    "Reinforce",
    "RoleTable",
    "Term",
    "TruncatedIS",
    "Unit",
    "UserMask",
    "parse",
]
