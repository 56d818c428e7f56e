"""`PolicyLossStep`: the loss plugged into Megatron-Core's schedules. `N` positions of this rank's shard of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss import finishing
from megatron_pgloss.errors import DataError, LayoutError, PGLossError, SpecError
from megatron_pgloss.megatron import counting, factors, finish, forward_only, mtp, outputs
from megatron_pgloss.megatron.head import HeadMode
from megatron_pgloss.megatron.reference import Reference, needed
from megatron_pgloss.megatron.runtime import Runtime, as_chunks
from megatron_pgloss.objective import LossOutput, policy_loss
from megatron_pgloss.objective.measure import names
from megatron_pgloss.planning import MicroBatch, Plan, Split
from megatron_pgloss.rollouts import TokenBatch, broken
from megatron_pgloss.spec import LossSpec


class PolicyLossStep(Runtime):
    """One training job's loss, from rollouts to metrics.

    Args:
        spec: what to train.
        model: the module, or list of chunks, handed to the schedule, wrapped as it will run: all else is read from it.
        split: how rows become micro-batches.
        pg_collection: process groups; None: Megatron's parallel_state.
        on_nonfinite: what `finish` does with NaN or infinity inside a component: ``raise`` on every rank; ``skip``:
            zero the gradients and set ``should_step`` to False; ``report`` in the metrics alone.
        allow_empty_microbatches: accept empty micro-batches although MoE auxiliary losses average over them.
        reuse_logits: write the logits' gradient into their own storage.
        vocab_size: the tokenizer's. Columns from here on are padding (their number depends on tensor parallelism), no
            part of the softmax; None: every column of the model is a token, as in Megatron's own cross entropy.
        head: ``given``: log-probs from the model's logits. Else from its hidden states and the head's weight:
            ``keep``, ``recompute``, ``forward``, ``auto`` (`megatron_pgloss.megatron.head.FusedHead`).
        head_memory: bytes that ``auto`` may spend on kept logits.
        reference: the frozen model of an exact KL, laid out as ``model`` (`megatron_pgloss.megatron.reference`).

    Raises:
        UnsupportedError, SpecError: a refused mode (`megatron_pgloss.megatron.modes`), or factors that cannot be
            established.
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
        head: HeadMode = "given",
        head_memory: int = 2**31,
        reference: Any = None,
    ) -> None:
        if on_nonfinite not in ("raise", "skip", "report"):
            raise SpecError(f"on_nonfinite={on_nonfinite!r}", expected="'raise', 'skip' or 'report'")
        super().__init__(
            spec, model, split=split, pg_collection=pg_collection, vocab_size=vocab_size, head=head,
            head_memory=head_memory, reuse_logits=reuse_logits,
        )  # fmt: skip
        self.on_nonfinite = on_nonfinite
        self.reference = None if reference is None else Reference(self, reference)
        self._allow_empty = allow_empty_microbatches
        self._plan: Plan | None = None
        self._counted: int  # Megatron's token count of the step that is open, in per-token mode
        self._mtp = mtp.Weight()
        self.should_step = True
        """Whether the optimizer should step, after `finish`: False after skipped faults, or where nothing can move."""

    # ---- planning -------------------------------------------------------------------------------------------------

    def begin(
        self, batches: Sequence[TokenBatch], *, coef: Mapping[str, float] | None = None, version: int | None = None
    ) -> Plan:
        """Plan one optimizer step. A collective over the world.

        The model, its wrappers and its config are read and checked anew, since trainers fill their config late.
        Where the spec decides something over the whole step (`LossSpec.needs_statistics_pass`), the model first
        runs over the micro-batches forward-only, in eval mode.

        Args:
            batches: this data-parallel rank's share, the same on its tensor, context and pipeline ranks; may be ``[]``.
            coef: coefficients of this step by component name.
            version: version of the weights being trained, for `Staleness` and ``old="interpolate"``.

        Returns:
            The plan; also read through ``num_microbatches``, ``seq_length``, ``micro_batch_size``.

        Raises:
            PGLossError: the same on every rank.
        """
        self.close()
        try:
            self.look_again()
        except PGLossError as error:
            batches = [broken(error)]  # the plan raises it on every rank: it may show on one stage alone
        made = self.make_plan(batches, self.spec, coef=coef, version=version)
        empty = made.job["empty_microbatches"]
        if empty and counting.has_moe_losses(self.config) and not self._allow_empty:
            raise LayoutError(
                "a micro-batch would be empty, and MoE auxiliary losses average over it",
                expected="no empty micro-batch",
                got=f"{empty} of {made.num_microbatches * made.ranks.data_size}",
                fix="fewer micro-batches (a larger Split), more rows, or allow_empty_microbatches=True",
            )
        if made.needs_statistics_pass:
            made = forward_only.statistics_pass(self, made)
        if self.per_token:
            self._counted = counting.total(made, self.layout, padding=self._padding_counts)
            if mtp.active(self.config):
                self._mtp.open(self.config, self._counted, made.job["actions"])
        if self.reference is not None:
            self.reference.open(made)
        self._plan = made
        self.should_step = made.has_signal
        return made

    def close(self) -> None:
        """Leave the open step without `finish`, after an error say; Megatron's config is as it was before `begin`."""
        self._plan = None
        self._mtp.close()
        if self.reference is not None:
            self.reference.close()

    @property
    def _padding_counts(self) -> bool:
        return counting.all_positions(self.config, fixed=self.arrangement.fixed)

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

    # ---- the schedule's callbacks ---------------------------------------------------------------------------------

    def data_iterator(self) -> Iterator[MicroBatch] | list[Iterator[MicroBatch]]:
        """This rank's shards of the step's micro-batches; one iterator per chunk under virtual pipelining."""
        return self.iterators(self.plan)

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

    def loss_func(self, micro: MicroBatch, *, ref_logits: Tensor | None = None) -> Callable[..., Any]:
        """Megatron's ``loss_func`` for one micro-batch, in the return form of the config's mode.

        It takes the model's output: logits; a critic's values ``[b, s, 1]`` where the spec has `Value` alone;
        ``(logits, values)`` where it has both. ``ref_logits``: the reference's, for an exact KL without ``reference=``.
        """
        made = self.plan

        def loss(output: Any, non_loss_data: bool = False) -> Any:
            out = self._loss_of(micro, output, ref_logits)
            report = {name: metric.pack() for name, metric in out.metrics.items()}
            if non_loss_data:
                return report
            factor = 1 / (self.schedule_factor * self.wrapper_factor)
            if self.per_token:
                # Megatron divides by the sum of these counts over all ranks.
                tokens = counting.of(micro, padding=self._padding_counts)
                count = torch.full((), tokens, dtype=torch.int32, device=out.loss.device)
                return out.loss * (factor / factors.per_token_factor(self._counted)), count, report
            return out.loss * (factor * made.num_microbatches), report

        return loss

    def _loss_of(self, micro: MicroBatch, output: Any, ref_logits: Tensor | None) -> LossOutput:
        """The planned loss of ``micro`` from the model's output, by what the spec reads."""
        spec, lp, value = self.spec, None, None
        if beside := outputs.reads_logprobs(spec):
            ref = needed(ref_logits, self.reference, micro) if spec.needs_exact_kl else None
            lp = self.logprobs(micro, output, entropy=spec.needs_entropy, ref_logits=ref)
        if outputs.reads_value(spec):
            value = outputs.values(micro, output, beside=beside)
        return policy_loss(lp, micro, value=value)

    # ---- forward-only passes and the end of the step --------------------------------------------------------------

    def score(
        self, batches: Sequence[TokenBatch], model: Any = None, *, into: Literal["old", "ref", "rollout", "values"]
    ) -> list[TokenBatch]:
        """Score the rollouts forward-only, by the same schedule, split and head, in eval mode. A collective.

        Args:
            batches: this data-parallel rank's share, as for `begin`.
            model: the chunks to run, with the weights to score by; None: those of the step.
            into: ``old`` with the current weights, ``ref`` with the reference's loaded; ``values`` by a value head.

        Returns: the batches with whole rows scored, on every rank.
        """
        chunks = self.chunks if model is None else as_chunks(model)
        return forward_only.score(self, self.make_plan(batches, None), batches, chunks, into)

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
        self._mtp.close()
        # Read from the plan: the streams it carries are agreed, so all ranks expect the same vector.
        streams = frozenset(made.table)
        wanted = [
            name for part in self.spec.components for name in names(part, self.spec, streams, self.spec.needs_entropy)
        ]
        metrics, place, updated = finish.collect(list(losses), wanted, made, self.layout)
        if updated:  # an evaluation is none
            made.mark_updated()
        self.close()
        results = finishing.results(metrics, made)
        error = finish.nonfinite(metrics, place)
        if made.recorder is not None and updated:
            if error is None or self.on_nonfinite == "report":
                forward_only.settle(self, made)
            else:
                made.recorder.forget()
        results["skipped"] = float(error is not None and self.on_nonfinite == "skip")
        if error is not None and self.on_nonfinite == "raise":
            raise error
        if results["skipped"]:
            self.should_step = False
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
        return results
