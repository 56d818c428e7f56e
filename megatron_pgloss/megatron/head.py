"""From the last stage's output to log-probs: the interface of a head, and the fused one, which reads hidden states and
the head's weight (`megatron_pgloss.megatron.given_head` reads logits).

Shapes: `b` rows and `s` positions of this rank's shard of a micro-batch, `H` hidden, `T` = s b rows in the model's own
order (sequence first), `R` its tokens that are no padding, `V` vocabulary, `Vl` columns of one shard.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.logprobs import TokenLogprobs, linear_token_logprobs
from megatron_pgloss.logprobs.head.gemm import HeadDtype, logit_dtype
from megatron_pgloss.megatron.given_head import GivenHead
from megatron_pgloss.megatron.head_dtype import OneSided, some
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.objective.loss import loss_gradients
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import LossSpec, Value

_LOG = logging.getLogger(__name__)

HeadMode = Literal["given", "auto", "keep", "keep32", "keep8", "recompute", "forward"]
HEAD_MODES: tuple[HeadMode, ...] = get_args(HeadMode)


class Head(Protocol):
    """The interface by which a step gets log-probs."""

    def attached(self, bare: Any) -> Any:
        """A context in which the unwrapped model ``bare`` gives what `logprobs` reads; yields keywords for its call."""

    def logprobs(
        self, micro: MicroBatch, output: Tensor, *, entropy: bool, ref_logits: Tensor | None = None
    ) -> TokenLogprobs:
        """Log-probs of ``micro.targets`` ``[b, s]`` under the sampler's temperature, with the exact KL where there are
        reference logits; one collective over tensor-parallel ranks.
        """


class FusedHead:
    """Log-probs from hidden states and the LM head's weight; logits are made, if at all, for `wanted_rows` alone.

    Args:
        mode: ``keep``, ``keep32``, ``keep8``, ``recompute`` or ``forward`` (see `linear_token_logprobs`), or ``auto``:
            ``keep32`` while the unrounded logits of the wanted tokens fit into ``memory`` bytes, beyond that
            ``forward`` for objectives that are a function of each token alone and ``recompute`` for the others. These
            three give the same numbers; 16-bit ``keep`` and ``keep8`` round, and are never picked.
        bare: this rank's chunks, unwrapped.
        memory: bytes that stored logits may take.
        head_dtype: numbers of the logits (`megatron_pgloss.logprobs.head.gemm`).
        sampler_head: those of the sampler's, where they are declared.

    What it cannot run with is refused by `megatron_pgloss.megatron.modes`.
    """

    def __init__(
        self, mode: HeadMode, bare: list[Any], layout: Layout, spec: LossSpec, vocab_size: int | None, memory: int,
        head_dtype: HeadDtype = "fp32", sampler_head: HeadDtype | None = None,
    ) -> None:  # fmt: skip
        self._by_token = spec.by_token
        self._mode, self._layout, self._vocab, self._memory = mode, layout, vocab_size, memory
        self._dtype, self._one_sided = head_dtype, OneSided(sampler_head, layout.tp_rank == 0)
        self._said_bytes = False
        owners = [model for model in bare if getattr(model, "post_process", False)]
        self._owner: Any = owners[0] if owners else None

    @contextmanager
    def attached(self, bare: Any) -> Iterator[dict[str, Any]]:
        """A context in which ``bare`` hands over hidden states ``[b, s, H]`` in place of logits. It yields the keywords
        that ``bare.forward`` needs for that.
        """
        if not getattr(bare, "post_process", False):
            yield {}
        elif "output_processor" in inspect.signature(bare.forward).parameters:
            yield {"output_processor": _hidden}
        else:  # before megatron-core 0.18, and HybridModel: the layer passes hidden states through
            layer = bare.output_layer
            layer.forward = lambda hidden, *args, **kwargs: (hidden, None)
            try:
                yield {}
            finally:
                del layer.forward

    def logprobs(
        self, micro: MicroBatch, output: Tensor, *, entropy: bool, ref_logits: Tensor | None = None
    ) -> TokenLogprobs:
        """Log-probs from hidden states ``[b, s, H]`` (``s/tp`` positions under sequence parallelism)."""
        if ref_logits is not None:
            raise DataError("reference logits for a fused head, which makes no logits", fix="head='given'")
        hidden = output
        layer = self._owner.output_layer
        weight = self.weight
        rows, positions = micro.shape
        shards = self._layout.tp_size if layer.sequence_parallel else 1
        if hidden.dim() != 3 or hidden.shape != (rows, positions // shards, weight.size(1)):
            raise DataError(
                "the model did not hand over hidden states",
                expected=[rows, positions // shards, weight.size(1)],
                got=list(hidden.shape),
                fix="run the model by step.run_model(micro, model), which step.forward_step does",
            )
        flat = _Flat(rows, positions)
        wanted = wanted_rows(micro)
        live = live_rows(micro, wanted)
        index = wanted.to(weight.device, non_blocking=True)
        live = live if live is None else live.to(weight.device, non_blocking=True)
        training = torch.is_grad_enabled() and micro.spec is not None
        tau = micro.temperature
        flat_RH = hidden.transpose(0, 1).reshape(-1, weight.size(1))
        common: dict[str, Any] = dict(
            temperature=None if tau is None else flat.down(tau), scale=_scale(self._owner), group=self._layout.tp,
            sequence_parallel=layer.sequence_parallel, vocab_size=self._vocab,
            padded_vocab=weight.size(0) * self._layout.tp_size,  # a weight is never gathered
        )  # fmt: skip
        lp = linear_token_logprobs(
            flat_RH, weight, flat.down(micro.targets), entropy=entropy, rows=index, live=live, head_dtype=self._dtype,
            mode=self._pick(index.numel(), weight, training), upstream=_upstream(micro, flat),  # type: ignore[arg-type]
            into_main_grad=hasattr(weight, "main_grad") and hasattr(weight, "grad_added_to_main_grad"), **common,
        )  # fmt: skip
        if index.numel() and self._one_sided.pending(self._dtype, weight.dtype):
            few_N = some(index)

            def sampler() -> Tensor:
                with torch.no_grad():
                    other = linear_token_logprobs(
                        flat_RH.detach(), weight, flat.down(micro.targets), rows=few_N, mode="recompute",
                        head_dtype=self._one_sided.sampler or self._dtype, **common,
                    )  # fmt: skip
                return other.logprob[few_N]

            self._one_sided.say(self._dtype, lp.logprob.detach()[few_N], sampler)
        return TokenLogprobs(flat.up(lp.logprob), None if lp.entropy is None else flat.up(lp.entropy))

    @property
    def weight(self) -> Tensor:
        """The LM head's weight ``[Vl, H]``; that of the embedding where the two are tied."""
        if self._owner.share_embeddings_and_output_weights:
            return self._owner.shared_embedding_or_output_weight()  # type: ignore[no-any-return]
        return self._owner.output_layer.weight  # type: ignore[no-any-return]

    def _pick(self, rows: int, weight: Tensor, training: bool) -> str:
        if self._mode != "auto":
            return "recompute" if self._mode == "forward" and not training else self._mode
        logits = rows * weight.size(0)
        bytes_exact = logits * logit_dtype(weight.dtype, self._dtype).itemsize
        fits = bytes_exact <= self._memory
        picked = "keep32" if fits else "forward" if self._by_token and training else "recompute"
        if training and rows and not self._said_bytes:
            self._said_bytes = True
            _LOG.info(
                "head='auto' takes %s: exact logits of this micro-batch are %d bytes, head_memory=%d. By name only, "
                "since they round what the gradient is made of: head='keep' %d bytes, head='keep8' %d (%d saved).",
                picked, bytes_exact, self._memory, min(bytes_exact, logits * weight.element_size()), logits,
                bytes_exact - logits,
            )  # fmt: skip
        return picked


