"""What to train: a `LossSpec` and its parts, validated and immutable."""

from megatron_pgloss.spec import parts
from megatron_pgloss.spec.component import Component
from megatron_pgloss.spec.components import AnyComponent
from megatron_pgloss.spec.corrections import Correction
from megatron_pgloss.spec.families import FAMILIES
from megatron_pgloss.spec.functions import Function
from megatron_pgloss.spec.gates import AnyGate
from megatron_pgloss.spec.kept_set import KeptSet
from megatron_pgloss.spec.kinds import Kind, kinds
from megatron_pgloss.spec.levels import LEVELS, UNITS, Level
from megatron_pgloss.spec.loss_spec import LossSpec
from megatron_pgloss.spec.masks import Mask
from megatron_pgloss.spec.normalizer import ALIASES, Path, Step, parse
from megatron_pgloss.spec.parts import *  # noqa: F403
from megatron_pgloss.spec.roles import RoleTable

__all__ = [
    "ALIASES",
    "FAMILIES",
    "LEVELS",
    "UNITS",
    "AnyComponent",
    "AnyGate",
    "Component",
    "Correction",
    "Function",
    "KeptSet",
    "Kind",
    "Level",
    "LossSpec",
    "Mask",
    "Path",
    "RoleTable",
    "Step",
    "kinds",
    "parse",
]
# Every kind of surrogate, ratio, gate, correction, mask and component.
__all__ += [name for name in vars(parts) if not name.startswith("_")]
