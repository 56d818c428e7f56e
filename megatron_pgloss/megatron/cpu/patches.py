"""Make Megatron-Core, which asks CUDA by name, run in a process that has none.

Everything here is either a stand-in for a CUDA object (device, stream, event, generator) or a rewrite of a call
that names CUDA. None of it changes arithmetic, with two exceptions that are said where they stand: a router softmax
and Megatron's cross entropy, which pin float32, stay float64 in a float64 model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_pgloss.errors import UnsupportedError

_CPU = torch.device("cpu")
_CROSS_ENTROPY = "megatron.core.tensor_parallel.cross_entropy"
_ENABLED = False


class _Stream:
    """A CUDA stream that has always finished: CPU work is done when the call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        # All stand-ins are the one stream there is, so code that asks "am I on the side stream?" hears yes.
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: object) -> float:
        return 0.0


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _caller_is_megatron(depth: int = 2, of: str = "megatron.core") -> bool:
    return sys._getframe(depth).f_globals.get("__name__", "").startswith(of)


class _CpuMode(TorchFunctionMode):
    """Rewrites calls that name CUDA. Entered once for the life of the process, on the thread that enables it."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs:
            # torch.zeros(..., device="cuda"): the token counter of the schedules, the loss scaler, clip_grads.
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            # Pinned memory needs a CUDA runtime: rotary slices under context parallelism ask for it.
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            # The router computes its scores in float32 whatever the model's dtype, which would end the agreement
            # of float64 gradients at 1e-8. A float64 model keeps float64 there; other dtypes are untouched.
            if (
                func is torch.softmax
                and kwargs.get("dtype") is torch.float32
                and args
                and args[0].dtype is torch.float64
                and _caller_is_megatron()
            ):
                kwargs = {**kwargs, "dtype": torch.float64}
        # Megatron's cross entropy (of multi-token prediction) works in float32, which would end that agreement too. A
        # copy, as the conversion makes one: the function overwrites it.
        if func is torch.Tensor.float and args[0].dtype is torch.float64 and _caller_is_megatron(of=_CROSS_ENTROPY):
            return args[0].clone()
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _caller_is_megatron():
            # The optimizers sort parameters by names such as "torch.cuda.FloatTensor". Other callers get the truth.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **(kwargs or {}))


def _patch_torch_cuda() -> None:
    generator = torch.Generator().manual_seed(0)  # stands for the device's generator; nothing else draws from it

    def current_device() -> torch.device:
        return _CPU  # used as device=torch.cuda.current_device() in some 200 places

    def nothing() -> Callable[..., None]:
        # A function of its own for each name: torch._dynamo keeps a rule per object, and refuses one object with two.
        return lambda *_, **__: None

    def stream() -> Callable[..., _Stream]:
        return lambda *_, **__: _Stream()

    def get_rng_state(device: object = None) -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(new_state: torch.Tensor, *_: object, **__: object) -> None:
        generator.set_state(new_state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    for name, value in {
        "current_device": current_device,
        "synchronize": nothing(),  # after every batched pipeline message
        "set_device": nothing(),
        "empty_cache": nothing(),
        "Stream": _Stream,  # all-to-all dispatcher of the experts
        "Event": _Event,
        "current_stream": stream(),  # 0.19: every start_grad_sync
        "default_stream": stream(),
        "stream": stream(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed,
    }.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = get_rng_state

    from megatron.core.tensor_parallel import random as tp_random

    # Reads torch.cuda.default_generators; full recompute and every fork of the tracker go through it.
    tp_random._set_cuda_rng_state = set_rng_state


def _patch_experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 names it in the router even without Transformer Engine

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # The original converts split sizes to numpy only when it moves them off a GPU; all-to-all needs the numbers.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_cpu


def _plain_bodies() -> None:
    """Undo ``jit_fuser`` on the one method that a CPU step would compile (seconds for nothing): expert bias."""
    from megatron.core.transformer.moe.router import TopKRouter

    fused = TopKRouter._apply_expert_bias
    TopKRouter._apply_expert_bias = getattr(fused, "_torchdynamo_orig_callable", fused)


def enable_cpu() -> None:
    """Make the installed Megatron-Core run on CPU under gloo, for this process. Calling it again does nothing.

    Call it before models are built, outside any ``with torch.device(...)`` block;
    ``verify.layouts.models.init_parallel`` calls it. It holds for the calling thread (CPU backward passes run there
    too), leaves ``torch.cuda.is_available()`` False, and cannot be undone.

    Raises:
        UnsupportedError: where CUDA is available: there Megatron-Core needs no help.
    """
    global _ENABLED
    if _ENABLED:
        return
    if torch.cuda.is_available():
        raise UnsupportedError(
            "enable_cpu would hide this machine's GPU from Megatron-Core",
            expected="a process without CUDA",
            got=f"{torch.cuda.device_count()} CUDA device(s)",
            fix="run Megatron-Core as it is, or hide the devices with CUDA_VISIBLE_DEVICES=",
        )
    # Some Megatron paths assert it; the value has no meaning on CPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import megatron.core  # noqa: F401  before the patches: its import decides by what CUDA says

    _patch_torch_cuda()
    _patch_experts()
    _plain_bodies()
    _CpuMode().__enter__()
    _ENABLED = True
