"""The plan's collective: one fixed-size row from every rank, so that all ranks know the same and fail alike.

A row is 128 int64 (1 KiB; floats travel as their bits): a head of fixed slots, then either the counts of every
component or, where the rank has a fault, the error itself. Every rank reduces the rows in rank order, so the result is
bit-identical.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.errors import KINDS, LayoutError, PGLossError
from megatron_pgloss.rollouts import streams

ROW = 128
HEAD = 32
BODY = ROW - HEAD
FIELDS = (
    "error", "spec", "version", "batch", "data_rank", "streams", "microbatches", "rows", "tokens", "width",
    "bin_rows", "bin_tokens", "unit_rows", "double", "excluded", "setup", "actions",
)  # fmt: skip
PLAN = "split, coefficients or options of plan or step"
Tell = Callable[[str, int, int], str]
"""Which values of one of `FIELDS` two ranks have, in words; a collective, made on every rank alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who takes part in a plan. The default is one process alone."""

    world: Any = None
    """Process group of all ranks of the job; None: no collective."""
    data: Any = None
    """Process group of ranks with different data (one of every replica); None: no collective."""
    world_rank: int = 0
    world_size: int = 1
    data_rank: int = 0
    data_size: int = 1

    @staticmethod
    def of(group: Any) -> Ranks:
        """Plain data parallelism over ``group``: every rank has its own data."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return Ranks(world=group, data=group, world_rank=rank, world_size=size, data_rank=rank, data_size=size)

    @staticmethod
    def named(group: Any, caller: str) -> Ranks:
        """The ranks of ``group``: a process group of data-parallel ranks, ``"local"``, or None in a world of one rank.

        Raises:
            LayoutError: ``group`` is None in a world of several ranks, or an unknown word.
        """
        if isinstance(group, str):
            if group != "local":
                raise LayoutError(f"group={group!r}", expected="a process group, 'local' or None")
            return Ranks()
        if group is not None:
            return Ranks.of(group)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise LayoutError(
                f"{caller}(group=None) in a world of several ranks would normalise each rank by itself",
                expected="group=the data-parallel process group",
                got=f"world size {dist.get_world_size()}",
                fix="pass the group, or group='local' if each rank really trains its own model",
            )
        return Ranks()

    def gather(self, rows: Tensor, group: Any, size: int) -> Tensor:
        """int64 [size, ...] of every rank's ``rows``, in rank order."""
        if group is None or size == 1:
            return rows[None]
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
        mine = rows.contiguous().to(device)
        out = torch.empty(size * mine.numel(), dtype=mine.dtype, device=device)
        dist.all_gather_into_tensor(out, mine.reshape(-1), group=group)
        return out.cpu().reshape(size, *rows.shape)

    def total(self, numbers: Tensor, group: Any) -> Tensor:
        """Sum of every rank's int64 ``numbers``; integers, so that the order of ranks does not matter."""
        if group is None:
            return numbers
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
        out = numbers.clone().to(device)
        dist.all_reduce(out, group=group)
        return out.cpu()


def pack(head: dict[str, int], body: Tensor) -> Tensor:
    """One rank's row.

    Args:
        head: values of `FIELDS`.
        body: int64 [<= BODY], counts.
    """
    row = torch.zeros(ROW, dtype=torch.int64)
    row[HEAD : HEAD + body.numel()] = body
    for name, value in head.items():
        row[FIELDS.index(name)] = value
    return row


def pack_error(error: PGLossError) -> Tensor:
    """The row of a rank with a fault: its text takes the place of the counts."""
    text = error_text(error, BODY * 8 - 8)
    return pack({"error": error_code(error)}, torch.cat([torch.tensor([len(text)]), to_words(text)]))


