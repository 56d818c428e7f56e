"""Units of a batch, of each level above the token, as dense indices, and their keys across ranks. `T` tokens, `S`
rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec.levels import INSIDE, KEYED


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Dense unit indices of one rank's tokens."""

    index: dict[str, Tensor]
    """Unit name to int64 [T]; -1 where the token belongs to none."""
    size: dict[str, int]
    """Unit name to how many there are on this rank."""
    parent: dict[tuple[str, str], Tensor]
    """(child, parent) to int64 [children]: the parent unit of every child unit, for all coarser parents."""
    cu_S1: Tensor
    """int64 [S + 1]: where each row begins in the streams."""
    first_turn_S1: Tensor
    """int64 [S + 1]: the first turn of every row: turns are numbered row by row."""
    key: dict[str, Tensor]
    """``prompt`` and ``episode`` to int64 [units, 2]: 128-bit hash of the unit's key."""


def find(batch: TokenBatch) -> Units:
    """Units of ``batch``; rows of length 0 are padding and belong to none."""
    seq_T = batch.seq_T
    index: dict[str, Tensor] = {"sequence": seq_T}
    size = {"sequence": len(batch)}
    key: dict[str, Tensor] = {}
    of_row: dict[str, Tensor] = {}
    for name in KEYED:
        if getattr(batch, f"{name}_ids") is None:
            continue
        keys = [_key(batch, row, name) for row in range(len(batch))]
        order = {text: i for i, text in enumerate(dict.fromkeys(keys))}
        of_row[name] = torch.tensor([order[text] for text in keys], dtype=torch.int64)
        size[name] = len(order)
        key[name] = torch.tensor([_hash(text) for text in order], dtype=torch.int64).reshape(-1, 2)
        index[name] = of_row[name][seq_T]
    parent = {("sequence", name): rows for name, rows in of_row.items()}
    above = "sequence"
    for name in INSIDE:
        index[name], size[name], owner_U = FIND[name](batch, index[above])
        coarser = {outer: of for (inner, outer), of in parent.items() if inner == above}
        parent[name, above] = owner_U
        parent |= {(name, outer): of[owner_U] for outer, of in coarser.items()}
        above = name
    if "prompt" in of_row and "episode" in of_row:
        first = torch.zeros(size["episode"], dtype=torch.int64)
        first[of_row["episode"]] = of_row["prompt"]
        parent["episode", "prompt"] = first
    first_turn_S1 = torch.searchsorted(parent["turn", "sequence"], torch.arange(len(batch) + 1))
    return Units(index=index, size=size, parent=parent, cu_S1=batch.cu_S1, first_turn_S1=first_turn_S1, key=key)


def turns_of(batch: TokenBatch, seq_T: Tensor | None = None) -> tuple[Tensor, int, Tensor]:
    """Turns as dense indices, row by row: int64 [T] (-1 for none), how many, and int64 [turns]: the row of each."""
    given_T, row_T = batch.turn_T, batch.seq_T if seq_T is None else seq_T
    if not given_T.numel():
        return given_T, 0, given_T
    # Turn ids of a row may be any integers, so turns are told apart by (row, id + 1), where 0 stands for no turn.
    id_T = given_T.clamp(min=-1) + 1
    width = int(id_T.max()) + 1
    if width * len(batch) >= 2**62:
        ids, id_T = torch.unique(torch.cat([id_T, id_T.new_zeros(1)]), return_inverse=True)
        id_T, width = id_T[:-1], ids.numel()
    key_T = row_T * width + id_T
    has_T = id_T > 0
    most_T = key_T.cummax(0).values
    if not bool((has_T & (key_T != most_T)).any()):  # ids usually rise along each row: no need to sort
        begins_T = has_T.clone()
        begins_T[1:] &= most_T.diff() != 0
        turn_T = begins_T.cumsum(0) - 1
        return torch.where(has_T, turn_T, -1), int(turn_T[-1]) + 1, row_T[begins_T]
    keys, inverse_K = torch.unique(key_T[has_T], return_inverse=True)
    turn_T = torch.full_like(given_T, -1)
    turn_T[has_T] = inverse_K
    return turn_T, keys.numel(), keys // width


FIND: dict[str, Callable[[TokenBatch, Tensor], tuple[Tensor, int, Tensor]]] = {
    "turn": turns_of,
}
"""Level inside a row to its function ``(batch, index_T of the level above)``: the unit of each token, int64 [T] (-1 for
none), the number of units, and int64 [units], the unit of the level above that holds each."""


def index_of(batch: TokenBatch, level: str) -> Tensor:
    """The unit of each token at a level inside rows, int64 [T]; -1 for none."""
    index_T = batch.seq_T
    for name in INSIDE[: INSIDE.index(level) + 1]:
        index_T = FIND[name](batch, index_T)[0]
    return index_T


def per_row(mask_T: Tensor, cu_S1: Tensor) -> Tensor:
    """int64 [S]: how many tokens of each row are in bool ``mask_T``; rows lie end to end."""
    before_T1 = torch.zeros(mask_T.numel() + 1, dtype=torch.int64)
    torch.cumsum(mask_T, 0, out=before_T1[1:])
    return before_T1[cu_S1].diff()


def per_unit(value_T: Tensor, index_T: Tensor, units: int) -> Tensor:
    """Sum of int64 or float64 ``value_T`` over the tokens of each unit; tokens of index -1 belong to none."""
    table_U1 = torch.zeros(units + 1, dtype=value_T.dtype)
    return table_U1.index_add_(0, index_T + 1, value_T)[1:]


def distinct(keys_K2: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of int64 ``[K, 2]`` in order, and int64 ``[K]``: the index of each row among them.

    This is ``torch.unique(dim=0)`` by two sorts of integers, several times as fast.
    """
    order_K = torch.argsort(keys_K2[:, 1], stable=True)
    order_K = order_K[torch.argsort(keys_K2[order_K, 0], stable=True)]
    sorted_K2 = keys_K2[order_K]
    begins_K = torch.ones_like(order_K, dtype=torch.bool)
    begins_K[1:] = (sorted_K2[1:] != sorted_K2[:-1]).any(1)
    of_key_K = torch.empty_like(order_K)
    of_key_K[order_K] = begins_K.cumsum(0) - 1
    return sorted_K2[begins_K], of_key_K


def _key(batch: TokenBatch, row: int, unit: str) -> str:
    # A unit's key is the tuple of ids from prompt down, so that episode 0 of one prompt is not that of another.
    parts = []
    if batch.prompt_ids is not None:
        parts.append(batch.prompt_ids[row])
    if unit == "episode" and batch.episode_ids is not None:
        parts.append(batch.episode_ids[row])
    return repr((unit, *parts))


def _hash(text: str) -> tuple[int, int]:
    raw = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return (int.from_bytes(raw[:8], "big", signed=True), int.from_bytes(raw[8:], "big", signed=True))
