"""Deals one rollout batch out to several optimizer steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_pgloss.errors import DataError
from megatron_pgloss.planning import agreement
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.planning.carried import Carried
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec.words import closed, nearest


@closed
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
        count: how many steps, at least 1.
        by: the unit whose rows stay together. ``sequence`` tells rows apart by their sample ids, which a world of
            several ranks needs; one process without sample ids goes by the rows' places.
        seed: seed of the deal; change it from batch to batch.
        group: process group to agree in; None: the world if there is one; ``"local"``: this process alone.

    Returns:
        Exactly ``count`` lists, one list of batches each, some possibly without rows.

    Raises:
        DataError: ids of the unit are absent, fewer units than steps, ``count`` below 1, an unknown unit.
        LayoutError: ranks ask for other deals. Every error is raised on all ranks alike.
    """
    local = isinstance(group, str) and group == "local"
    everyone = dist.is_available() and dist.is_initialized() and not local
    if group is None and everyone:
        group = dist.group.WORLD
    ranks = Ranks.of(group) if everyone else Ranks()
    keys: list[list[tuple[int, int]]] = []
    with Carried() as here:
        _check(count, by, seed)
        for place, batch in enumerate(batches):
            if batch.fault is not None:
                raise batch.fault
            keys.append([_key(batch, place, row, by, seed, ranks.world_size) for row in range(len(batch))])
        mine = sorted({key for of in keys for key in of})
        options = {"count": count, "by": by, "seed": seed}
        here.row = agreement.pack({"setup": agreement.digest(repr(options).encode())}, torch.tensor([len(mine)]))
        here.about = {"setup": lambda: options}
    rows = here.gather(ranks, "minibatches' count, by or seed")
    everywhere = _everywhere(mine, int(rows[:, agreement.HEAD].max()), ranks)
    if len(everywhere) < count:
        # Raised by every rank alike. Unsaid, it would come up later, as a step without a single action.
        raise DataError(
            f"fewer {by}s than steps",
            expected=f"at least {count}",
            got=len(everywhere),
            fix=f"minibatches(..., {len(everywhere)})" if everywhere else "give rows",
        )
    return _dealt(batches, count, keys, {key: place for place, key in enumerate(everywhere)})


def _dealt(
    batches: Sequence[TokenBatch], count: int, keys: list[list[tuple[int, int]]], order: dict[tuple[int, int], int]
) -> Iterator[list[TokenBatch]]:
    for step in range(count):
        mini = []
        for batch, of in zip(batches, keys, strict=True):
            rows = [row for row, key in enumerate(of) if order[key] % count == step]
            mini += [batch.select(rows)] if rows else []
        yield mini


def _check(count: int, by: str, seed: int) -> None:
    for name, value in (("count", count), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise DataError(f"minibatches: {name} is not an integer", got=repr(value))
    if count < 1:
        raise DataError("minibatches: count must be positive", expected="at least 1 step", got=count)
    if by not in _IDS:
        raise DataError(f"minibatches(by={by!r})", expected=" | ".join(_IDS), fix=nearest(str(by), list(_IDS)))


_IDS = {"prompt": ("prompt",), "episode": ("prompt", "episode"), "sequence": ("prompt", "episode", "sample")}
"""Unit that stays together to the ids that its key is made of, where they are given."""


def _key(batch: TokenBatch, place: int, row: int, by: str, seed: int, world: int) -> tuple[int, int]:
    parts: list[Any] = []
    for name in _IDS[by]:
        ids = getattr(batch, f"{name}_ids")
        if ids is not None:
            parts.append(ids[row])
        elif name == by or (by == "sequence" and name == "sample" and world > 1):
            raise DataError(f"minibatches(by={by!r}) needs {name}_ids", fix=f"give {name}_ids= to the TokenBatch")
    if by == "sequence" and batch.sample_ids is None:
        parts += [place, row]
    raw = hashlib.blake2b(repr((seed, by, *parts)).encode(), digest_size=16).digest()
    return (int.from_bytes(raw[:8], "big", signed=True), int.from_bytes(raw[8:], "big", signed=True))


def _everywhere(mine: list[tuple[int, int]], most: int, ranks: Ranks) -> list[tuple[int, int]]:
    """Keys of all ranks' units in order.

    Args:
        most: the largest number of units that a rank has.
    """
    rows = torch.zeros(most, 3, dtype=torch.int64)
    for i, key in enumerate(mine):
        rows[i] = torch.tensor((1, *key))
    table = ranks.gather(rows, ranks.world, ranks.world_size).reshape(-1, 3)
    return sorted({(int(a), int(b)) for flag, a, b in table.tolist() if flag})
