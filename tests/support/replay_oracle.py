"""The oracle's training run: steps of examples/train_rl.py on recorded rollouts, in one process, from the formulas.

Only the rows of each step come from the run under test; scoring, loss, gradient, norm and update are computed here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import megatron_pgloss as pg
from megatron_pgloss.verify.oracle import oracle_logprobs, oracle_step

Row = dict[str, Any]
BETAS = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of the run; the model is that of ``examples/train_rl.py --layers 4``."""

    seed: int
    init_std: float
    optimizer: str
    lr: float
    clip: float = 0.0
    eps: float = 1e-8
    layers: int = 4
    hidden: int = 32


def rows_of(record: Path) -> dict[str, Row]:
    """The record file as the oracle's rows, by sample id. Advantages are the float32 numbers that a trace holds."""
    rows = {}
    for line in record.read_text().splitlines():
        data = json.loads(line)
        length = len(data["tokens"])
        action = [i % 3 != 0 for i in range(length)]
        rows[f"{data['iteration']}/{data['index']}"] = {
            "tokens": data["tokens"],
            "action": action,
            "observation": [i > 0 and not act for i, act in enumerate(action)],
            "advantages": torch.tensor([data["advantage"]]).double().expand(length).tolist(),
            "prompt": data["hidden"],
            "episode": data["index"],
            "termination": "success" if data["success"] else "failure",
        }
    return rows


def trajectory(
    record: Path, steps: list[dict[str, Any]], spec: pg.LossSpec, recipe: Recipe
) -> list[tuple[float, float]]:
    """Loss and gradient norm before each of ``steps``, in a process group of one that the caller has made."""
    from megatron_pgloss.verify.layouts.models import build_gpt, destroy_parallel, init_parallel
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    init_parallel()
    chunks = build_gpt(
        vocab_size=12, seq_length=64, hidden=recipe.hidden, heads=4, query_groups=None, ffn=2 * recipe.hidden,
        layers=recipe.layers, dtype=torch.float64,
    )  # fmt: skip
    deterministic_weights(chunks, seed=recipe.seed, std=recipe.init_std)
    module = chunks[0].module

    def model_fn(tokens: torch.Tensor) -> torch.Tensor:
        return module(tokens, torch.arange(tokens.shape[1])[None], None)

    params = [param for param in module.parameters() if param.requires_grad]
    initial = [param.detach().clone() for param in params]
    rows, out = rows_of(record), []
    state = [(torch.zeros_like(param), torch.zeros_like(param)) for param in params]
    for number, step in enumerate(steps):
        if step["update"] == 0:
            names = [name for name in rows if name.startswith(f"{step['iteration']}/")]
            _score([rows[name] for name in names], model_fn, "old")
            present = [param.detach().clone() for param in params]
            _set(params, initial)
            _score([rows[name] for name in names], model_fn, "ref")
            _set(params, present)
        answer = oracle_step(model_fn, [rows[name] for name in step["samples"]], spec.to_dict())
        grads = torch.autograd.grad(answer["loss"], params)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        out.append((float(answer["loss"]), norm))
        _update(params, grads, state, number + 1, norm, recipe)
    destroy_parallel()
    return out


def _score(rows: list[Row], model_fn: Any, stream: str) -> None:
    with torch.no_grad():
        for row in rows:
            logits = model_fn(torch.tensor(row["tokens"])[None])
            row[stream] = oracle_logprobs(logits[0], row["tokens"], None)[0].tolist()


def _set(params: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


@torch.no_grad()
def _update(params: Any, grads: Any, state: Any, count: int, norm: float, recipe: Recipe) -> None:
    """SGD, or Adam (1412.6980, algorithm 1), after clipping by the global norm; Megatron adds 1e-6 to that norm."""
    scale = min(1.0, recipe.clip / (norm + 1e-6)) if recipe.clip else 1.0
    for param, grad, (first, second) in zip(params, grads, state, strict=True):
        grad = grad * scale
        if recipe.optimizer == "sgd":
            param -= recipe.lr * grad
            continue
        first.mul_(BETAS[0]).add_((1 - BETAS[0]) * grad)
        second.mul_(BETAS[1]).add_((1 - BETAS[1]) * grad.square())
        mean, spread = first / (1 - BETAS[0] ** count), second / (1 - BETAS[1] ** count)
        param -= recipe.lr * mean / (spread.sqrt() + recipe.eps)
