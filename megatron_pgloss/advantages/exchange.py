"""One gather of rows from every rank, in which an error on one rank becomes an error on all.

Rows are sent as Python objects: keys of prompts and episodes with a few numbers, never tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megatron_pgloss.errors import Caught, LayoutError

Rows = TypeVar("Rows")


def members(caller: str, group: Any) -> tuple[Any, int]:
    """The process group to agree in (None: this process alone), and this rank's place in it.

    Raises:
        LayoutError: ``group`` is None in a world of several ranks, or an unknown word.
    """
    if isinstance(group, str):
        if group != "local":
            raise LayoutError(f"group={group!r}", expected="a process group, 'local' or None")
        return None, 0
    everyone = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if group is None and everyone:
        raise LayoutError(
            f"{caller}(group=None) in a world of several ranks would see this rank's episodes only",
            expected="group=the data-parallel process group",
            got=f"world size {dist.get_world_size()}",
            fix="pass the group that plan gets, or group='local' if no prompt has episodes on several ranks",
        )
    return (None, 0) if group is None else (group, dist.get_rank(group))


def exchange(
    caller: str, make: Callable[[int], Rows], group: Any, options: Mapping[str, object] | None = None
) -> tuple[list[Rows], int]:
    """Gather what ``make(rank)`` returns on each rank of ``group``, in rank order; also return this rank's place in it.

    A collective over ``group``.

    Args:
        caller: the name of the public function, for errors.
        make: a function that is called once, with this rank's place in the group.
        group: a process group, ``"local"``, or None in a world of one rank.
        options: the caller's arguments by name, which must be equal on all ranks.

    Raises:
        PGLossError: on every rank, the error of the first rank whose ``make`` raised one; or options differ.
    """
    where, rank = members(caller, group)
    rows: Rows | None = None
    with Caught() as here:
        rows = make(rank)
    if where is None:
        if here.error is not None:
            raise here.error
        return [cast(Rows, rows)], rank
    said = {name: repr(value) for name, value in (options or {}).items()}
    everyone: list[Any] = [None] * dist.get_world_size(where)
    dist.all_gather_object(everyone, (rows, here.error, said), group=where)
    for number, (_, fault, _) in enumerate(everyone):
        if fault is not None:
            place = f"rank {number}" + (f", {fault.where}" if fault.where else "")
            found = type(fault)(fault.what, expected=fault.expected, got=fault.got, where=place, fix=fault.fix)
            raise found from (here.error.__cause__ if here.error is not None else None)
    for number, (_, _, other) in enumerate(everyone):
        first = everyone[0][2]
        if other != first:
            names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            differ = [f"{name} = {first.get(name)} on rank 0 and {other.get(name)} on rank {number}" for name in names]
            raise LayoutError(
                f"ranks call {caller} with different arguments",
                expected="the same on every rank",
                got=", ".join(differ),
                where=f"rank 0 and rank {number}",
                fix="pass the same arguments on every rank",
            )
    return [rows for rows, _, _ in everyone], rank
