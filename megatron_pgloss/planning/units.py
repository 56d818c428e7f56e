"""Units of a batch (prompt, episode, sequence, turn) as dense indices, and their keys across ranks. `T` tokens, `S`
rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pgloss.rollouts import TokenBatch

KEYED = ("prompt", "episode")
"""Units that may straddle ranks; sequences and turns never leave theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Dense unit indices of one rank's tokens."""

    index: dict[str, Tensor]
    """Unit name to int64 [T]; -1 where the token belongs to none."""
    size: dict[str, int]
    """Unit name to how many there are on this rank."""
    parent: dict[tuple[str, str], Tensor]
    """(child, parent) to int64 [children]: the parent unit of every child unit, for all coarser parents."""
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
    index["turn"], size["turn"], turn_row = turns_of(batch)
    parent = {("turn", "sequence"): turn_row}
    for name, rows in of_row.items():
        parent["sequence", name] = rows
        parent["turn", name] = rows[turn_row]
    if "prompt" in of_row and "episode" in of_row:
        first = torch.zeros(size["episode"], dtype=torch.int64)
        first[of_row["episode"]] = of_row["prompt"]
        parent["episode", "prompt"] = first
    return Units(index=index, size=size, parent=parent, key=key)


def turns_of(batch: TokenBatch) -> tuple[Tensor, int, Tensor]:
    """Turns as dense indices: int64 [T] (-1 for none), how many, and int64 [turns]: the row of each."""
    # Turn ids of a row may be any integers: dense over (row, id).
    has_T = batch.turn_T >= 0
    id_K, row_K = batch.turn_T[has_T], batch.seq_T[has_T]
    width = int(id_K.max()) + 1 if id_K.numel() else 1
    if width * len(batch) >= 2**62:
        ids, id_K = torch.unique(id_K, return_inverse=True)
        width = ids.numel()
    key_K = row_K * width + id_K
    # Ids rise along a row as a rule: then nothing need be sorted.
    rising = bool((key_K[1:] >= key_K[:-1]).all())
    keys, inverse_K = (torch.unique_consecutive if rising else torch.unique)(key_K, return_inverse=True)
    turn_T = torch.full_like(batch.turn_T, -1)
    turn_T[has_T] = inverse_K
    return turn_T, keys.numel(), keys // width


def _key(batch: TokenBatch, row: int, unit: str) -> str:
    # A unit's key is the tuple of ids from prompt down, so that episode 0 of two prompts are two episodes.
    parts = []
    if batch.prompt_ids is not None:
        parts.append(batch.prompt_ids[row])
    if unit == "episode" and batch.episode_ids is not None:
        parts.append(batch.episode_ids[row])
    return repr((unit, *parts))


def _hash(text: str) -> tuple[int, int]:
    raw = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return (int.from_bytes(raw[:8], "big", signed=True), int.from_bytes(raw[8:], "big", signed=True))
