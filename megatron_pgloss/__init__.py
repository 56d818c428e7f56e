"""megatron_pgloss: a policy-gradient loss for Megatron-Core, the same gradient on every layout.

The flow: `TokenBatch` (what was rolled out) -> `plan` (who is divided by what, once per step) -> `token_logprobs` ->
`policy_loss` (a plain sum). For Megatron-Core see `megatron_pgloss.megatron`.
"""

from megatron_pgloss import presets
from megatron_pgloss._version import __version__
from megatron_pgloss.errors import (
    DataError,
    LayoutError,
    NonFiniteError,
    PGLossError,
    SpecError,
    UnsupportedError,
)
from megatron_pgloss.logprobs import TokenLogprobs, token_logprobs
from megatron_pgloss.objective import LossOutput, policy_loss, weighted_sum
from megatron_pgloss.planning import MicroBatch, Plan, Split, minibatches, plan
from megatron_pgloss.rollouts import Author, Sampler, Span, Termination, TokenBatch, Trace
from megatron_pgloss.spec import (
    KL,
    Clip,
    CrossEntropy,
    DropTruncated,
    DropZeroAdvantage,
    Entropy,
    LossSpec,
    PolicyGradient,
    Reinforce,
    RoleTable,
    Term,
    TruncatedIS,
    UserMask,
)

__all__ = [
    "KL",
    "Author",
    "Clip",
    "CrossEntropy",
    "DataError",
    "DropTruncated",
    "DropZeroAdvantage",
    "Entropy",
    "LayoutError",
    "LossOutput",
    "LossSpec",
    "MicroBatch",
    "NonFiniteError",
    "PGLossError",
    "Plan",
    "PolicyGradient",
    "Reinforce",
    "RoleTable",
    "Sampler",
    "Span",
    "SpecError",
    "Split",
    "Term",
    "Termination",
    "TokenBatch",
    "TokenLogprobs",
    "Trace",
    "TruncatedIS",
    "UnsupportedError",
    "UserMask",
    "__version__",
    "minibatches",
    "plan",
    "policy_loss",
    "presets",
    "token_logprobs",
    "weighted_sum",
]
