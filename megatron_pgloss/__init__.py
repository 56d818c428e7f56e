"""megatron_pgloss: a policy-gradient loss for Megatron-Core, the same gradient on every layout.

The flow: `TokenBatch` (the rollouts) -> `plan` (every token's weight, once per step) -> `token_logprobs` ->
`policy_loss` (a plain sum). For Megatron-Core see `megatron_pgloss.megatron`.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron_pgloss._version import __version__

_MISSING = [name for name in ("torch", "pydantic") if not TYPE_CHECKING and find_spec(name) is None]
if not _MISSING:
    from megatron_pgloss import advantages, presets
    from megatron_pgloss.errors import (
        DataError,
        LayoutError,
        NonFiniteError,
        PGLossError,
        SpecError,
        UnsupportedError,
    )
    from megatron_pgloss.finishing import finish
    from megatron_pgloss.logprobs import TokenLogprobs, token_logprobs
    from megatron_pgloss.mismatch import mismatch
    from megatron_pgloss.objective import LossOutput, policy_loss, weighted_sum
    from megatron_pgloss.planning import MicroBatch, Plan, Split, minibatches, plan, voters
    from megatron_pgloss.rollouts import Author, Sampler, Span, Termination, TokenBatch, Trace
    from megatron_pgloss.scoring import statistics_pass
    from megatron_pgloss.spec import KeptSet, LossSpec, RoleTable, parts
    from megatron_pgloss.spec.parts import *  # noqa: F403

__all__ = [
    "Author",
    "DataError",
    "KeptSet",
    "LayoutError",
    "LossOutput",
    "LossSpec",
    "MicroBatch",
    "NonFiniteError",
    "PGLossError",
    "Plan",
    "RoleTable",
    "Sampler",
    "Span",
    "SpecError",
    "Split",
    "Termination",
    "TokenBatch",
    "TokenLogprobs",
    "Trace",
    "UnsupportedError",
    "__version__",
    "advantages",
    "finish",
    "minibatches",
    "mismatch",
    "plan",
    "policy_loss",
    "presets",
    "statistics_pass",
    "token_logprobs",
    "voters",
    "weighted_sum",
]
if not _MISSING:
    # Every kind of surrogate, ratio, gate, correction, mask and component.
    __all__ += [name for name in vars(parts) if not name.startswith("_")]


def __getattr__(name: str) -> object:
    if _MISSING and name in __all__:
        # The command `doctor` works without these packages, and names them.
        raise ModuleNotFoundError(f"megatron_pgloss needs {_MISSING[0]}, which is not installed", name=_MISSING[0])
    raise AttributeError(f"module 'megatron_pgloss' has no attribute {name!r}")
