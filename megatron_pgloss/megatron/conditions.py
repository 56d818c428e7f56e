"""The set-up of a step, and conditions on it: those by which `megatron_pgloss.megatron.modes` finds refused modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.spec import LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The set-up of a step: everything that `megatron_pgloss.megatron.modes` looks at."""

    config: Any
    """The model's TransformerConfig."""
    chunks: Sequence[Any]
    """Model chunks as handed to the schedule, wrapped."""
    bare: Sequence[Any]
    """The same chunks, unwrapped."""
    layout: Layout
    spec: LossSpec
    head: str
    """Name of the head: ``given`` for the model's logits, else a mode of the fused head."""
    head_dtype: str | None = None
    """Numbers of a fused head's logits."""
    packed: bool = False
    """Whether rows are packed."""
    own_forward: bool = False
    """Whether the user's function calls the model."""
    skips: bool = False
    """Whether a step that is not finite is skipped."""

    @property
    def fused(self) -> bool:
        """Whether log-probs come from hidden states and the head's weight."""
        return self.head != "given"

    @property
    def output_layers(self) -> list[Any]:
        """The output layer of this rank's last chunk, where this rank has the last stage."""
        return [model.output_layer for model in self.bare if getattr(model, "post_process", False)]


def flag(name: str) -> Callable[[Setup], bool]:
    """The condition that the config has a field ``name`` and it is true."""
    return lambda setup: bool(getattr(setup.config, name, False))


def delayed_scaling(setup: Setup) -> bool:
    """Whether FP8 takes its scales from a history of steps."""
    recipe = getattr(setup.config, "fp8_recipe", None)
    return bool(getattr(setup.config, "fp8", None)) and str(getattr(recipe, "value", recipe)) == "delayed"


def full_graph(setup: Setup) -> bool:
    """Whether one CUDA graph holds the whole iteration."""
    config = setup.config
    scope = str(getattr(config, "cuda_graph_scope", "")) + str(getattr(config, "cuda_graph_modules", ""))
    whole = getattr(config, "cuda_graph_impl", "none") == "full_iteration" or "full_iteration" in scope
    return whole and "full_iteration_inference" not in scope


def in_chain(model: Any, *names: str) -> bool:
    """Whether ``model``, or a module that it wraps, is of a class with one of these names. The names stand for the
    classes because these need not be importable.
    """
    while model is not None:
        if type(model).__name__ in names:
            return True
        model = getattr(model, "module", None)
    return False


def wrapped_in(*names: str) -> Callable[[Setup], bool]:
    """The condition that a chunk is wrapped in a class with one of these names."""
    return lambda setup: any(in_chain(chunk, *names) for chunk in setup.chunks)


def overlap_without_no_sync(setup: Setup) -> bool:
    """Whether gradients are reduced during backward, and nothing holds that back until the last micro-batch."""
    overlap = any(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False) for chunk in setup.chunks)
    return overlap and setup.config.no_sync_func is None


def swapped_messages(setup: Setup) -> bool:
    """Whether both neighbours of a stage are one rank, and messages to both are sent in one batch."""
    return setup.layout.pp_size == 2 and len(setup.chunks) > 1 and bool(setup.config.batch_p2p_comm)


def gathered(setup: Setup) -> bool:
    """Whether tensor-parallel ranks get the logits of the whole vocabulary."""
    return setup.layout.tp_size > 1 and any(getattr(model, "parallel_output", True) is False for model in setup.bare)


def flags_differ(setup: Setup) -> bool:
    """Whether some model or wrapper reads another ``calculate_per_token_loss`` than the schedule."""
    want = bool(setup.config.calculate_per_token_loss)
    return any(bool(model.config.calculate_per_token_loss) != want for model in (*setup.bare, *setup.chunks))


def generalised_tensor_parallel(setup: Setup) -> bool:
    """Whether the collection has a group of ranks that hold different tokens outside of data parallelism."""
    group = getattr(setup.layout.collection, "gtp_remat", None) if setup.layout.collection is not None else None
    return group is not None and group.size() > 1


def fused_on(found: Callable[[Setup, Any], object]) -> Callable[[Setup], object]:
    """The condition ``found(setup, layer)`` on an output layer that a fused head reads."""

    def anywhere(setup: Setup) -> object:
        return setup.fused and next(filter(None, (found(setup, layer) for layer in setup.output_layers)), False)

    return anywhere


def other_layer(setup: Setup, layer: Any) -> str:
    """The type of an output layer that is no plain ColumnParallelLinear, else the empty string."""
    name = type(layer).__name__
    return "" if name == "ColumnParallelLinear" else name


def replaced(name: str) -> Callable[[Setup, Any], bool]:
    """The condition that a layer's method ``name`` is not that of Megatron's ColumnParallelLinear, because it was set
    on the layer or replaced in the class.
    """

    def found(setup: Setup, layer: Any) -> bool:
        code = getattr(getattr(type(layer), name, None), "__code__", None)
        return name in vars(layer) or getattr(code, "co_qualname", "") != f"ColumnParallelLinear.{name}"

    return found


def asks_for_float32(setup: Setup, layer: Any) -> bool:
    """Whether the model wants float32 logits of its output layer (``logit_dtype``, megatron-core 0.20's development),
    and the fused head would round them.
    """
    wanted = (getattr(model, "logit_dtype", None) for model in setup.bare)
    return setup.head_dtype in ("bf16", "fp16") and any(dtype == torch.float32 for dtype in wanted)


def hooked(setup: Setup, layer: Any) -> str:
    """Which hooks of torch an output layer has, else the empty string."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return ", ".join(kind.strip("_").replace("_", " ") for kind in kinds if getattr(layer, kind, None))


def tied(setup: Setup) -> bool:
    """Whether the output layer's weight is the embedding's."""
    return any(getattr(model, "share_embeddings_and_output_weights", False) for model in setup.bare)
