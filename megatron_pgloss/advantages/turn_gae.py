"""Generalised advantage estimation in which a turn is one action. `T` tokens, `U` turns.

Everything is `gae`'s, on batches in which a turn's first action token stands for the turn: its value is the state's in
which the turn begins, its reward is the turn's, and what comes out holds for all action tokens of the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megatron_pgloss.advantages.gae import gae
from megatron_pgloss.advantages.inputs import Batches, finite, merge, tokenwise
from megatron_pgloss.advantages.reports import GAEReport
from megatron_pgloss.errors import PGLossError
from megatron_pgloss.rollouts import TokenBatch, broken
from megatron_pgloss.spec.words import closed


@closed
def turn_gae(
    batches: Batches,
    rewards: Any,
    *,
    values: Tensor | None = None,
    last_values: Any = None,
    token_rewards: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Literal["value", "none"] = "value",
    order: Any = None,
    group: Any = None,
) -> tuple[Batches, GAEReport]:
    """``A_k = sum_j (gamma lam)^j delta_(k+j)``, ``delta_k = r_k + gamma V_(k+1) - V_k``, k over the episode's turns
    (GAE, 1506.02438 eq. 16, with turns as actions): the same advantage and return on every action token of a turn. V_k
    is the value at the turn's first action token, r_k the sum of ``token_rewards`` over its action tokens; the
    episode's reward falls on its last turn. gamma and lam are per turn.

    A turn that is cut between two rows counts as one in each. Arguments and report as in `gae`.

    Returns:
        the batches with streams ``advantages``, ``returns`` (``A_k + V_k``) and ``values`` (the token's own, for the
        value clip) on actions, 0 elsewhere.
    """
    try:
        reduced, moved = _reduced(batches, token_rewards)
    except PGLossError as error:
        # One rank that raises here would leave the others waiting in the gather: there it is raised on all.
        reduced, moved = cast(Batches, broken(error)), None
    found, report = gae(
        reduced, rewards, values=values, last_values=last_values, token_rewards=moved, gamma=gamma, lam=lam,
        bootstrap=bootstrap, order=order, group=group, caller="turn_gae",
    )  # fmt: skip
    return _spread(batches, found, values), report


def _one_list(batches: TokenBatch | Sequence[TokenBatch]) -> list[TokenBatch]:
    return [batches] if isinstance(batches, TokenBatch) else list(batches)


def _reduced(batches: Batches, token_rewards: Tensor | None) -> tuple[Batches, Tensor | None]:
    """The batches with one action a turn, and the sums of token rewards there."""
    whole = merge(batches)
    changed = [replace(batch, action_T=_firsts(batch)[0]) for batch in _one_list(batches)]
    reduced = cast(Batches, changed[0] if isinstance(batches, TokenBatch) else changed)
    more_T, kind = tokenwise("token_rewards", token_rewards, whole)
    if more_T is None or whole is None:
        return reduced, None
    finite("token_rewards", more_T, whole.action_T, whole)
    first_T, leader_T = _firsts(whole)
    sums_T = torch.zeros_like(more_T).index_add(0, leader_T, torch.where(whole.action_T, more_T, 0))
    return reduced, torch.where(first_T, sums_T, 0).to(kind)


def _firsts(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """bool [T]: the first action token of each turn of each row; int64 [T]: where it is, the token itself elsewhere."""
    action_T, total = batch.action_T, batch.action_T.numel()
    at_T = torch.arange(total)
    # Turns of a row, as one number; what lies before the first turn has none, and no action.
    most = int(batch.turn_T.max()) + 2 if total else 1
    unit_T = batch.seq_T * most + batch.turn_T + 1
    known, inverse_T = torch.unique(unit_T, return_inverse=True)
    place_T = torch.where(action_T, at_T, total)
    first_U = torch.full((known.numel(),), total).scatter_reduce(0, inverse_T, place_T, "amin")
    leader_T = torch.where(action_T, first_U[inverse_T] if total else at_T, at_T)
    return action_T & (leader_T == at_T), leader_T


def _spread(batches: Batches, found: Batches, values: Tensor | None) -> Batches:
    """What stands at each turn's first action, on all of its actions."""
    out, start = [], 0
    for batch, one in zip(_one_list(batches), _one_list(found), strict=True):
        leader_T, total = _firsts(batch)[1], batch.tokens_T.numel()
        streams = {}
        for name in ("advantages", "returns"):
            stream_T = one.streams[name]
            streams[name] = torch.where(batch.action_T, stream_T[leader_T] if total else stream_T, 0)
        own_T = batch.streams["values"] if values is None else values[start : start + total]
        kept_T = torch.where(batch.action_T, own_T.detach().cpu(), 0).to(one.streams["values"].dtype)
        start += total
        out.append(replace(batch, streams={**batch.streams, **streams, "values": kept_T}))
    return cast(Batches, out[0] if isinstance(batches, TokenBatch) else out)
