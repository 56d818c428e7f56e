"""Distillation on a teacher's top-k: by hand, against autograd of the plain formula, over arrangements; refusals."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.maths.topk import log_mass, topk_divergence
from megatron_pgloss.megatron.conditions import Setup
from megatron_pgloss.megatron.modes import refuse
from megatron_pgloss.metrics import merge_all
from megatron_pgloss.objective.measure import names
from support.steps import ONE, near, pictured, refused

KINDS = [("forward", "drop"), ("forward", "renormalize"), ("reverse", "renormalize")]
ROWS = ("cAAo", "ccAAAo", "cA")
TOKENS, VOCAB, K = 12, 11, 4
SPLITS = (ONE, pg.Split(sequences=1), pg.Split(max_tokens=16), pg.Split(max_tokens=8, multiple_of=4))


@pytest.mark.parametrize(
    ("direction", "tail", "value", "slopes"),
    [
        # q = 1/2, 1/4; p = 1/8, 1/2: 1/2 log 4 + 1/4 log 1/2 = 3/4 log 2; slopes -q.
        ("forward", "drop", 0.75 * log(2), [-1 / 2, -1 / 4]),
        # q/Q = 2/3, 1/3; p/P = 1/5, 4/5: slopes p/P - q/Q.
        ("forward", "renormalize", 2 / 3 * log(10 / 3) + 1 / 3 * log(5 / 12), [1 / 5 - 2 / 3, 4 / 5 - 1 / 3]),
        # The logs' ratios less their mean, the value, times p/P.
        ("reverse", "renormalize", 1 / 5 * log(3 / 10) + 4 / 5 * log(12 / 5), None),
    ],
)
def test_by_hand(direction: Any, tail: Any, value: float, slopes: list[float] | None) -> None:
    policy = torch.tensor([[1 / 8, 9.0, 1 / 2], [7.0, 7.0, 7.0]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[1 / 2, 5.0, 1 / 4], [float("nan")] * 3], dtype=torch.float64).log()
    there = torch.tensor([[True, False, True], [False] * 3])
    found = topk_divergence(policy, teacher, there, direction, tail)
    near(found, [value, 0.0], 1e-14)
    near(log_mass(policy, there), [log(5 / 8), 0.0], 1e-14)
    found.sum().backward()
    first, second = slopes or [1 / 5 * (log(3 / 10) - value), 4 / 5 * (log(12 / 5) - value)]
    near(policy.grad, [[first, 0, second], [0, 0, 0]], 1e-13)


def given(
    dtype: torch.dtype = torch.float64, broken: int | None = None
) -> tuple[pg.TokenBatch, Tensor, Tensor, Tensor]:
    """The rows, logits [T, V] target-aligned, and the teacher's ids and log-probs in token order."""
    random = torch.Generator().manual_seed(4)
    logits, teacher = (torch.randn(TOKENS, VOCAB, generator=random, dtype=torch.float64) * 2 for _ in range(2))
    logp, ids = teacher.log_softmax(1).topk(K)
    ids[3, 2:] = -1
    ids[6] = -1  # an action that nobody taught
    logp[ids < 0] = float("nan")
    if broken is not None:
        logp[broken, 0] = float("nan")
    batch = pictured(*ROWS, old_logprobs=-1.0, streams={}, dtype=dtype)
    batch = pg.TokenBatch.from_packed(
        tokens=torch.arange(TOKENS) % VOCAB, lengths=[len(row) for row in ROWS],
        action_mask=torch.tensor([c == "A" for row in ROWS for c in row]),
        observation_mask=torch.tensor([c == "o" for row in ROWS for c in row]),
        advantages=torch.ones(TOKENS, dtype=dtype), old_logprobs=torch.full((TOKENS,), -1.0, dtype=dtype),
        streams={"teacher_ids": ids, "teacher_logprobs": logp.to(dtype)}, sample_ids=["a", "b", "c"],
    )  # fmt: skip
    return batch, logits, ids, logp