def make_head(
    mode: HeadMode, bare: list[Any], layout: Layout, spec: LossSpec, *, vocab_size: int | None, padded: int | None,
    reuse: bool, memory: int, head_dtype: HeadDtype | None = None, sampler_head: HeadDtype | None = None,
) -> Head:  # fmt: skip
    """The head called ``mode``. ``padded``: columns of the model, by its own word.

    Raises:
        SpecError: the mode is unknown, or ``vocab_size`` is not known under tensor parallelism.
    """
    if mode not in HEAD_MODES:
        raise SpecError(f"head={mode!r}", expected=" | ".join(HEAD_MODES))
    if mode == "given":
        if layout.tp_size > 1 and vocab_size is None:
            raise SpecError(
                "the model does not say how large its vocabulary is, and gathered logits could not be told from shards",
                expected="vocab_size", fix="PolicyLossStep(vocab_size=...), the tokenizer's",
            )  # fmt: skip
        return GivenHead(layout, vocab_size, reuse, spec.kept, padded, sampler_head)
    return FusedHead(mode, bare, layout, spec, vocab_size, memory, head_dtype or "fp32", sampler_head)


def wanted_rows(micro: MicroBatch) -> Tensor:
    """int64 ``[N]``, ascending in the model's order: the positions whose log-prob anything reads.

    In a step with an objective these are the members of components that read log-probs, and the sampled tokens, which
    statistics over units run over. In a scoring pass they are all real tokens. The result is on the CPU, as the plan
    is, so nothing waits for the device.
    """
    read_N = micro.index_N >= 0
    if micro.spec is not None:
        at_R = micro.index_N[read_N]  # the tokens of this micro-batch alone: tables have all of the rank's
        any_R = micro.table["action"][at_R]
        for part in micro.spec.components:
            if not isinstance(part, Value):
                any_R |= micro.shared.components[part.name].member_T[at_R]
        read_N = read_N.masked_scatter(read_N, any_R)
    return _Flat(*micro.shape).down(read_N.reshape(micro.shape)).nonzero()[:, 0]


