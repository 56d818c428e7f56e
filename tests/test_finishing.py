"""`pg.finish`: the numbers of a step in a loop of one's own, and what must not reach the weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from support.steps import refused
from support.worlds import world_fixture

A, D = (1.0, -2.0, 0.5), ((0.1, -0.2), (0.3,), (0.0, 0.4, -0.1))
"""Advantage and log-ratios of three rows."""


def batch(rows: tuple[int, ...], prompts: str = "xxy") -> pg.TokenBatch:
    """Rows of 2, 1 and 3 actions behind one token; old log-probs -1, so that the policy's are d - 1."""
    lengths = [1 + len(D[row]) for row in rows]
    action = [bit for length in lengths for bit in [False] + [True] * (length - 1)]
    return pg.TokenBatch.from_packed(
        tokens=torch.zeros(sum(lengths), dtype=torch.int64), lengths=lengths, action_mask=action,
        advantages=torch.tensor([A[row] for row in rows], dtype=torch.float64),
        old_logprobs=torch.full((sum(lengths),), -1.0, dtype=torch.float64), sample_ids=[f"row {row}" for row in rows],
        prompt_ids=[prompts[row] for row in rows],
    )  # fmt: skip


def given(logp: torch.Tensor) -> pg.TokenLogprobs:
    """Log-probs of one's own, without logits."""
    return pg.TokenLogprobs(logprob=logp)


def step(
    rows: tuple[int, ...], *, group: Any = None, split: int = 1, wrong: float | None = None
) -> tuple[Any, Any, Any]:
    """A planned step with its outputs, and a parameter with a gradient."""
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    plan = pg.plan(
        [batch(rows)] if rows else [], pg.presets.ppo(entropy=0.0), split=pg.Split(sequences=split), group=group
    )
    outputs = []
    for micro in plan.microbatches():
        logp = weight - 1.0 + torch.zeros(micro.targets.shape, dtype=torch.float64)
        for at, row in enumerate(plan.parts[micro.number]):
            d = D[rows[row]]
            logp = logp.clone()
            logp[at, : len(d)] = weight - 1.0 + torch.tensor(d, dtype=torch.float64)
            if wrong is not None and at == 0:
                logp[at, 0] = wrong
        outputs.append(pg.policy_loss(given(logp), micro))
        outputs[-1].loss.backward()
    return plan, outputs, weight


R = [math.exp(d) for row in D for d in row]
TERMS = [-min(math.exp(d) * a, min(max(math.exp(d), 0.8), 1.2) * a) for a, row in zip(A, D, strict=True) for d in row]


def check(found: dict[str, float]) -> None:
    """By hand: the mean over six tokens; effective size (sum r)^2 / (n sum r^2)."""
    assert found["loss"] == pytest.approx(sum(TERMS) / 6, rel=1e-12)
    assert found["rl/loss"] == pytest.approx(sum(TERMS) / 6, rel=1e-12)
    assert found["rl/ratio"] == pytest.approx(sum(R) / 6, rel=1e-12)
    assert found["rl/ess"] == pytest.approx(sum(R) ** 2 / (6 * sum(r * r for r in R)), rel=1e-12)
    assert (found["rl/n_token"], found["rl/n_sequence"], found["rl/n_members"], found["fault"]) == (6, 3, 6, 0)
    assert found["rl/ratio_max"] == pytest.approx(math.exp(0.4), rel=1e-12)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_numbers_of_a_step_by_hand(split: int) -> None:
    plan, outputs, weight = step((0, 1, 2), split=split)
    found = pg.finish(plan, outputs, parameters=[weight])
    check(found)
    # Prompts x and y; nobody gave episode ids, and the path names neither.
    assert found["rl/n_prompt"] == 2 and "rl/n_episode" not in found
    refused(pg.LayoutError, lambda: pg.finish(plan, outputs[1:]), "another number of micro-batch outputs", "rank 0")
    refused(pg.DataError, lambda: pg.finish(plan, outputs, on_nonfinite="skip"), "raise, report")  # type: ignore[arg-type]


def test_what_is_not_finite_is_raised_before_the_optimizer_steps() -> None:
    plan, outputs, weight = step((0, 1, 2), wrong=math.nan)
    error = refused(
        pg.NonFiniteError, lambda: pg.finish(plan, outputs), "log-probs or terms", "sample 'row 0', token 1"
    )
    assert "zero_grad" in str(error.fix)
    assert pg.finish(plan, outputs, on_nonfinite="report")["fault"] == 3  # the first token of each row
    plan, outputs, weight = step((0, 1, 2))
    for bad in (math.nan, math.inf, -math.inf):
        weight.grad = torch.tensor(bad, dtype=torch.float64)
        refused(pg.NonFiniteError, lambda: pg.finish(plan, outputs, parameters=[weight]), "gradients of rank 0")
    assert pg.finish(plan, outputs, parameters=[weight], on_nonfinite="report")["fault"] == 1
    check(pg.finish(plan, outputs))  # nobody looked


def on_ranks(rank: int, size: int) -> dict[str, Any]:
    """Two ranks: rows 0 and 1, and row 2; and one where a gradient is broken, a report missing, a rank without rows."""
    group = torch.distributed.group.WORLD
    rows = ((0, 1), (2,))[rank]
    found: dict[str, Any] = {}
    plan, outputs, weight = step(rows, group=group)
    found["sum"] = pg.finish(plan, outputs, parameters=[weight])
    weight.grad = weight.grad * (math.nan if rank == 1 else 1.0)

    def said(call: Any) -> str:
        try:
            call()
        except pg.PGLossError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found["grad"] = said(lambda: pg.finish(plan, outputs, parameters=[weight]))
    bad, more, _ = step(rows, group=group, wrong=math.nan if rank == 1 else None)
    found["token"] = said(lambda: pg.finish(bad, more))
    found["count"] = said(lambda: pg.finish(plan, outputs[rank:]))
    plan, outputs, weight = step(((0, 1, 2), ())[rank], group=group)
    found["empty"] = pg.finish(plan, outputs, parameters=[weight])
    return found


ranks = world_fixture(on_ranks, 2)


@pytest.mark.multiproc
def test_every_rank_has_the_same_numbers_and_errors(ranks: list[dict[str, Any]]) -> None:
    one, two = ranks
    assert one == two
    check(one["sum"])
    check(one["empty"])
    assert one["grad"].startswith("NonFiniteError: gradients of rank 1 are not finite")
    assert "rank 1, component rl, sample 'row 2', token 1" in one["token"]
    assert one["count"].startswith("LayoutError") and "rank 1" in one["count"]
