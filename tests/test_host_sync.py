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
from megatron_pgloss.logprobs import linear_token_logprobs
from megatron_pgloss.megatron.head import live_rows, wanted_rows
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("live", [None, 4])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_fused_head_runs_forward_and_backward_without_values(mode: Any, live: int | None, dtype: torch.dtype) -> None:
    """Nine rows, six wanted, chunks of two. The device "meta" takes the way of an accelerator: on a CPU the row passes
    look for rows without a gradient, which costs nothing there.
    """
    with FakeTensorMode():
        hidden = torch.empty(9, 8, device="meta", dtype=dtype, requires_grad=True)
        weight = torch.empty(16, 8, device="meta", dtype=dtype, requires_grad=True)
        targets, rows = (torch.empty(size, device="meta", dtype=torch.int64) for size in (9, 6))
        lp = linear_token_logprobs(
            hidden, weight, targets, rows=rows, mode=mode, entropy=True, chunk_tokens=2, chunk_elements=32,
            live=None if live is None else torch.empty(live, device="meta", dtype=torch.int64),
        )  # fmt: skip
        assert lp.entropy is not None
        (lp.logprob.sum() + lp.entropy.sum()).backward()
        assert isinstance(hidden.grad, FakeTensor) and isinstance(weight.grad, FakeTensor)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_rows_that_are_said_to_get_no_gradient_are_left_out_and_looked_at(mode: Any) -> None:
    """Rows 1, 4, 5 and 8 are wanted, and 4 and 8 of them pulled: the gradient is that of a head that knows of none. A
    pull at row 1 beside them makes it NaN.
    """
    torch.manual_seed(0)
    given = torch.randn(9, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
    rows, pull = torch.tensor([1, 4, 5, 8]), torch.zeros(9, dtype=torch.float64)
    pull[4], pull[8] = 2.0, -1.0

    def gradients(live: list[int] | None, pull: torch.Tensor) -> list[torch.Tensor]:
        hidden, weight = (x.clone().requires_grad_() for x in given)
        places = None if live is None else torch.tensor(live, dtype=torch.int64)
        lp = linear_token_logprobs(hidden, weight, torch.arange(9), rows=rows, live=places, mode=mode, chunk_tokens=3)
        (lp.logprob * pull).sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        return [hidden.grad, weight.grad]

    for live in ([1, 3], [0, 1, 2, 3], [1, 2, 3]):
        for found, wanted in zip(gradients(live, pull), gradients(None, pull), strict=True):
            assert float((found - wanted).abs().max()) < 1e-14
    assert not gradients([], torch.zeros(9))[0].any()
    pull[1] = 1.0
    assert all(bool(found.isnan().any()) for found in gradients([1, 3], pull))


def test_the_plan_knows_which_rows_can_get_a_gradient() -> None:
    """Row 1 has A = 0: nothing there moves the clipped loss, and with an entropy bonus everything does. A ratio over
    the sequence sends a token's gradient to others: all are live.
    """
    batch = pictured("cAA", "cAAA", "cAo", advantages=torch.tensor([1.0, 0.0, -1.0]), old_logprobs=-1.0)

    def live(spec: pg.LossSpec, **more: Any) -> list[int] | None:
        (micro,) = pg.plan([batch], spec, split=pg.Split(sequences=3), **more).microbatches()
        wanted = wanted_rows(micro)
        found = live_rows(micro, wanted)
        return None if found is None else wanted[found].tolist()

    # Position-major, three rows: position 0 has rows 0, 1, 2 at 0, 1, 2. Row 0 acts at positions 0 and 1, row 2 at 0.
    assert live(pg.presets.ppo()) == [0, 2, 3]
    assert live(pg.presets.ppo(entropy=0.1)) == [0, 1, 2, 3, 4, 7]
    assert live(pg.presets.ppo(entropy=0.1), coef={"entropy": 0.0}) == [0, 2, 3]
    assert live(pg.presets.gspo()) is None


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