def live_rows(micro: MicroBatch, wanted: Tensor) -> Tensor | None:
    """int64 ``[L]``, ascending: places among the ``wanted`` rows of those that the loss can send a gradient to: members
    with a weight whose advantage is not 0, or whose component moves without one. None: all of them, in a scoring pass
    and where a term at one token reads the log-probs of others. On the CPU, where the plan is: no sync.
    """
    spec, table = micro.spec, micro.table
    if spec is None or not spec.by_token or not table["tokens"].numel():
        return None
    real_N = micro.index_N >= 0
    at_R = micro.index_N[real_N]
    live_R = torch.zeros_like(at_R, dtype=torch.bool)
    for part in spec.components:
        if isinstance(part, Value) or not micro.shared.coef[part.name]:
            continue
        known = micro.shared.components[part.name]
        moves_R = known.member_T[at_R] & (known.weight_T[at_R] != 0)
        live_R |= moves_R if part.moves_at_zero_advantage else moves_R & (table["advantages"][at_R] != 0)
    live_N = real_N.masked_scatter(real_N, live_R)
    return _Flat(*micro.shape).down(live_N.reshape(micro.shape))[wanted].nonzero()[:, 0]


class _Flat:
    """[b, s] to the model's [s b] and back."""

    def __init__(self, rows: int, positions: int) -> None:
        self._shape = (positions, rows)

    def down(self, value: Tensor) -> Tensor:
        return value.t().reshape(-1)

    def up(self, value_T: Tensor) -> Tensor:
        return value_T.view(self._shape).t()


def _upstream(micro: MicroBatch, flat: _Flat) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """The objective's own gradients at given log-probs; the factors of schedule and wrapper come later."""

    def gradients(logprob_T: Tensor, entropy_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
        entropy = None if entropy_T is None else flat.up(entropy_T)
        g, h = loss_gradients(TokenLogprobs(flat.up(logprob_T), entropy), micro)
        return flat.down(g), None if h is None else flat.down(h)

    return gradients


def _hidden(*, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Megatron's ``output_processor``: [s, b, H] to [b, s, H], without the head."""
    return hidden_states.transpose(0, 1)


def _scale(model: Any) -> float:
    """muP's multiplier of the logits, as the model itself applies it."""
    if not getattr(model.config, "use_mup", False):
        return 1.0
    return float(model._scale_logits(torch.ones((), dtype=torch.float64)))
