"""Small real Megatron-Core models (GPT, Hybrid), for every layout, on CPU and GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron_pgloss.errors import SpecError, UnsupportedError
from megatron_pgloss.megatron.cpu import cpu_layer_spec, cpu_mtp_spec
from megatron_pgloss.verify.layouts.parallel import Axes, axes, destroy_parallel, init_parallel

__all__ = ["Axes", "ModelConfig", "axes", "build_gpt", "build_hybrid", "destroy_parallel", "init_parallel"]

_HALF = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model that ``build_gpt`` or ``build_hybrid`` builds. Sizes of parallel dimensions come from
    ``parallel_state``.
    """

    vocab_size: int
    """Number of real tokens; the model's vocabulary is this rounded up to a multiple of ``vocab_multiple * tp``."""
    seq_length: int
    """Longest row, before context parallelism."""
    hidden: int = 32
    layers: int = 4
    heads: int = 4
    query_groups: int | None = 2
    """Key/value heads; None: as many as ``heads``."""
    ffn: int = 64
    dtype: torch.dtype = torch.float64
    """Dtype of parameters and activations. bf16 and fp16 models are wrapped in Float16Module, with float32 gradients.
    """
    norm: str = "RMSNorm"
    position: str = "rope"
    """``rope``, ``learned_absolute`` or ``none``."""
    tied: bool = False
    """The output layer shares the embedding's weight."""
    gated: bool = True
    """SwiGLU instead of GELU."""
    bias: bool = False
    vocab_multiple: int = 1
    pattern: str | None = None
    """For ``build_hybrid``: one letter per layer, ``*`` attention, ``-`` MLP, ``E`` experts; None: ``*-`` repeated."""
    experts: int | None = None
    topk: int = 2
    moe_ffn: int | None = None
    moe_aux_coeff: float = 0.0
    moe_z_coeff: float = 0.0
    moe_dispatcher: str | None = None
    """None: ``allgather``, or ``alltoall`` where ``variable_seq_lengths`` demands it."""
    sequence_parallel: bool = False
    per_token_loss: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    average_in_collective: bool = False
    bucket_size: int | None = None
    """Parameters per gradient bucket; there are several buckets under ``overlap_grad_reduce`` only."""
    variable_seq_lengths: bool = False
    batch_p2p_comm: bool | None = None
    """None: True, but False at PP 2 with VPP, where True swaps messages (megatron-core does not refuse it)."""
    recompute: str | None = None
    """``full`` or ``selective``."""
    wrap: bool = True
    """Wrap each chunk in Megatron's DistributedDataParallel."""
    layer_spec: str = "auto"
    """``own`` (plain torch, any device), ``local`` or ``te``. ``auto`` is ``own`` on CPU; on a GPU it is ``te`` where
    Transformer Engine is installed and the dtype is not float64, else ``local``, or ``own`` where context or sequence
    parallelism rules out ``local``.
    """
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of ``TransformerConfig``, by their own names."""

    def padded_vocab(self, tp: int) -> int:
        """The model's vocabulary, padding included, at tensor-parallel size ``tp``."""
        unit = self.vocab_multiple * tp
        return math.ceil(self.vocab_size / unit) * unit


def build_gpt(config: ModelConfig | None = None, /, **changes: Any) -> list[torch.nn.Module]:
    """This rank's chunks of a real ``GPTModel``, as a trainer would hand them to the schedule.

    ``parallel_output`` is on; each chunk is wrapped (Float16Module for half precision, then Megatron's DDP), moved
    to the GPU where there is one, and in train mode. ``config.finalize_model_grads_func`` is the real
    ``finalize_model_grads``; ``deallocate_pipeline_outputs`` is on; ``no_sync_func`` is set for overlap.

    Args:
        config: what to build; None: ``ModelConfig(**changes)``.
        changes: fields of ``ModelConfig`` that replace those of ``config``.

    Returns:
        One module, or one per virtual stage. Initial weights depend on the rank: set them by
        ``verify.layouts.weights.deterministic_weights`` or ``verify.layouts.reshard.load_full``.
    """
    return _build(_shape(config, changes), _gpt)


