"""Convert parameters and gradients between this layout's shards and full tensors that do not depend on the layout.

``placements`` says of each parameter its name in the whole model, the full tensor's shape, and which rows or columns of
the full tensor this rank holds. Setting weights, gathering gradients and loading all read it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_pgloss.errors import DataError, LayoutError

Piece = tuple[int, int, int]
"""(Start in the local tensor, start in the full tensor, length) along the dimension that is cut over ranks."""

# Transformer Engine fuses a norm into the linear layer after it. Global names are those of the unfused modules.
_RENAMED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One parameter of this rank, and its place in the whole model."""

    name: str
    param: torch.nn.Parameter
    full_shape: tuple[int, ...]
    dim: int
    pieces: tuple[Piece, ...]
    tied: bool = False

    def cut(self, full: torch.Tensor) -> Iterable[tuple[slice, torch.Tensor]]:
        """Yield slices of the local tensor along ``dim``, each with the part of ``full`` that belongs there."""
        for local, start, length in self.pieces:
            yield slice(local, local + length), full.narrow(self.dim, start, length)

    def write(self, full: torch.Tensor) -> None:
        """Set the parameter from ``full``; padded vocabulary rows stay as they are."""
        with torch.no_grad():
            for local, part in self.cut(full):
                target = self.param.data.narrow(self.dim, local.start, local.stop - local.start)
                target.copy_(part)


def unwrap(chunk: torch.nn.Module) -> Any:
    """The model inside DDP and Float16Module."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def as_chunks(chunks: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """A list of chunks, whether one model or several were given."""
    return [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)


def placements(chunks: torch.nn.Module | Sequence[torch.nn.Module]) -> list[Placement]:
    """Every parameter of this rank with its place in the whole model, in the model's own order."""
    models = [unwrap(chunk) for chunk in as_chunks(chunks)]
    return [_place(model, *item) for model in models for item in model.named_parameters() if not _dead(model, item[0])]


def _dead(model: Any, name: str) -> bool:
    """Whether the parameter is unused: a last stage that holds the embedding for multi-token prediction reads a tied
    head from the embedding, and not from its own output layer.
    """
    at_head = name == "output_layer.weight" and model.share_embeddings_and_output_weights
    return at_head and getattr(model, "mtp_process", False) and not model.pre_process


def _place(model: Any, name: str, param: torch.nn.Parameter) -> Placement:
    from megatron.core import parallel_state as ps

    tied = bool(model.share_embeddings_and_output_weights)
    is_expert = ".experts." in name
    is_fc1 = ".linear_fc1." in name  # asked before fused norms are renamed
    size, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    if is_expert:
        size, rank = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
    if not getattr(param, "tensor_model_parallel", False):
        size, rank = 1, 0
    dim = max(getattr(param, "partition_dim", 0), 0)
    shape = list(param.shape)
    width = shape[dim]
    shape[dim] = width * size
    # A gated fc1 holds [gate of this rank; up of this rank], so it is cut in each half; other layers are cut once.
    strips = 2 if is_fc1 and dim == 0 and size > 1 and model.config.gated_linear_unit else 1
    strip = width // strips
    pieces = [(k * strip, k * strip * size + rank * strip, strip) for k in range(strips)]
    if name.startswith(("embedding.word_embeddings.", "output_layer.")):
        shape[0] = min(shape[0], getattr(model, "unpadded_vocab_size", shape[0]))
        pieces = [(at, start, max(0, min(count, shape[0] - start))) for at, start, count in pieces]
        tied = tied and name.endswith("weight")
    else:
        tied = False
    kept = tuple(piece for piece in pieces if piece[2] > 0)
    return Placement(
        name=_global_name(model, name, tied), param=param, full_shape=tuple(shape), dim=dim, pieces=kept, tied=tied
    )


def _global_name(model: Any, name: str, tied: bool) -> str:
    from megatron.core import parallel_state as ps

    if tied:
        return "embedding.word_embeddings.weight"
    if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
        number = model.decoder.layers[int(layer[1])].layer_number - 1  # counts over pipeline and virtual stages
        name = f"decoder.layers.{number}." + name[layer.end() :]
    first = ps.get_expert_model_parallel_rank() * (model.config.num_moe_experts or 0)
    first //= ps.get_expert_model_parallel_world_size()
    name = re.sub(r"(?<=\.local_experts\.)\d+", lambda found: str(int(found[0]) + first), name)
    # Grouped experts keep their weights side by side in one module: linear_fc1.weight0, weight1, ...
    name = re.sub(
        r"\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$",
        lambda found: f".experts.local_experts.{int(found[2]) + first}.{found[1]}",
        name,
    )
    for fused, plain in _RENAMED.items():
        name = name.replace(fused, plain)
    return name


def load_full(chunks: torch.nn.Module | Sequence[torch.nn.Module], full: dict[str, torch.Tensor]) -> None:
    """Set this rank's parameters from full tensors, as ``full_parameters`` gives them on any other layout.

    Every rank must hold every tensor that it needs; there is no communication. An optimizer's float32 copies are not
    changed: have the optimizer reload them.

    Raises:
        DataError: a tensor is missing or has another shape.
    """
    for place in placements(chunks):
        value = full.get(place.name)
        if value is None or tuple(value.shape) != place.full_shape:
            raise DataError(
                f"load_full has no fitting tensor for {place.name}",
                expected=f"shape {list(place.full_shape)}",
                got="nothing" if value is None else f"shape {list(value.shape)}",
            )
        place.write(value)


