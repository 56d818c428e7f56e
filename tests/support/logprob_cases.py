"""The float64 reference of the log-prob tests, and the inputs that single and parallel runs share.

Shapes: `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INF = float("inf")
HALF_ULP = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def dense(
    logits: Tensor,
    targets: Tensor,
    g: Tensor | None = None,
    h: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob, entropy, gradient of sum(g logp + h H)) by log_softmax and autograd in float64.

    Columns of -inf and columns from ``vocab`` on are cut out, not computed with.
    """
    z = logits.detach().double().requires_grad_()
    tau = torch.as_tensor(temperature, dtype=torch.float64)
    u = z / (tau[..., None] if tau.dim() else tau)
    keep = (z > -INF) & (torch.arange(z.size(-1)) < (vocab or z.size(-1)))
    logp = torch.where(keep, u, -1e300).log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp.masked_fill(~keep, 0.0)).sum(-1)
    logprob = logp.gather(-1, targets.clamp(0, z.size(-1) - 1)[..., None])[..., 0]
    total = z.sum() * 0 if g is None and h is None else 0.0
    total = total + (0.0 if g is None else (logprob * g.double()).sum())
    total = total + (0.0 if h is None else (entropy * h.double()).sum())
    (gradient,) = torch.autograd.grad(total, z)
    return logprob.detach(), entropy.detach(), gradient


def assert_one_rounding(got: Tensor, exact: Tensor, noise: float) -> None:
    """``got`` is ``exact`` rounded once to its dtype, after float32 ``noise`` was added."""
    smallest = 2**-25 if got.dtype == torch.float16 else 0.0  # half the step of fp16 denormals
    bound = HALF_ULP[got.dtype] * exact.abs() * 1.001 + noise + smallest
    excess = (got.double() - exact).abs() - bound
    assert got.dtype in HALF_ULP and bool((excess <= 0).all()), f"over by {excess.max().item()}"


@dataclass
class Case:
    """One call: full logits [T, V] (a rank takes its columns), upstream g and h, or None."""

    logits: Tensor
    targets: Tensor
    g: Tensor | None = None
    h: Tensor | None = None
    temperature: float | Tensor | None = None
    vocab: int | None = None
    entropy: bool = True


def cases(dtype: torch.dtype = torch.float64) -> dict[str, Case]:
    """Inputs of 16 columns (4 in the worked example), to be cut into 1, 2 or 4 shards."""
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def logits(rows: int, columns: int = 16) -> Tensor:
        # Columns of very different size, so that the shards' shares of the probability differ.
        return (2 * normal(rows, columns) + torch.linspace(-3, 3, columns)).to(dtype)

    g, h = normal(16), normal(16)
    every = torch.arange(16)  # each column is a target once: first and last of every shard
    padded = logits(16)
    padded[:, 12:] = -INF  # a whole shard of four
    lone = logits(16)
    lone[:, 1:] = -INF  # all shards but the first
    confident = logits(16)
    confident[every, every] += 30
    tau = torch.linspace(0.3, 2.0, 16, dtype=torch.float64)
    out = {
        "both": Case(logits(16), every, g, h),
        "logprob alone, entropy off": Case(logits(16), every, g, entropy=False),
        "logprob alone, entropy unused": Case(logits(16), every, g),
        "entropy alone": Case(logits(16), every, None, h),
        "one temperature": Case(logits(16), every, g, h, 0.7),
        "one temperature, entropy off": Case(logits(16), every, g, None, 0.7, entropy=False),
        "temperature per token": Case(logits(16), every, g, h, tau),
        "padding of -inf": Case(padded, every % 12, g, h, tau),
        "padding of -inf, entropy off": Case(padded, every % 12, g, entropy=False),
        "one finite column": Case(lone, every * 0, g, h),
        "vocab_size": Case(logits(16), every % 11, g, h, 0.7, vocab=11),
        "confident": Case(confident, every, g, h),
        "far from zero": Case(logits(16) + 1000, every, g, h),
    }
    four = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=dtype)
    one = torch.ones(1, dtype=torch.float64)
    out["worked example, logprob"] = Case(four, torch.tensor([3]), one)
    out["worked example, entropy"] = Case(four, torch.tensor([3]), None, one)
    return out
