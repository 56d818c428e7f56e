"""Advantages in a world of two: a group and an episode straddle the ranks, and nothing tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_gae import several

import megatron_pgloss as pg
from support.steps import NAN
from support.worlds import world_fixture

pytestmark = pytest.mark.multiproc
A = pg.advantages
DEALS = [([0, 3, 5], [1, 2, 4]), ([5, 4, 3], [2, 1, 0]), ([0, 1, 2, 3, 4, 5], [])]


def streams(batch: Any, pick: list[int], group: Any) -> list[dict[str, torch.Tensor]]:
    """Everything the module makes of these rows, in the group."""
    whole, value_T, more_T, reward_S = batch
    part = whole.select(pick)
    at = torch.cat([(whole.seq_T == row).nonzero().flatten() for row in pick] or [torch.zeros(0, dtype=torch.int64)])
    rows, tokens = torch.tensor(pick, dtype=torch.int64), {"token_rewards": more_T[at]}
    found = []
    for options in ({}, {"scale": "batch"}, {"baseline": "leave_one_out", "scale": "none"}):
        out, report = A.group_relative(part, reward_S[rows], group=group, **options, **tokens)
        found += [out.streams, {"report": torch.tensor([report.groups, report.episodes, report.voters])}]
        found.append(A.whiten(out, group=group)[0].streams)
    found.append(A.gae(part, reward_S[rows], values=value_T[at], order=rows, group=group, **tokens)[0].streams)
    found.append({"lengths": A.episode_lengths(part, group=group)})
    return found


def differ(rank: int) -> list[str]:
    """What is not the same, bit for bit, as in one process."""
    batch = several()
    whole = batch[0]
    alone = streams(batch, list(range(6)), "local")
    wrong = []
    for deal in DEALS:
        mine = deal[rank]
        at = torch.cat([(whole.seq_T == r).nonzero().flatten() for r in mine] or [torch.zeros(0, dtype=torch.int64)])
        for number, (one, many) in enumerate(zip(alone, streams(batch, mine, dist.group.WORLD), strict=True)):
            for name in one.keys() & many.keys() - {"values"}:
                wanted = one[name][at] if one[name].numel() == whole.tokens_T.numel() else one[name]
                wanted = wanted[torch.tensor(mine, dtype=torch.int64)] if name == "lengths" else wanted
                if not torch.equal(wanted, many[name]):
                    wrong.append(f"{deal} {number} {name}")
    return wrong


def error_of(build: Any) -> str:
    try:
        build()
    except pg.PGLossError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def world(rank: int, size: int) -> dict[str, Any]:
    """The same numbers, then errors that reach both ranks, each where one rank alone is at fault."""
    whole, value_T, _, reward_S = several()
    mine = DEALS[0][rank]
    part, rows = whole.select(mine), torch.tensor(mine)
    at = torch.cat([(whole.seq_T == row).nonzero().flatten() for row in mine])
    bad_S = reward_S[rows].clone()
    if rank:
        bad_S[1] = NAN
    everyone = dist.group.WORLD
    bare = pg.TokenBatch.from_padded(
        tokens=torch.zeros(1, 3, dtype=torch.int64), lengths=torch.tensor([9 if rank else 3]),
        action_mask=torch.ones(1, 3).bool(), prompt_ids=[0],
    )  # fmt: skip
    return {
        "differ": differ(rank),
        "nan": error_of(lambda: A.group_relative(part, bad_S, group=everyone)),
        "broken batch": error_of(lambda: A.group_relative(bare, [1.0], group=everyone)),
        "options": error_of(lambda: A.group_relative(part, reward_S[rows], min_voters=2 + rank, group=everyone)),
        "over": error_of(lambda: A.whiten(part, over="sequence" if rank else "tokens", group=everyone)),
        "k": error_of(lambda: A.pass_at_k(part, reward_S[rows], 0 if rank else 1, group=everyone)),
        "another k": error_of(lambda: A.pass_at_k(part, reward_S[rows], 2 + rank, group=everyone)),
        "weights": error_of(lambda: A.gdpo(part, {"r": reward_S[rows]}, weights={"rs"[rank]: 1.0}, group=everyone)),
        "baseline": error_of(
            lambda: A.reinforce_plus_plus(part, reward_S[rows], baseline="groups" if rank else "none", group=everyone)
        ),
        "order": error_of(lambda: A.gae(part, reward_S[rows], values=value_T[at], group=everyone)),
        "rewards": error_of(lambda: A.group_relative(part, reward_S[rows] + rank, group=everyone)),
        "no group": error_of(lambda: A.group_relative(part, reward_S[rows])),
        "bad group": error_of(lambda: A.whiten(part, group="loca")),
    }


everyone = world_fixture(world, 2)


def test_two_ranks_find_what_one_process_finds_and_fail_alike(everyone: Any) -> None:
    first, second = everyone
    assert first["differ"] == second["differ"] == []
    for name, words in {
        "nan": ("DataError", "not finite", "rank 1, sample 'w'"),
        "broken batch": ("DataError", "a length is larger", "rank 1"),
        "options": ("LayoutError", "different arguments", "min_voters = 2 on rank 0 and 3 on rank 1; at rank 0 and"),
        "over": ("DataError", "over='sequence'", "rank 1"),
        "k": ("DataError", "pass_at_k: k must be", "rank 1"),
        "another k": ("LayoutError", "k = 2 on rank 0 and 3 on rank 1"),
        "weights": ("DataError", "weights names 's'", "rank 1"),
        "baseline": ("DataError", "baseline='groups'", "rank 1"),
        "order": ("DataError", "order=", "ranks [0, 1]"),
        "rewards": ("DataError", "different rewards"),
        "no group": ("LayoutError", "group=None", "world size 2", "group='local'"),
        "bad group": ("LayoutError", "'loca'"),
    }.items():
        assert first[name] == second[name]
        for word in words:
            assert word in first[name], first[name]
