"""Which operations a piece of code dispatches, forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique", "masked_select", "bincount")
"""Operations whose result, or the size of whose result, the host must know: on a GPU it waits for everything that was
launched before. ``unique`` stands for its variants."""


class Dispatched(TorchDispatchMode):
    """Counts operations by name; `waits` are those after which the host knows a value."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.number[name] += 1
        # The host waits in both: indexing by a mask finds its true places, and repeating by a tensor sums it.
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name.strip("_").startswith(("unique",)) or name in READS or by_mask or repeats:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))
