"""Rows as a user would hand them over: the streams of a model, batches, and each data-parallel rank's share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_pgloss.rollouts import STREAMS, TokenBatch
from megatron_pgloss.spec import KeptSet, LossSpec
from megatron_pgloss.verify.data.rows import (
    VOCAB,
    WIDTH,
    Row,
    attach_kept,
    attach_streams,
    attach_teacher,
    make_rows,
    tail_rows,
)


def rows_of_step(seed: int = 0, model_fn: Any = None, *, tail: bool = False, **more: Any) -> list[Row]:
    """Rows whose streams lie around the model's own log-probs, so that clips and corrections are active.

    Args:
        seed: of everything that is drawn.
        model_fn: tokens int64 [1, L] to logits float64 [1, L, V]; None: streams are made up.
        tail: `tail_rows` in place of `make_rows`.
        more: arguments of the two.
    """
    from megatron_pgloss.verify.oracle import oracle_logprobs

    rows = tail_rows(**more) if tail else make_rows(seed, **(dict(vocab=VOCAB, max_length=WIDTH) | more))
    if model_fn is not None:
        with torch.no_grad():
            scored = [
                oracle_logprobs(model_fn(torch.tensor(row["tokens"])[None])[0], row["tokens"], row.get("temperature"))[
                    0
                ]
                for row in rows
            ]
        attach_streams(rows, scored, seed, scale=0.4 if tail else 0.25)
    attach_teacher(rows, seed, more.get("vocab", VOCAB))
    attach_kept(rows, seed, more.get("vocab", VOCAB))
    # A name that does not depend on who holds the row.
    return [row | {"name": f"r{i}"} for i, row in enumerate(rows)]


def rounded(rows: Sequence[Row], dtype: torch.dtype) -> list[Row]:
    """The rows with every number as ``dtype`` holds it, so that both sides of a comparison start from the same."""

    def cast(values: Any) -> Any:
        return None if values is None else torch.tensor(values, dtype=dtype).tolist()

    return [
        row
        | {stream.name: cast(row[stream.name]) for stream in STREAMS if stream.is_float and stream.name in row}
        | {"wide": row["wide"] | {"teacher_logprobs": cast(row["wide"]["teacher_logprobs"])}}
        | {"sampler": row["sampler"] | {name: cast(row["sampler"][name]) for name in ("top_p", "min_p")}}
        | {"weights": {name: cast(values) for name, values in row["weights"].items()}}
        for row in rows
    ]


def batch_of(
    rows: Sequence[Row], weights: Sequence[str] = (), dtype: torch.dtype = torch.float64, teacher: bool = False,
    kept: KeptSet | None = None,
) -> TokenBatch:  # fmt: skip
    """The rows as a user would hand them over, packed, in token order.

    Args:
        rows: at least one.
        weights: components whose user weights go along.
        dtype: of the float streams.
        teacher: hand over a teacher's ids and log-probs too.
        kept: hand over what the sampler could draw from, as this rule reads it.
    """

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in row[name]], dtype=dtype)

    def flags(name: str) -> torch.Tensor:
        return torch.tensor([bool(value) for row in rows for value in row[name]])

    taught = {}
    for name, kind in (("teacher_ids", torch.int64), ("teacher_logprobs", dtype)) if teacher else ():
        taught[name] = torch.tensor([value for row in rows for value in row["wide"][name]], dtype=kind)
    sets: dict[str, Any] = {}
    if kept is not None and kept.source == "recorded":
        sets = {"kept_sets": torch.tensor([ids for row in rows for ids in row["wide"]["kept"]])}
    elif kept is not None:
        for name in ("top_k", "top_p", "min_p"):
            values = [value for row in rows for value in row["sampler"][name]]
            sets[name] = torch.tensor(values, dtype=torch.int64 if name == "top_k" else dtype)
    there = [stream for stream in STREAMS if stream.is_float and rows[0].get(stream.name) is not None]
    streams: dict[str, Any] = {stream.argument: flat(stream.name) for stream in there}
    return TokenBatch.from_packed(
        tokens=torch.tensor([token for row in rows for token in row["tokens"]]),
        lengths=[len(row["tokens"]) for row in rows],
        action_mask=flags("action"),
        observation_mask=flags("observation"),
        prompt_ids=[row["prompt"] for row in rows],
        episode_ids=[row["episode"] for row in rows],
        sample_ids=[row["name"] for row in rows],
        terminations=[row["termination"] for row in rows],
        streams=taught,
        masks={"keep": torch.tensor([value for row in rows for value in row["masks"]["keep"]])},
        weights={
            name: torch.tensor([value for row in rows for value in row["weights"][name]], dtype=dtype)
            for name in weights
        },
        **streams,
        **sets,
    )


def share(
    rows: Sequence[Row], rank: int, size: int, empty_rank: bool = False, *, alone: bool = False, shuffle: int = 0
) -> list[Row]:
    """A data-parallel rank's rows: uneven, dealt out so that prompts and episodes straddle ranks.

    Args:
        rows: of the whole step.
        rank, size: data-parallel.
        empty_rank: the last rank has none.
        alone: the first rank has all.
        shuffle: seed of another order; 0: as they come.
    """
    workers = 1 if alone else size - 1 if empty_rank else size
    if rank >= workers:
        return []
    # The first rank has one row more than its part: uneven counts, and more micro-batches there.
    owner = [0 if i < 2 else i % workers for i in range(len(rows))]
    mine = [row for row, who in zip(rows, owner, strict=True) if who == rank]
    if not shuffle:
        return mine
    order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(shuffle)).tolist()
    return [mine[i] for i in order]


def batches_of(layout: Any, where: Any, spec: LossSpec, rows: Sequence[Row], dtype: Any = None) -> list[TokenBatch]:
    """This data-parallel rank's share, with the weights of the spec's components.

    Args:
        layout: a `megatron_pgloss.verify.layouts.scenario.Scenario`.
        where: this rank's `megatron_pgloss.verify.layouts.parallel.Axes`.
        spec: whose components take their user weights.
        rows: of the whole step.
        dtype: of the float streams; default float64.
    """
    mine = share(rows, where.dp_rank, where.dp, layout.empty_rank, alone=layout.alone, shuffle=layout.shuffle)
    weights = [name for name in rows[0]["weights"] if name in spec.names]
    return [batch_of(mine, weights, dtype or torch.float64, spec.chosen is not None, spec.kept)] if mine else []
