"""The implementations that `bench_loss.py` sets side by side, found at run time; each may be absent with a reason.

Shapes: logits [T, V], hidden [T, H], weight [V, H], targets [T]. Every function returns (log-prob,
entropy or None), [T].
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., tuple[Tensor, Tensor | None]]


def logits_given(backends: list[str], megatron: str | None) -> Iterator[tuple[str, Run | str]]:
    """(name, function or the reason why it cannot run) of each implementation on logits [T, V] and targets."""
    from megatron_pgloss.logprobs.rows.backends import backend_problem

    for name in backends:
        problem = backend_problem(name, "cuda" if torch.cuda.is_available() else "cpu")
        yield f"ours, {name}", problem or ours(name)
        if problem is None:
            yield f"ours, {name}, logits untouched", ours(name, reuse=False)
    yield "naive torch", naive
    yield "naive, torch.compile", torch.compile(naive, dynamic=True)
    yield "Megatron unfused", megatron or megatron_unfused
    yield "Megatron fused", megatron or megatron_fused
    yield "verl", megatron or verl_or_reason()
    yield "Liger vocab-parallel CE", liger_or_reason()
    yield "cut-cross-entropy", "takes hidden states alone: see the fused heads"


def heads() -> Iterator[tuple[str, Run | str]]:
    """(name, function or the reason why it cannot run) of each implementation on hidden states, weight and targets."""
    if importlib.util.find_spec("megatron_pgloss.logprobs.head.linear"):
        for mode in ("keep", "recompute", "forward"):
            yield f"ours, {mode}", our_head(mode)
    yield "naive torch", naive_head
    yield "naive, torch.compile", torch.compile(naive_head, dynamic=True)
    yield "verl torch head", verl_head_or_reason()
    if torch.cuda.is_available():
        yield "cut-cross-entropy", cce_or_reason()
    else:
        yield "cut-cross-entropy", "its kernels need a GPU"
        yield "Liger fused linear", "its kernels need a GPU"


def ours(backend: str, reuse: bool = True) -> Run:
    """The package, writing the gradient over the logits, or into a tensor of its own."""
    from megatron_pgloss import token_logprobs

    def run(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        out = token_logprobs(logits, targets, entropy=True, reuse_logits=reuse, backend=backend)
        return out.logprob, out.entropy

    return run


def our_head(mode: str, chunk: int | None = None) -> Run:
    """The package's fused head; in mode ``forward`` the gradient is that of the bench's own loss.

    ``chunk``: tokens of one GEMM. None: the package's own number where logits are kept, else 512, so that there are
    several chunks and only one of them is held.
    """
    from megatron_pgloss.logprobs import linear_token_logprobs

    chunk = chunk or (4096 if mode == "keep" else 512)

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        more: dict[str, Any] = {}
        if mode == "forward":
            more["upstream"] = lambda logp, entropy: (torch.ones_like(logp), torch.full_like(logp, 0.1))
        out = linear_token_logprobs(hidden, weight, targets, entropy=True, mode=mode, chunk_tokens=chunk, **more)
        return out.logprob, out.entropy

    return run


def naive(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """The obvious implementation in plain torch."""
    logp = logits.float().log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def naive_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """The obvious implementation in plain torch, after the head's matrix product."""
    return naive(hidden @ weight.t(), targets)


def megatron_unfused(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Megatron's default: no entropy; destroys float32 logits."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits, targets), None


def megatron_fused(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Megatron's `cross_entropy_loss_fusion`: no entropy."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group()
    return -fused_vocab_parallel_cross_entropy(logits[None], targets[None], group)[0], None


def _file_of(package: str, path: str) -> Any:
    """One file of a package, without its other dependencies (verl's __init__ wants ray and tensordict)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / path
    if not file.exists():
        return None
    made = importlib.util.spec_from_file_location(f"bench_{package}_{file.stem}", file)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def verl_or_reason() -> Run | str:
    """verl's Megatron logits processor: entropy from a clone, then Megatron's cross entropy."""
    module = _file_of("verl", "utils/megatron/tensor_parallel.py")
    if module is None:
        return "not installed"
    module.dist = torch.distributed

    def run(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        entropy = module.vocab_parallel_entropy(logits.clone())
        return module.vocab_parallel_log_probs_from_logits(logits, targets), entropy

    return run


def verl_head_or_reason() -> Run | str:
    """verl's FusedLinearForPPO in torch."""
    try:
        module = _file_of("verl", "utils/experimental/torch_functional.py")
    except ImportError as error:
        return f"does not import: {error}"
    if module is None:
        return "not installed"
    # With Liger installed, verl would pick Liger's kernels, on a CPU too; this runs its torch path.
    module._LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY = None
    layer = module.FusedLinearForPPO(chunk_size=512)

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        logprob, entropy = layer(hidden[None], weight, targets[None])[:2]
        return logprob[0], entropy[0]

    return run


def liger_or_reason() -> Run | str:
    """Liger's vocab-parallel cross entropy: log-prob only."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "not installed"
    if not torch.cuda.is_available():
        return "its Triton kernels need a GPU"
    module = importlib.import_module("liger_kernel.ops.vocab_parallel_cross_entropy")
    function = module.LigerVocabParallelCrossEntropyFunction
    return lambda logits, targets: (-function.apply(logits, targets, None), None)


def cce_or_reason() -> Run | str:
    """Apple's cut cross entropy: log-prob only."""
    if importlib.util.find_spec("cut_cross_entropy") is None:
        return "not installed"
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, targets: (-function(hidden, weight, targets, reduction="none"), None)
