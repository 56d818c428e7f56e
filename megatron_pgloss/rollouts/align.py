"""The one shift: from token order (``x[i]`` is about ``tokens[i]``) to target alignment (``x[t]`` is about ``tokens[t +
1]``).

`T` tokens of all rows end to end, `S` rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Shift:
    """Moves streams in token order one place to the left, inside each row.

    Args:
        lengths_S: int64 [S], the lengths of the rows.

    The entry of a row's first token, which is never a target, drops out; a row's last position, which predicts nothing,
    is filled.
    """

    def __init__(self, lengths_S: Tensor) -> None:
        total = int(lengths_S.sum())
        ends_S = lengths_S.cumsum(0)
        self.predicts_T = torch.ones(total, dtype=torch.bool)
        self.predicts_T[ends_S[lengths_S > 0] - 1] = False
        # The last position of all has no successor; where() below never reads it.
        self._next_T = torch.arange(total).add(1).clamp(max=max(total - 1, 0))

    def __call__(self, stream_T: Tensor, fill: float | bool) -> Tensor:
        """The target-aligned stream, [T] or [T, k]; ``fill`` where a row ends."""
        moved_T = stream_T[self._next_T]
        predicts_T = self.predicts_T if stream_T.dim() == 1 else self.predicts_T[:, None]
        return torch.where(predicts_T, moved_T, torch.full_like(moved_T, fill))


def turns(action_T: Tensor, lengths_S: Tensor) -> Tensor:
    """The turn of every token, in token order, from the action flags as sampled.

    A turn is one unbroken run of policy tokens with the tokens that follow it until the next run; tokens before the
    first run belong to no turn (-1).

    Args:
        action_T: bool [T], token order.
        lengths_S: int64 [S].

    Returns:
        int64 [T].
    """
    total = action_T.numel()
    starts_S = lengths_S.cumsum(0) - lengths_S
    first_T = torch.zeros(total, dtype=torch.bool)
    first_T[starts_S[lengths_S > 0]] = True
    before_T = torch.cat([torch.zeros(1, dtype=torch.bool), action_T[:-1]])[:total]
    begins_T = action_T & (first_T | ~before_T)
    count_T = begins_T.to(torch.int64).cumsum(0)
    row_T = torch.repeat_interleave(torch.arange(lengths_S.numel()), lengths_S)
    earlier_S = torch.cat([torch.zeros(1, dtype=torch.int64), count_T])[starts_S]
    return count_T - earlier_S[row_T] - 1
