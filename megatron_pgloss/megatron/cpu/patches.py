"""Make Megatron-Core, which calls CUDA by name, run in a process without CUDA.

Everything here is either a stand-in for a CUDA object (device, stream, event, generator) or a rewrite of a call
that names CUDA. None of it changes arithmetic, with two exceptions, explained where they stand: a router softmax
and Megatron's cross entropy, which pin float32, stay float64 in a float64 model.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megatron_pgloss.errors import UnsupportedError
from megatron_pgloss.megatron.cpu.gloo import share_devices

_CPU = torch.device("cpu")
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


def _caller_is_megatron() -> bool:
    """Whether the function that called the caller of this one is Megatron's."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.core")


def _without_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor of tensors that makes them on the CPU where CUDA is asked for, and pins no memory."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        # The token counter of the schedules, the loss scaler and clip_grads name a device.
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        # Pinned memory needs a CUDA runtime: rotary slices under context parallelism ask for it.
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_cpu


def _patch_constructors() -> None:
    """Replace the constructors one by one: a ``TorchFunctionMode``, which sees every call of torch, would take half the
    time of a step on a small model.
    """
    likes = {torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randn_like, torch.zeros_like}
    constructors: list[Any] = [*_device_constructors(), *likes]
    for name, function in [(function.__name__, function) for function in constructors]:
        if hasattr(torch, name) and getattr(torch, name) is function:
            setattr(torch, name, _without_cuda(function))


def _patch_tensors() -> None:
    kind, softmax = torch.Tensor.type, torch.softmax
    # torch.compile follows a method that it finds on the tensor, but not one that a closure holds.
    torch.Tensor._to_as_it_was = torch.Tensor.to

    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return self._to_as_it_was(*args, **kwargs)

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        # The optimizers sort parameters by names such as "torch.cuda.FloatTensor". Other callers get the real name.
        return found.replace("torch.", "torch.cuda.", 1) if not (args or kwargs) and _caller_is_megatron() else found

    def in_its_own_precision(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The router computes its scores in float32 whatever the model's dtype, which would end the agreement of float64
        # gradients at 1e-8. A float64 model keeps float64 there; other dtypes are untouched.
        if kwargs.get("dtype") is torch.float32 and input.dtype is torch.float64 and _caller_is_megatron():
            kwargs["dtype"] = torch.float64
        return softmax(input, *args, **kwargs)

    torch.softmax = in_its_own_precision
    stay = {name: lambda self, *_, **__: self for name in ("cuda", "pin_memory")}
    for name, method in {"to": to_cpu, "type": named, **stay}.items():
        setattr(torch.Tensor, name, method)


def _patch_cross_entropy() -> None:
    """Keep Megatron's cross entropy (of multi-token prediction) in float64 where the model is: its float32 would end
    the agreement of float64 gradients at 1e-8.
    """
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    largest = VocabParallelCrossEntropy.calculate_logits_max

    def in_float64(vocab_parallel_logits: torch.Tensor) -> Any:
        if vocab_parallel_logits.dtype is not torch.float64:
            return largest(vocab_parallel_logits)
        # During this call ``float()`` keeps the dtype, and it copies, because the function overwrites its argument.
        setattr(torch.Tensor, float.__name__, lambda self: self.clone())
        try:
            return largest(vocab_parallel_logits)
        finally:
            delattr(torch.Tensor, float.__name__)  # the method that it hid is the base class's

    VocabParallelCrossEntropy.calculate_logits_max = staticmethod(in_float64)


def _patch_torch_cuda() -> None:
    generator = torch.Generator().manual_seed(0)  # stands for the device's generator; nothing else draws from it

    def current_device() -> torch.device:
        return _CPU  # Megatron-Core uses it as device=torch.cuda.current_device() throughout

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

    # The original reads torch.cuda.default_generators; full recompute and every fork of the tracker go through it.
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
    """Undo ``jit_fuser`` on expert bias, the one method that a CPU step would compile: seconds for no gain."""
    from megatron.core.transformer.moe.router import TopKRouter

    fused = TopKRouter._apply_expert_bias
    TopKRouter._apply_expert_bias = getattr(fused, "_torchdynamo_orig_callable", fused)


def enable_cpu() -> None:
    """Make the installed Megatron-Core run on CPU under gloo, for this process. Calling it again does nothing.

    Call it before models are built; ``verify.layouts.models.init_parallel`` calls it. It leaves
    ``torch.cuda.is_available()`` False, and cannot be undone.

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
    _patch_constructors()
    _patch_tensors()
    _patch_cross_entropy()
    share_devices()
    _ENABLED = True
