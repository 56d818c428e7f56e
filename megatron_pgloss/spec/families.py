"""The families of kinds: all that a spec can be put together from."""

from __future__ import annotations

from megatron_pgloss.spec.component import Component
from megatron_pgloss.spec.correction import CorrectionKind
from megatron_pgloss.spec.gates import GateKind
from megatron_pgloss.spec.kinds import Kind
from megatron_pgloss.spec.masks import MaskKind
from megatron_pgloss.spec.ratios import RatioKind
from megatron_pgloss.spec.surrogates.surrogate import SurrogateKind

FAMILIES: dict[str, type[Kind]] = {
    "components": Component,
    "surrogates": SurrogateKind,
    "ratios": RatioKind,
    "gates": GateKind,
    "corrections": CorrectionKind,
    "masks": MaskKind,
}
"""Name of a family to its class; `megatron_pgloss.spec.kinds.kinds` lists the kinds of one."""
