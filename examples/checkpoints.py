"""Checkpoint and resume through Megatron's distributed checkpointing (on CPU it needs the package psutil)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.utils import unwrap_model
from optimizers import Optimizer

_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""The state that plain torch keeps for each parameter."""


def _sharded(chunks: list, optimizer: Optimizer, *, is_loading: bool) -> dict[str, Any]:
    """Model and optimizer as tensors that know their place in the whole model, so that any layout can read them."""
    state: dict[str, Any] = {f"model{i}": unwrap_model(chunk).sharded_state_dict() for i, chunk in enumerate(chunks)}
    if optimizer.kind == "megatron":
        state["optimizer"] = optimizer.inner.sharded_state_dict(dict(state), is_loading=is_loading)
        return state
    places = get_param_id_to_sharded_param_map(state, optimizer.params)
    for name in _MOMENTS[optimizer.kind]:
        state[name] = {
            i: make_sharded_optimizer_tensor(
                places[i], optimizer.inner.state[param].get(name, torch.zeros_like(param)), name
            )
            for i, param in enumerate(optimizer.params)
        }
    return state


def save(folder: str, chunks: list, optimizer: Optimizer, progress: dict[str, int]) -> None:
    """Write model, optimizer and ``progress`` into ``folder``. Every rank calls it."""
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    # Torch counts Adam's steps in each parameter's state; Megatron's optimizer keeps its own count.
    states = optimizer.inner.state.values() if optimizer.kind == "adam" else ()
    common = {"progress": progress, "updates": max((int(state["step"]) for state in states), default=0)}
    dist_checkpointing.save(_sharded(chunks, optimizer, is_loading=False) | common, folder)


def load(folder: str, chunks: list, optimizer: Optimizer) -> dict[str, int]:
    """Set model and optimizer from ``folder`` and return ``progress``. Every rank calls it."""
    state = dist_checkpointing.load(_sharded(chunks, optimizer, is_loading=True), folder)
    for i, chunk in enumerate(chunks):
        unwrap_model(chunk).load_state_dict(state[f"model{i}"])
    if optimizer.kind == "megatron":
        optimizer.inner.load_state_dict(state["optimizer"])
    for name in _MOMENTS.get(optimizer.kind, ()):
        for i, param in enumerate(optimizer.params):
            optimizer.inner.state[param][name] = state[name][i]
            optimizer.inner.state[param]["step"] = torch.tensor(float(state["updates"]))
    return state["progress"]