def run(spec: pg.LossSpec, split: pg.Split, **options: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    batch, logits, _, _ = given(**options)
    leaf = logits.clone().requires_grad_()
    plan = pg.plan([batch], spec, split=split)
    total, parts = torch.zeros((), dtype=torch.float64), []
    assert spec.chosen is not None
    for micro in plan.microbatches():
        placed = leaf[micro.index_N.clamp(min=0)].reshape(*micro.shape, VOCAB)
        lp = pg.token_logprobs(placed, micro.targets, chosen_ids=micro.wide(spec.chosen), entropy=True)
        out = pg.policy_loss(lp, micro)
        there = frozenset(batch.streams)
        assert list(out.metrics) == [name for part in spec.components for name in names(part, spec, there, True)]
        total, parts = total + out.loss, [*parts, out.metrics]
    total.backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad, {name: metric.result() for name, metric in merge_all(parts).items()}


def plain(part: pg.TopKDistill, letter: str = "A") -> tuple[Tensor, Tensor]:
    """The mean over tokens of the divergence in full, token by token, and its gradient."""
    _, logits, ids, logp = given()
    leaf, terms = logits.clone().requires_grad_(), []
    for t, here in enumerate("".join(ROWS)):
        if here != letter:
            continue
        some = [j for j in range(K) if ids[t, j] >= 0]
        p = leaf[t - 1].log_softmax(0)[ids[t, some]]  # position t - 1 predicts token t
        q = logp[t, some]
        if part.tail == "renormalize":
            p, q = p.log_softmax(0), q.log_softmax(0)
        terms.append((q.exp() * (q - p)).sum() if part.direction == "forward" else (p.exp() * (p - q)).sum())
    loss = torch.stack(terms).mean()
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("direction", "tail"), KINDS)
def test_the_same_on_every_arrangement(direction: Any, tail: Any, split: pg.Split) -> None:
    part = pg.TopKDistill(direction=direction, tail=tail)
    loss, gradient, metrics = run(pg.LossSpec(components=[part]), split)
    want, slope = plain(part)
    near(loss, want, 1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-11, atol=1e-14)
    _, logits, ids, logp = given()
    taught = [t for t, c in enumerate("".join(ROWS)) if c == "A" and ids[t].max() >= 0]
    mass = [sum(exp(x) for x, i in zip(logp[t].tolist(), ids[t].tolist(), strict=True) if i >= 0) for t in taught]
    near(metrics["distill/teacher_mass"], sum(mass) / len(taught), 1e-12)
    near(metrics["distill/divergence"], float(want) * 6 / len(taught), 1e-11)
    own = [float(logits[t - 1].softmax(0)[ids[t][ids[t] >= 0]].sum()) for t in taught]
    near(metrics["distill/policy_mass"], sum(own) / len(taught), 1e-12)


def test_beside_a_policy_gradient_and_on_observations() -> None:
    """Each component has its own tokens: the sum of two losses is the loss of both."""
    observed = pg.TopKDistill(on="observation", coef=0.5)
    both = pg.presets.ppo().add(observed)
    loss, gradient, _ = run(both, ONE)
    want, slope = plain(observed, "o")
    alone = run(pg.presets.ppo().add(observed.replace(coef=0.0)), ONE)
    near(loss, alone[0] + 0.5 * want, 1e-12)
    torch.testing.assert_close(gradient, alone[1] + 0.5 * slope, rtol=1e-11, atol=1e-14)


def test_a_teacher_that_is_no_number_is_refused_by_the_plan() -> None:
    spec = pg.LossSpec(components=[pg.TopKDistill()])
    refused(
        pg.DataError, lambda: run(spec, ONE, broken=2), "a teacher's log-prob", "got nan", "token 2, stream 'teacher"
    )


def test_float32_streams_and_bf16_logits() -> None:
    spec = pg.LossSpec(components=[pg.TopKDistill()])
    loss, _, _ = run(spec, ONE, dtype=torch.float32)
    near(loss, plain(pg.TopKDistill())[0], 1e-6)


def test_what_does_not_fit_is_refused() -> None:
    refused(pg.SpecError, lambda: pg.TopKDistill(direction="reverse"), "leaves the teacher's ids", "renormalize")
    two = [pg.TopKDistill(), pg.TopKDistill(name="other", ids="other_ids")]
    refused(pg.SpecError, lambda: pg.LossSpec(components=two), "one teacher", "other_ids, teacher_ids")
    spec = pg.LossSpec(components=[pg.TopKDistill()])
    assert not spec.by_token and spec.chosen == "teacher_ids" and pg.presets.ppo().chosen is None
    layout: Any = None  # not reached
    fused = Setup(config=None, chunks=[], bare=[], layout=layout, spec=spec, head="keep")
    refused(pg.UnsupportedError, lambda: refuse(fused), "fused head", "teacher_ids")
    absent = pictured(*ROWS, old_logprobs=-1.0)
    refused(pg.DataError, lambda: pg.plan([absent], spec, split=ONE), "teacher_ids", "distill")
    batch, logits, _, _ = given()
    (micro,) = pg.plan([batch], spec, split=ONE).microbatches()
    placed = logits[micro.index_N.clamp(min=0)].reshape(*micro.shape, VOCAB)
    bare = pg.token_logprobs(placed, micro.targets)
    refused(pg.DataError, lambda: pg.policy_loss(bare, micro), "teacher's ids", "chosen_ids=micro.wide(spec.chosen)")
    few = pg.token_logprobs(placed, micro.targets, chosen_ids=micro.wide("teacher_ids")[..., :2])
    refused(pg.DataError, lambda: pg.policy_loss(few, micro), "do not fit", f"[3, 6, {K}]")
