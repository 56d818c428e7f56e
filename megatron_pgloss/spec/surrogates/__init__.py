"""Surrogates: what a ratio r and an advantage A of a token become, as a term to be minimised.

r is the ratio of the component's ratio axis (`megatron_pgloss.spec.ratios`), sg is the stop-gradient, d = log r. A
parameter that takes ``Bound`` is a number, or the name of a per-token constant stream of the batch
(``streams={"name": [B, L]}``). The arithmetic of each kind stands in `megatron_pgloss.objective.surrogates`.
"""

from typing import TYPE_CHECKING

from megatron_pgloss.spec.kinds import one_of
from megatron_pgloss.spec.surrogates.held import CISPO, TOPR, VESPO
from megatron_pgloss.spec.surrogates.joined import FIPO, GMPO, REAL
from megatron_pgloss.spec.surrogates.likelihood import NLL, Distill, Reinforce
from megatron_pgloss.spec.surrogates.moving import DRO, SAPO, Clip, Unclipped
from megatron_pgloss.spec.surrogates.surrogate import Surrogate, SurrogateKind

if TYPE_CHECKING:
    AnySurrogate = SurrogateKind
else:
    AnySurrogate = one_of(SurrogateKind)

__all__ = [
    "CISPO",
    "DRO",
    "FIPO",
    "GMPO",
    "NLL",
    "REAL",
    "SAPO",
    "TOPR",
    "VESPO",
    "AnySurrogate",
    "Clip",
    "Distill",
    "Reinforce",
    "Surrogate",
    "SurrogateKind",
    "Unclipped",
]
