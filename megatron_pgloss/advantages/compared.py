"""Further comparisons of an episode: with a given baseline, by length, by pass@k, by several rewards. `S` rows.

As in `megatron_pgloss.advantages.groups`: every episode votes once, sums are exact, and one gather carries one entry a
row. A row that no action token is in has nothing to train and does not vote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch

from megatron_pgloss.advantages.exchange import exchange
from megatron_pgloss.advantages.groups import deviation, standardize
from megatron_pgloss.advantages.inputs import Batches, Ids, Key, deal, merge, numbers, real, voting
from megatron_pgloss.advantages.relative import spread
from megatron_pgloss.advantages.reports import GroupReport, SilentGroup
from megatron_pgloss.advantages.termination import EFFECTS
from megatron_pgloss.errors import Caught, DataError
from megatron_pgloss.rollouts import Id, TokenBatch, broken
from megatron_pgloss.spec.words import closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One episode: what it is compared by."""

    prompt: Id
    rewards: tuple[float, ...]
    tokens: int
    """Policy tokens of all its rows."""
    votes: bool
    fault: bool
    name: str


Formula = Callable[[Sequence[Standing]], Sequence[float] | str]
"""The advantages of a group's voters, or why the group teaches nothing."""


@closed
def given_baseline(batches: Batches, rewards: Any, baselines: Any) -> Batches:
    """``A = r - b`` on every token, with a baseline from elsewhere: ReMax's is the reward of the greedy answer to the
    same prompt (2310.10505). No collective: nothing is compared.

    Args:
        batches: this rank's rollouts.
        rewards, baselines: float [S], one per row; the rows of an episode carry the same ones.

    Returns:
        the batches with stream ``advantages`` (float64 for float64 rewards, else float32); 0 in rows of a fault.

    Raises:
        DataError: another number of rows, or not finite in a row without a fault.
    """
    batch = merge(batches)
    ids = Ids.of(batch)
    reward_S, kind = numbers("rewards", rewards, ids.rows)
    base_S, _ = numbers("baselines", baselines, ids.rows)
    fault_S = torch.tensor([_fault(ids, row) for row in range(ids.rows)], dtype=torch.bool)
    for name, value_S in (("a reward", reward_S), ("a baseline", base_S)):
        bad = (~value_S.isfinite() & ~fault_S).nonzero().flatten().tolist()
        if bad:
            raise DataError(f"{name} is not finite", got=float(value_S[bad[0]]), where=ids.name(bad[0]))
    # Select before arithmetic: a broken rollout may have no number.
    out_S = torch.where(fault_S, 0, reward_S) - torch.where(fault_S, 0, base_S)
    return spread(batches, batch, out_S.to(kind))


@closed
def opo(
    batches: Batches, rewards: Any, *, voters: Any = None, min_voters: int = 2, group: Any = None
) -> tuple[Batches, GroupReport]:
    """OPO: the reward less the group's length-weighted mean, ``A_i = r_i - sum_j L_j r_j / sum_j L_j``, the baseline of
    least variance where the squared gradient of an answer grows with its length (2505.23585). L: policy tokens
    of the episode. Arguments and report as in `group_relative`.
    """

    def formula(group: Sequence[Standing]) -> Sequence[float] | str:
        rewards = [one.rewards[0] for one in group]
        if min(rewards) == max(rewards):
            return f"all rewards equal ({rewards[0]:g})"
        base = math.fsum(one.tokens * one.rewards[0] for one in group) / sum(one.tokens for one in group)
        return [reward - base for reward in rewards]

    return _compared("opo", batches, {"rewards": rewards}, formula, voters, min_voters, group, {})


