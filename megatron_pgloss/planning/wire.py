"""The one row that every rank sends for a step: packed, gathered, read back.

Its head has the names of `agreement.FIELDS`. Behind it come, for every component, its counts (`SLOTS`), the number of
tokens that each of the spec's rules took out, and two numbers for each normalised correction.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss._version import __version__
from megatron_pgloss.errors import DataError, LayoutError
from megatron_pgloss.planning import agreement, difference, members
from megatron_pgloss.planning.agreement import FIELDS, HEAD, Ranks
from megatron_pgloss.planning.counts import Local
from megatron_pgloss.planning.preflight import CheckedRows, Request
from megatron_pgloss.planning.split import legal_count, round_up
from megatron_pgloss.planning.token_weights import check_range, finest
from megatron_pgloss.rollouts import STREAMS, TokenBatch
from megatron_pgloss.rollouts.place import row_name
from megatron_pgloss.spec import LossSpec, PolicyGradient
from megatron_pgloss.spec.levels import IN_ROWS

SLOTS = ("base", "members", "live", *IN_ROWS)
"""Counts of a component in a row; the tokens each rule took out follow them."""
MOST_TOKENS = 2**39
"""The most tokens that a step may have over all ranks: sums of that many (`megatron_pgloss.planning.select.pieces`) are
exact."""
_ROWS = 4096
"""Rows of a batch that are told apart where the ranks of a replica have different batches."""
Counts = dict[str, dict[str, int | float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know after the gather."""

    counts: Counts
    """Component to counts over all ranks: `SLOTS`, and the tokens that each reason (`members.reasons`) took out."""
    means: dict[str, dict[int, float]]
    """Component to the mean weight of each normalised correction, by the correction's index."""
    job: dict[str, int]
    """Rows, tokens, tokens the policy sampled, excluded rows, empty ranks and micro-batches, over all ranks."""
    number: int
    """Micro-batches of every rank."""
    height: int
    """Rows per micro-batch, where fixed."""
    width: int
    """Width of padded rows, or tokens of a packed row, where fixed."""
    streams: int
    """Bits of `agreement.OPTIONAL`: the streams that any rank has."""
    unit_rows: int
    """How many rows each rank has in the keyed gather."""
    most_rows: int
    """The largest number of sequences of any rank."""
    dtype: torch.dtype
    """Dtype of weights and of the float streams that the loss reads."""


def pack(local: Local, asked: Request, ranks: Ranks, setup: int) -> Tensor:
    """This rank's row.

    Args:
        setup: a hash of what must be the same on every rank.

    Raises:
        LayoutError: more counts than a row holds.
    """
    head = {
        "spec": asked.spec.digest if asked.spec is not None else 0,
        "version": agreement.digest(__version__.encode()),
        "data_rank": ranks.data_rank,
        "setup": setup,
    }
    if local.rows is not None:
        head |= _about(local, local.rows, asked, ranks)
    return agreement.pack(head, body(local))


def fields(local: Local, asked: Request) -> dict[str, Callable[[], Any]]:
    """What the digests of `pack` are of, for the error of two ranks that differ."""
    batch = None if local.rows is None else local.rows.batch
    return {
        "spec": lambda: {} if asked.spec is None else asked.spec.to_dict(),
        "version": lambda: {"megatron_pgloss": __version__},
        "setup": lambda: asked.options,
        "streams": lambda: _names(batch),
        "batch": lambda: _contents(batch),
    }


def _names(batch: TokenBatch | None) -> dict[str, dict[str, bool]]:
    given = {} if batch is None else agreement.names_given(batch)
    return {kind: dict.fromkeys(names, True) for kind, names in given.items()}


def _contents(batch: TokenBatch | None) -> dict[str, Any]:
    """Sizes of the batch, a digest of each of its fields and one of each of its first rows."""
    if batch is None:
        return {"number of rows": 0}
    found: dict[str, Any] = {"number of rows": len(batch), "number of tokens": batch.tokens_T.numel()}
    for name, part in agreement.contents(batch).items():
        found[name] = f"{difference.CONTENT}{agreement.digest(part):x}"
    for row in range(min(len(batch), _ROWS)):
        content = agreement.batch_digest(batch.select([row]))
        found[f"row {row} ({row_name(row, batch.sample_ids)})"] = f"{difference.CONTENT}{content:x}"
    return found


def _about(local: Local, rows: CheckedRows, asked: Request, ranks: Ranks) -> dict[str, int]:
    """What the head says about this rank's rows."""
    batch = rows.batch
    lengths = batch.lengths_S.tolist()
    packed = [sum(round_up(lengths[row], asked.arrangement.multiple) for row in part) for part in rows.parts]
    unit = finest(asked.spec) if asked.spec is not None else None
    return {
        # The digest lets the ranks of one replica compare their rows. Where every rank is a replica by itself, no other
        # rank has the same rows, and the digest is not computed.
        "batch": agreement.batch_digest(batch) if ranks.world_size > ranks.data_size else 0,
        "streams": agreement.presence(batch),
        "microbatches": len(rows.parts),
        "rows": len(batch),
        "tokens": batch.tokens_T.numel(),
        "width": max(lengths, default=0),
        "bin_rows": max((len(part) for part in rows.parts), default=0),
        "bin_tokens": max(packed, default=0),
        # Rows of the keyed gather: one for each of this rank's units of the finest kind that a path names.
        "unit_rows": local.units.size.get(unit, 0) if local.units is not None and unit is not None else 0,
        "double": int(_double(batch)),
        "excluded": local.excluded,
        "actions": int(batch.action_T.sum()),
    }


