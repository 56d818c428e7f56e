"""Pure maths on token streams, used everywhere: bounded log-ratios, k-estimators, sums over units."""

from megatron_pgloss.terms import corrections, gates, running
from megatron_pgloss.terms.estimators import bounded, k1, k2, k3
from megatron_pgloss.terms.segments import UnitSums
from megatron_pgloss.terms.selection import finite, flags, selected

__all__ = ["UnitSums", "bounded", "corrections", "finite", "flags", "gates", "k1", "k2", "k3", "running", "selected"]
