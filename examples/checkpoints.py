"""Checkpoint and resume through Megatron's distributed checkpointing (its CPU path needs the package psutil)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.utils import unwrap_model
from optimizers import Optimizer


def _sharded(chunks: list, optimizer: Optimizer, *, is_loading: bool) -> dict[str, Any]:
    """Model and optimizer as Megatron's sharded tensors; every one knows its place in the whole model."""
    models = [unwrap_model(chunk) for chunk in chunks]
    model = {f"model{i}": part.sharded_state_dict() for i, part in enumerate(models)}
    if optimizer.kind == "megatron":
        return model | {"optimizer": optimizer.inner.sharded_state_dict(model, is_loading=is_loading)}
    if is_loading and not optimizer.inner.state and optimizer.kind == "adam":
        # Torch makes Adam's state at the first step; its shapes are needed to know what to read.
        for param in optimizer.params:
            zero = torch.zeros_like(param)
            optimizer.inner.state[param] = {"step": torch.zeros(()), "exp_avg": zero, "exp_avg_sq": zero.clone()}
    state = optimizer.inner.state_dict()
    places = get_param_id_to_sharded_param_map(model, optimizer.params)
    optim_state_to_sharding_state(state, places, exclude_keys=("step",))
    return model | {"optimizer": state}


def save(folder: str, chunks: list, optimizer: Optimizer, progress: dict[str, Any]) -> None:
    """Write model, optimizer and ``progress``. Every rank calls it."""
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_sharded(chunks, optimizer, is_loading=False) | {"progress": progress}, folder)


def load(folder: str, chunks: list, optimizer: Optimizer) -> dict[str, Any]:
    """Read model and optimizer in place and return ``progress``. Every rank calls it."""
    state = dist_checkpointing.load(_sharded(chunks, optimizer, is_loading=True), folder)
    for i, chunk in enumerate(chunks):
        unwrap_model(chunk).load_state_dict(state[f"model{i}"])
    optimizer.inner.load_state_dict(state["optimizer"])
    return state["progress"]
