"""Small batches written as strings of letters, and the whole loss of a plan from made-up log-probs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.metrics import merge_all

NAN = float("nan")
ONE = pg.Split(microbatches=1)


def pictured(*rows: str, dtype: torch.dtype = torch.float64, **given: Any) -> pg.TokenBatch:
    """A packed batch, one row per string, one letter per token: "A" action, "o" observation, any other letter context.

    ``given`` are arguments of `TokenBatch.from_packed`. A number or a list becomes a tensor: one number for all tokens,
    one per row, or one per token (rows end to end), in token order.
    """
    text = "".join(rows)
    more: dict[str, Any] = {"advantages": 1.0} | given
    for name in ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns"):
        if name in more:
            more[name] = _stream(more[name], rows, dtype)
    for name, kind in (("weights", dtype), ("streams", dtype), ("masks", torch.bool)):
        if name in more:
            more[name] = {key: _stream(value, rows, kind) for key, value in more[name].items()}
    if "turn_ids" in more:
        more["turn_ids"] = torch.tensor(more["turn_ids"])
    return pg.TokenBatch.from_packed(
        tokens=torch.arange(1, len(text) + 1),
        lengths=[len(row) for row in rows],
        action_mask=flags(text, "A"),
        observation_mask=flags(text, "o"),
        **more,
    )


def flags(text: str, letter: str) -> Tensor:
    """bool, where ``text`` has ``letter``."""
    return torch.tensor([c == letter for c in text], dtype=torch.bool)


def _stream(value: Any, rows: Sequence[str], dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value
    values = value if isinstance(value, list) else [value] * len(rows)
    if len(values) == len(rows) and len(values) != sum(map(len, rows)):
        values = [item for item, row in zip(values, rows, strict=True) for _ in row]
    return torch.tensor(values, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A step's loss with its gradients by the given streams ``[T]``."""

    loss: float
    grad_T: Tensor
    entropy_grad_T: Tensor
    """Zeros where no component reads the entropy."""
    value_grad_T: Tensor
    """Zeros where there is no value head."""
    metrics: dict[str, float]
    outs: list[pg.LossOutput]
    plan: pg.Plan


def arrange(micro: pg.MicroBatch, stream_T: Tensor, fill: float = NAN) -> Tensor:
    """A target-aligned stream of the rank in the shape of ``micro``; ``fill`` at padding."""
    index_N = micro.index_N
    source_T = stream_T if stream_T.numel() else stream_T.new_zeros(1)
    filled = torch.full(index_N.shape, fill, dtype=stream_T.dtype)
    return torch.where(index_N >= 0, source_T[index_N.clamp(min=0)], filled).reshape(micro.shape)


def solve(
    batches: pg.TokenBatch | Sequence[pg.TokenBatch],
    spec: pg.LossSpec,
    logp: Tensor | Sequence[float],
    entropy: Tensor | Sequence[float] | None = None,
    *,
    value: Tensor | Sequence[float] | None = None,
    split: pg.Split = ONE,
    coef: Mapping[str, float] | None = None,
    version: int | None = None,
    fill: float = NAN,
    **options: Any,
) -> Answer:
    """Plan, compute the loss of every micro-batch from ``logp`` (and ``entropy``, ``value``), add up, run backward. If
    the spec needs a statistics pass, it runs first.

    Args:
        logp: [T], target-aligned: entry t is about the token after position t. Lists become float64.
        fill: the model's output at padding.
    """
    given = [batches] if isinstance(batches, pg.TokenBatch) else list(batches)
    plan = pg.plan(given, spec, split=split, coef=coef, version=version)
    logp_T = _leaf(logp)
    entropy_T, value_T = (None if given is None else _leaf(given) for given in (entropy, value))

    def scored(micro: pg.MicroBatch) -> pg.TokenLogprobs:
        entropy = None if entropy_T is None else arrange(micro, entropy_T, fill)
        return pg.TokenLogprobs(logprob=arrange(micro, logp_T, fill), entropy=entropy)

    if plan.needs_statistics_pass:
        plan = pg.statistics_pass(plan, [scored(micro) for micro in plan.microbatches()])
    total, outs = torch.zeros((), dtype=torch.float64), []
    for micro in plan.microbatches():
        worth = None if value_T is None else arrange(micro, value_T, fill)
        out = pg.policy_loss(scored(micro), micro, value=worth, **options)
        total = total + out.loss
        outs.append(out)
    total.backward()
    metrics = {name: metric.result() for name, metric in merge_all(out.metrics for out in outs).items()}
    assert logp_T.grad is not None
    return Answer(
        loss=float(total.detach()),
        grad_T=logp_T.grad,
        entropy_grad_T=torch.zeros_like(logp_T) if entropy_T is None or entropy_T.grad is None else entropy_T.grad,
        value_grad_T=torch.zeros_like(logp_T) if value_T is None or value_T.grad is None else value_T.grad,
        metrics=metrics,
        outs=outs,
        plan=plan,
    )


def _leaf(values: Tensor | Sequence[float]) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    return tensor.detach().clone().requires_grad_()


def weights_of(batches: pg.TokenBatch | Sequence[pg.TokenBatch], spec: pg.LossSpec, name: str = "rl") -> list[float]:
    """The weight of every member of ``name``, in order of the tokens."""
    given = [batches] if isinstance(batches, pg.TokenBatch) else list(batches)
    plan = pg.plan(given, spec, split=ONE)
    return plan.components[name].weight_T[plan.components[name].member_T].tolist()


def weights_under(normalizer: str, batches: pg.TokenBatch | Sequence[pg.TokenBatch], **more: Any) -> list[float]:
    """Weights of a plain policy gradient under a normaliser."""
    part = pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", normalizer=normalizer, **more)
    return weights_of(batches, pg.LossSpec(old="policy", components=[part]))


def near(got: Any, expected: Any, rtol: float = 1e-14) -> None:
    """Equal to float64 rounding."""
    got = got.detach().to(torch.float64) if isinstance(got, Tensor) else torch.tensor(got, dtype=torch.float64)
    expected = expected if isinstance(expected, Tensor) else torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got, expected.to(torch.float64), rtol=rtol, atol=1e-300)


def refused(kind: type[pg.PGLossError], build: Callable[[], Any], *words: str) -> pg.PGLossError:
    """Assert that ``build`` raises exactly ``kind``, with all of ``words`` in the message."""
    try:
        build()
    except pg.PGLossError as error:
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        for word in words:
            assert word in str(error), f"{word!r} not in: {error}"
        return error
    raise AssertionError(f"not refused: {words}")
