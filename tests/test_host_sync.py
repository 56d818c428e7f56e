"""The loss of a micro-batch never waits for the device, and dispatches as many operations for many rows as for few.

On a CPU nothing waits, so what is looked at is which operations are called (`dispatched`), on streams that are already
arranged: arranging is the host's own work, on its own tensors. ``tests/test_gpu.py`` shows the same on a GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

import megatron_pgloss as pg
from megatron_pgloss.objective import surrogates
from support.dispatched import Dispatched
from support.steps import pictured

ROWS = ("cAAo", "cAAAAo", "ccAoAAo", "cAo")
SPECS = {name: preset.build(**preset.example) for name, preset in pg.presets.PRESETS.items()}
SPECS |= {
    "everything": pg.presets.grpo(corrections=[pg.TruncatedIS(on=("rl", "kl"))], entropy=0.1, dual=2.0).add(
        pg.CrossEntropy()
    ),
    "late": pg.presets.ppo(corrections=[pg.TruncatedIS(of="policy", level="sequence")]),
    "units": pg.presets.ppo().add(
        pg.Term("mine", lambda x: x.unit_mean(x.log_ratio, "sequence") * x.logp + x.prefix_sum(x.log_ratio, "turn"))
    ),
}


def step(spec: pg.LossSpec, rows: tuple[str, ...]) -> tuple[pg.MicroBatch, pg.TokenLogprobs, Any]:
    """One micro-batch of all rows, and what a model might give for it."""
    torch.manual_seed(0)
    size = sum(map(len, rows))
    old, rollout, ref = (torch.randn(3, size, dtype=torch.float64) * 0.1 - 1).unbind()
    batch = pictured(
        *rows, advantages=torch.randn(len(rows), dtype=torch.float64), old_logprobs=old, rollout_logprobs=rollout,
        ref_logprobs=ref, values=old, returns=old, prompt_ids=[0] * len(rows), episode_ids=list(range(len(rows))),
        sample_ids=list(range(len(rows))),
    )  # fmt: skip
    plan = pg.plan([batch], spec, split=pg.Split(sequences=len(rows)))
    scored = [
        pg.TokenLogprobs(logprob=-torch.rand(m.shape).double(), entropy=torch.rand(m.shape).double())
        for m in plan.microbatches()
    ]
    plan = pg.statistics_pass(plan, scored) if plan.needs_statistics_pass else plan
    micro = next(plan.microbatches())
    out = [(-torch.rand(micro.shape, dtype=torch.float64)).requires_grad_() for _ in range(3)]
    return micro, pg.TokenLogprobs(logprob=out[0], entropy=out[1]), out[2]


@pytest.mark.parametrize("name", SPECS)
def test_a_loss_runs_forward_and_backward_on_tensors_without_values(name: str) -> None:
    """Under FakeTensorMode a tensor has shape and dtype and nothing else: what asked for a value would raise."""
    micro, lp, value = step(SPECS[name], ROWS)
    pg.policy_loss(lp, micro, value=value)  # arranges the streams, which is the host's own work
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [
            None if x is None else mode.from_tensor(x.detach()).requires_grad_()
            for x in (lp.logprob, lp.entropy, value)
        ]
        assert given[0] is not None
        out = pg.policy_loss(pg.TokenLogprobs(logprob=given[0], entropy=given[1]), micro, value=given[2])
        assert isinstance(out.loss, FakeTensor) and all(isinstance(m.value, FakeTensor) for m in out.metrics.values())
        out.loss.backward()
        assert any(isinstance(x.grad, FakeTensor) for x in given if x is not None)


def test_what_asks_for_a_value_raises_there() -> None:
    spec = pg.LossSpec(components=[pg.Term("mine", lambda x: x.logp * float(x.logp.detach().sum()))])
    micro, lp, _ = step(spec, ROWS)
    pg.policy_loss(lp, micro)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(DataDependentOutputException):
        pg.policy_loss(pg.TokenLogprobs(logprob=mode.from_tensor(lp.logprob.detach())), micro)


def test_the_arithmetic_of_a_clip_is_four_calls_below_the_loss() -> None:
    micro, lp, _ = step(pg.presets.ppo(), ROWS)
    depths = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is surrogates._clip.__code__:
            depth, above = 0, frame
            while above.f_code is not pg.policy_loss.__code__:
                depth, above = depth + 1, above.f_back
            depths.append(depth)

    sys.setprofile(look)
    try:
        pg.policy_loss(lp, micro)
    finally:
        sys.setprofile(None)
    assert depths and max(depths) <= 4


def operations(spec: pg.LossSpec, rows: tuple[str, ...]) -> Dispatched:
    """What a micro-batch dispatches, forward and backward, once its streams are arranged."""
    micro, lp, value = step(spec, rows)
    pg.policy_loss(lp, micro, value=value)
    with Dispatched() as seen:
        pg.policy_loss(lp, micro, value=value).loss.backward()
    return seen


@pytest.mark.parametrize("name", SPECS)
def test_no_operation_of_a_micro_batch_waits_for_the_device(name: str) -> None:
    seen = operations(SPECS[name], ROWS)
    assert seen.waits == []
    assert seen.number.total() > 50  # it did look


@pytest.mark.parametrize("name", SPECS)
def test_many_rows_take_as_many_operations_as_few(name: str) -> None:
    few, many = (operations(SPECS[name], ROWS * k).number for k in (1, 16))
    # A discounted sum is a scan by doubling: 11 operations for each of the four doublings.
    scan = 11 * 4 if name == "fipo" else 0
    assert many.total() == few.total() + scan


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: float(x.sum()), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.unique(),
        lambda x: bool(x.any()),
        lambda x: torch.repeat_interleave(x, torch.ones(3, dtype=torch.int64)), lambda x: x.masked_select(x > 0),
    ],
)  # fmt: skip
def test_what_waits_is_seen(wait: Any) -> None:
    with Dispatched() as seen:
        wait(torch.ones(3))
    assert seen.waits


def test_planning_calls_grow_with_tokens_alone() -> None:
    spec = pg.presets.grpo()

    def planned(rows: tuple[str, ...]) -> int:
        with Dispatched() as seen:
            step(spec, rows)
        return seen.number.total()

    assert planned(ROWS * 64) == planned(ROWS * 4)
