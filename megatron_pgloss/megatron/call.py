"""What the model is called with on one micro-batch, beside tokens and positions."""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams

from megatron_pgloss.megatron import mtp
from megatron_pgloss.megatron.conditions import in_chain
from megatron_pgloss.planning import MicroBatch


def keywords(micro: MicroBatch, model: Any, config: Any) -> dict[str, Any]:
    """Keyword arguments of the model's ``forward``.

    Args:
        micro: this rank's shard.
        model: the chunk as the schedule hands it over, wrapped.
        config: its TransformerConfig.
    """
    found: dict[str, Any] = {}
    if micro.cu_seqlens is not None:
        cu = micro.cu_seqlens.to(micro.device, non_blocking=True)
        found["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu, cu_seqlens_kv_padded=cu,
            max_seqlen_q=micro.max_seqlen, max_seqlen_kv=micro.max_seqlen,
        )  # fmt: skip
    if mtp.active(config):
        found["loss_mask"] = mtp.loss_mask(micro)
    if in_chain(model, "Float16Module"):
        # It would upcast the logits: twice the memory, and more traffic than the whole loss.
        found["fp32_output"] = False
    return found
