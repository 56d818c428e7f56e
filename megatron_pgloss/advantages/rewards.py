"""Terms to add to rewards: KL per token, and penalties on length. `S` rows, `E` lengths, `T` tokens.

A length penalty changes what is rewarded; a normaliser changes how much a token of a long answer weighs. Neither
replaces the other: see docs/advantages.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss.advantages.exchange import exchange
from megatron_pgloss.advantages.inputs import Ids, Key, finite, merge, real
from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import bounded, k1, k2, k3
from megatron_pgloss.rollouts import Termination, TokenBatch, arrays
from megatron_pgloss.spec.words import closed

_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@closed
def kl_penalty(
    batches: TokenBatch | Sequence[TokenBatch],
    coef: float,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    of: Literal["old", "rollout"] = "old",
    to: str = "ref",
    log_ratio_bound: float = 20.0,
) -> Tensor:
    """KL as a reward of each token, to be passed as ``token_rewards=``: ``-coef * k(d)`` with ``d = log of - log to``
    on actions, 0 elsewhere (with k1: Ziegler 1909.08593, eq. 2).

    Args:
        batches: this rank's rollouts, with the streams that ``of`` and ``to`` name.
        coef: coefficient >= 0.
        estimator: k1 ``d``, k2 ``d^2/2``, k3 ``exp(-d) + d - 1``.
        of: the stream of log-probs whose distance is penalised.
        to: the stream that the distance is to: ``ref``, ``old``, or another reference by its name.
        log_ratio_bound: d is clipped to plus or minus this.

    Returns:
        float32/64 [T], target-aligned, a constant.

    Raises:
        DataError: a stream is missing, or not finite on an action of a row without a fault.
    """
    real("coef", coef, 0)
    real("log_ratio_bound", log_ratio_bound, 0, 80, above=True)
    if estimator not in _ESTIMATORS:
        raise DataError(f"estimator={estimator!r}", expected=", ".join(_ESTIMATORS))
    batch = merge(batches)
    if batch is None:
        return torch.zeros(0)
    for name in (of, to):
        if name not in batch.streams:
            raise DataError(
                f"kl_penalty reads stream {name!r}, which the batch does not have", fix=f"give {name}_logprobs="
            )
    read_T = batch.action_T & ~_broken(batch)
    for name in (of, to):
        finite(f"stream {name!r}", batch.streams[name], read_T, batch)
    # Selected before arithmetic: positions outside may hold NaN or infinity.
    d_T = torch.where(read_T, batch.streams[of], 0) - torch.where(read_T, batch.streams[to], 0)
    k_T = _ESTIMATORS[estimator](bounded(d_T, log_ratio_bound))
    return torch.where(read_T, 0 - coef * k_T, 0)


def _broken(batch: TokenBatch) -> Tensor:
    states = batch.terminations if batch.terminations is not None else (None,) * len(batch)
    fault_S = torch.tensor([state is Termination.FAULT for state in states], dtype=torch.bool)
    return torch.repeat_interleave(fault_S, batch.lengths_S)


@closed
def episode_lengths(batches: TokenBatch | Sequence[TokenBatch], *, group: Any = None) -> Tensor:
    """Number of policy tokens of each row's episode, over all rows of the episode, int64 [S]. A collective with
    ``group=``.
    """
    mine: list[Key] = []

    def make(rank: int) -> list[tuple[Key, int]]:
        nonlocal mine
        batch = merge(batches)
        if batch is None:
            return []
        ids = Ids.of(batch)
        count_S = torch.zeros(len(batch), dtype=torch.int64).index_add(0, batch.seq_T, batch.action_T.to(torch.int64))
        mine = [ids.key(row, rank) for row in range(len(batch))]
        return list(zip(mine, count_S.tolist(), strict=True))

    ranks, _ = exchange("episode_lengths", make, group)
    total: dict[Key, int] = {}
    for key, count in (item for rows in ranks for item in rows):
        total[key] = total.get(key, 0) + count
    return torch.tensor([total[key] for key in mine], dtype=torch.int64)


@closed
def soft_overlong(lengths: Any, limit: float, buffer: float, *, penalty: float = 1.0) -> Tensor:
    """Soft overlong punishment, to be added to the rewards: 0 up to ``limit - buffer`` tokens, then falling in a
    straight line to ``-penalty`` at ``limit``, and ``-penalty`` beyond (DAPO 2503.14476, eq. 13).

    Args:
        lengths: int [E], policy tokens of each episode.
        limit: the hard maximum L_max, in tokens.
        buffer: L_cache, in tokens, in (0, limit].
        penalty: the largest penalty, >= 0.

    Returns:
        float64 [E], in [-penalty, 0].
    """
    real("limit", limit, 0, above=True)
    real("buffer", buffer, 0, limit, above=True)
    real("penalty", penalty, 0)
    over_E = (_lengths(lengths) - (limit - buffer)) / buffer
    return 0 - penalty * over_E.clamp(0, 1)


@closed
def linear_length(lengths: Any, per_token: float, *, free: float = 0.0) -> Tensor:
    """A price per token, to be added to the rewards: ``-per_token * max(length - free, 0)``.

    Args:
        lengths: int [E], policy tokens of each episode.
        per_token: reward units per token, >= 0.
        free: tokens that cost nothing.

    Returns:
        float64 [E].
    """
    real("per_token", per_token, 0)
    real("free", free, 0)
    return 0 - per_token * (_lengths(lengths) - free).clamp(min=0)


def _lengths(given: Any) -> Tensor:
    value = arrays.tensor("lengths", given)
    if value.is_floating_point() or value.dtype == torch.bool or bool((value < 0).any()):
        raise DataError("lengths must be whole numbers >= 0", expected="int64 [E]", got=value.dtype)
    return value.to(torch.float64)
