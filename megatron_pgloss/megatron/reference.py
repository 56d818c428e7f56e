"""The reference model beside a step, for the exact KL: its logits at every micro-batch of the last stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, LayoutError, SpecError
from megatron_pgloss.megatron import forward_only, outputs
from megatron_pgloss.megatron.call import Boundaries, Shard
from megatron_pgloss.megatron.runtime import Runtime, as_chunks
from megatron_pgloss.planning import MicroBatch, Plan


class Reference:
    """Logits of a frozen model, laid out as the policy's.

    Without pipelining it is run on each micro-batch as the loss needs it. With pipelining it has stages of its own,
    which cannot run inside the policy's schedule: `open` runs it forward-only over the whole step by a schedule of its
    own, and the last stage keeps the logits ``[b, s, V/tp]`` of every micro-batch until the step is closed.

    Args:
        model: the module or list of chunks, built on the policy's layout, wrapped or not. It is put into eval mode.

    Raises:
        SpecError: no component reads the exact KL.
        LayoutError: the reference has another number of chunks than the policy.
    """

    def __init__(self, runtime: Runtime, model: Any) -> None:
        self.chunks = as_chunks(model)
        if not runtime.spec.needs_exact_kl:
            raise SpecError(
                "reference= is read by the exact KL alone, which this spec does not have",
                expected='KL(estimator="exact", to="ref")',
                fix='log-probs of the reference: step.score(batches, REFERENCE, into="ref")',
            )
        if len(self.chunks) != len(runtime.chunks):
            raise LayoutError(
                "the reference is cut into another number of chunks than the policy",
                expected=len(runtime.chunks), got=len(self.chunks), fix="build both on the same layout",
            )  # fmt: skip
        for chunk in self.chunks:
            chunk.eval()
        self._runtime, self._logits = runtime, list[Tensor]()

    def open(self, made: Plan) -> None:
        """Make ready for the micro-batches of ``made``; a collective under pipelining."""
        if self._runtime.layout.pp_size > 1:
            self._logits = forward_only.reference_logits(self._runtime, made, self.chunks)

    def logits(self, micro: MicroBatch) -> Tensor:
        """The reference's logits ``[b, s, V/tp]`` on ``micro``, for the last stage; they have no graph."""
        if self._runtime.layout.pp_size > 1:
            return self._logits[micro.number]
        with torch.no_grad():
            # A shard with notes of its own: boundaries that the reference reads have not reached the policy.
            apart = Shard.of(micro, 0, Boundaries())
            return outputs.for_logprobs(self._runtime.run_model(apart, self.chunks[0]))  # type: ignore[no-any-return]

    def close(self) -> None:
        """Drop the logits that were kept."""
        self._logits.clear()


def needed(given: Tensor | None, reference: Reference | None, micro: MicroBatch) -> Tensor:
    """The reference's logits for ``micro``: those handed to the loss function, else those of the step's own reference.

    Raises:
        DataError: there are neither.
    """
    if given is not None:
        return given
    if reference is None:
        raise DataError(
            "the spec reads the exact KL, and no logits of the reference came",
            expected="[b, s, V/tp] of the same micro-batch",
            fix="PolicyLossStep(..., reference=MODEL), or a forward step of your own with step.loss_func(micro, "
            "ref_logits=LOGITS)",
        )
    return reference.logits(micro)
