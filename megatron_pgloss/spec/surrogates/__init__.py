"""Surrogates: what a ratio r and an advantage A of a token become, as a term to be minimised.

r is the ratio of the component's ratio axis (`megatron_pgloss.spec.ratios`), sg is the stop-gradient, d = log r. A
parameter that takes ``Bound`` is a number, or the name of a per-token constant stream of the batch
(``streams={"name": [B, L]}``). The arithmetic of each kind stands in `megatron_pgloss.objective.surrogates`.
"""

from typing import TYPE_CHECKING

from megatron_pgloss.spec.kinds import one_of
from megatron_pgloss.spec.surrogates.held import *  # noqa: F403
from megatron_pgloss.spec.surrogates.joined import *  # noqa: F403
from megatron_pgloss.spec.surrogates.likelihood import *  # noqa: F403
from megatron_pgloss.spec.surrogates.moving import *  # noqa: F403
from megatron_pgloss.spec.surrogates.surrogate import *  # noqa: F403
from megatron_pgloss.spec.surrogates.surrogate import SurrogateKind

if TYPE_CHECKING:
    AnySurrogate = SurrogateKind
else:
    AnySurrogate = one_of(SurrogateKind)
