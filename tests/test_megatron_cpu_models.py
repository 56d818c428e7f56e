"""The CPU rooms beyond layouts: other models, dtypes, loading, optimizers, refusals, and what must stay untouched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.megatron_cpu_checks import (
    expert_losses,
    gpt2_like,
    groups_share_a_device,
    half_precision,
    loading,
    optimizers,
    order,
    own_layers_are_megatrons,
    refusals,
    threads_stay,
    torch_is_untouched,
)
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

CHECKS = [
    gpt2_like,
    own_layers_are_megatrons,
    expert_losses,
    half_precision,
    loading,
    optimizers,
    order,
    threads_stay,
    groups_share_a_device,
    refusals,
    torch_is_untouched,
]


def _all_checks(rank: int, world: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    return {check.__name__: check(rank) for check in CHECKS}


results = world_fixture(_all_checks, 2)


# (check, largest value allowed). float64 models are compared to rounding; float32 training and bf16 to their own.
@pytest.mark.parametrize(
    ("check", "limit"),
    [
        (gpt2_like, 1e-12),
        (own_layers_are_megatrons, 1e-13),
        (expert_losses, 1e-12),
        (half_precision, 0.01),
        (loading, 0.0),
        (optimizers, 1e-4),
    ],
)
def test_error_is_within_rounding(check: Callable, limit: float, results: Any) -> None:
    worst = max(per_rank[check.__name__] for per_rank in results)
    print(f"{check.__name__}: {worst:.1e}")
    assert worst <= limit


def test_rank_order_is_tp_cp_dp_pp(results: Any) -> None:
    for rank in (0, 1):
        assert [spelled for spelled, _, _ in results[rank]["order"]] == [rank] * 4
        assert results[rank]["order"][2] == (rank, rank == 0, rank == 1)


def test_a_layout_leaves_no_threads_behind(results: Any) -> None:
    assert len({count for per_rank in results for count in per_rank["threads_stay"][1:]}) <= 2
    assert all(per_rank["threads_stay"][-1] <= per_rank["threads_stay"][0] for per_rank in results)


def test_groups_of_gloo_poll_with_one_thread_and_sum_over_their_own_ranks(results: Any) -> None:
    for rank, per_rank in enumerate(results):
        seen = per_rank["groups_share_a_device"]
        assert seen["more devices"] == 0
        assert seen["sums"] == [rank + 1.0] + [3.0] * 18


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("world", ["LayoutError", "divisible by tp * pp * cp = 4", "got 2"]),
        ("zigzag", ["LayoutError", "divisible by 2 * cp = 4", "got 10"]),
        ("not reduced", ["LayoutError", "disagree on it", "finalize_model_grads_func"]),
        ("missing", ["DataError", "no fitting tensor for", "got nothing"]),
        ("cu_seqlens", ["LayoutError", "cu_seqlens[-1] = 16", "got 8"]),
        ("unknown field", ["SpecError", "hiden", "hidden"]),
        ("dropout", ["UnsupportedError", "attention_dropout"]),
    ],
)
def test_refused_with_a_reason(case: str, words: list[str], results: Any) -> None:
    for per_rank in results:
        for word in words:
            assert word in per_rank["refusals"][case]


def test_torch_outside_megatron_is_untouched(results: Any) -> None:
    expected = {
        "cuda": False,
        "type": "torch.FloatTensor",
        "type in a thread": "torch.FloatTensor",
        "convert": torch.int64,
        "softmax": torch.float32,
        "device": "cpu",
        "cuda()": True,
        "to": torch.float64,
        "grad": True,
        "cpu generator kept": True,
    }
    for per_rank in results:
        seen = per_rank["torch_is_untouched"]
        assert seen | {"type": seen["type"], "type in a thread": seen["type in a thread"]} == expected | {
            "type": "torch.DoubleTensor",  # the children's default dtype
            "type in a thread": "torch.DoubleTensor",
        }