def _double(batch: TokenBatch) -> bool:
    """Whether a stream that the loss reads is float64, and so the loss; streams of the log-prob pass do not count."""
    of_pass = {row.name for row in STREAMS if row.read_by != "loss"}
    return any(stream_T.dtype == torch.float64 for name, stream_T in batch.streams.items() if name not in of_pass)


def body(local: Local) -> Tensor:
    """The counts of this rank's components, int64."""
    values: list[int] = []
    for part, live in zip(local.counts, local.live, strict=True):
        tokens = part.tokens
        total = part.totals["token"]
        bits = _bits(total) if isinstance(total, float) else total
        values += [int(tokens.base_T.count_nonzero()), int(tokens.member_T.count_nonzero()), live]
        values += [*(int(part.totals[level]) for level in IN_ROWS[:-1]), bits, *tokens.dropped]
        for weight, number in tokens.means:
            values += [_bits(weight), number]
    if len(values) > agreement.BODY:
        raise LayoutError(
            "too many components and masks for one agreement row",
            expected=f"<= {agreement.BODY} counts",
            got=len(values),
            fix="merge components, or use fewer masks",
        )
    return torch.tensor(values, dtype=torch.int64)


def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float64).view(torch.int64))


def read(rows: Tensor, asked: Request) -> Agreed:
    """What the rows of all ranks say.

    Args:
        rows: int64 [world, ROW], on which all ranks agree (`agreement.raise_agreed`).

    Raises:
        DataError: a policy-gradient component without a token anywhere (the same on every rank).
        DataError: weights that no float32 holds.
        LayoutError: more tokens than `MOST_TOKENS`.
    """
    mine = rows[agreement.firsts(rows)]
    fields = {name: mine[:, i] for i, name in enumerate(FIELDS)}
    number = max(int(fields["microbatches"].max()), 1)
    if asked.interleaved is not None:
        number = legal_count(number, *asked.interleaved)
    tokens = int(fields["tokens"].sum())
    if tokens > MOST_TOKENS:
        raise LayoutError("a step of too many tokens", expected=f"<= {MOST_TOKENS}, over all ranks", got=tokens)
    width = int(fields["bin_tokens" if asked.split.packed else "width"].max())
    counts = job_counts(asked.spec, mine)
    if asked.spec is not None:
        check_range(asked.spec, counts, int(fields["rows"].sum()))
    return Agreed(
        counts=counts,
        means=mean_weights(asked.spec, mine),
        job={
            "rows": int(fields["rows"].sum()),
            "tokens": tokens,
            "actions": int(fields["actions"].sum()),
            "excluded": int(fields["excluded"].sum()),
            "empty_ranks": int((fields["rows"] == 0).sum()),
            # After refining, a rank has an empty micro-batch only for want of rows.
            "empty_microbatches": int((number - torch.minimum(fields["rows"], torch.tensor(number))).sum()),
        },
        number=number,
        height=int(fields["bin_rows"].max()),
        width=round_up(max(width, 1), asked.arrangement.multiple),
        streams=functools.reduce(operator.or_, fields["streams"].tolist(), 0),
        unit_rows=int(fields["unit_rows"].max()),
        most_rows=int(fields["rows"].max()),
        dtype=torch.float64 if bool(fields["double"].any()) else torch.float32,
    )


def stride_of(spec: LossSpec) -> int:
    """Numbers that a component takes in a row: `SLOTS`, its reasons, and two for each normalised correction."""
    return len(SLOTS) + len(members.reasons(spec)) + 2 * len(members.normalized(spec))


def job_counts(spec: LossSpec | None, mine: Tensor) -> Counts:
    """Every component's counts over the job, from one row of each replica.

    Raises:
        DataError: a policy-gradient component without a token anywhere (the same on every rank).
    """
    counts: Counts = {}
    if spec is None:
        return counts
    why = members.reasons(spec)
    stride = stride_of(spec)
    for c, part in enumerate(spec.components):
        body = mine[:, HEAD + c * stride : HEAD + (c + 1) * stride]
        sums = body[:, : len(SLOTS) + len(why)].sum(0).tolist()
        counts[part.name] = dict.fromkeys((*SLOTS, *why), 0)
        for slot, value in zip((*SLOTS, *why), sums, strict=True):
            counts[part.name][slot] += value  # two masks of one name share a reason
        if part.divide_by == "weights":
            counts[part.name]["token"] = body[:, SLOTS.index("token")].contiguous().view(torch.float64).sum().item()
        if isinstance(part, PolicyGradient) and counts[part.name]["base"] == 0:
            raise DataError(
                f"no action anywhere: no rank has a token for component {part.name!r}",
                expected="at least one action token in the step",
                got=f"{int(mine[:, FIELDS.index('rows')].sum())} rows",
                fix="check action_mask; an empty step must not reach the optimizer",
            )
    return counts


def mean_weights(spec: LossSpec | None, mine: Tensor) -> dict[str, dict[int, float]]:
    """Component to the mean over the job of each normalised correction's weights, by the correction's index."""
    found: dict[str, dict[int, float]] = {}
    for c, part in enumerate(spec.components if spec is not None else ()):
        assert spec is not None
        at = HEAD + c * stride_of(spec) + len(SLOTS) + len(members.reasons(spec))
        found[part.name] = {}
        for k, i in enumerate(members.normalized(spec)):
            pair = mine[:, at + 2 * k : at + 2 * k + 2]
            total = pair[:, 0].contiguous().view(torch.float64).sum().item()
            number = int(pair[:, 1].sum())
            if number:
                found[part.name][i] = total / number
    return found
