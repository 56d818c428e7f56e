"""`Runtime`: the model as it runs on this rank, and all that planning a step, running micro-batches and scoring share.

Shapes: `b` rows and `s` positions of this rank's shard of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_pgloss.errors import DataError, PGLossError, SpecError
from megatron_pgloss.logprobs import TokenLogprobs
from megatron_pgloss.logprobs.head.gemm import HeadDtype
from megatron_pgloss.megatron import call, factors, modes, outputs, vocabulary
from megatron_pgloss.megatron import head_dtype as head_dtypes
from megatron_pgloss.megatron.call import Boundaries, Forward, Inputs, Shard
from megatron_pgloss.megatron.conditions import Setup
from megatron_pgloss.megatron.context_parallel import shard
from megatron_pgloss.megatron.head import Head, HeadMode, make_head
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.planning import Arrangement, MicroBatch, Plan, Split, plan
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec import LossSpec

NOTHING: Mapping[str, object] = MappingProxyType({})


class Runtime:
    """Spec, split, layout, head, and the model with its config.

    Args: as the arguments of `megatron_pgloss.megatron.PolicyLossStep` with the same names.

    Raises:
        UnsupportedError, SpecError: a refused mode (`megatron_pgloss.megatron.modes`), or factors that cannot be
            established.
        LayoutError: a process group is missing.
    """

    chunks: list[Any]
    """The model's chunks as handed to the schedule, wrapped."""
    config: Any
    per_token: bool
    """``calculate_per_token_loss``."""
    schedule_factor: float
    wrapper_factor: float

    def __init__(
        self,
        spec: LossSpec,
        model: Any,
        *,
        split: Split,
        pg_collection: Any,
        vocab_size: int | None,
        head: HeadMode,
        head_memory: int,
        head_dtype: HeadDtype | None,
        sampler_head: HeadDtype | None,
        reuse_logits: bool,
        forward: Forward | None,
        on_nonfinite: str,
    ) -> None:
        if on_nonfinite not in ("raise", "skip", "report"):
            raise SpecError(f"on_nonfinite={on_nonfinite!r}", expected="'raise', 'skip' or 'report'")
        if forward is not None:
            call.check(forward)
        self.spec, self.split = spec, split
        self._forward, self.on_nonfinite = forward, on_nonfinite
        self.masked = False
        """Whether the step that is open hands ``padding_mask`` over."""
        self.note: dict[str, str | None] = {
            "head": head, "head_dtype": head_dtypes.chosen(head, head_dtype, sampler_head),
            "sampler_head": sampler_head,
        }  # fmt: skip
        """The numbers in which the head works, for the checkpoint (`check_note`)."""
        head_dtypes.log_start(*self.note.values())  # type: ignore[arg-type]
        # The options that must be the same on all ranks, beside what a plan compares anyway.
        self._agreed: dict[str, object] = self.note | {
            "head_memory": head_memory, "reuse_logits": reuse_logits, "forward": forward is not None,
            "on_nonfinite": on_nonfinite, "vocab_size": vocab_size,
        }  # fmt: skip
        self.layout = Layout.read(pg_collection)
        self._model, self._head_mode = model, head
        bare = self.look_again()
        said = vocabulary.of_model(bare)
        if vocab_size is not None and said is not None and vocab_size > said:
            raise SpecError("vocab_size is larger than the model's", expected=f"at most {said}", got=vocab_size)
        self.vocab_size: int | None = vocab_size or said
        """Columns of the softmax, where anything says how many they are."""
        self._ids_below = self.vocab_size or vocabulary.of_embeddings(bare)
        self.head: Head = make_head(
            head, bare, self.layout, spec, vocab_size=self.vocab_size, padded=said, reuse=reuse_logits,
            memory=head_memory, head_dtype=self.note["head_dtype"],  # type: ignore[arg-type]
            sampler_head=sampler_head,
        )  # fmt: skip

    def look_again(self) -> list[Any]:
        """Read chunks, config, wrappers and factors as they are now, and refuse what would be wrong.

        It is called before every step: trainers fill their config late, and reading it again costs less than finding
        out whether it changed.

        Returns:
            The chunks, unwrapped.
        """
        self.chunks = as_chunks(self._model)
        self.config = get_model_config(self.chunks[0])
        self._bare = bare = [unwrap_model(chunk) for chunk in self.chunks]
        modes.refuse(
            Setup(
                config=self.config, chunks=self.chunks, bare=bare, layout=self.layout, spec=self.spec,
                head=self._head_mode, head_dtype=self.note["head_dtype"],
                packed=self.split.packed, own_forward=self._forward is not None,
                skips=self.on_nonfinite == "skip",
            )
        )  # fmt: skip
        self.per_token = bool(self.config.calculate_per_token_loss)
        self.schedule_factor = factors.schedule_factor(self.config, self.layout)
        self.wrapper_factor = factors.wrapper_factor(self.chunks, self.layout)
        return bare

    def check_note(self, saved: Mapping[str, str | None]) -> None:
        """Refuse to go on from a checkpoint whose `note` has other numbers than this step.

        Raises:
            SpecError: names what differs.
        """
        head_dtypes.compare_notes(self.note, saved)

    def refuse_another(self, model: Any) -> None:
        """Refuse to train a model that is not a chunk of the step's model.

        Raises:
            DataError: ``model`` is not such a chunk.
        """
        bare = unwrap_model(model)
        if not any(bare is one for one in self._bare):
            raise DataError(
                "forward_step got a model that is not the step's: its gradients would go where finish does not look",
                expected="a chunk of the model that the step was made of",
                got=type(bare).__name__,
                fix="hand the schedule the same model, or score another one by step.score(batches, MODEL, into=...)",
            )

    # ---- from batches to micro-batches ----------------------------------------------------------------------------

    def make_plan(
        self,
        batches: Sequence[TokenBatch],
        spec: LossSpec | None,
        *,
        agreed: Mapping[str, object] = NOTHING,
        **more: Any,
    ) -> Plan:
        """A plan of ``batches`` on this layout, without an objective where ``spec`` is None. A collective.

        Args:
            agreed: what the ranks must have in common beside the step's options, by name.
        """
        interleaved = None
        if len(self.chunks) > 1:
            interleaved = (int(self.config.microbatch_group_size_per_vp_stage), self.layout.pp_size)
        common = self._agreed | {"calculate_per_token_loss": self.per_token} | dict(agreed)
        return plan(
            batches, spec, split=self.split, ranks=self.layout.ranks,
            arrangement=replace(self.arrangement, agreed=tuple(common.items())),
            interleaved=interleaved, vocab_size=self._ids_below, **more,
        )  # fmt: skip

    @property
    def arrangement(self) -> Arrangement:
        """How rows are laid out so that layout and schedule can cut them."""
        tp, cp = self.layout.tp_size, self.layout.cp_size
        multiple = (2 * cp if cp > 1 else 1) * (tp if self.config.sequence_parallel else 1)
        # Expert-parallel dispatchers may size their buffers by the tokens of the first micro-batch they see.
        fixed = not self.config.variable_seq_lengths or self.config.expert_model_parallel_size > 1
        return Arrangement(multiple=math.lcm(multiple, self.split.multiple_of), fixed=fixed, left=True)

    def iterators(self, made: Plan, boundaries: Boundaries | None = None) -> Iterator[Shard] | list[Iterator[Shard]]:
        """This rank's shards of the plan's micro-batches; one iterator per chunk under virtual pipelining."""
        notes = boundaries or Boundaries()

        def shards(chunk: int) -> Iterator[Shard]:
            for micro in made.microbatches(self.layout.device):
                part = shard(micro, self.layout.cp_rank, self.layout.cp_size, self.layout.cp)
                notes.handed_out.add((chunk, micro.number))
                yield Shard.of(part, chunk, notes)

        return [shards(chunk) for chunk in range(len(self.chunks))] if len(self.chunks) > 1 else shards(0)

    # ---- from micro-batches to log-probs --------------------------------------------------------------------------

    def run_model(self, micro: MicroBatch, model: Any, **more: Any) -> Any:
        """The model's output on ``micro``: vocabulary-parallel logits ``[b, s, V/tp]`` on the last stage, or hidden
        states with a fused head; a critic's values ``[b, s, 1]``, or both. ``more`` overrides the step's own keywords.
        """
        bare, run = unwrap_model(model), self._forward or call.plain
        given = self._inputs(micro, model, strict=self._forward is None)
        with self.head.attached(bare) as own:
            given.update(own)
            given.update(more)
            return run(model, micro, given)

    def takes(self, name: str) -> bool:
        """Whether the ``forward`` of every chunk takes the keyword ``name``."""
        return all(call.taken(unwrap_model(chunk))(name) for chunk in self.chunks)

    def inputs(self, micro: MicroBatch, model: Any) -> Inputs:
        """Keywords for a call of ``model`` on ``micro`` in a forward step of your own.

        Of tokens, positions, boundaries of packed rows, the padding mask of a router and MTP's loss mask they are those
        that the model's ``forward`` names; with ``fp32_output=False`` for a Float16Module. They do not switch on a
        fused head: with one, run the model by `run_model`, or give the step ``forward=``.

        Raises:
            UnsupportedError: the model needs a keyword that its ``forward`` does not take.
        """
        return self._inputs(micro, model, strict=True)

    def _inputs(self, micro: MicroBatch, model: Any, *, strict: bool) -> Inputs:
        config = get_model_config(model)
        return call.inputs(micro, model, unwrap_model(model), config, strict=strict, masked=self.masked)

    @property
    def may_miss_boundaries(self) -> bool:
        """Whether a pass by `run_model` can run packed rows without their boundaries: the same on every rank."""
        return self.split.packed and self._forward is not None

    def unread(self, made: Plan, boundaries: Boundaries) -> PGLossError | None:
        """The error of packed rows that were run without their boundaries in a pass over ``made``, or None."""
        return boundaries.unread(len(self.chunks), made.num_microbatches) if self.split.packed else None

    def logprobs(
        self, micro: MicroBatch, output: Any, *, entropy: bool, ref_logits: Tensor | None = None
    ) -> TokenLogprobs:
        """Log-probs of ``micro.targets`` from what `run_model` gave, and the exact KL to ``ref_logits``."""
        return self.head.logprobs(micro, outputs.for_logprobs(output), entropy=entropy, ref_logits=ref_logits)

    @property
    def logprob_dtype(self) -> torch.dtype:
        """float64 for a float64 model, else float32."""
        return torch.float64 if self.config.params_dtype == torch.float64 else torch.float32


def as_chunks(model: Any) -> list[Any]:
    """The module, or the list of chunks, that a schedule takes, as a list."""
    return list(model) if isinstance(model, list | tuple) else [model]
