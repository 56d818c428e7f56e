"""Generalised advantage estimation over the actions of an episode. `S` rows, `T` tokens.

Time is counted in actions: the value after an action is the value at the episode's next action, across observations and
across the seam between two rows of the episode. A row's advantages are an affine function of what follows the row
(`gae_rows`), so an episode's rows may lie on any ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss.advantages.exchange import exchange
from megatron_pgloss.advantages.gae_rows import Local, Row
from megatron_pgloss.advantages.inputs import Batches, Key, deal, merge, real
from megatron_pgloss.advantages.reports import GAEReport
from megatron_pgloss.advantages.termination import EFFECTS
from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec.words import closed


@closed
def gae(
    batches: Batches,
    rewards: Any,
    *,
    values: Tensor | Callable[[TokenBatch], Tensor] | None = None,
    last_values: Any = None,
    token_rewards: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_lam: float | None = None,
    bootstrap: Literal["value", "none"] = "value",
    order: Any = None,
    group: Any = None,
    caller: str = "gae",
) -> tuple[Batches, GAEReport]:
    """``A_t = sum_k (gamma lam)^k delta_(t+k)``, ``delta_t = r_t + gamma V_(t+1) - V_t``, t over the episode's actions
    (Schulman 1506.02438, eq. 16). Returns are ``A_t + V_t``.

    After its last action an episode is worth 0 if it ended (success, failure, invalid), and V(last) if it was
    truncated. An episode with a fault takes no part: its advantages and returns are 0, whatever its numbers.

    Args:
        batches: this rank's rollouts, with terminations (unless ``bootstrap="none"``).
        rewards: float [S], the episode's reward, given on each of its rows and counted once, at its last action.
        values: float32/64 [T]: the value head's output at each position t, which is V of the state in which
            ``targets_T[t]`` is chosen; at a row's last position it is V of the state after the row. Default: the
            batch's stream ``values``, which has no value after a row. Or a function that makes ``values`` from all rows
            as one batch.
        last_values: float [S]: V of the state after each row; default: ``values`` at the row's last position.
        token_rewards: float32/64 [T], target-aligned, on actions.
        gamma: discount in [0, 1], per action token.
        lam: lambda in [0, 1], per action token.
        value_lam: lambda of the returns, if another than ``lam`` (VC-PPO 2503.01491).
        bootstrap: ``"value"`` as above; with ``"none"`` truncated episodes are worth 0 after their last action too.
        order: int [S]: place of a row in its episode. Default: the order of rows, which is refused for an episode
            whose rows lie on several ranks.
        group: process group of data-parallel ranks, as in `group_relative`; one gather of a few numbers per row.
        caller: the function's name in errors.

    Returns:
        The batches with streams ``advantages``, ``returns`` and ``values`` on actions, 0 elsewhere (float64 if values
        or rewards are), and the report.

    Raises:
        DataError: values or terminations are missing, a number that is read is not finite, or the order of an
            episode's rows is unknown.
    """
    lambdas = (lam,) if value_lam is None else (lam, value_lam)
    work: dict[str, Any] = {"local": None}

    def make(rank: int) -> list[tuple[Key, Row]]:
        for name, value in (("gamma", gamma), *(("lam", value) for value in lambdas)):
            real(name, value, 0, 1)
        if bootstrap not in ("value", "none"):
            raise DataError(f"bootstrap={bootstrap!r}", expected="value, none")
        batch = merge(batches)
        if batch is not None:
            value_T = values if isinstance(values, Tensor) or values is None else values(batch)
            work["local"] = Local(batch, rewards, value_T, last_values, token_rewards)
        local: Local | None = work["local"]
        if local is None:
            return []
        return local.rows(rank, gamma, lambdas, order, bootstrap)

    options = {"gamma": gamma, "lam": lambdas, "bootstrap": bootstrap, "order given": order is not None}
    ranks, rank = exchange(caller, make, group, options)
    episodes: dict[Key, list[Row]] = {}
    for key, row in (item for rows in ranks for item in rows):
        episodes.setdefault(key, []).append(row)
    ends = {key: _continue(_ordered(key, rows, order), gamma, lambdas, bootstrap) for key, rows in episodes.items()}
    report = GAEReport(
        episodes=len(ends),
        bootstrapped=sum(end.bootstrapped for end in ends.values()),
        left=sum(end.left for end in ends.values()),
        empty=sum(not any(row.actions for row in rows) for rows in episodes.values()),
    )
    local = work["local"]
    if local is None:
        none = torch.zeros(0)
        return deal(batches, {"advantages": none, "returns": none, "values": none}), report
    mine = [ends[key].after[rank, place] for place, (key, _) in enumerate(ranks[rank])]
    return deal(batches, local.finish(mine, gamma, lambdas)), report


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """What follows each row of an episode."""

    after: dict[tuple[int, int], tuple[float, tuple[float, ...]] | None]
    """(rank, row of the rank) to ``tail`` and ``next`` of the row (see `gae_rows`); None: the episode takes no part."""
    bootstrapped: bool
    left: bool


def _ordered(key: Key, rows: list[Row], order: Any) -> list[Row]:
    if order is None and len({row.rank for row in rows}) > 1:
        raise DataError(
            "the rows of an episode lie on several ranks, and their order is unknown",
            got=f"episode {key!r} on ranks {sorted({row.rank for row in rows})}",
            where=" and ".join(row.name for row in rows[:2]),
            fix="pass order=, the place of each row in its episode, or keep an episode's rows on one rank",
        )
    if order is not None and len({row.order for row in rows}) < len(rows):
        raise DataError("two rows of an episode have the same order", where=f"episode {key!r}", fix="mend order=")
    return sorted(rows, key=lambda row: row.order)


def _continue(rows: list[Row], gamma: float, lambdas: tuple[float, ...], bootstrap: str) -> _End:
    left = any(row.state is not None and EFFECTS[row.state].bootstrap == "leaves" for row in rows)
    places = [(row.rank, row.place) for row in rows]
    if left:
        return _End(after=dict.fromkeys(places), bootstrapped=False, left=True)
    if len({row.reward for row in rows}) > 1:
        raise DataError(
            "rows of one episode have different rewards",
            expected="the episode's reward on each of its rows",
            where=" and ".join(row.name for row in rows[:2]),
            fix="give rewards of tokens or turns as token_rewards=",
        )
    last = rows[-1]
    goes_on = bootstrap == "value" and last.state is not None and EFFECTS[last.state].bootstrap == "value"
    if goes_on and any(row.actions for row in rows) and not math.isfinite(last.last_value):
        raise DataError(
            "a truncated episode needs the value of its last state",
            got=last.last_value,
            where=last.name,
            fix="pass last_values=, or values= with the value head's output at every position, or bootstrap='none'",
        )
    tail, later = last.reward + (gamma * last.last_value if goes_on else 0.0), (0.0,) * len(lambdas)
    after: dict[tuple[int, int], tuple[float, tuple[float, ...]] | None] = {}
    for row, place in zip(reversed(rows), reversed(places), strict=True):
        after[place] = (tail, later)
        if row.actions:
            decays = [gamma * lam for lam in lambdas]
            later = tuple(
                alone + decay ** (row.actions - 1) * (tail + decay * next_)
                for alone, decay, next_ in zip(row.alone, decays, later, strict=True)
            )
            tail = gamma * row.first_value
    return _End(after=after, bootstrapped=goes_on, left=False)
