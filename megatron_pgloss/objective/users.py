"""Checks of what a user's own function returned."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.objective.streams import Streams


def checked(value: Any, x: Streams, owner: str) -> Tensor:
    """``value`` if it is one number per position.

    Raises:
        DataError: it is not.
    """
    if not isinstance(value, Tensor) or value.shape != x.logp.shape or not value.is_floating_point():
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise DataError(
            f"{owner} must return one number per position", expected=f"float {list(x.logp.shape)}", got=got,
            fix="leave the mean or sum out of it: the normalizer reduces; over a unit, x.unit_mean(v, 'sequence')",
        )  # fmt: skip
    return value
