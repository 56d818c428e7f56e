"""The planned loss of one micro-batch, from those parts of a model's output that the spec reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_pgloss.megatron import outputs
from megatron_pgloss.megatron.reference import Reference, needed
from megatron_pgloss.megatron.runtime import Runtime
from megatron_pgloss.objective import LossOutput, policy_loss
from megatron_pgloss.planning import MicroBatch


def micro_loss(
    runtime: Runtime, reference: Reference | None, micro: MicroBatch, output: Any, ref_logits: Tensor | None
) -> LossOutput:
    """`policy_loss` of ``micro``.

    Args:
        output: the model's output, as `PolicyLossStep.loss_func` takes it.
        ref_logits: the reference model's logits, for an exact KL without ``reference``.
    """
    spec, lp, value = runtime.spec, None, None
    if beside := outputs.reads_logprobs(spec):
        ref = needed(ref_logits, reference, micro) if spec.needs_exact_kl else None
        lp = runtime.logprobs(micro, output, entropy=spec.needs_entropy, ref_logits=ref)
    if outputs.reads_value(spec):
        value = outputs.values(micro, output, beside=beside)
    return policy_loss(lp, micro, value=value)
