"""Rules on data and on ratios: which tokens a mask takes, what a gate lets pass, what a correction weighs or rejects.

`megatron_pgloss.spec` declares a rule, the file of the same name here applies it, wherever it is applied.
"""

from megatron_pgloss.rules import corrections, gates, masks

__all__ = ["corrections", "gates", "masks"]