@closed
def pass_at_k(
    batches: Batches, rewards: Any, k: int, *, voters: Any = None, group: Any = None
) -> tuple[Batches, GroupReport]:
    """Advantages for pass@k: of all subsets of k answers to a prompt, each worth 1 where one of them is right, an
    answer gets the mean standardised worth of those that it is in (2508.10751, the analytical form). With c of n right:

    ``R = 1 - C(n - c, k) / C(n, k)``, ``s = sqrt(R (1 - R))``; right: ``A = (1 - R) / s``; wrong:
    ``A = (1 - R - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / s``.

    ``k=1`` is GRPO with the population's deviation. A group of fewer than k voters, or whose subsets are all worth the
    same, gets 0 and stands in the report.

    Args:
        rewards: [S], 0 or 1; the rest as in `group_relative`.
        k: at least 1.

    Raises:
        DataError: a voter's reward is neither 0 nor 1.
    """

    def formula(group: Sequence[Standing]) -> Sequence[float] | str:
        for one in group:
            if one.rewards[0] not in (0.0, 1.0):
                raise DataError("pass_at_k takes rewards of 0 and 1", got=one.rewards[0], where=one.name)
        n, right = len(group), int(sum(one.rewards[0] for one in group))
        worth = 1 - math.comb(n - right, k) / math.comb(n, k)
        spread_ = math.sqrt(worth * (1 - worth))
        if not spread_:
            return f"every {k} of its answers are worth the same ({worth:g})"
        missed = math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)
        return [(1 - worth) / spread_ if one.rewards[0] else (1 - worth - missed) / spread_ for one in group]

    least = 2
    with Caught() as here:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise DataError("pass_at_k: k must be a whole number", expected=">= 1", got=repr(k)[:64])
        least = max(k, 2)
    if here.error is not None:
        batches = cast(Batches, [broken(here.error)])  # raised by the gather, on every rank
    return _compared("pass_at_k", batches, {"rewards": rewards}, formula, voters, least, group, {"k": k})


@closed
def gdpo(
    batches: Batches,
    rewards: Mapping[str, Any],
    *,
    weights: Mapping[str, float] | None = None,
    scale: Literal["batch", "none"] = "batch",
    voters: Any = None,
    min_voters: int = 2,
    group: Any = None,
) -> tuple[Batches, GroupReport]:
    """GDPO: each reward is standardised within the group by itself, and then they are added up, ``A_i = sum_k w_k
    (r_ki - mean_k) / s_k``, and divided by the deviation of these sums over the whole step (2601.05242). If the rewards
    were added up first, the sum would hide which of them an answer earned.

    Deviations have ``n - 1``; a reward that is the same in the whole group adds 0. The sums of a group add up to 0, so
    they are not centred again.

    Args:
        rewards: name to float [S], one per row.
        weights: name to w_k, 1 by default.
        scale: ``none`` leaves the sums as they are.
    """
    given: dict[str, float] = {}
    with Caught() as here:
        given = {name: real(f"weights[{name!r}]", value) for name, value in (weights or {}).items()}
        if not isinstance(rewards, Mapping) or not rewards:
            raise DataError("gdpo takes rewards by their names", expected="{name: [S]}", got=type(rewards).__name__)
        for name in given:
            if name not in rewards:
                raise DataError(f"weights names {name!r}, which is no reward", expected=", ".join(map(str, rewards)))
        if scale not in ("batch", "none"):
            raise DataError(f"scale={scale!r}", expected="batch, none")
    if here.error is not None:
        batches, rewards = cast(Batches, [broken(here.error)]), {}  # raised by the gather, on every rank
    factors = [given.get(name, 1.0) for name in rewards]

    def formula(group: Sequence[Standing]) -> Sequence[float] | str:
        sums = [0.0] * len(group)
        for k, factor in enumerate(factors):
            values = [one.rewards[k] for one in group]
            middle, std = math.fsum(values) / len(values), deviation(values)
            if std:
                sums = [total + factor * (value - middle) / std for total, value in zip(sums, values, strict=True)]
        return sums if any(sums) else "all rewards equal"

    return _compared(
        "gdpo", batches, dict(rewards), formula, voters, min_voters, group,
        {"scale": scale, "weights": sorted(given.items())},
        over_all=scale == "batch",
    )  # fmt: skip