def build_hybrid(config: ModelConfig | None = None, /, **changes: Any) -> list[torch.nn.Module]:
    """`build_gpt` with a real ``HybridModel``: attention and MLP are separate layers, in the order of ``pattern``.

    Raises:
        UnsupportedError: megatron-core before 0.18, which has no HybridModel.
        SpecError: the pattern does not have ``layers`` letters, or they do not divide over the pipeline's stages.
    """
    if importlib.util.find_spec("megatron.core.models.hybrid") is None:
        raise UnsupportedError("this megatron-core has no HybridModel", expected="megatron-core 0.18 or later")
    shape = _shape(config, changes)
    pattern = ("*-" * shape.layers)[: shape.layers] if shape.pattern is None else shape.pattern
    if len(pattern) != shape.layers:
        raise SpecError(
            "the pattern must have one letter for each layer", expected=f"{shape.layers} letters", got=pattern
        )
    return _build(dataclasses.replace(shape, pattern=pattern), _hybrid)


def _shape(config: ModelConfig | None, changes: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(**changes) if config is None else dataclasses.replace(config, **changes)
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(ModelConfig))
        raise SpecError(f"build_gpt: {error}", expected=f"fields of ModelConfig: {known}") from error


def _build(shape: ModelConfig, make: Callable[..., Any]) -> list[torch.nn.Module]:
    from megatron.core.distributed import finalize_model_grads

    where = axes()
    transformer = _transformer_config(shape, where)
    stages = range(where.vpp) if where.vpp > 1 else [None]
    chunks = [_finish(shape, transformer, make(shape, transformer, where, stage)) for stage in stages]
    if not shape.wrap:
        return chunks
    chunks = [_wrap(shape, transformer, chunk, index) for index, chunk in enumerate(chunks)]
    transformer.finalize_model_grads_func = finalize_model_grads
    if shape.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = functions[0] if len(functions) == 1 else functions
    return chunks


def _transformer_config(shape: ModelConfig, where: Axes) -> Any:
    from megatron.core.transformer import TransformerConfig

    fields: dict[str, Any] = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups or shape.heads,
        ffn_hidden_size=shape.ffn,
        normalization=shape.norm,
        gated_linear_unit=shape.gated,
        activation_func=F.silu if shape.gated else F.gelu,
        add_bias_linear=shape.bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=shape.dtype,
        bf16=shape.dtype is torch.bfloat16,
        fp16=shape.dtype is torch.float16,
        pipeline_dtype=shape.dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
        tensor_model_parallel_size=where.tp,
        pipeline_model_parallel_size=where.pp,
        virtual_pipeline_model_parallel_size=where.vpp if where.vpp > 1 else None,
        context_parallel_size=where.cp,
        expert_model_parallel_size=where.ep,
        expert_tensor_parallel_size=where.etp,
        sequence_parallel=shape.sequence_parallel and where.tp > 1,
        calculate_per_token_loss=shape.per_token_loss,
        variable_seq_lengths=shape.variable_seq_lengths,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type=shape.moe_dispatcher or ("alltoall" if shape.variable_seq_lengths else "allgather"),
        # megatron-core overlaps messages in interleaved schedules with unbatched messages only.
        batch_p2p_comm=shape.batch_p2p_comm
        if shape.batch_p2p_comm is not None
        else not (where.pp == 2 and where.vpp > 1),
    )
    if shape.experts:
        fields |= dict(
            num_moe_experts=shape.experts,
            moe_router_topk=shape.topk,
            moe_ffn_hidden_size=shape.moe_ffn or shape.ffn,
            moe_aux_loss_coeff=shape.moe_aux_coeff,
            moe_z_loss_coeff=shape.moe_z_coeff or None,
            moe_router_load_balancing_type="aux_loss" if shape.moe_aux_coeff else "none",
        )
    if shape.recompute == "full":
        fields |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif shape.recompute == "selective":
        fields |= dict(recompute_granularity="selective")
    elif shape.recompute is not None:
        raise SpecError("unknown recompute", expected="None, 'full' or 'selective'", got=shape.recompute)
    return TransformerConfig(**(fields | dict(shape.extra)))


