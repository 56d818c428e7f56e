"""The stack of a HybridModel on CPU: attention, MLP and expert layers, without the Mamba kernels.

It needs megatron-core 0.18 or later, which has ``HybridModel``; import this module only there.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_pgloss.megatron.cpu.norm import Norm
from megatron_pgloss.megatron.cpu.spec import layer_spec


class Stack(HybridStack):  # type: ignore[misc]
    """A HybridStack whose final norm is `Norm`, because Megatron's own class takes that of Transformer Engine."""

    def __init__(self, config: Any, submodules: Any, *, post_layer_norm: bool = True, **more: Any) -> None:
        super().__init__(config, submodules, post_layer_norm=False, **more)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)


def cpu_hybrid_spec(config: Any) -> Any:
    """A ``hybrid_stack_spec`` of ``HybridModel`` for patterns of ``*`` (attention), ``-`` (MLP) and ``E`` (experts).

    Each layer is half of a GPT layer of `cpu_layer_spec`, with its norm in front.

    Args:
        config: the model's ``TransformerConfig``.
    """
    dense = layer_spec(config, None).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=Norm, self_attention=dense.self_attention, self_attn_bda=dense.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=dense.mlp, mlp_bda=dense.mlp_bda)
    parts = {
        "attention_layer": ModuleSpec(module=TransformerLayer, submodules=attention),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=mlp),
    }
    if config.num_moe_experts:
        experts = layer_spec(config, config.num_moe_experts).submodules
        halves = TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=experts.mlp, mlp_bda=experts.mlp_bda)
        parts["moe_layer"] = ModuleSpec(module=TransformerLayer, submodules=halves)
    return ModuleSpec(module=Stack, submodules=HybridStackSubmodules(**parts))
