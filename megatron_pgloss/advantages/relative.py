"""Advantages that are one number per episode, or one per turn. `S` rows, `T` tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.advantages.groups import Baseline, Scale, compute
from megatron_pgloss.advantages.inputs import Batches, Ids, deal, finite, merge, numbers, tokenwise, voting
from megatron_pgloss.advantages.reports import GroupReport
from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import TokenBatch, arrays
from megatron_pgloss.spec.words import closed


@closed
def group_relative(
    batches: Batches,
    rewards: Any,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    token_rewards: Tensor | None = None,
    voters: Any = None,
    min_voters: int = 2,
    group: Any = None,
) -> tuple[Batches, GroupReport]:
    """The episode's reward relative to its group's, on every token: ``A = (r - b) / s`` over the episodes of a prompt.

    Statistics are over episodes. Each counts once, however many rows it has and on whichever ranks they lie. An episode
    whose rows all leave the loss, or have no action, does not vote, and its advantage is 0. A group with fewer than
    ``min_voters`` voters, or with equal rewards, gets advantage 0 and is listed in the report. Standard deviations
    divide by ``n - 1``; no epsilon is added.

    ======================  ================  =============================================
    ``baseline``            ``scale``         known as
    ======================  ================  =============================================
    ``mean``                ``group``         GRPO (2402.03300, section 4.1.2)
    ``mean``                ``none``          Dr. GRPO (2503.20783, section 3.2)
    ``mean``                ``batch``         lite PPO (2508.08221): deviation over all rewards
    ``mean``                ``mean``          MaxRL: ``(r - mean) / mean``, rewards >= 0
    ``leave_one_out``       ``none``          RLOO (2402.14740, eq. 7), see `rloo`
    ======================  ================  =============================================

    Args:
        batches: this rank's rollouts, with prompt ids; episode ids where an episode has several rows.
        rewards: float [S], one per row; all rows of an episode have the episode's reward.
        baseline: b, see the table.
        scale: s, see the table.
        token_rewards: float32/64 [T], target-aligned, added up over the episode's tokens (`kl_penalty`).
        voters: bool [S]: rows that stay in the loss (`megatron_pgloss.voters` says which under a spec); faults never
            vote.
        min_voters: at least 2 (1 for ``baseline="none"``).
        group: process group of data-parallel ranks, over which one keyed gather runs. None: this process alone, which
            is refused in a world of several ranks; ``"local"``: this process alone, on purpose.

    Returns:
        The batches with stream ``advantages`` (float64 for float64 rewards, else float32), and the report.

    Raises:
        DataError: prompt ids are missing, rows of one episode have different rewards, or a voter's reward is not
            finite.
    """
    state: dict[str, Any] = {}

    def read() -> tuple[Ids, Tensor, torch.dtype, Tensor, Tensor | None]:
        batch = state["batch"] = merge(batches)
        ids = Ids.of(batch)
        reward_S, kind = numbers("rewards", rewards, ids.rows)
        more_T, _ = tokenwise("token_rewards", token_rewards, batch)
        more_S = None if more_T is None or batch is None else _row_sums(batch, more_T)
        voter_S = voting(voters, ids.rows)
        # What has no action cannot be trained, so it is nothing to compare the others with.
        return ids, reward_S, kind, voter_S if batch is None else voter_S & _acts(batch), more_S

    out_S, kind, report = compute(
        "group_relative", read, baseline=baseline, scale=scale, min_voters=min_voters, group=group
    )
    return spread(batches, state["batch"], out_S.to(kind)), report


@closed
def rloo(batches: Batches, rewards: Any, **more: Any) -> tuple[Batches, GroupReport]:
    """Reward minus the mean reward of the *other* episodes of the prompt (2402.14740, eq. 7), which is ``n / (n - 1)``
    times the reward minus the mean of all. The arguments are those of `group_relative`.
    """
    return group_relative(batches, rewards, **{"baseline": "leave_one_out", "scale": "none", **more})


@closed
def per_turn(batches: Batches, values: Sequence[Any]) -> Batches:
    """One given number for every token of a turn: ``values[s][k]`` is about the k-th turn of row s.

    A turn is a run of policy tokens and the tokens up to the next run; tokens before the first turn get 0. There is no
    collective.

    Args:
        batches: this rank's rollouts.
        values: for each row, as many finite numbers as the row has turns; a tensor [S, K] where all rows have K turns.
            The rows of a list of batches are numbered on from one batch to the next.

    Raises:
        DataError: the number of rows or turns is another, or a number is not finite.
    """
    batch = merge(batches)
    rows = 0 if batch is None else len(batch)
    if not isinstance(values, Sequence | Tensor) or isinstance(values, str | bytes):
        raise DataError("per_turn takes a list of values of each row", got=type(values).__name__)
    if len(values) != rows:
        raise DataError("per_turn has values for another number of rows", expected=rows, got=len(values))
    if batch is None:
        return deal(batches, {"advantages": torch.zeros(0)})
    kind = torch.float64 if isinstance(values, Tensor) and values.dtype == torch.float64 else torch.float32
    place_T, turns_S = _turn_places(batch)
    flat: list[float] = []
    start: list[int] = []
    for row, given in enumerate(values):
        turn_K = arrays.tensor("a row of per_turn's values", given, torch.float64)
        mine = turn_K.reshape(-1).tolist()
        if len(mine) != int(turns_S[row]):
            raise DataError(
                "per_turn has another number of values than the row has turns",
                expected=int(turns_S[row]),
                got=len(mine),
                where=batch.sample_name(row),
            )
        start.append(len(flat))
        flat += mine
    value_K = torch.tensor([*flat, 0.0], dtype=torch.float64)
    at_T = torch.tensor(start, dtype=torch.int64)[batch.seq_T] + place_T
    out_T = torch.where(place_T >= 0, value_K[torch.where(place_T >= 0, at_T, 0)], 0)
    finite("a turn's value", out_T, place_T >= 0, batch)
    return deal(batches, {"advantages": out_T.to(kind)})


def spread(batches: Batches, batch: TokenBatch | None, value_S: Tensor) -> Batches:
    """Set ``advantages`` to one number per row, and to 0 at positions that predict nothing."""
    if batch is None:
        return deal(batches, {"advantages": value_S})
    return deal(batches, {"advantages": torch.where(batch.predicts_T, value_S[batch.seq_T], 0)})


def _acts(batch: TokenBatch) -> Tensor:
    """bool [S]: rows with an action."""
    return torch.zeros(len(batch), dtype=torch.bool).index_fill_(0, batch.seq_T[batch.action_T], True)


def _row_sums(batch: TokenBatch, stream_T: Tensor) -> Tensor:
    finite("token_rewards", stream_T, batch.action_T, batch)
    picked_T = torch.where(batch.action_T, stream_T, 0)
    return torch.zeros(len(batch), dtype=torch.float64).index_add(0, batch.seq_T, picked_T)


def _turn_places(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """int64 [T]: the number of the token's turn within its row, from 0, or -1; int64 [S]: the number of turns of each
    row.
    """
    turn_T, seq_T = batch.turn_T, batch.seq_T
    before_T = torch.cat([torch.full((1,), -1), turn_T[:-1]])[: turn_T.numel()]
    first_T = torch.ones_like(batch.predicts_T)
    first_T[1:] = seq_T[1:] != seq_T[:-1]
    begins_T = (turn_T >= 0) & (first_T | (turn_T != before_T))
    count_T = begins_T.to(torch.int64).cumsum(0)
    total_S = torch.zeros(len(batch), dtype=torch.int64).index_add(0, seq_T, begins_T.to(torch.int64))
    earlier_S = total_S.cumsum(0) - total_S
    return torch.where(turn_T >= 0, count_T - earlier_S[seq_T] - 1, -1), total_S
