"""Whitening of advantages over the tokens of the whole step. `S` rows, `T` tokens.

The rank that holds a row computes the row's count, mean and sum of squares. Rows are merged by exact sums, so no bit of
the result depends on which rank or batch holds a row.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megatron_pgloss.advantages.exchange import exchange
from megatron_pgloss.advantages.gae import gae
from megatron_pgloss.advantages.groups import standardize
from megatron_pgloss.advantages.inputs import Batches, Ids, deal, finite, merge, voting
from megatron_pgloss.advantages.relative import group_relative
from megatron_pgloss.advantages.reports import Moments
from megatron_pgloss.advantages.termination import EFFECTS
from megatron_pgloss.errors import Caught, DataError
from megatron_pgloss.rollouts import TokenBatch, arrays, broken
from megatron_pgloss.spec.words import closed


@closed
def whiten(
    batches: Batches,
    *,
    scale: bool = True,
    over: Literal["tokens", "sequences"] = "tokens",
    voters: Any = None,
    mask: Tensor | None = None,
    group: Any = None,
) -> tuple[Batches, Moments]:
    """Shift and scale advantages to mean 0 and standard deviation 1 over the action tokens of the step, on all ranks.

    ``A' = (A - mean) / std``, with ``n - 1`` in the deviation; tokens outside get exactly 0. Where all advantages are
    equal the result is 0, and nothing is divided.

    Args:
        batches: rollouts with stream ``advantages``.
        scale: whether to divide by the standard deviation; if False, advantages are only centred.
        over: ``sequences``: mean and deviation are those of the rows' means, each row once, so that a long answer has
            no more say in them than a short one; applied to the tokens all the same.
        voters: bool [S]: rows that stay in the loss; rows with a fault never do.
        mask: bool [T], target-aligned: the action tokens to whiten; default: all.
        group: process group of data-parallel ranks, as in `group_relative`.

    Returns:
        The batches with the stream replaced, and its moments before.

    Raises:
        DataError: advantages are missing, or not finite where they are read.
    """
    state: dict[str, Any] = {}

    def make(rank: int) -> list[tuple[int, float, float]]:
        if over not in ("tokens", "sequences"):
            raise DataError(f"over={over!r}", expected="tokens, sequences")
        batch = state["batch"] = merge(batches)
        if batch is None:
            return []
        if "advantages" not in batch.streams:
            raise DataError("whiten needs a batch with advantages", fix="call group_relative(...) or gae(...) first")
        stream_T = batch.streams["advantages"].to(torch.float64)
        over_T = state["over"] = _over(batch, voters, mask)
        finite("stream 'advantages'", stream_T, over_T, batch)
        rows = _row_moments(batch, torch.where(over_T, stream_T, 0), over_T)
        return [(1, mean, 0.0) for _, mean, _ in rows] if over == "sequences" else rows

    ranks, _ = exchange("whiten", make, group, {"scale": scale, "over": over})
    moments = _merged([row for rows in ranks for row in rows])
    batch = state["batch"]
    if batch is None:
        return deal(batches, {"advantages": torch.zeros(0)}), moments
    stream_T = batch.streams["advantages"]
    out_T = torch.where(state["over"], stream_T.to(torch.float64), moments.mean) - moments.mean
    if scale:
        out_T = out_T * standardize(1.0, moments.std)
    return deal(batches, {"advantages": out_T.to(stream_T.dtype)}), moments


@closed
def reinforce_plus_plus(
    batches: Batches,
    rewards: Any,
    *,
    baseline: Literal["none", "group"] = "none",
    token_rewards: Tensor | None = None,
    gamma: float = 1.0,
    statistics: Literal["tokens", "sequences"] = "tokens",
    voters: Any = None,
    group: Any = None,
) -> tuple[Batches, Moments]:
    """REINFORCE++ (2501.03262): the return of each token, whitened over the tokens of the whole step, or (``statistics=
    "sequences"``) by mean and deviation of one number per sequence.

    With ``baseline="none"`` it is ``whiten(sum_{k>=t} gamma^(k-t) r_k)``, where r_k is the token's reward
    (``token_rewards``, see `kl_penalty`) plus, on the last action of the episode, the episode's reward. With
    ``"group"`` it is the episode's reward, token rewards added, minus its group's mean, on every token, then whitened;
    silent groups (see `GroupReport`) enter with 0. The other arguments are those of `group_relative`.
    """
    with Caught() as here:
        if baseline not in ("none", "group"):
            raise DataError(f"baseline={baseline!r}", expected="none, group")
        if baseline == "group" and gamma != 1.0:
            raise DataError("a group baseline compares whole episodes", expected="gamma=1", got=gamma)
    if here.error is not None:
        batches = cast(Batches, [broken(here.error)])  # raised by the gather, on every rank
    if baseline == "group":
        centred, _ = group_relative(
            batches, rewards, scale="none", token_rewards=token_rewards, voters=voters, group=group
        )
        return whiten(centred, over=statistics, voters=voters, group=group)

    def zeros(batch: TokenBatch) -> Tensor:
        return torch.zeros(batch.tokens_T.numel(), dtype=_kind(rewards))

    returns, _ = gae(
        batches, rewards, values=zeros, token_rewards=token_rewards, gamma=gamma, lam=1.0, bootstrap="none",
        group=group, caller="reinforce_plus_plus",
    )  # fmt: skip
    return whiten(returns, over=statistics, voters=voters, group=group)


def _kind(rewards: Any) -> torch.dtype:
    given = rewards[0] if isinstance(rewards, list | tuple) and rewards else rewards
    return torch.float64 if isinstance(given, Tensor) and given.dtype == torch.float64 else torch.float32


def _over(batch: TokenBatch, voters: Any, mask: Tensor | None) -> Tensor:
    ids = Ids.of(batch)
    states = [ids.state(row) for row in range(ids.rows)]
    stays_S = torch.tensor([state is None or EFFECTS[state].bootstrap != "leaves" for state in states])
    stays_S = stays_S.to(torch.bool) & voting(voters, ids.rows)
    over_T = batch.action_T & stays_S[batch.seq_T]
    if mask is not None:
        mask_T = arrays.tensor("mask", mask)
        if mask_T.dtype != torch.bool or mask_T.shape != over_T.shape:
            got = f"{mask_T.dtype} {list(mask_T.shape)}"
            raise DataError("mask has the wrong type", expected=f"bool {list(over_T.shape)}", got=got)
        over_T = over_T & mask_T
    return over_T


def _row_moments(batch: TokenBatch, stream_T: Tensor, over_T: Tensor) -> list[tuple[int, float, float]]:
    """Count, mean and sum of squared deviations of every row that has tokens."""
    seq_T, zero_S = batch.seq_T, torch.zeros(len(batch), dtype=torch.float64)
    count_S = zero_S.index_add(0, seq_T, over_T.to(torch.float64))
    some_S = torch.where(count_S > 0, count_S, 1)
    mean_S = zero_S.index_add(0, seq_T, stream_T) / some_S
    off_T = torch.where(over_T, stream_T - mean_S[seq_T], 0)
    square_S = zero_S.index_add(0, seq_T, off_T.square())
    rows = zip(count_S.long().tolist(), mean_S.tolist(), square_S.tolist(), strict=True)
    return [row for row in rows if row[0]]


def _merged(rows: list[tuple[int, float, float]]) -> Moments:
    # Chan, Golub, LeVeque (1979): squares within rows plus squares between their means, each an exact sum.
    count = sum(n for n, _, _ in rows)
    if not count:
        return Moments(count=0, mean=0.0, std=0.0)
    mean = math.fsum(n * m for n, m, _ in rows) / count
    if len({m for _, m, _ in rows}) == 1 and not any(square for _, _, square in rows):
        return Moments(count=count, mean=rows[0][1], std=0.0)
    square = math.fsum((*(s for _, _, s in rows), *(n * (m - mean) ** 2 for n, m, _ in rows)))
    return Moments(count=count, mean=mean, std=math.sqrt(square / (count - 1)) if count > 1 else 0.0)
