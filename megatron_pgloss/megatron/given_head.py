"""The head that reads logits as the model makes them. Shapes: `b` rows and `s` positions of this rank's shard of a
micro-batch, `N` of its tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.logprobs import TokenLogprobs, token_logprobs
from megatron_pgloss.logprobs.head.gemm import HeadDtype
from megatron_pgloss.megatron.head_dtype import OneSided, of_dtype, rounded, some
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import KeptSet


class GivenHead:
    """Logits ``[b, s, V/tp]`` as the model makes them.

    Args:
        layout: this rank's process groups.
        vocab_size: columns from this index on are padding; None: no column is.
        reuse_logits: whether to write the gradient into the logits' own storage.
        kept: how sampled tokens are scored on the sets that they were drawn from; None: on the whole vocabulary.
        padded_vocab: the number of columns that the model says it has, padding included.
        sampler_head: the numbers in which the sampler makes its logits; None: not declared.
    """

    def __init__(
        self, layout: Layout, vocab_size: int | None, reuse_logits: bool, kept: KeptSet | None = None,
        padded_vocab: int | None = None, sampler_head: HeadDtype | None = None,
    ) -> None:  # fmt: skip
        self._layout, self._vocab, self._reuse, self._kept = layout, vocab_size, reuse_logits, kept
        self._padded, self._one_sided = padded_vocab, OneSided(sampler_head, layout.tp_rank == 0)

    @contextmanager
    def attached(self, bare: Any) -> Iterator[dict[str, Any]]:
        """A context that changes nothing: the model gives logits by itself."""
        yield {}

    def logprobs(
        self, micro: MicroBatch, output: Tensor, *, entropy: bool, ref_logits: Tensor | None = None
    ) -> TokenLogprobs:
        """Log-probs from logits; the reference's logits have the same shape."""
        if output.shape[:2] != micro.shape:
            raise DataError(
                "the model's output has the wrong shape", expected=[*micro.shape, "V/tp"], got=list(output.shape)
            )
        ids = micro.spec.chosen if micro.spec is not None else None
        if self._one_sided.pending(of_dtype(output.dtype), output.dtype):
            self._compare(micro, output.detach())
        return token_logprobs(
            output, micro.targets, chosen_ids=None if ids is None else micro.wide(ids), temperature=micro.temperature,
            entropy=entropy, ref_logits=ref_logits, kept=micro.kept_by(self._kept), group=self._layout.tp,
            vocab_size=self._vocab, padded_vocab=self._padded, reuse_logits=self._reuse,
        )  # fmt: skip

    def _compare(self, micro: MicroBatch, output: Tensor) -> None:
        """The model's logits beside the same logits rounded as the sampler's head does, on some real tokens."""
        sampler, own = self._one_sided.sampler, of_dtype(output.dtype)
        place_N = some((micro.index_N >= 0).nonzero()[:, 0]).to(output.device, non_blocking=True)
        if sampler is None or not place_N.numel():
            return
        tau = None if micro.temperature is None else micro.temperature.reshape(-1)[place_N]
        z_NV, target_N = output.reshape(-1, output.size(-1))[place_N], micro.targets.reshape(-1)[place_N]

        def scored(logits: Tensor) -> Tensor:
            return token_logprobs(
                logits, target_N, temperature=tau, group=self._layout.tp, vocab_size=self._vocab,
                padded_vocab=self._padded,
            ).logprob  # fmt: skip

        finer = output.dtype.itemsize > 2 and sampler in ("bf16", "fp16")
        self._one_sided.say(own, scored(z_NV), (lambda: scored(rounded(z_NV, sampler))) if finer else None)
