"""`PolicyLossStep`: the loss plugged into Megatron-Core's schedules. `N` positions of this rank's shard of a
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_pgloss.errors import DataError, LayoutError, SpecError
from megatron_pgloss.logprobs import TokenLogprobs, token_logprobs
from megatron_pgloss.megatron import exchange, factors, modes, replay
from megatron_pgloss.megatron.context_parallel import shard
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.objective import policy_loss
from megatron_pgloss.objective.measure import names
from megatron_pgloss.planning import Arrangement, MicroBatch, Plan, Split, plan
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec import LossSpec

_INT32 = 2**31


class PolicyLossStep:
    """One training job's loss, from rollouts to metrics.

    Args:
        spec: what to train.
        model: the module, or list of chunks, that is handed to the schedule, wrapped as it will run. Config,
            data-parallel wrapper and Float16Module are read from it.
        split: how rows become micro-batches.
        pg_collection: process groups; None: Megatron's parallel_state.
        on_nonfinite: what `finish` does with NaN or infinity inside a component: ``raise`` on every rank; ``skip``:
            zero the gradients and set ``should_step`` to False; ``report`` in the metrics alone.
        allow_empty_microbatches: accept empty micro-batches although MoE auxiliary losses average over them.
        reuse_logits: write the logits' gradient into their own storage.
        vocab_size: the tokenizer's. Columns from here on are padding (their number depends on tensor parallelism), no
            part of the softmax; None: every column of the model is a token, as in Megatron's own cross entropy.

    Raises:
        UnsupportedError: a refused mode (`megatron_pgloss.megatron.modes`), or factors that cannot be established.
        LayoutError: process groups missing.
    """

    def __init__(
        self,
        spec: LossSpec,
        model: Any,
        *,
        split: Split,
        pg_collection: Any = None,
        on_nonfinite: Literal["raise", "skip", "report"] = "raise",
        allow_empty_microbatches: bool = False,
        reuse_logits: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        if on_nonfinite not in ("raise", "skip", "report"):
            raise SpecError(f"on_nonfinite={on_nonfinite!r}", expected="'raise', 'skip' or 'report'")
        self.spec, self.split, self.on_nonfinite = spec, split, on_nonfinite
        self.chunks: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
        self.config = get_model_config(self.chunks[0])
        self.layout = Layout.read(pg_collection)
        bare = [unwrap_model(chunk) for chunk in self.chunks]
        modes.refuse(modes.Job(config=self.config, chunks=self.chunks, bare=bare, layout=self.layout))
        self.per_token = bool(self.config.calculate_per_token_loss)
        self.schedule_factor = factors.schedule_factor(self.config, self.layout)
        self.wrapper_factor = factors.wrapper_factor(self.chunks, self.layout)
        self.vocab_size: int | None = vocab_size or getattr(bare[0], "vocab_size", None)
        self._allow_empty, self._reuse = allow_empty_microbatches, reuse_logits
        self._plan: Plan | None = None
        self._routed_tokens = 0
        self.should_step = True
        """Whether the optimizer should step, after `finish`: False where faults are skipped or nothing can move the
        policy.
        """

    # ---- planning -------------------------------------------------------------------------------------------------

    def begin(self, batches: Sequence[TokenBatch], *, coef: Mapping[str, float] | None = None) -> Plan:
        """Plan one optimizer step. A collective over the world.

        Args:
            batches: this data-parallel rank's share, the same on all its tensor, context and pipeline ranks; ``[]`` is
                legal.
            coef: coefficients of this step by component name.

        Returns:
            The plan; also read through ``num_microbatches``, ``seq_length``, ``micro_batch_size``.

        Raises:
            PGLossError: the same on every rank.
        """
        self._plan = None
        made = self._make_plan(batches, self.spec, coef)
        empty = made.job["empty_microbatches"]
        if empty and self._has_moe_losses and not self._allow_empty:
            raise LayoutError(
                "a micro-batch would be empty, and MoE auxiliary losses average over it",
                expected="no empty micro-batch",
                got=f"{empty} of {made.num_microbatches * made.ranks.data_size}",
                fix="fewer micro-batches (a larger Split), more rows, or allow_empty_microbatches=True",
            )
        self._routed_tokens = self._routed(made) if self.per_token else 0
        if self._routed_tokens >= _INT32:
            raise LayoutError(
                "the step routes more tokens than Megatron's int32 counter holds",
                expected=f"< {_INT32}",
                got=self._routed_tokens,
                fix="calculate_per_token_loss=False, or smaller steps",
            )
        self._plan = made
        self.should_step = made.has_signal
        return made

    def _make_plan(
        self, batches: Sequence[TokenBatch], spec: LossSpec | None, coef: Mapping[str, float] | None = None
    ) -> Plan:
        interleaved = None
        if len(self.chunks) > 1:
            interleaved = (int(self.config.microbatch_group_size_per_vp_stage), self.layout.pp_size)
        return plan(
            batches, spec, split=self.split, coef=coef, ranks=self.layout.ranks, arrangement=self._arrangement,
            interleaved=interleaved, vocab_size=self.vocab_size,
        )  # fmt: skip

    @property
    def _arrangement(self) -> Arrangement:
        tp, cp = self.layout.tp_size, self.layout.cp_size
        multiple = (2 * cp if cp > 1 else 1) * (tp if self.config.sequence_parallel else 1)
        # The allgather dispatcher exchanges equally many tokens between expert-parallel ranks.
        experts = int(getattr(self.config, "expert_model_parallel_size", 1) or 1)
        fixed = not (self.config.variable_seq_lengths and experts == 1)
        return Arrangement(multiple=math.lcm(multiple, self.split.multiple_of), fixed=fixed, left=True)

    @property
    def _has_moe_losses(self) -> bool:
        if not getattr(self.config, "num_moe_experts", None):
            return False
        aux = getattr(self.config, "moe_aux_loss_coeff", 0) or 0
        return bool(max(aux) if isinstance(aux, list | tuple) else aux) or bool(self.config.moe_z_loss_coeff)

    @property
    def plan(self) -> Plan:
        """The plan of the step that `begin` opened."""
        if self._plan is None:
            raise DataError("no step is open", fix="call step.begin(batches) first")
        return self._plan

    @property
    def num_microbatches(self) -> int:
        """For the schedule; equal on all ranks and legal for an interleaved one."""
        return self.plan.num_microbatches

    @property
    def seq_length(self) -> int:
        """For the schedule: width of the rows, or tokens of a packed row, before context parallelism."""
        return self.plan.width

    @property
    def micro_batch_size(self) -> int:
        """For the schedule: rows per micro-batch; 1 where packed."""
        return self.plan.rows_per_microbatch

    def _routed(self, made: Plan) -> int:
        """Positions that enter the model in the whole step, padding included: what Megatron's token count must add up
        to.
        """
        if made.arrangement.fixed:
            return made.width * made.rows_per_microbatch * made.num_microbatches * made.ranks.data_size
        mine = sum(math.prod(micro.shape) for micro in made.microbatches("cpu"))
        ranks = self.layout.ranks
        return int(ranks.gather(torch.tensor([mine]), ranks.data, ranks.data_size).sum())

    # ---- the schedule's callbacks ---------------------------------------------------------------------------------

    def data_iterator(self) -> Iterator[MicroBatch] | list[Iterator[MicroBatch]]:
        """This rank's shards of the step's micro-batches; one iterator per chunk under virtual pipelining."""
        return self._iterators(self.plan)

    def _iterators(self, made: Plan) -> Iterator[MicroBatch] | list[Iterator[MicroBatch]]:
        def shards() -> Iterator[MicroBatch]:
            for micro in made.microbatches(self.layout.device):
                yield shard(micro, self.layout.cp_rank, self.layout.cp_size, self.layout.cp)

        return [shards() for _ in self.chunks] if len(self.chunks) > 1 else shards()

    def forward_step(
        self,
        data_iterator: Iterator[MicroBatch],
        model: Any,
        checkpoint_activations_microbatch: Any = None,
        *,
        return_schedule_plan: bool = False,
    ) -> tuple[Any, Callable[..., Any]]:
        """Megatron's ``forward_step_func``: run the model on the next micro-batch and hand over its loss function."""
        micro = next(data_iterator)
        return self.run_model(micro, model), self.loss_func(micro)

    def run_model(self, micro: MicroBatch, model: Any) -> Any:
        """The model's output on ``micro``: vocabulary-parallel logits ``[b, s, V/tp]`` on the last stage."""
        extra: dict[str, Any] = {}
        if micro.cu_seqlens is not None:
            cu = micro.cu_seqlens.to(micro.device, non_blocking=True)
            extra["packed_seq_params"] = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu, cu_seqlens_kv_padded=cu,
                max_seqlen_q=micro.max_seqlen, max_seqlen_kv=micro.max_seqlen,
            )  # fmt: skip
        if modes.in_chain(model, "Float16Module"):
            # It would upcast the logits: twice the memory, and more traffic than the whole loss.
            extra["fp32_output"] = False
        return model(micro.input_ids, micro.position_ids, None, **extra)

    def logprobs(self, micro: MicroBatch, logits: Tensor, *, entropy: bool) -> TokenLogprobs:
        """Log-probs of ``micro.targets`` under the sampler's temperature; one collective over tensor-parallel ranks."""
        if logits.shape[:2] != micro.shape:
            raise DataError(
                "the model's output has the wrong shape", expected=[*micro.shape, "V/tp"], got=list(logits.shape)
            )
        return token_logprobs(
            logits, micro.targets, temperature=micro.temperature, entropy=entropy, group=self.layout.tp,
            vocab_size=self.vocab_size, reuse_logits=self._reuse,
        )  # fmt: skip

    def loss_func(self, micro: MicroBatch) -> Callable[..., Any]:
        """Megatron's ``loss_func`` for one micro-batch, in the return form of the config's mode."""
        made = self.plan

        def loss(logits: Tensor, non_loss_data: bool = False) -> Any:
            out = policy_loss(self.logprobs(micro, logits, entropy=self.spec.needs_entropy), micro)
            report = {name: metric.pack() for name, metric in out.metrics.items()}
            if non_loss_data:
                return report
            factor = 1 / (self.schedule_factor * self.wrapper_factor)
            if self.per_token:
                # Megatron divides by the routed tokens of all ranks, so that MoE losses keep their weight.
                count = torch.full((), math.prod(micro.shape), dtype=torch.int32, device=logits.device)
                return out.loss * (factor / factors.per_token_factor(self._routed_tokens)), count, report
            return out.loss * (factor * made.num_microbatches), report

        return loss

    # ---- forward-only passes and the end of the step --------------------------------------------------------------

    def score(
        self, batches: Sequence[TokenBatch], model: Any = None, *, into: Literal["old", "ref", "rollout"]
    ) -> list[TokenBatch]:
        """Score the rollouts forward-only, by the same schedule, split and head, in eval mode. A collective.

        Args:
            batches: this data-parallel rank's share, as for `begin`.
            model: the chunks to run, with the weights to score by; None: those of the step.
            into: the stream to set: ``old`` with the current weights, ``ref`` with the reference's loaded.

        Returns:
            The batches with whole rows scored, on every rank.
        """
        chunks = self.chunks if model is None else list(model) if isinstance(model, list | tuple) else [model]
        return replay.score(self, self._make_plan(batches, None), batches, chunks, into)

    def finish(self, losses: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Close the step: one gather over the world. Every rank calls it, before the optimizer steps.

        Args:
            losses: what ``forward_backward_func`` returned on this rank (``[]`` before the last stage).

        Returns:
            The same numbers on every rank: ``loss`` (with coefficients) and the table of `megatron_pgloss.metrics`.

        Raises:
            NonFiniteError: with ``on_nonfinite="raise"``, on every rank alike.
        """
        made = self.plan
        # Read from the plan: the streams it carries are agreed, so all ranks expect the same vector.
        streams = frozenset(made.table)
        wanted = [
            name for part in self.spec.components for name in names(part, self.spec, streams, self.spec.needs_entropy)
        ]
        metrics, place, updated = exchange.collect(list(losses), wanted, made, self.layout)
        if updated:  # an evaluation is none
            made.mark_updated()
        self._plan = None
        results = {name: metric.result() for name, metric in metrics.items() if not name.endswith("/fault_at")}
        for name, counts in made.counts.items():
            results |= {f"{name}/n_{what.replace(' ', '_')}": float(count) for what, count in counts.items()}
            if f"{name}/ratio_sq" in results:
                # Of the member tokens, how many equally weighted ones the ratios are worth: (sum r)^2 / (n sum r^2).
                results[f"{name}/ess"] = results[f"{name}/ratio"] ** 2 / results[f"{name}/ratio_sq"]
        results["loss"] = sum(coef * results[f"{name}/loss"] for name, coef in made.coef.items())
        error = exchange.nonfinite(metrics, place)
        results["skipped"] = float(error is not None and self.on_nonfinite == "skip")
        if error is not None and self.on_nonfinite == "raise":
            raise error
        if results["skipped"]:
            self.should_step = False
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
        return results
