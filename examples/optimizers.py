"""One interface to Megatron's optimizer and to plain torch on ``main_grad`` (float64 too), and the gradient norm."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron_pgloss.verify.layouts.reshard import full_gradients, placements


def gradient_norm(chunks: list, *, distributed: bool) -> float:
    """L2 norm of the whole model's gradient, in float64 from ``main_grad``; the same number on every rank.

    Each piece of each parameter counts once, however many ranks hold it (tensor-parallel replicas, tied embeddings,
    data parallelism). A collective over the world; call it between the schedule and the optimizer.
    """
    if distributed:
        # Each rank holds the reduced gradient of its own shards only, so they are gathered.
        return math.sqrt(sum(float(grad.square().sum()) for grad in full_gradients(chunks).values()))
    mine = {}
    for place in placements(chunks):
        for local, start, length in place.pieces:
            piece = place.param.main_grad.narrow(place.dim, local, length)
            mine[place.name, start] = float(piece.double().square().sum())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    squares = {key: value for part in reversed(everyone) for key, value in part.items()}
    return math.sqrt(sum(squares[key] for key in sorted(squares)))


class Optimizer:
    """``kind`` is ``megatron`` (Adam, as Megatron's trainer builds it), ``adam`` or ``sgd`` (plain torch).

    The plain optimizers take ``main_grad`` as it is, in the model's dtype, clip by the norm they are given, and keep
    nothing but torch's own state.
    """

    def __init__(self, kind: str, chunks: list, *, lr: float, eps: float, clip: float, distributed: bool) -> None:
        self.kind, self.chunks, self.clip = kind, chunks, clip
        self.params = [param for chunk in chunks for param in chunk.parameters() if param.requires_grad]
        if kind == "megatron":
            from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

            dtype = self.params[0].dtype
            config = OptimizerConfig(
                optimizer="adam", lr=lr, weight_decay=0.0, clip_grad=clip, adam_beta2=0.99, adam_eps=eps,
                params_dtype=dtype,
                bf16=dtype is torch.bfloat16, use_distributed_optimizer=distributed,
            )  # fmt: skip
            self.inner = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        elif kind == "adam":
            self.inner = torch.optim.Adam(self.params, lr=lr, betas=(0.9, 0.99), eps=eps)
        else:
            self.inner = torch.optim.SGD(self.params, lr=lr)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.inner.param_groups:
            group["lr"] = lr

    def zero_grad(self) -> None:
        """Set all gradients to zero; call it before a step's schedule."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def step(self, norm: float) -> None:
        """Update the parameters from ``main_grad``; ``norm`` is `gradient_norm`."""
        if self.kind == "megatron":
            self.inner.step()
            return
        scale = self.clip / norm if self.clip and norm > self.clip else 1.0
        for param in self.params:
            param.grad = param.main_grad * scale
        self.inner.step()
        for param in self.params:
            param.grad = None
