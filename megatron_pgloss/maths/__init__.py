"""Pure maths on token streams, used everywhere: bounded log-ratios, k-estimators, sums over units."""

from megatron_pgloss.maths import running
from megatron_pgloss.maths.estimators import beyond, bounded, k1, k2, k3, sloped
from megatron_pgloss.maths.segments import Asked, UnitSums, taken
from megatron_pgloss.maths.selection import finite, flags, selected

__all__ = [
    "Asked",
    "UnitSums",
    "beyond",
    "bounded",
    "finite",
    "flags",
    "k1",
    "k2",
    "k3",
    "running",
    "selected",
    "sloped",
    "taken",
]