def raise_agreed(rows: Tensor, tell: Tell, options: str = PLAN) -> None:
    """Raise, on every rank alike, what any rank reported or what the rows disagree on.

    Args:
        rows: int64 [world, ROW].
        tell: asked where two ranks have different digests.
        options: what ``setup`` is a hash of, in words for the error.

    Raises:
        PGLossError: the first faulty rank's error, or a disagreement on spec, version, streams or a replica's batch.
    """
    codes = rows[:, FIELDS.index("error")]
    if bool((codes != 0).any()):
        faulty = codes.nonzero().flatten().tolist()
        raise _unpack(rows[faulty[0]], faulty)
    for name, what, fix in _EQUAL:
        values = rows[:, FIELDS.index(name)]
        others = (values != values[0]).nonzero().flatten().tolist()
        if others:
            raise LayoutError(
                what.format(options), expected="the same on every rank", got=tell(name, 0, others[0]),
                where=_places(0, others), fix=fix,
            )  # fmt: skip
    _streams(rows, tell)
    batch, data_rank = (rows[:, FIELDS.index(name)].contiguous() for name in ("batch", "data_rank"))
    first = firsts(rows)
    first_of_row = first[torch.searchsorted(data_rank[first], data_rank)]
    differs = (batch != batch[first_of_row]).nonzero().flatten()
    if differs.numel():
        other = int(differs[torch.argsort(data_rank[differs], stable=True)[0]])
        one = int(first_of_row[other])
        raise LayoutError(
            "ranks of one replica (tensor, context, pipeline ranks of a data-parallel rank) have different batches",
            expected="the same batches in the same order",
            got=tell("batch", one, other),
            where=f"rank {one} and rank {other}, replica {int(data_rank[other])}",
            fix="pass the same batches on all of them, or call broadcast first",
        )


def firsts(rows: Tensor) -> Tensor:
    """int64: the first row of every replica, in the order of data ranks; its other ranks have the same batches."""
    order = torch.argsort(rows[:, FIELDS.index("data_rank")], stable=True)
    ranks = rows[order, FIELDS.index("data_rank")]
    begins = torch.ones_like(ranks, dtype=torch.bool)
    begins[1:] = ranks[1:] != ranks[:-1]
    return order[begins]


_EQUAL = (
    ("spec", "ranks have different loss specs", "build the spec from one file or argument on every rank"),
    ("version", "ranks run different versions of megatron_pgloss", "install one version everywhere"),
    ("setup", "ranks differ in {}", "pass the same arguments on every rank"),
)


def _places(one: int, others: list[int]) -> str:
    """``rank 0 and rank 2 (ranks 3, 5 differ from rank 0 as well)``."""
    more = ", ".join(map(str, others[1:6])) + (", ..." if len(others) > 6 else "")
    return f"rank {one} and rank {others[0]}" + (f" ({more} of the others differ from rank {one} too)" if more else "")


def _streams(rows: Tensor, tell: Tell) -> None:
    # Ranks without rows have no streams and no say.
    filled = (rows[:, FIELDS.index("rows")] > 0).nonzero().flatten()
    masks = rows[filled, FIELDS.index("streams")]
    differs = (masks != masks[0]).nonzero().flatten() if masks.numel() else masks
    if differs.numel():
        bits = int(masks[0]) ^ int(masks[int(differs[0])])
        names = [name for bit, name in enumerate(OPTIONAL) if bits >> bit & 1] or ["masks or weights"]
        one, others = int(filled[0]), filled[differs].tolist()
        raise LayoutError(
            f"optional streams are present on some ranks only: {', '.join(names)}",
            expected="the same streams on every rank that has rows",
            got=tell("streams", one, others[0]),
            where=_places(one, others),
            fix="give them on every rank, or on none",
        )


OPTIONAL = (*streams.OPTIONAL, "prompt_ids", "episode_ids", "sample_ids", "terminations")
"""What a batch may lack, one presence bit each."""


