"""One rollout batch into several optimizer steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_pgloss.errors import DataError
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.rollouts import TokenBatch, broken


def minibatches(
    batches: Sequence[TokenBatch],
    count: int,
    *,
    by: Literal["prompt", "episode", "sequence"] = "prompt",
    seed: int = 0,
    group: Any = None,
) -> Iterator[list[TokenBatch]]:
    """Deal this rank's rows out to ``count`` steps, whole units together. A collective in a world of several ranks.

    Units are ordered by a hash of their key and ``seed`` and dealt round robin over the whole job, so the steps are
    equally large in units and the same on every layout; a unit that straddles ranks lands in one step on all of them.

    Args:
        batches: this rank's rollouts; ``[]`` is legal.
        by: what stays together; ``sequence`` needs sample ids in a world of several ranks.
        seed: of the deal; change it from batch to batch.
        group: process group to agree in; None: the world if there is one; ``"local"``: this process alone.

    Yields:
        Exactly ``count`` lists, one list of batches each, some possibly without rows.

    Raises:
        DataError: ids of the unit are absent (kept in the batch and raised by `plan` in a world of several ranks).
    """
    local = isinstance(group, str) and group == "local"
    everyone = dist.is_available() and dist.is_initialized() and not local
    if group is None and everyone:
        group = dist.group.WORLD
    ranks = Ranks.of(group) if everyone else Ranks()
    fault: DataError | None = None
    keys: list[list[tuple[int, int]]] = []
    try:
        keys = [[_key(batch, row, by, seed, ranks.world_size) for row in range(len(batch))] for batch in batches]
    except DataError as error:
        if ranks.world_size == 1:
            raise
        fault = error
    broken_here = fault is not None or any(batch.fault is not None for batch in batches)
    everywhere, whole = _everywhere(keys, broken_here, ranks)
    order = {key: place for place, key in enumerate(everywhere)}
    if whole and len(order) < count:
        # The same on every rank, and better said here than as a step without a single action.
        raise DataError(
            f"fewer {by}s than steps",
            expected=f"at least {count}",
            got=len(order),
            fix=f"minibatches(..., {len(order)})",
        )
    for step in range(count):
        if fault is not None:
            yield [broken(fault)]
            continue
        mini = []
        for batch, of in zip(batches, keys, strict=True):
            rows = [row for row, key in enumerate(of) if order[key] % count == step]
            # A batch that carries an error goes into every step: the plan raises it.
            mini += [batch] if batch.fault is not None else [batch.select(rows)] if rows else []
        yield mini


def _key(batch: TokenBatch, row: int, by: str, seed: int, world: int) -> tuple[int, int]:
    wanted = {"prompt": ("prompt",), "episode": ("prompt", "episode"), "sequence": ("prompt", "episode", "sample")}[by]
    parts: list[Any] = []
    for name in wanted:
        ids = getattr(batch, f"{name}_ids")
        if ids is not None:
            parts.append(ids[row])
        elif name == by or (by == "sequence" and name == "sample" and world > 1):
            raise DataError(f"minibatches(by={by!r}) needs {name}_ids", fix=f"give {name}_ids= to the TokenBatch")
    if by == "sequence" and batch.sample_ids is None:
        parts.append(id(batch.records_S[row]))
    raw = hashlib.blake2b(repr((seed, by, *parts)).encode(), digest_size=16).digest()
    return (int.from_bytes(raw[:8], "big", signed=True), int.from_bytes(raw[8:], "big", signed=True))


def _everywhere(
    keys: list[list[tuple[int, int]]], broken_here: bool, ranks: Ranks
) -> tuple[list[tuple[int, int]], bool]:
    """Keys of all ranks' units in order, and whether no rank carries an error."""
    mine = sorted({key for of in keys for key in of})
    sizes = ranks.gather(torch.tensor([len(mine), int(broken_here)]), ranks.world, ranks.world_size)
    rows = torch.zeros(int(sizes[:, 0].max()), 3, dtype=torch.int64)
    for i, key in enumerate(mine):
        rows[i] = torch.tensor((1, *key))
    table = ranks.gather(rows, ranks.world, ranks.world_size).reshape(-1, 3)
    return sorted({(int(a), int(b)) for flag, a, b in table.tolist() if flag}), not bool(sizes[:, 1].any())
