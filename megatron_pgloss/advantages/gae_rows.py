"""One row of an episode: its advantages if nothing followed it, and how they depend on what follows. `S` rows, `T`
tokens, `A` action tokens.

With ``decay = gamma lam`` and ``k`` actions left in the row, what follows adds ``decay^k (tail + decay next)``.
``tail`` is what the row's last action earns beyond the row (gamma times the next value, or the reward of the episode);
``next`` is the advantage of the action after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.advantages.inputs import Ids, Key, finite, numbers, tokenwise
from megatron_pgloss.advantages.termination import EFFECTS
from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import Termination, TokenBatch

After = tuple[float, tuple[float, ...]] | None
"""``tail`` and, for each lambda, ``next``; None: the episode takes no part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The facts about a row that the rest of its episode needs."""

    rank: int
    place: int
    """Index among the rank's rows."""
    order: int
    """Place in its episode."""
    name: str
    actions: int
    reward: float
    first_value: float
    """V at the row's first action."""
    alone: tuple[float, ...]
    """Advantage of the first action if nothing followed, for each lambda."""
    last_value: float
    """V after the row's last token; NaN where it is unknown."""
    state: Termination | None


class Local:
    """All rows of one rank, with their values and rewards."""

    def __init__(self, batch: TokenBatch, rewards: Any, values: Any, last_values: Any, token_rewards: Any) -> None:
        self.batch, self.ids, rows = batch, Ids.of(batch), len(batch)
        self.reward_S, kind = numbers("rewards", rewards, rows)
        value_T, value_kind = tokenwise("values", values, batch)
        self.last_S = torch.full((rows,), float("nan"), dtype=torch.float64)
        if value_T is None:
            if "values" not in batch.streams:
                raise DataError("gae needs values", fix="pass values=, the value head's output at each position")
            value_T, value_kind = batch.streams["values"].to(torch.float64), batch.streams["values"].dtype
        else:
            filled_S = batch.lengths_S > 0
            self.last_S[filled_S] = value_T[batch.cu_S1[1:][filled_S] - 1]
        if last_values is not None:
            self.last_S = numbers("last_values", last_values, rows)[0]
        self.kind = torch.float64 if torch.float64 in (kind, value_kind) else torch.float32
        states = [self.ids.state(row) for row in range(rows)]
        self.fault_S = torch.tensor([s is not None and EFFECTS[s].bootstrap == "leaves" for s in states]).bool()
        read_T = batch.action_T & ~self.fault_S[batch.seq_T]
        finite("values", value_T, read_T, batch)
        more_T, _ = tokenwise("token_rewards", token_rewards, batch)
        reward_T = torch.zeros_like(value_T) if more_T is None else more_T
        finite("token_rewards", reward_T, read_T, batch)
        self.at_A = batch.action_T.nonzero().flatten()
        self.row_A = batch.seq_T[self.at_A]
        self.count_S = torch.bincount(self.row_A, minlength=rows)
        ends_S = self.count_S.cumsum(0)
        self.left_A = ends_S[self.row_A] - 1 - torch.arange(self.at_A.numel())
        self.first_S = ends_S - self.count_S
        # Rows with a fault may hold any numbers, so these are selected out before arithmetic.
        self.value_A = torch.where(read_T, value_T, 0)[self.at_A]
        self.reward_A = torch.where(read_T, reward_T, 0)[self.at_A]
        self.alone: list[Tensor] = []

    def rows(
        self, rank: int, gamma: float, lambdas: tuple[float, ...], order: Any, bootstrap: str
    ) -> list[tuple[Key, Row]]:
        """Each row's episode, and the facts about the row that the other ranks need."""
        if bootstrap == "value" and self.ids.terminations is None and self.ids.rows:
            raise DataError(
                "gae needs terminations: a truncated episode continues with V(last), a finished one with 0",
                fix="give terminations= to the batch, or pass bootstrap='none' to end all episodes with 0",
            )
        order_S = torch.arange(self.ids.rows) if order is None else numbers("order", order, self.ids.rows)[0]
        next_A = torch.zeros_like(self.value_A)
        next_A[:-1] = self.value_A[1:]
        delta_A = self.reward_A + gamma * torch.where(self.left_A > 0, next_A, 0) - self.value_A
        self.alone = [scan(delta_A, gamma * lam, self.left_A) for lam in lambdas]
        found = []
        for row in range(self.ids.rows):
            actions, first = int(self.count_S[row]), int(self.first_S[row])
            reward = float(self.reward_S[row])
            if not bool(self.fault_S[row]) and not bool(self.reward_S[row].isfinite()):
                raise DataError("a reward is not finite", got=reward, where=self.ids.name(row))
            found.append(
                (
                    self.ids.key(row, rank),
                    Row(
                        rank=rank, place=row, order=int(order_S[row]), name=self.ids.name(row), actions=actions,
                        reward=reward, first_value=float(self.value_A[first]) if actions else 0.0,
                        alone=tuple(float(a_A[first]) if actions else 0.0 for a_A in self.alone),
                        last_value=float(self.last_S[row]), state=self.ids.state(row),
                    ),
                )
            )  # fmt: skip
        return found

    def finish(self, after: list[After], gamma: float, lambdas: tuple[float, ...]) -> dict[str, Tensor]:
        """Add what follows each row, and return streams ``advantages``, ``returns`` and ``values`` [T]."""
        stays_A = torch.tensor([item is not None for item in after]).bool()[self.row_A]
        tail_S = torch.tensor([0.0 if item is None else item[0] for item in after], dtype=torch.float64)
        whole = []
        for k, (lam, alone_A) in enumerate(zip(lambdas, self.alone, strict=True)):
            next_S = torch.tensor([0.0 if item is None else item[1][k] for item in after], dtype=torch.float64)
            decay = torch.tensor(gamma * lam, dtype=torch.float64)
            beyond_S = tail_S + decay * next_S
            whole.append(alone_A + decay.pow(self.left_A) * beyond_S[self.row_A])
        streams = {"advantages": whole[0], "returns": whole[-1] + self.value_A, "values": self.value_A}
        out = {}
        for name, stream_A in streams.items():
            stream_T = torch.zeros(self.batch.tokens_T.numel(), dtype=torch.float64)
            stream_T[self.at_A] = torch.where(stays_A, stream_A, 0)
            out[name] = stream_T.to(self.kind)
        return out


def scan(delta_A: Tensor, decay: float, left_A: Tensor) -> Tensor:
    """``sum_{k=0}^{left} decay^k delta_(t+k)`` within each row, by log2 of the longest row's length passes over all
    tokens.

    Args:
        delta_A: float64 [A].
        decay: the factor from one action to the next.
        left_A: int64 [A], the number of actions after this one in its row.
    """
    out_A, reach, factor = delta_A, 1, decay
    longest = int(left_A.max()) if left_A.numel() else 0
    while reach <= longest:
        ahead_A = torch.zeros_like(out_A)
        ahead_A[:-reach] = out_A[reach:]
        out_A = out_A + torch.where(left_A >= reach, factor * ahead_A, 0)
        reach, factor = 2 * reach, factor * factor
    return out_A