def presence(batch: Any) -> int:
    """A bit for each of `OPTIONAL` that the batch has; above them a hash of the names of its weights, masks and the
    caller's own streams.
    """
    given = names_given(batch)
    bits = sum(1 << bit for bit, name in enumerate(OPTIONAL) if name in given["optional"])
    names = json.dumps([given["weights"], given["masks"], given["streams"]])
    return bits | (digest(names.encode()) >> len(OPTIONAL) << len(OPTIONAL))


def names_given(batch: Any) -> dict[str, list[str]]:
    """Those of `OPTIONAL` that the batch has, and the names of its weights, masks and the caller's own streams."""
    return {
        "optional": [name for name in OPTIONAL if name in batch.streams or getattr(batch, name, None) is not None],
        "weights": sorted(batch.weights),
        "masks": sorted(batch.masks),
        "streams": sorted(set(batch.streams) - set(OPTIONAL)),
    }


def digest(*parts: Any) -> int:
    """A 62-bit hash of bytes, or of arrays of bytes."""
    state = hashlib.sha1(usedforsecurity=False)  # hashlib's fastest on processors with instructions for it
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest()[:8], "big") >> 2


def batch_digest(batch: Any) -> int:
    """A hash of everything in the batch that the loss reads."""
    return digest(*contents(batch).values())


def contents(batch: Any) -> dict[str, Any]:
    """Everything in the batch that the loss reads, as bytes or arrays of bytes, by name."""
    tensors = {name: getattr(batch, f"{name}_T") for name in ("tokens", "action", "observation", "target", "turn")}
    tensors["lengths"] = batch.cu_S1
    for kind, table in (("", batch.streams), ("weights ", batch.weights), ("masks ", batch.masks)):
        tensors |= {f"{kind}{name}": table[name] for name in sorted(table)}
    found = {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}
    ids = {name: getattr(batch, name) for name in ("prompt_ids", "episode_ids", "sample_ids", "terminations")}
    return found | {name: repr(value).encode() for name, value in ids.items()}


def error_text(error: PGLossError, room: int) -> bytes:
    """The parts of an error as JSON of at most ``room`` bytes; the longest ones are cut first."""
    given = (error.what, error.expected, error.got, error.where, error.fix)
    parts = [None if part is None else str(part) for part in given]
    while True:
        text = json.dumps(parts, ensure_ascii=True).encode()
        if len(text) <= room:
            return text
        longest = max(range(len(parts)), key=lambda i: len(parts[i] or ""))
        parts[longest] = (parts[longest] or "")[: -(len(text) - room) - 4] + "..."


def _unpack(row: Tensor, faulty: list[int]) -> PGLossError:
    kind, size = int(row[FIELDS.index("error")]), int(row[HEAD])
    return error_of(kind, of_words(row[HEAD + 1 :], size), faulty)


def to_words(text: bytes, words: int = 0) -> Tensor:
    """``text`` as int64 words for a row, filled with spaces up to ``words`` of them."""
    size = max(words, (len(text) + 7) // 8)
    return torch.frombuffer(bytearray(text.ljust(8 * size)), dtype=torch.int64)


def of_words(row: Tensor, length: int) -> bytes:
    """The text of ``length`` bytes that `to_words` put into ``row``."""
    return row.contiguous().view(torch.uint8).numpy().tobytes()[:length]


def error_code(error: PGLossError) -> int:
    """The number that a row carries for an error's type; 0 stands for no error."""
    name = type(error).__name__
    return 1 + sorted(KINDS).index(name if name in KINDS else PGLossError.__name__)


def error_of(code: int, text: bytes, faulty: list[int]) -> PGLossError:
    """The error of the first of the ``faulty`` ranks, from its `error_code` and its `error_text`."""
    what, expected, got, where, fix = json.loads(text)
    place = f"rank {faulty[0]}" + (f", {where}" if where else "")
    if len(faulty) > 1:
        place += f" (and {len(faulty) - 1} more ranks: {', '.join(map(str, faulty[1:6]))})"
    return KINDS[sorted(KINDS)[code - 1]](what, expected=expected, got=got, where=place, fix=fix)