def full_parameters(chunks: torch.nn.Module | Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Full parameters by global name, float64 on CPU, the same dictionary on every rank. Collective over the world.

    Raises:
        LayoutError: ranks that hold the same part disagree, or a part is held by none.
    """
    return _assemble(chunks, lambda chunk: {param: param.data for param in unwrap(chunk).parameters()})


def full_gradients(chunks: torch.nn.Module | Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Full gradients by global name, float64 on CPU, the same dictionary on every rank. Collective over the world.

    Gradients are read from ``main_grad`` (without DDP from ``.grad``) after ``finalize_model_grads``. Under the
    distributed optimizer, whose reduce-scatter leaves each rank one shard of every bucket, the shards are gathered
    first. Gradient buffers are not changed.

    Raises:
        LayoutError: ranks that hold the same part disagree (a gradient was not reduced), or a part is held by none.
    """
    return _assemble(chunks, _local_gradients)


def _local_gradients(chunk: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    if not hasattr(chunk, "ddp_config"):
        return {p: torch.zeros_like(p) if p.grad is None else p.grad for p in unwrap(chunk).parameters()}
    if not chunk.ddp_config.use_distributed_optimizer:
        return {param: param.main_grad for param in unwrap(chunk).parameters()}
    out = {}
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            whole = torch.empty_like(bucket.grad_data)
            mine = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(whole, mine, group=group)
            for param in bucket.params_list:
                start, end = (edge - bucket.offset for edge in buffer.param_index_map[param][:2])
                out[param] = whole[start:end].view(param.shape)
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """The description of a piece of a full tensor that one rank holds, without its numbers."""

    name: str
    full_shape: tuple[int, ...]
    dim: int
    start: int
    shape: tuple[int, ...]


def _assemble(
    chunks: Any, values_of: Callable[[Any], dict[torch.nn.Parameter, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    values: dict[torch.nn.Parameter, torch.Tensor] = {}
    for chunk in as_chunks(chunks):
        values |= values_of(chunk)
    parts, numbers = [], []
    for place in placements(chunks):
        value = values[place.param].detach()
        for local, start, length in place.pieces:
            piece = value.narrow(place.dim, local, length)
            parts.append(_Part(place.name, place.full_shape, place.dim, start, tuple(piece.shape)))
            numbers.append(piece.reshape(-1).to(torch.float64))
    is_double = all(value.dtype is torch.float64 for value in values.values())
    everyone = _exchange(is_double, parts, torch.cat(numbers))
    tolerance = 1e-9 if all(flag for flag, _, _ in everyone) else 1e-3
    limit = tolerance * max(flat.abs().max().item() for _, _, flat in everyone)
    seen: dict[tuple[str, int], tuple[int, torch.Tensor]] = {}
    full: dict[str, torch.Tensor] = {}
    covered: dict[str, int] = {}
    for rank, (_, items, flat) in enumerate(everyone):
        pieces = flat.split([math.prod(part.shape) for part in items])
        for part, piece in zip(items, pieces, strict=True):
            mine = (rank, piece.view(part.shape))
            if (part.name, part.start) in seen:
                _check_replica(part.name, seen[part.name, part.start], mine, limit)
                continue
            seen[part.name, part.start] = mine
            target = full.setdefault(part.name, torch.full(part.full_shape, torch.nan, dtype=torch.float64))
            target.narrow(part.dim, part.start, part.shape[part.dim]).copy_(mine[1])
            covered[part.name] = covered.get(part.name, 0) + piece.numel()
    for name, count in covered.items():
        if count != full[name].numel():
            raise LayoutError(f"no rank holds all of {name}", expected=f"{full[name].numel()} elements", got=count)
    return dict(sorted(full.items()))


def _exchange(is_double: bool, parts: list[_Part], flat: torch.Tensor) -> list[tuple[bool, list[_Part], torch.Tensor]]:
    """Every rank's descriptions and numbers, on CPU. Numbers travel as one tensor: pickling them costs far more."""
    described: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(described, (is_double, parts))
    sizes = [sum(math.prod(part.shape) for part in items) for _, items in described]
    padded = torch.nn.functional.pad(flat, (0, max(sizes) - flat.numel()))
    out = padded.new_empty(len(sizes) * max(sizes))
    dist.all_gather_into_tensor(out, padded)
    rows = out.cpu().view(len(sizes), -1)
    return [(flag, items, row[:size]) for (flag, items), size, row in zip(described, sizes, rows, strict=True)]


def _check_replica(name: str, first: tuple[int, torch.Tensor], other: tuple[int, torch.Tensor], limit: float) -> None:
    if torch.allclose(first[1], other[1], rtol=0.0, atol=limit, equal_nan=True):
        return
    raise LayoutError(
        f"ranks that hold the same part of {name} disagree on it",
        expected=f"a difference of at most {limit:.1e}",
        got=f"{(first[1] - other[1]).abs().max().item():.3e}",
        where=f"ranks {first[0]} and {other[0]}",
        fix="a gradient was not reduced over the tensor, data or embedding group; "
        "is config.finalize_model_grads_func set, and did the schedule end?",
    )
