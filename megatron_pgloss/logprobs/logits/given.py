"""Log-probs and entropies from given logits: the public function.

Shapes: `Vl` columns of the local vocabulary shard; the leading dimensions [...] are those of the targets.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.errors import UnsupportedError
from megatron_pgloss.logprobs.inputs import (
    check_inputs,
    check_reference,
    check_separate_rows,
    inverse_temperature,
    rows_per_chunk,
    usual_chunk_elements,
)
from megatron_pgloss.logprobs.kept.renormalised import check_alone, kept_logprobs
from megatron_pgloss.logprobs.logits.chosen import check_chosen
from megatron_pgloss.logprobs.logits.exact_kl import GivenBoth, ReferenceJob
from megatron_pgloss.logprobs.logits.node import GivenJob, GivenLogits
from megatron_pgloss.logprobs.result import TokenLogprobs
from megatron_pgloss.logprobs.rows.backends import Backend, choose
from megatron_pgloss.logprobs.vocab.order import RowOrder
from megatron_pgloss.logprobs.vocab.shard import find_shard
from megatron_pgloss.maths.kept import Kept


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor | None = None,
    entropy: bool = False,
    lse: bool = False,
    ref_logits: Tensor | None = None,
    chosen_ids: Tensor | None = None,
    kept: Kept | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    padded_vocab: int | None = None,
    reuse_logits: bool = False,
    backend: Backend | None = None,
    chunk_elements: int | None = None,
) -> TokenLogprobs:
    """Log-probability of each target, and entropy, under softmax(logits / temperature).

    logp_t = z_t[target]/tau - lse_t,  lse_t = log sum_v exp(z_tv/tau),  H_t = -sum_v p_tv log p_tv

    Args:
        logits: bfloat16, float16, float32 or float64 [..., Vl], any strides. The maths is float32, or
            float64 on float64 logits; the gradient is rounded once, to the logits' dtype.
            Entries of -inf (masked columns) have probability 0 and gradient exactly 0.
        targets: int64 [...], global token ids. A target off the vocabulary gives log-prob NaN, and
            a NaN gradient if that log-prob is used: never a plausible number, and without a host sync.
            A target whose logit is -inf has log-prob -inf, and a NaN gradient too if that is used.
            Where the log-prob is not used (upstream gradient exactly 0), any label will do.
        temperature: None (1), a positive number, or a float32 or float64 tensor, 0-d or of
            targets' shape (size 1 along axes where it does not vary); a constant. A temperature that is
            not positive and finite is refused; in a tensor on an accelerator it makes that token's
            log-prob NaN instead, which the loss reports like any other non-finite value.
        entropy: also return the entropy in nats, with its gradient.
        lse: also return log-sum-exp in nats, with its gradient (for a z-loss).
        ref_logits: the reference model's logits, of the same shape and any of the dtypes; a constant. If given, also
            return the exact KL(p || q) over the vocabulary, with its gradient; q is the reference's distribution at
            the same temperature. The pass still makes one collective, of two more numbers per token. It runs on the
            eager backend alone.
        chosen_ids: int64 [..., k], -1 where a token has fewer than k: also return the log-probs at these ids, each with
            its gradient (a teacher's top-k, for `TopKDistill`). The pass still makes one collective, of k more numbers
            a token. An id off the vocabulary gives NaN, and so does a row that names an id twice. Cannot be combined
            with ref_logits.
        kept: the set of tokens that the sampler could draw from (``MicroBatch.kept``, a
            `megatron_pgloss.maths.kept.Kept`): log-prob, entropy and lse are renormalised on that set,
            ``TokenLogprobs.kept`` is its share of the vocabulary, and a target outside it (``TokenLogprobs.outside``)
            has log-prob -inf. Recorded ids cost no further collective. Recomputed sets cost one all-reduce of [T, 256]
            int64 for each byte of a logit in each search (top-k, top-p), and one of [T] for top-p and min-p. It runs
            on the eager backend alone. Cannot be combined with ref_logits or chosen_ids.
        group: None where logits hold the whole vocabulary; else the tensor-parallel group, whose
            ranks hold equal contiguous shards in rank order and the same targets. Every rank of it
            makes the call, and all get the same bits.
        vocab_size: number of real vocabulary columns, over all shards. Columns at or beyond it are padding:
            they are no part of the softmax and get gradient 0. None: every column counts.
        padded_vocab: columns of all shards together, padding included: needed where the vocabulary is so small that
            one shard has room for it, and reads as gathered logits otherwise.
        reuse_logits: let backward write the gradient into the logits' own memory, so that no further
            [T, Vl] tensor is ever made. The caller gives the logits away: a second backward is refused, and
            so is (by torch's version check) any other backward that needs them unchanged. It does not
            matter whether they are a leaf. If False, the logits are never written to.
        backend: "triton", "compiled" or "eager" by name (refused where it cannot run). None: Triton on
            CUDA where it is installed; on a CPU compiled loops from 16,384 columns on, if there is a
            C++ compiler (the first call then compiles for some seconds); else, and for float64, eager.
            `logprobs.backend_report()`, which `doctor` prints, says why a backend cannot run.
        chunk_elements: how many logits are worked on at a time. Scratch memory is two buffers of this many
            elements (at least one row) in the dtype of the maths (eager), and a third in the logits' dtype
            where rows without a gradient lie between rows with one (eager, compiled). None: on a CPU 2^18
            per thread, which fits a core's cache; else 2^24.

    Returns:
        TokenLogprobs: ``logprob`` and, where asked for, ``entropy``, ``lse``, ``kl``, ``kept`` and ``outside`` of
        targets' shape, and ``chosen`` of ``chosen_ids``' shape; float32 (float64 on float64 logits), ``outside`` bool.

    Rows whose upstream gradients are all exactly 0 get gradient 0, whatever their logits hold.
    Only first derivatives exist: create_graph=True is refused.

    Raises:
        DataError, SpecError: unusable shapes, dtypes, devices or temperature.
        LayoutError: logits that cannot be a shard of the vocabulary, such as gathered logits beside a group.
        UnsupportedError: options that cannot be combined, or a backend that cannot run; in backward, a second backward
            through reused logits, or create_graph=True.
    """
    if chunk_elements is None:
        chunk_elements = usual_chunk_elements(logits.device)
    check_inputs(logits, targets, chunk_elements)
    if ref_logits is not None:
        check_reference(ref_logits, logits, backend)
    if chosen_ids is not None:
        check_chosen(chosen_ids, targets)
        if ref_logits is not None:
            raise UnsupportedError(
                "chosen_ids and ref_logits cannot be combined in one pass", fix="pass one of the two"
            )
    shard = find_shard(logits.size(-1), group, vocab_size, padded_vocab)
    inverse_tau = inverse_temperature(temperature, targets)
    if kept is not None:
        check_alone(ref_logits, chosen_ids, backend)
        if reuse_logits and logits.requires_grad and torch.is_grad_enabled():
            check_separate_rows(logits)
        on_set = kept_logprobs(
            logits, targets, inverse_tau, kept, shard,
            entropy=entropy, lse=lse, reuse_logits=reuse_logits, chunk_elements=chunk_elements,
        )  # fmt: skip
        return TokenLogprobs(*on_set[:3], kept=on_set[3], outside=on_set[4])
    job = GivenJob(shard, RowOrder.of(logits), entropy, lse, reuse_logits, choose(logits, backend), chunk_elements)
    if reuse_logits and logits.requires_grad and torch.is_grad_enabled():
        check_separate_rows(logits)
    if ref_logits is not None:
        step = rows_per_chunk(chunk_elements, shard.width)
        both = ReferenceJob(shard, RowOrder.of(logits), entropy, lse, reuse_logits, step)
        return TokenLogprobs(*GivenBoth.apply(logits, ref_logits.detach(), targets, inverse_tau, both))
    # Where nothing requires a gradient, autograd drops the node and all that it would keep.
    logprob, entropies, lses, chosen = GivenLogits.apply(logits, targets, inverse_tau, chosen_ids, job)
    return TokenLogprobs(logprob, entropies, lses, chosen=chosen)
