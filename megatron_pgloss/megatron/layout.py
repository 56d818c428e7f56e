"""This rank's place in the job: sizes, ranks and groups of tensor, context, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pgloss.errors import LayoutError
from megatron_pgloss.planning import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's place in the job. A group is None where its size is 1."""

    tp: Any
    cp: Any
    pp: Any
    dp: Any
    """Ranks with different data: data parallel without context parallel."""
    tp_size: int
    cp_size: int
    pp_size: int
    dp_size: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    dp_rank: int
    collection: Any = None
    """The ``pg_collection`` it was read from, or None for parallel_state."""

    @staticmethod
    def read(collection: Any = None) -> Layout:
        """The layout that ``collection`` (a ``pg_collection``) describes, or parallel_state where it is None.

        Raises:
            LayoutError: there is no process group, parallel_state is not initialised, a group is missing, or the sizes
                do not make up the world.
        """
        if not dist.is_initialized():
            raise LayoutError(
                "torch.distributed is not initialised", fix="launch with torchrun and call init_process_group first"
            )
        groups = _collection(collection) if collection is not None else _parallel_state()
        size = {name: group.size() for name, group in groups.items()}
        rank = {name: group.rank() for name, group in groups.items()}
        world = dist.get_world_size()
        if size["tp"] * size["cp"] * size["pp"] * size["dp"] != world:
            raise LayoutError(
                "the groups do not make up the world",
                expected=f"tp*cp*pp*dp = {world}",
                got=size,
                fix="leave extra axes (GTP, separate rollout ranks) out of the training job's world",
            )
        shared: dict[str, Any] = {name: group if size[name] > 1 else None for name, group in groups.items()}
        sizes = {f"{name}_size": value for name, value in size.items()}
        places = {f"{name}_rank": value for name, value in rank.items()}
        return Layout(**shared, **sizes, **places, collection=collection)

    @property
    def last_stage(self) -> bool:
        """Whether this rank is on the last pipeline stage, where the loss is computed."""
        return self.pp_rank == self.pp_size - 1

    @property
    def dp_cp_size(self) -> int:
        """Number of ranks over which gradients are summed."""
        return self.dp_size * self.cp_size

    @property
    def speaks(self) -> bool:
        """Whether this rank's metrics count: the first tensor-parallel rank of the last stage."""
        return self.last_stage and self.tp_rank == 0

    @property
    def ranks(self) -> Ranks:
        """The layout as the plan sees it."""
        return Ranks(
            world=dist.group.WORLD, data=self.dp, world_rank=dist.get_rank(), world_size=dist.get_world_size(),
            data_rank=self.dp_rank, data_size=self.dp_size,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """The device on which the model runs."""
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _collection(collection: Any) -> dict[str, Any]:
    groups = {name: getattr(collection, name, None) for name in ("tp", "cp", "pp", "dp", "dp_cp")}
    missing = [name for name, group in groups.items() if group is None]
    if missing:
        # 0.19's collection answers None for unset fields, and Megatron then reduces over the whole world.
        raise LayoutError(
            f"pg_collection lacks {', '.join(missing)}",
            expected="tp, cp, pp, dp and dp_cp",
            fix="set them, or pass pg_collection=None to read parallel_state",
        )
    del groups["dp_cp"]
    return groups


def _parallel_state() -> dict[str, Any]:
    if not parallel_state.model_parallel_is_initialized():
        raise LayoutError("Megatron's parallel_state is not initialised", fix="call initialize_model_parallel first")
    return {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=False),
    }
