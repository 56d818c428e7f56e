"""State of modules that a step changes beside the gradients: `begin` keeps a copy, and a skip puts it back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ModuleState:
    """Buffers, persistent or not, and extra state of the modules of ``chunks`` as they are now.

    A mixture of experts has its selection bias and its counts of routed tokens there, and Megatron changes both in
    every step, a skipped one too. Modules of Transformer Engine are left out: their extra state is that of FP8 with
    delayed scaling, which `megatron_pgloss.megatron.modes` refuses together with a skip.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._buffers: list[tuple[Any, str, Tensor | None, Tensor | None]] = []
        self._extra: list[tuple[Any, Any]] = []
        for module in (module for chunk in chunks for module in chunk.modules()):
            for name, tensor in module._buffers.items():
                self._buffers.append((module, name, tensor, None if tensor is None else tensor.detach().clone()))
            kind = type(module)
            if kind.get_extra_state is not torch.nn.Module.get_extra_state and not _engine(kind):
                self._extra.append((module, copy.deepcopy(module.get_extra_state())))

    def restore(self) -> None:
        """Put all of it back, bit by bit."""
        for module, name, tensor, content in self._buffers:
            module._buffers[name] = tensor  # another tensor may stand there by now
            if tensor is None or content is None:
                continue
            if (tensor.dtype, tensor.shape) == (content.dtype, content.shape):
                tensor.detach().copy_(content)
            else:  # Megatron turns an expert bias into float32 in place
                tensor.data = content.clone()
        for module, extra in self._extra:
            module.set_extra_state(copy.deepcopy(extra))


def _engine(kind: type) -> bool:
    return any(base.__module__.startswith("transformer_engine") for base in kind.__mro__)
