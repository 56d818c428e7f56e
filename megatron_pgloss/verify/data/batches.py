"""From rows to batches as a user would hand them over: streams by a model, and each data-parallel rank's share."""

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
        seed: the seed of everything that is drawn.
        model_fn: a causal function from tokens int64 [N, L] to logits float64 [N, L, V]; None: streams are made up.
        tail: make the rows by `tail_rows` instead of `make_rows`.
        more: arguments for `tail_rows` or `make_rows`.
    """
    rows = tail_rows(**more) if tail else make_rows(seed, **(dict(vocab=VOCAB, max_length=WIDTH) | more))
    if model_fn is not None:
        attach_streams(rows, _scored(rows, model_fn), seed, scale=0.4 if tail else 0.25)
    attach_teacher(rows, seed, more.get("vocab", VOCAB))
    attach_kept(rows, seed, more.get("vocab", VOCAB))
    # The name does not depend on the rank that holds the row.
    return [row | {"name": f"r{i}"} for i, row in enumerate(rows)]


def _scored(rows: Sequence[Row], model_fn: Any) -> list[torch.Tensor]:
    """Log-probs of each row's tokens, from one call of the model on all rows: what stands behind a row's last token
    changes none of them.
    """
    from megatron_pgloss.verify.oracle import oracle_logprobs

    ids = [torch.tensor(row["tokens"]) for row in rows]
    with torch.no_grad():
        logits = model_fn(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True))
    return [
        oracle_logprobs(one[: len(row["tokens"])], row["tokens"], row.get("temperature"))[0]
        for one, row in zip(logits, rows, strict=True)
    ]


def rounded(rows: Sequence[Row], dtype: torch.dtype) -> list[Row]:
    """The rows with every number rounded to ``dtype``, so that both sides of a comparison start equal."""

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
        weights: names of the components whose user weights are handed over.
        dtype: the dtype of the float streams.
        teacher: hand over a teacher's ids and log-probs too.
        kept: hand over the sampler's kept sets in the form that this rule reads; None: hand over none.
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
    """One data-parallel rank's rows. Ranks get unequal numbers of rows, and prompts and episodes straddle ranks.

    Args:
        rows: the rows of the whole step.
        rank: the data-parallel rank.
        size: the number of data-parallel ranks.
        empty_rank: the last rank gets no rows.
        alone: the first rank gets all rows.
        shuffle: the seed of a random order of the rank's rows; 0: their order in ``rows``.
    """
    workers = 1 if alone else size - 1 if empty_rank else size
    if rank >= workers:
        return []
    # The first rank gets one row more than its share: counts are uneven, and it has more micro-batches.
    owner = [0 if i < 2 else i % workers for i in range(len(rows))]
    mine = [row for row, who in zip(rows, owner, strict=True) if who == rank]
    if not shuffle:
        return mine
    order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(shuffle)).tolist()
    return [mine[i] for i in order]


def batches_of(layout: Any, where: Any, spec: LossSpec, rows: Sequence[Row], dtype: Any = None) -> list[TokenBatch]:
    """Batches of this data-parallel rank's share of the rows, with user weights for the spec's components.

    Args:
        layout: a `megatron_pgloss.verify.layouts.scenario.Scenario`.
        where: this rank's `megatron_pgloss.verify.layouts.parallel.Axes`.
        spec: the spec whose components take user weights, a teacher or kept sets.
        rows: the rows of the whole step.
        dtype: the dtype of the float streams; default float64.
    """
    mine = share(rows, where.dp_rank, where.dp, layout.empty_rank, alone=layout.alone, shuffle=layout.shuffle)
    weights = [name for name in rows[0]["weights"] if name in spec.names]
    return [batch_of(mine, weights, dtype or torch.float64, spec.chosen is not None, spec.kept)] if mine else []
