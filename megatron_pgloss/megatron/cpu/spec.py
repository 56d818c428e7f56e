"""The GPT layer spec for CPU: Megatron's local layers with attention and norms of our own."""

from __future__ import annotations

from typing import Any

from megatron_pgloss.megatron.cpu.attention import CoreAttention
from megatron_pgloss.megatron.cpu.norm import Norm


def layer_spec(config: Any, experts: int | None) -> Any:
    """One GPT layer, dense or with ``experts`` experts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,  # grouped GEMM is a CUDA extension; experts run one after the other
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts = spec.submodules
    parts.input_layernorm = Norm
    parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec


def _is_expert_layer(config: Any) -> list[bool]:
    """One flag per layer of the whole model, from ``config.moe_layer_freq`` (every N-th, or a 0/1 list)."""
    if not config.num_moe_experts:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(config.num_layers)]
    return [bool(flag) for flag in frequency]


def cpu_layer_spec(config: Any, *, vp_stage: int | None = None) -> Any:
    """The decoder block of this pipeline (and virtual) stage, for ``GPTModel(transformer_layer_spec=...)``.

    Dense, or mixture of experts where ``config.num_moe_experts`` is set (sequential experts). It does context
    parallelism, sequence parallelism, packed (thd) rows, grouped query attention and float64; it works on other
    devices too, and is slow there.

    Args:
        config: the model's ``TransformerConfig``.
        vp_stage: index of the model chunk on this rank, under virtual pipelining.

    Returns:
        ``TransformerBlockSubmodules``. A whole block rather than one layer, because the block's final norm must be
        ours too: the default one refuses sequence parallelism.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    start = get_transformer_layer_offset(config, vp_stage)
    count = get_num_layers_to_build(config, vp_stage)
    specs = {
        flag: layer_spec(config, config.num_moe_experts if flag else None) for flag in set(_is_expert_layer(config))
    }
    layers = [specs[flag] for flag in _is_expert_layer(config)[start : start + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def cpu_mtp_spec(config: Any, decoder: Any, *, vp_stage: int | None = None) -> Any:
    """An ``mtp_block_spec`` of ``GPTModel`` for CPU: layers like the decoder's last, on the last stage.

    Args:
        config: the model's ``TransformerConfig``.
        decoder: this stage's `cpu_layer_spec`.
        vp_stage: index of the model chunk on this rank, under virtual pipelining.

    Returns:
        A block spec, or None where this chunk has no layer of multi-token prediction.
    """
    if not getattr(config, "mtp_num_layers", None):
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    block = get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in block.layer_specs if block is not None else ():
        parts = layer.submodules
        parts.enorm = parts.hnorm = parts.layer_norm = Norm
    return block
