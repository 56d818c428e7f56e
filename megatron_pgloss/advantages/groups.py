"""Rewards of episodes relative to those of their group. `N` rows; an episode of several rows counts once.

Sums are exact (`math.fsum`), so no bit of an advantage depends on the order of episodes or on the ranks that hold them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss.advantages.exchange import exchange
from megatron_pgloss.advantages.inputs import Ids, Key, numbers, voting
from megatron_pgloss.advantages.reports import GroupReport, SilentGroup
from megatron_pgloss.advantages.termination import EFFECTS
from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import Id, Termination
from megatron_pgloss.spec.words import closed

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "mean", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode, or one row of it before rows are merged."""

    prompt: Id
    reward: float
    more: tuple[float, ...]
    """Sums of the token rewards of its rows."""
    votes: bool
    fault: bool
    name: str

    @property
    def score(self) -> float:
        """The episode's reward plus the rewards of its tokens."""
        return math.fsum((self.reward, *self.more))


@closed
def of_rewards(
    rewards: Any,
    prompt_ids: Any,
    *,
    episode_ids: Any = None,
    terminations: Any = None,
    voters: Any = None,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    min_voters: int = 2,
    group: Any = None,
) -> tuple[Tensor, GroupReport]:
    """Group-relative advantages of plain rewards, for `TokenBatch`'s ``advantages=``. A collective with ``group=``.

    ``A_i = (r_i - b) / s``. The arguments are those of `group_relative`; ids and terminations are as `TokenBatch` takes
    them.

    Args:
        rewards: float [N], one per row.
        prompt_ids: [N] of int or str; rows with one prompt id are a group.

    Returns:
        float [N] (float64 for float64 rewards, else float32), and the report.
    """

    def ids() -> tuple[Ids, Tensor, torch.dtype, Tensor]:
        prompts = _list(prompt_ids)
        rows = len(prompts)
        reward_N, kind = numbers("rewards", rewards, rows)
        states = None if terminations is None else tuple(_state(value) for value in _list(terminations))
        episodes = None if episode_ids is None else tuple(_list(episode_ids))
        for name, value in (("episode_ids", episodes), ("terminations", states)):
            if value is not None and len(value) != rows:
                raise DataError(f"{name} has the wrong length", expected=rows, got=len(value))
        return (
            Ids(rows=rows, prompts=tuple(prompts), episodes=episodes, terminations=states),
            reward_N, kind, voting(voters, rows),
        )  # fmt: skip

    out_N, kind, report = compute(
        "of_rewards", lambda: (*ids(), None), baseline=baseline, scale=scale, min_voters=min_voters, group=group
    )
    return out_N.to(kind), report


def compute(
    caller: str, read: Any, *, baseline: Baseline, scale: Scale, min_voters: int, group: Any
) -> tuple[Tensor, torch.dtype, GroupReport]:
    """The advantage of every row of this rank, float64 [N]; the dtype to return it in; and the report.

    Args:
        caller: the name of the public function, for errors.
        read: a function that returns `Ids`, rewards, their dtype, voters and sums of token rewards (or None) of this
            rank's rows.
        baseline: as in `group_relative`; so are the others.
    """
    kind, mine = torch.float32, []

    def make(rank: int) -> list[tuple[Key, Episode]]:
        nonlocal kind, mine
        _known(baseline, scale, min_voters)
        ids, reward_N, kind, voter_N, more_N = read()
        if ids.rows and ids.prompts is None:
            raise DataError(f"{caller} needs prompt_ids, which say which episodes are a group")
        mine = [(ids.key(row, rank), _episode(ids, row, reward_N, voter_N, more_N)) for row in range(ids.rows)]
        return mine

    ranks, _ = exchange(caller, make, group, {"baseline": baseline, "scale": scale, "min_voters": min_voters})
    episodes = _merged([item for rows in ranks for item in rows])
    table, report = _advantages(episodes, baseline, scale, min_voters)
    return torch.tensor([table[key] for key, _ in mine], dtype=torch.float64), kind, report


def standardize(centered: float, std: float) -> float:
    """``centered / std``. Where ``std`` is 0 nothing is divided; no epsilon is added."""
    return centered / std if std > 0 else centered


