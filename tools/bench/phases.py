"""Where the time of the log-probs goes: the phases of this package's pass, and floors that no implementation can beat.

Shapes: logits [T, V], hidden [T, H], weight [V, H], targets [T].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss import TokenLogprobs, token_logprobs
from megatron_pgloss.logprobs import linear_token_logprobs

Timer = Callable[[Callable[[], Any]], float]
"""A function that returns the milliseconds of a call."""


class Model(torch.autograd.Function):
    """Passes its input on, and takes the gradient as the layer before the logits would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a tensor on the input's memory that is no view of it, because some peers write over their inputs."""
        return x.new_empty(0).set_(x.detach())  # type: ignore[call-overload,no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        """Drop the gradient."""


def _phases(make: Callable[[], TokenLogprobs], timer: Timer) -> dict[str, float]:
    """Milliseconds of forward with entropy, and of the rest of the whole pass."""

    def whole() -> None:
        out = make()
        assert out.entropy is not None
        (out.logprob.sum() + 0.1 * out.entropy.sum()).backward()

    forward = timer(make)
    return {"forward": forward, "backward": timer(whole) - forward}


def logits(inputs: list[Tensor], targets: Tensor, timer: Timer) -> dict[str, float]:
    """Forward and backward of the backend that is picked here, over the logits; reading and writing them once."""
    free = inputs[0].detach()
    return {
        **_phases(lambda: _rows(inputs[0], targets), timer),
        "floor of forward (reading them, for a maximum)": timer(lambda: free.amax(-1)),
        "floor of backward (reading and writing them)": timer(free.neg_),
    }


def _rows(x: Tensor, targets: Tensor) -> TokenLogprobs:
    return token_logprobs(Model.apply(x), targets, entropy=True, reuse_logits=True)


def head(inputs: list[Tensor], targets: Tensor, timer: Timer) -> dict[str, float]:
    """Forward and backward of the head that keeps its logits; the three GEMMs and the row passes by themselves."""
    found = _phases(lambda: linear_token_logprobs(*map(Model.apply, inputs), targets, entropy=True), timer)
    x_TH, w_VH = (x.detach() for x in inputs)
    z_TV = x_TH @ w_VH.t()
    parts = {
        "GEMM h W^T": timer(lambda: torch.mm(x_TH, w_VH.t())),
        "GEMM dZ W": timer(lambda: torch.mm(z_TV, w_VH)),
        "GEMM dZ^T h": timer(lambda: torch.mm(z_TV.t(), x_TH)),
    }
    rows = _phases(lambda: _rows(z_TV.requires_grad_(), targets), timer)
    return found | parts | {"the three GEMMs": sum(parts.values()), "row passes alone": sum(rows.values())}
