"""Rules on data and on ratios: which tokens a mask takes, what a gate lets pass, what a correction weighs or rejects.

`megatron_pgloss.spec` declares a rule; ``apply`` in the file of the same name here gives its `Verdict`, wherever the
rule is applied: when the step is planned, in the statistics pass, inside the loss.
"""

from megatron_pgloss.rules import corrections, gates, masks
from megatron_pgloss.rules.verdict import Verdict

__all__ = ["Verdict", "corrections", "gates", "masks"]