def deviation(values: Sequence[float]) -> float:
    """Standard deviation with ``n - 1``; exactly 0 where all values are equal or there is only one."""
    if len(values) < 2 or min(values) == max(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _episode(ids: Ids, row: int, reward_N: Tensor, voter_N: Tensor, more_N: Tensor | None) -> Episode:
    state = ids.state(row)
    fault = state is not None and not EFFECTS[state].votes
    reward, more = float(reward_N[row]), () if more_N is None else (float(more_N[row]),)
    votes = bool(voter_N[row]) and not fault
    if votes and not all(math.isfinite(value) for value in (reward, *more)):
        raise DataError(
            "a reward is not finite",
            got=reward,
            where=ids.name(row),
            fix="mend the reward, or mark the episode as a fault",
        )
    assert ids.prompts is not None
    return Episode(prompt=ids.prompts[row], reward=reward, more=more, votes=votes, fault=fault, name=ids.name(row))


def _merged(rows: list[tuple[Key, Episode]]) -> dict[Key, Episode]:
    """Merge rows into episodes. An episode votes if any of its rows stays in the loss and none has a fault."""
    found: dict[Key, Episode] = {}
    for key, row in rows:
        known = found.setdefault(key, row)
        if known is row:
            continue
        fault = known.fault or row.fault
        if known.reward != row.reward and not fault:
            raise DataError(
                "rows of one episode have different rewards",
                expected="the episode's reward on each of its rows",
                got=f"{known.reward:g} and {row.reward:g}",
                where=f"{known.name} and {row.name}, episode {key!r}",
                fix="give rewards of tokens or turns as token_rewards=, which are added up over the episode",
            )
        found[key] = replace(
            known, more=(*known.more, *row.more), votes=(known.votes or row.votes) and not fault, fault=fault
        )
    return found


def _advantages(
    episodes: dict[Key, Episode], baseline: Baseline, scale: Scale, min_voters: int
) -> tuple[dict[Key, float], GroupReport]:
    groups: dict[Id, list[Key]] = {}
    for key, episode in episodes.items():
        groups.setdefault(episode.prompt, []).append(key)
    whole = deviation([episode.score for episode in episodes.values() if episode.votes]) if scale == "batch" else 0.0
    table, silent, voters = dict.fromkeys(episodes, 0.0), [], 0
    for prompt, keys in groups.items():
        voting_keys = [key for key in keys if episodes[key].votes]
        scores = [episodes[key].score for key in voting_keys]
        voters += len(scores)
        reason = _reason(scores, scale, min_voters, baseline)
        if reason:
            silent.append(SilentGroup(prompt=prompt, episodes=len(keys), voters=len(scores), reason=reason))
            continue
        total, n = math.fsum(scores), len(scores)
        mean, spread = total / n, {"group": deviation(scores), "batch": whole, "mean": total / n, "none": 0.0}[scale]
        for key, score in zip(voting_keys, scores, strict=True):
            base = {"mean": mean, "leave_one_out": math.fsum((total, -score)) / max(n - 1, 1), "none": 0.0}[baseline]
            table[key] = standardize(score - base, spread)
    return table, GroupReport(groups=len(groups), episodes=len(episodes), voters=voters, silent=tuple(silent))


def _reason(scores: list[float], scale: Scale, min_voters: int, baseline: Baseline) -> str | None:
    """The reason why all advantages of a group are 0, or None."""
    if len(scores) < min_voters:
        return f"too few voters, fewer than {min_voters}"
    if baseline != "none" and min(scores) == max(scores):
        return f"all rewards equal ({scores[0]:g})"
    if scale == "mean" and min(scores) < 0:
        raise DataError("scale='mean' divides by the mean reward", expected="rewards >= 0", got=f"{min(scores):g}")
    return None


def _known(baseline: str, scale: str, min_voters: int) -> None:
    for name, value, known in (
        ("baseline", baseline, ("mean", "leave_one_out", "none")),
        ("scale", scale, ("group", "batch", "mean", "none")),
    ):
        if not isinstance(value, str) or value not in known:
            raise DataError(f"{name}={value!r}", expected=", ".join(known))
    least = 1 if baseline == "none" else 2
    if type(min_voters) is not int or min_voters < least:
        raise DataError(f"min_voters={min_voters}", expected=f">= {least}: one episode has nothing to be compared with")


def _list(given: Any) -> list[Any]:
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise DataError("ids and terminations are lists, one entry a row", got=type(values).__name__)
    return list(values)


def _state(value: Any) -> Termination:
    try:
        return Termination(value)
    except ValueError as error:
        known = ", ".join(state.value for state in Termination)
        raise DataError(f"unknown termination: {error}", expected=known) from None
