"""Select before arithmetic: what lies outside a component never matters by a bit, what breaks inside is taken out."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megatron_pgloss as pg
from support.steps import NAN, Answer, near, pictured, solve

INF = float("inf")
ROWS = ("cAAoA", "coAo", "coAAoc")
TEXT, ENDS = "".join(ROWS), (4, 8, 14)
DROPPED = (2, 8, 12)  # two actions and an answer
STREAMS = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")


def elementwise(x: Any) -> Tensor:
    """Reads all there is."""
    return x.ratio * x.advantage + x.logp * x.entropy + (x.logp - x.rollout) * x.ref + x.old.square()


def by_unit(x: Any) -> Tensor:
    """Statistics over the sampled tokens and over the members."""
    return x.unit_mean(x.log_ratio, "turn") * x.logp + x.unit_sum(x.entropy, over="members") + x.prefix_sum(x.logp)


KINDS: dict[str, Any] = {
    "reinforce": pg.PolicyGradient(surrogate=pg.Reinforce()),
    "clip": pg.PolicyGradient(surrogate=pg.Clip(low=0.05, high=0.05, dual=1.2)),
    "clip, ratio none": pg.PolicyGradient(ratio="none"),
    "k1": pg.KL(estimator="k1"),
    "k2": pg.KL(estimator="k2", to="old"),
    "k3": pg.KL(estimator="k3", to="rollout"),
    "entropy": pg.Entropy(),
    "cross entropy": pg.CrossEntropy(),
    "term": pg.Term("t", elementwise, needs=("entropy",)),
    "term on answers": pg.Term("t", elementwise, on="observation", needs=("entropy",)),
    "term by unit": pg.Term("t", by_unit, needs=("entropy",)),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def spec_of(kind: str) -> pg.LossSpec:
    part = KINDS[kind].replace(normalizer="mean(sequence) > mean(token)")
    corrections = [pg.TruncatedIS(high=1.2)] if part.name == "rl" else []
    return pg.LossSpec(components=[part], masks=[pg.UserMask(name="keep")], corrections=corrections)


def members(kind: str) -> list[bool]:
    """bool per token."""
    letter = {"observation": "o", "action": "A"}[KINDS[kind].over]
    return [c == letter and k not in DROPPED for k, c in enumerate(TEXT)]


def read(kind: str) -> list[bool]:
    """bool per token: whether its streams may matter. A dropped action still votes in the statistics of its unit."""
    return [c == "A" for c in TEXT] if kind == "term by unit" else members(kind)


def answer_of(kind: str, dtype: torch.dtype = torch.float64, garbage: list[float] | None = None) -> Answer:
    """Loss and gradients on plain numbers, with ``garbage`` wherever the component has no business."""

    def stream(number: int, where: list[bool]) -> list[float]:
        plain = [-1.0 - 0.04 * ((7 * k + 3 * number) % 11) for k in range(len(TEXT))]
        bad = plain if garbage is None else garbage[number:] + garbage[:number]
        return [value if there else other for value, other, there in zip(plain, bad, where, strict=True)]

    def aligned(values: list[float]) -> Tensor:
        return torch.tensor([NAN if k in ENDS else values[k + 1] for k in range(len(TEXT))], dtype=dtype)

    batch = pictured(
        *ROWS,
        dtype=dtype,
        masks={"keep": [k not in DROPPED for k in range(len(TEXT))]},
        weights={KINDS[kind].name: stream(4, members(kind))},
        **{name: stream(number, read(kind)) for number, name in enumerate(STREAMS)},
    )
    return solve(batch, spec_of(kind), aligned(stream(5, read(kind))), aligned(stream(6, read(kind))), keep_tokens=True)


@functools.cache
def plain_answer(kind: str, dtype: torch.dtype) -> Answer:
    return answer_of(kind, dtype)


@EVERY_KIND
@settings(max_examples=12)
@given(
    garbage=st.lists(st.sampled_from([NAN, INF, -INF, 1e4, -1e4, 0.0]), min_size=15, max_size=15),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_masked_positions_never_change_loss_or_gradient_bitwise(
    kind: str, garbage: list[float], dtype: torch.dtype
) -> None:
    """In log-probs, entropies, advantages, old, rollout, ref and weights at once."""
    plain, garbled = plain_answer(kind, dtype), answer_of(kind, dtype, garbage)
    assert plain.loss == garbled.loss and plain.loss not in (0.0, NAN)
    assert torch.equal(plain.grad_T, garbled.grad_T)
    assert torch.equal(plain.entropy_grad_T, garbled.entropy_grad_T)
    assert garbled.grad_T.isfinite().all() and repr(garbled.metrics) == repr(plain.metrics)
    outside = torch.tensor([not there for there in [*read(kind)[1:], False]])
    assert not plain.grad_T[outside].any() and not plain.entropy_grad_T[outside].any()


@EVERY_KIND
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("stream", ["log-prob", "entropy"])
def test_a_broken_member_is_taken_out_and_said_so(kind: str, value: float, stream: str) -> None:
    """The first member of row 2 (position 9 or 10): no share in value or gradient, the others as they were."""
    part = KINDS[kind]
    at = 9 if part.over == "observation" else 10
    logp = torch.linspace(-1.0, -0.3, len(TEXT), dtype=torch.float64)
    entropy = torch.linspace(0.3, 1.0, len(TEXT), dtype=torch.float64)
    batch = pictured(*ROWS, **dict.fromkeys(STREAMS[1:], -0.6), advantages=[2.0, -1.0, 1.0])
    spec = spec_of(kind).replace(masks=())
    whole = solve(batch, spec, logp, entropy, keep_tokens=True)
    broken_logp, broken_entropy = logp.clone(), entropy.clone()
    (broken_logp if stream == "log-prob" else broken_entropy)[at] = value
    answer = solve(batch, spec, broken_logp, broken_entropy, keep_tokens=True)
    reads = stream == "log-prob" or spec.needs_entropy
    assert answer.metrics[f"{part.name}/fault"] == (1.0 if reads else 0.0)
    assert answer.grad_T.isfinite().all() and answer.entropy_grad_T.isfinite().all()
    if not reads:
        assert answer.loss == whole.loss and torch.equal(answer.grad_T, whole.grad_T)
        return
    assert answer.metrics[f"{part.name}/fault_at"] == at
    assert answer.grad_T[at] == 0.0 and answer.entropy_grad_T[at] == 0.0
    if kind != "term by unit":
        token = whole.outs[0].tokens[part.name]
        near(answer.loss, whole.loss - float((token.loss * token.weight).reshape(-1)[_place(whole, at)]), 1e-12)
        others = [k for k in range(len(TEXT)) if k != at]
        assert torch.equal(answer.grad_T[others], whole.grad_T[others])


def _place(answer: Answer, position: int) -> int:
    (micro,) = answer.plan.microbatches()
    return int((micro.index_N == position).nonzero())


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: 1 / (x.logp + 1),
        lambda x: (x.logp + 1).log(),
        lambda x: x.logp / (x.logp + 1) + x.entropy,
        lambda x: (x.logp + 1).square().log() * x.entropy,
    ],
)
def test_a_term_that_is_infinite_at_finite_inputs_is_taken_out(fn: Any) -> None:
    """At a log-prob of -1; 0 * inf reaches neither the log-prob nor the entropy."""
    spec = pg.LossSpec(components=[pg.Term("t", fn, needs=("entropy",), normalizer="sum(token)")])
    answer = solve(pictured("cAAA"), spec, [-0.5, -1.0, -0.25, NAN], [1.0] * 4)
    alone = solve(pictured("cAcA"), spec, [-0.5, -1.0, -0.25, NAN], [1.0] * 4)
    near(answer.loss, alone.loss)
    assert torch.equal(answer.grad_T, alone.grad_T) and answer.grad_T[1] == 0.0
    assert answer.metrics["t/fault"] == 1.0 and answer.metrics["t/fault_at"] == 1.0
    assert answer.entropy_grad_T.isfinite().all()


def test_an_infinite_slope_at_a_token_outside_reaches_nobody() -> None:
    """sqrt|d| has slope infinity at d = 0, where a dropped action lies: 0 * inf must not come back as its gradient."""
    spec = pg.LossSpec(
        components=[pg.Term("t", lambda x: x.log_ratio.abs().sqrt(), normalizer="sum(token)")],
        masks=[pg.UserMask(name="m")],
    )
    batch = pictured("cAA", old_logprobs=-1.0, masks={"m": [True, False, True]})
    answer = solve(batch, spec, [-1.0, -0.75, NAN])
    near(answer.loss, 0.5)
    near(answer.grad_T, [0.0, 1.0, 0.0])
    assert answer.metrics["t/fault"] == 0.0


def test_a_broken_unit_breaks_no_other() -> None:
    """The statistics of row 0 are infinite: its members are out, row 1 is as it was."""
    fn = lambda x: x.unit_mean(1 / (x.logp + 1)) * x.logp  # noqa: E731
    spec = pg.LossSpec(components=[pg.Term("t", fn, normalizer="sum(token)")])
    answer = solve(pictured("cAA", "cA"), spec, [-1.0, -0.5, NAN, -0.5, NAN])
    near(answer.loss, -1.0)
    near(answer.grad_T, [0.0, 0.0, 0.0, 2.0 + 2.0, 0.0])  # d/dl of l/(l + 1) = 1/(l + 1)^2 = 4
    assert answer.metrics["t/fault"] == 2.0 and answer.metrics["t/fault_at"] == 0.0


def test_no_members_at_all_is_a_zero_that_belongs_to_the_graph() -> None:
    spec = pg.LossSpec(
        components=[KINDS["cross entropy"], KINDS["k3"], KINDS["term by unit"]], empty_sequences="exclude"
    )
    empty = pictured("ccc", **dict.fromkeys(STREAMS[1:], NAN))
    answer = solve(empty, spec, [NAN, INF, 1e4], [NAN] * 3)
    assert answer.loss == 0.0 and answer.grad_T.tolist() == [0.0] * 3
    assert answer.outs[0].loss.requires_grad