def _layer_spec(shape: ModelConfig, config: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec

    kind = shape.layer_spec
    if kind == "auto":
        needs_own = config.context_parallel_size > 1 or config.sequence_parallel
        te = HAVE_TE and shape.dtype is not torch.float64
        kind = "own" if not torch.cuda.is_available() else "te" if te else "own" if needs_own else "local"
    if kind == "own":
        return cpu_layer_spec(config, vp_stage=vp_stage)
    if kind not in ("local", "te"):
        raise SpecError("unknown layer_spec", expected="auto, own, local or te", got=shape.layer_spec)
    if kind == "te" and not HAVE_TE:
        raise UnsupportedError("layer_spec='te' needs Transformer Engine", fix="install it, or use layer_spec='own'")
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=kind == "te", normalization=config.normalization, vp_stage=vp_stage
    )


def _common(shape: ModelConfig, config: Any, where: Axes, vp_stage: int | None) -> dict[str, Any]:
    """The constructor arguments that both kinds of model take."""
    return dict(
        config=config,
        vocab_size=shape.padded_vocab(where.tp),
        max_sequence_length=shape.seq_length,
        pre_process=where.is_first_stage and vp_stage in (None, 0),
        post_process=where.is_last_stage and vp_stage in (None, where.vpp - 1),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type=shape.position,
        vp_stage=vp_stage,
    )


def _gpt(shape: ModelConfig, config: Any, where: Axes, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import GPTModel

    spec = _layer_spec(shape, config, vp_stage)
    more = {"mtp_block_spec": cpu_mtp_spec(config, spec, vp_stage=vp_stage)} if _mtp(config) else {}
    return GPTModel(transformer_layer_spec=spec, **more, **_common(shape, config, where, vp_stage))


def _mtp(config: Any) -> bool:
    return getattr(config, "mtp_num_layers", None) is not None


def _hybrid(shape: ModelConfig, config: Any, where: Axes, vp_stage: int | None) -> Any:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_pgloss.megatron.cpu.hybrid import cpu_hybrid_spec

    letters, stages = shape.pattern or "", where.pp * where.vpp
    size, rest = divmod(len(letters), stages)
    if rest:
        raise SpecError("the layers do not divide over the stages", expected=f"a multiple of {stages}", got=letters)
    pattern = "|".join(letters[k * size : (k + 1) * size] for k in range(stages))
    return HybridModel(
        hybrid_stack_spec=cpu_hybrid_spec(config),
        hybrid_layer_pattern=pattern,
        **_common(shape, config, where, vp_stage),
    )


def _finish(shape: ModelConfig, config: Any, model: Any) -> torch.nn.Module:
    from megatron.core.transformer.module import Float16Module

    model.unpadded_vocab_size = shape.vocab_size  # rows past it belong to no layout-independent tensor (reshard.py)
    if torch.cuda.is_available():
        model = model.cuda()
    return Float16Module(config, model) if shape.dtype in _HALF else model  # type: ignore[no-any-return]


def _wrap(shape: ModelConfig, config: Any, chunk: torch.nn.Module, index: int) -> torch.nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=shape.dtype in _HALF,
        overlap_grad_reduce=shape.overlap_grad_reduce,
        use_distributed_optimizer=shape.distributed_optimizer,
        average_in_collective=shape.average_in_collective,
        bucket_size=shape.bucket_size,
    )
    # Like Megatron's trainer: chunks after the first keep one bucket.
    return DistributedDataParallel(config=config, ddp_config=ddp, module=chunk, disable_bucketing=index > 0)
