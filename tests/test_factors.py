"""The wrapper's factor where there is no wrapper: what blind mutation found untested."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.megatron import factors


def test_a_bare_model_on_one_rank_scales_nothing_and_is_refused_on_several() -> None:
    one: Any = SimpleNamespace(dp_cp_size=1)
    assert factors.wrapper_factor([torch.nn.Linear(2, 2)], one) == 1.0
    several: Any = SimpleNamespace(dp_cp_size=2)
    with pytest.raises(pg.UnsupportedError, match="cannot read the gradient factor of Linear"):
        factors.wrapper_factor([torch.nn.Linear(2, 2)], several)
