"""Log-probs and entropies from hidden states and the LM head's weight: the public function.

Shapes: `T` rows (tokens), `H` hidden, `Vl` columns of the local vocabulary shard, `tp` shards.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.errors import DataError, LayoutError, SpecError
from megatron_pgloss.logprobs.head.backward import BackwardHead
from megatron_pgloss.logprobs.head.forward import HeadJob
from megatron_pgloss.logprobs.head.gemm import HeadDtype, check_head_dtype
from megatron_pgloss.logprobs.head.planned import LossGradients, PlannedHead
from megatron_pgloss.logprobs.head.stored import Store
from megatron_pgloss.logprobs.inputs import inverse_temperature, usual_chunk_elements
from megatron_pgloss.logprobs.result import TokenLogprobs
from megatron_pgloss.logprobs.vocab.shard import find_shard

Mode = Literal["keep", "keep32", "keep8", "recompute", "forward"]
MODES: dict[Mode, Store] = {
    "keep": "model", "keep32": "exact", "keep8": "byte", "recompute": "none", "forward": "none",
}  # fmt: skip
"""What each mode stores of the logits between forward and backward."""


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor | None = None,
    entropy: bool = False,
    scale: float = 1.0,
    rows: Tensor | None = None,
    live: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    padded_vocab: int | None = None,
    mode: Mode = "keep",
    head_dtype: HeadDtype = "fp32",
    upstream: LossGradients | None = None,
    into_main_grad: bool = False,
    chunk_tokens: int = 4096,
    chunk_elements: int | None = None,
) -> TokenLogprobs:
    """Log-probability of each target, and entropy, under softmax(scale hidden weight^T / temperature).

    The logits never leave this function. It computes them by one GEMM per chunk of tokens, runs the row passes of
    `token_logprobs` over them, and in backward computes dX = dZ W and dW += dZ^T h.

    Args:
        hidden: [T, H], or this rank's [T/tp, H] with ``sequence_parallel``; rows are tokens in the order of targets.
        weight: [Vl, H] of hidden's dtype: this rank's vocabulary shard.
        targets: int64 [T], the same on every rank of ``group``.
        temperature: as for `token_logprobs`; a tensor has targets' shape.
        entropy: also return the entropy, with its gradient.
        scale: multiplies the logits (muP's output multiplier).
        rows: int64 [N], ascending: the tokens that are wanted. The other tokens enter no GEMM; their log-prob and
            entropy are 0 and pass no gradient. None: all tokens are wanted.
        live: int64 [L], ascending: places among the wanted tokens of those that the loss may send a gradient to; the
            others enter no GEMM of backward. A gradient that arrives at one of these makes the whole gradient NaN:
            never a plausible one, and without a host sync. None: all wanted tokens. Mode ``forward`` does not read it.
        group: the tensor-parallel group over which the vocabulary is split, or None.
        sequence_parallel: ``hidden`` is a shard along T. It is gathered over ``group`` in forward and once more in
            backward, and its gradient is reduce-scattered. If False, the gradient is all-reduced over ``group``.
        vocab_size: number of real vocabulary columns; columns at or beyond it are padding. None: there is no padding.
        padded_vocab: as for `token_logprobs`.
        mode: ``keep`` stores the logits of the wanted rows for backward in the weight's dtype and overwrites them by
            their gradient (3 GEMMs, memory of N Vl elements); ``keep32`` stores them as they are, ``keep8`` in one byte
            (`head.stored`); ``recompute`` computes them once more, chunk by chunk (4 GEMMs, one chunk); ``forward``
            computes the gradient in the forward pass (3 GEMMs, one chunk and a [Vl, H] float32 sum) and needs
            ``upstream``. Log-prob and entropy are the same in all of them; 16-bit ``keep`` and ``keep8`` round the
            logits that the gradient is made of.
        head_dtype: numbers of the logits, `head.gemm`: ``fp32`` sums as they are, ``bf16`` or ``fp16`` rounds them as a
            sampler does whose head is not float32.
        upstream: for mode ``forward``: a function from (logprob [T], entropy [T] or None) to the loss's gradients by
            both, up to one common factor that backward finds by itself. A token's gradients must depend on that token
            alone: it is called once per chunk, with 0 at tokens outside the chunk.
        into_main_grad: add the weight's gradient to ``weight.main_grad``, as Megatron's own layers do (see
            `head.wgrad.WeightGrad`).
        chunk_tokens: tokens of one GEMM.
        chunk_elements: as for `token_logprobs`.

    Returns:
        TokenLogprobs of [T], float32 (float64 on float64).

    Gradient: first derivatives only, by one backward. Under ``no_grad`` every mode runs one GEMM per chunk and keeps
    nothing.

    Raises:
        DataError: shapes or dtypes that do not belong together.
        SpecError: an unknown mode or ``head_dtype``; ``forward`` without ``upstream``; an unusable temperature or
            chunk size.
        LayoutError: ``sequence_parallel`` without a group; shards that cannot make up the vocabulary.
        UnsupportedError: (in backward) a second backward; create_graph=True; in mode ``forward`` an incoming gradient
            that is not ``upstream``'s times one factor.

    Source: the row gradient is that of `token_logprobs`. docs/performance.md compares the modes.
    """
    if mode not in MODES:
        raise SpecError(f"no head mode {mode!r}", expected=" | ".join(MODES))
    check_head_dtype(head_dtype)
    if mode == "forward" and upstream is None:
        raise SpecError("mode='forward' takes the gradient before the loss is known", fix="pass upstream=")
    if chunk_tokens < 1:
        raise SpecError("chunk_tokens must be positive", got=chunk_tokens)
    shards = 1 if group is None else dist.get_world_size(group)
    if sequence_parallel and group is None:
        raise LayoutError("sequence_parallel needs the tensor-parallel group", fix="pass group=")
    _check(hidden, weight, targets, shards if sequence_parallel else 1)
    if chunk_elements is None:
        chunk_elements = usual_chunk_elements(hidden.device)
    inverse_tau = inverse_temperature(temperature, targets)
    if scale != 1.0:
        one = torch.full(targets.shape, float(scale), dtype=torch.float64, device=targets.device)
        inverse_tau = one if inverse_tau is None else inverse_tau * scale
    job = HeadJob(
        shard=find_shard(weight.size(0), group, vocab_size, padded_vocab), entropy=entropy, rows=rows, live=live,
        group=group,
        sequence_parallel=sequence_parallel, into_main_grad=into_main_grad, chunk_tokens=chunk_tokens,
        chunk_elements=chunk_elements, store=MODES[mode], head_dtype=head_dtype,
    )  # fmt: skip
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if mode == "forward" and needs_grad:
        assert upstream is not None
        logprob, entropies = PlannedHead.apply(hidden, weight, targets, inverse_tau, job, upstream)
    else:
        logprob, entropies = BackwardHead.apply(hidden, weight, targets, inverse_tau, job, needs_grad)
    return TokenLogprobs(logprob, entropies)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, shards: int) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.size(1) != weight.size(1):
        raise DataError(
            "hidden states and head weight do not belong together",
            expected="[T, H] and [Vl, H]",
            got=f"{list(hidden.shape)} and {list(weight.shape)}",
        )
    if hidden.dtype != weight.dtype:
        raise DataError("hidden states and head weight differ in dtype", got=f"{hidden.dtype} and {weight.dtype}")
    if targets.dtype != torch.int64:
        raise DataError("targets must be token ids", expected="int64", got=targets.dtype)
    if targets.shape != (hidden.size(0) * shards,):
        raise DataError(
            "targets do not belong to the hidden states",
            expected=f"[{hidden.size(0) * shards}]" + (" (rows of all sequence-parallel ranks)" if shards > 1 else ""),
            got=list(targets.shape),
        )