def _compared(
    caller: str, batches: Batches, rewards: Mapping[str, Any], formula: Formula, voters: Any, min_voters: int,
    group: Any, options: Mapping[str, object], *, over_all: bool = False,
) -> tuple[Batches, GroupReport]:  # fmt: skip
    """The batches with the advantages that ``formula`` gives each group, and the report.

    Args:
        over_all: divide by their deviation over the voters of the step.
    """
    state: dict[str, Any] = {"kind": torch.float32}

    def make(rank: int) -> list[tuple[Key, Standing]]:
        if type(min_voters) is not int or min_voters < 2:
            raise DataError(f"min_voters={min_voters!r}", expected=">= 2: one episode has nothing to be compared with")
        batch = state["batch"] = merge(batches)
        found, state["kind"] = _standings(caller, batch, rewards, voters, rank)
        state["mine"] = [key for key, _ in found]
        return found

    ranks, _ = exchange(caller, make, group, {"min_voters": min_voters, "rewards": tuple(rewards), **options})
    episodes: dict[Key, Standing] = {}
    for key, row in (item for rows in ranks for item in rows):
        episodes[key] = _joined(key, episodes[key], row) if key in episodes else row
    groups: dict[Id, list[Key]] = {}
    for key, one in episodes.items():
        groups.setdefault(one.prompt, []).append(key)
    table, silent, voted = dict.fromkeys(episodes, 0.0), [], 0
    for prompt, keys in groups.items():
        mine = [key for key in keys if episodes[key].votes]
        voted += len(mine)
        found = f"too few voters, fewer than {min_voters}" if len(mine) < min_voters else None
        values = found or formula([episodes[key] for key in mine])
        if isinstance(values, str):
            silent.append(SilentGroup(prompt=prompt, episodes=len(keys), voters=len(mine), reason=values))
        else:
            table.update(zip(mine, values, strict=True))
    if over_all:
        std = deviation([table[key] for key, one in episodes.items() if one.votes])
        table = {key: standardize(value, std) for key, value in table.items()}
    report = GroupReport(groups=len(groups), episodes=len(episodes), voters=voted, silent=tuple(silent))
    batch = state["batch"]
    if batch is None:
        return deal(batches, {"advantages": torch.zeros(0)}), report
    out_S = torch.tensor([table[key] for key in state["mine"]], dtype=torch.float64)
    return spread(batches, batch, out_S.to(state["kind"])), report


def _standings(
    caller: str, batch: TokenBatch | None, rewards: Mapping[str, Any], voters: Any, rank: int
) -> tuple[list[tuple[Key, Standing]], torch.dtype]:
    ids = Ids.of(batch)
    read = [numbers(name, given, ids.rows) for name, given in rewards.items()]
    kind = torch.float64 if any(kind == torch.float64 for _, kind in read) else torch.float32
    voter_S = voting(voters, ids.rows)
    if batch is None:
        return [], kind
    if ids.prompts is None:
        raise DataError(f"{caller} needs prompt_ids: they say which episodes are a group")
    token_S = torch.zeros(ids.rows, dtype=torch.int64).index_add(0, batch.seq_T, batch.action_T.long())
    found = []
    for row in range(ids.rows):
        fault = _fault(ids, row)
        votes = bool(voter_S[row]) and not fault and bool(token_S[row])
        own = tuple(float(value_S[row]) for value_S, _ in read)
        if votes and not all(map(math.isfinite, own)):
            raise DataError("a reward is not finite", got=own[0], where=ids.name(row), fix="mark the episode a fault")
        found.append(
            (ids.key(row, rank), Standing(prompt=ids.prompts[row], rewards=own, tokens=int(token_S[row]), votes=votes,
                                          fault=fault, name=ids.name(row)))
        )  # fmt: skip
    return found, kind


def _joined(key: Key, one: Standing, row: Standing) -> Standing:
    """An episode with one more of its rows: it votes if any of its rows can be trained and none broke."""
    fault = one.fault or row.fault
    if one.rewards != row.rewards and not fault:
        raise DataError(
            "rows of one episode have different rewards", expected="the episode's reward on each of its rows",
            got=f"{one.rewards} and {row.rewards}", where=f"{one.name} and {row.name}, episode {key!r}",
        )  # fmt: skip
    return replace(one, tokens=one.tokens + row.tokens, votes=(one.votes or row.votes) and not fault, fault=fault)


def _fault(ids: Ids, row: int) -> bool:
    state = ids.state(row)
    return state is not None and not EFFECTS[state].votes


__all__ = ["Standing", "gdpo", "given_baseline", "opo", "pass_at_k"]
