"""`PolicyLossStep`: the loss plugged into Megatron-Core's schedules. `N` positions of this rank's shard of a
micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss.errors import Caught, DataError
from megatron_pgloss.logprobs.head.gemm import HeadDtype
from megatron_pgloss.megatron import call, counting, factors, finish, forward_only, gradients, mtp, padding
from megatron_pgloss.megatron.call import Boundaries, Forward, Shard
from megatron_pgloss.megatron.head import HeadMode
from megatron_pgloss.megatron.micro_loss import micro_loss
from megatron_pgloss.megatron.reference import Reference
from megatron_pgloss.megatron.runtime import Runtime
from megatron_pgloss.megatron.state import ModuleState
from megatron_pgloss.megatron.watch import Watch, watched
from megatron_pgloss.planning import MicroBatch, Plan, Split
from megatron_pgloss.rollouts import TokenBatch, broken
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.words import closed

_LOG = logging.getLogger(__name__)


@closed
class PolicyLossStep(Runtime):
    """One training job's loss, from rollouts to metrics.

    Args:
        spec: what to train.
        model: the module, or list of chunks, that the schedule is handed, wrapped as it will run; the config, the
            wrapper's factors and the head are read from it.
        split: how rows become micro-batches.
        pg_collection: process groups; None: Megatron's parallel_state.
        on_nonfinite: what `finish` does where the loss or a gradient is not finite: ``raise`` on every rank; ``skip``:
            zero the gradients and set ``should_step`` to False; ``report``: only say so in the metrics.
        allow_empty_microbatches: accept empty micro-batches although MoE auxiliary losses average over them.
        allow_routed_padding: let routers count padding (`megatron_pgloss.megatron.padding`).
        reuse_logits: write the logits' gradient into their own storage.
        vocab_size: the tokenizer's vocabulary size. Columns from there on are padding (their number depends on tensor
            parallelism) and no part of the softmax; None: every column of the model is a token, as in Megatron's own
            cross entropy.
        head: ``given`` reads the model's logits; ``keep``, ``keep32``, ``keep8``, ``recompute``, ``forward`` and
            ``auto`` read hidden states and the head's weight (`megatron_pgloss.megatron.head.FusedHead`).
        head_memory: bytes that ``auto`` may spend on stored logits.
        sampler_head: the numbers in which the sampler's head makes logits: ``bf16`` or ``fp16`` (rounded to it),
            ``fp32``, ``tf32``; None: not declared.
        head_dtype: the numbers of a fused head; None: the sampler's, or ``fp32`` where that is not declared. Another
            one than the sampler's warns, with the k3 between the two on the first micro-batch. `note` has all of it.
        reference: the frozen model of an exact KL, laid out as ``model`` (`megatron_pgloss.megatron.reference`).
        forward: ``FN(model, micro, inputs) -> output``, how the model is run on a micro-batch, in training, scoring,
            the statistics pass and evaluation; for models whose ``forward`` has another signature. ``inputs`` has the
            keywords that the step would hand over (`inputs`), and the fused head's. None: ``model(**inputs)``.
        patience: seconds in one phase after which a rank logs for whom it waits (`megatron_pgloss.megatron.watch`);
            None: 120, or half of the world's timeout if that is less.

    Raises:
        UnsupportedError, SpecError: a refused mode (`megatron_pgloss.megatron.modes`), or factors that cannot be
            established.
        LayoutError: a process group is missing.
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
        allow_routed_padding: bool = False,
        reuse_logits: bool = True,
        vocab_size: int | None = None,
        head: HeadMode = "given",
        head_memory: int = 2**31,
        head_dtype: HeadDtype | None = None,
        sampler_head: HeadDtype | None = None,
        reference: Any = None,
        forward: Forward | None = None,
        patience: float | None = None,
    ) -> None:
        super().__init__(
            spec, model, split=split, pg_collection=pg_collection, vocab_size=vocab_size, head=head,
            head_memory=head_memory, head_dtype=head_dtype, sampler_head=sampler_head, reuse_logits=reuse_logits,
            forward=forward, on_nonfinite=on_nonfinite,
        )  # fmt: skip
        self.reference = None if reference is None else Reference(self, reference)
        self._allow_empty, self._allow_padding = allow_empty_microbatches, allow_routed_padding
        self._agreed |= {"allow_empty_microbatches": self._allow_empty, "allow_routed_padding": self._allow_padding}
        self._agreed["reference"] = reference is not None
        self._plan: Plan | None = None
        self._boundaries = Boundaries()
        self._state: ModuleState | None = None  # what a skip puts back
        self._counted: int  # Megatron's token count of the step that is open, in per-token mode
        self._mtp = mtp.Weight()
        self.watch = Watch(self.layout.ranks.world_rank, self.layout.ranks.world_size, patience)
        self.should_step = True
        """After `finish`: whether the optimizer should step; not after a skip, an evaluation, or without a gradient."""

    # ---- planning -------------------------------------------------------------------------------------------------

    @watched("begin", then="schedule")
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
        if self._plan is not None and self._plan.ledger.updated:
            _LOG.warning(
                "begin: the previous step was left without finish, so its losses and gradients were not looked at. "
                "Call step.finish(losses) before the optimizer steps, or step.close() where a step is given up."
            )
        self._close()
        with Caught() as here:
            self.look_again()
        if here.error is not None:
            batches = [broken(here.error)]  # the plan raises it on every rank: it may show on one stage alone
        made = self.make_plan(batches, self.spec, coef=coef, version=version)
        if not self._allow_empty:
            counting.refuse_empty(made, self.config)
        self.masked = self.masks_padding(made)
        if made.needs_statistics_pass:
            made = forward_only.statistics_pass(self, made)
        if self.per_token:
            self._counted = counting.total(made, self.layout, padding=self._padding_counts)
            if mtp.active(self.config):
                self._mtp.open(self.config, self._counted, made.job["actions"])
        if self.reference is not None:
            self.reference.open(made)
        self._plan, self._boundaries = made, Boundaries()
        self._state = ModuleState(self.chunks) if self.on_nonfinite == "skip" else None
        self.should_step = made.has_signal
        return made

    def close(self) -> None:
        """Leave the open step without `finish`: no update was made, rows may be tried again, the config is put back."""
        if self._plan is not None:
            self._plan.ledger.take_back()
        self._close()

    def _close(self) -> None:
        self._plan = self._state = None
        self._mtp.close()
        if self.reference is not None:
            self.reference.close()

    def masks_padding(self, made: Plan) -> bool:
        """Whether a step of ``made`` hands the model ``padding_mask``; refused where padding would be routed."""
        takes = self.takes("padding_mask")
        return padding.masked(self.config, self.layout, made, takes_mask=takes, allowed=self._allow_padding)

    @property
    def _padding_counts(self) -> bool:
        return not self.masked and counting.all_positions(self.config, fixed=self.arrangement.fixed)

    @property
    def plan(self) -> Plan:
        """The plan of the step that `begin` opened."""
        if self._plan is None:
            fix = "call step.begin(batches) before the schedule, step.finish(losses) once after it; later: begin's plan"
            raise DataError("no step is open", expected="a step between begin and finish", fix=fix)
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

    def data_iterator(self) -> Iterator[Shard] | list[Iterator[Shard]]:
        """This rank's shards of the step's micro-batches; one iterator per chunk under virtual pipelining."""
        return self.iterators(self.plan, self._boundaries)

    def forward_step(
        self,
        data_iterator: Iterator[Shard],
        model: Any,
        checkpoint_activations_microbatch: Any = None,
        *,
        return_schedule_plan: bool = False,
    ) -> tuple[Any, Callable[..., Any]]:
        """Megatron's ``forward_step_func``: run the model on the next micro-batch and hand over its loss function."""
        self.refuse_another(model)
        micro = call.following(data_iterator)
        with self.watch.during("forward", micro.number, then="schedule"):
            return self.run_model(micro, model), self.loss_func(micro)

    def loss_func(self, micro: MicroBatch, *, ref_logits: Tensor | None = None) -> Callable[..., Any]:
        """Megatron's ``loss_func`` for one micro-batch, in the return form of the config's mode.

        It takes the model's output: logits; a critic's values ``[b, s, 1]`` where the spec has `Value` alone;
        ``(logits, values)`` where it has both. ``ref_logits``: the reference model's, for an exact KL without
        ``reference=``.
        """
        made = self.plan

        def loss(output: Any, non_loss_data: bool = False) -> Any:
            with self.watch.during("loss", micro.number, then="schedule"):
                out = micro_loss(self, self.reference, micro, output, ref_logits)
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

    # ---- forward-only passes and the end of the step --------------------------------------------------------------

    @watched("score", then="idle")
    def score(
        self, batches: Sequence[TokenBatch], model: Any = None, *, into: str,
        under: AbstractContextManager[Any] | None = None,
    ) -> list[TokenBatch]:  # fmt: skip
        """Score the rollouts forward-only, by the same schedule, split and head, in eval mode. A collective.

        Args:
            batches: this data-parallel rank's share, as for `begin`.
            model: the chunks to run, with the weights to score by; None: those of the step.
            into: ``old`` with the current weights, ``ref`` or a reference that the spec names (``KL(to=NAME)``) with
                the weights of that reference; ``values`` by a value head.
            under: a context that is entered for the pass on every rank, for example one that switches adapters off.

        Returns: the batches with whole rows scored, on every rank.
        """
        return forward_only.score(self, batches, model, into, under)

    @watched("finish", then="idle")
    def finish(self, losses: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Close the step: one gather over the world. Every rank calls it, before the optimizer steps.

        Args:
            losses: what ``forward_backward_func`` returned on this rank (``[]`` before the last stage).

        Returns:
            The same numbers on every rank: ``loss`` (with coefficients) and the table of `megatron_pgloss.metrics`.

        Raises:
            NonFiniteError: with ``on_nonfinite="raise"``, on every rank alike.
            DataError: packed rows were run without their boundaries, or the reports are not this step's; on every rank
                alike.
        """
        made = self.plan
        self._mtp.close()
        # A rank that sees no loss cannot tell an update from an evaluation, so it looks; the ranks decide together.
        look = made.ledger.pulled or made.batch is None or not self.layout.last_stage
        found = finish.collect(
            losses, finish.expected(self.spec, made), made, self.layout,
            gradient=gradients.largest(self.chunks, self.layout.device) if look else None,
            error=self.unread(made, self._boundaries),
        )  # fmt: skip
        made.ledger.mark_updated() if found.updated else made.ledger.take_back()  # an evaluation is no update
        state = self._state
        self._close()
        results = finish.results(found, made)
        error = finish.nonfinite(found, made, gradients=not gradients.loss_scaler_decides(self.config))
        # The model's own losses (MoE, MTP) have gradients where the policy has none.
        self.should_step = found.updated and (made.has_signal or found.gradient != 0)
        if error is not None and self.on_nonfinite != "report":
            made.ledger.take_back()
        elif made.ledger.recorder is not None and found.updated:
            forward_only.settle(self, made)
        results["skipped"] = float(error is not None and self.on_nonfinite == "skip")
        if error is not None and self.on_nonfinite == "raise":
            raise error
        if results["skipped"]:
            self.should_step = False
            gradients.zero(self.chunks)
            if state is not None:
                state.restore()
        return results
