"""The oracle: the policy-gradient loss in plain torch and float64, from the formulas, the whole step at once.

It judges the rest of the package and shares nothing with it: of the package it imports ``errors`` alone.
"""

from megatron_pgloss.verify.oracle.answer import oracle_kl, oracle_logprobs, oracle_loss, oracle_step

__all__ = ["oracle_kl", "oracle_logprobs", "oracle_loss", "oracle_step"]
