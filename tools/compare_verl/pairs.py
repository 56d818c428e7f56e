"""Both sides of a comparison with verl: the batches, this package's answer and verl's. See tools/compare_verl.sh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss import spec as ps

B, L = 7, 12
"""Rows and response tokens of a batch."""
SEQUENCE, TOKEN = "mean(sequence) > mean(token)", "mean(token)"
Answer = tuple[float, Tensor]
"""A loss and its gradient by log-probs (or values) [B, L]."""


@dataclass(frozen=True)
class Data:
    """The inputs of both sides: float64 [B, L], and a mask with holes and one row that is masked whole."""

    logp: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    advantage: Tensor
    mask: Tensor
    value: Tensor
    returns: Tensor
    values: Tensor

    @classmethod
    def draw(cls, seed: int, spread: float = 0.4, empty_row: bool = True, varied: bool = False) -> Data:
        """A batch of one seed.

        Args:
            seed: the seed of everything that is drawn.
            spread: standard deviation of log-ratios.
            empty_row: whether one row is masked whole.
            varied: draw an advantage for each token, not one per row.
        """
        dice = torch.Generator().manual_seed(seed)

        def normal(scale: float = 1.0) -> Tensor:
            return torch.randn(B, L, generator=dice, dtype=torch.float64) * scale

        logp = (normal(0.7) - 1.5).clamp(max=-0.02)
        lengths = torch.randint(2, L + 1, (B, 1), generator=dice)
        mask = (torch.arange(L) < lengths) & (torch.rand(B, L, generator=dice) > 0.2)
        mask[:, 0] = True
        if empty_row:
            mask[3] = False
        streams = [(logp + normal(spread)).clamp(max=-1e-3) for _ in range(3)]
        advantage = normal()
        advantage = advantage if varied else advantage[:, :1].expand(B, L).clone()
        value = normal()
        return cls(logp, *streams, advantage, mask, value, value + normal(0.5), value + normal(0.3))


def ours(data: Data, spec: pg.LossSpec) -> Answer:
    """This package on the batch: a context token before each response, everything masked by a user mask."""

    def wide(x: Tensor, fill: float = 0.0) -> Tensor:
        return torch.cat([torch.full((B, 1), fill, dtype=x.dtype), x], 1)

    rows = data.mask.any(1)
    actions = wide(data.mask)
    batch = pg.TokenBatch.from_padded(
        tokens=torch.ones(B, L + 1, dtype=torch.int64), lengths=[L + 1] * B, action_mask=actions,
        advantages=wide(data.advantage), old_logprobs=wide(data.old), rollout_logprobs=wide(data.rollout),
        ref_logprobs=wide(data.ref), values=wide(data.values), returns=wide(data.returns),
        sample_ids=list(range(B)),
    )  # fmt: skip
    plan = pg.plan(
        [batch], spec if rows.all() else spec.replace(empty_sequences="exclude"), split=pg.Split(sequences=3)
    )
    logp, value = data.logp.clone().requires_grad_(), data.value.clone().requires_grad_()

    def scored(micro: pg.MicroBatch) -> pg.TokenLogprobs:
        return pg.TokenLogprobs(logprob=placed(micro, logp))

    def placed(micro: pg.MicroBatch, x: Tensor) -> Tensor:
        full = torch.cat([x, torch.zeros(B, 1, dtype=x.dtype)], 1).reshape(-1)
        return full[micro.index_N.clamp(min=0)].reshape(micro.shape)

    if plan.needs_statistics_pass:
        plan = pg.statistics_pass(plan, [scored(micro) for micro in plan.microbatches()])
    critic = any(part.kind == "value" for part in spec.components)
    total = torch.zeros((), dtype=torch.float64)
    for micro in plan.microbatches():
        worth = placed(micro, value) if critic else None
        total = total + pg.policy_loss(scored(micro), micro, value=worth).loss
    total.backward()
    leaf = value if critic else logp
    assert leaf.grad is not None
    return float(total.detach()), leaf.grad


def theirs(data: Data, loss: Callable[[Tensor], Tensor], leaf: Tensor | None = None) -> Answer:
    """verl's function of the log-probs (or of ``leaf``)."""
    x = (data.logp if leaf is None else leaf).clone().requires_grad_()
    value = loss(x)
    value.backward()
    assert x.grad is not None
    return float(value.detach()), x.grad


def policy(name: str, data: Data, mode: str = "token-mean", **config: Any) -> Answer:
    """verl's registered policy loss ``name``; ``policy_loss=`` holds fields of its own config."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    inner = PolicyLossConfig(loss_mode=name, **config.pop("policy_loss", {}))
    weights, info = config.pop("weights", None), config.pop("info", {})
    actor = ActorConfig(strategy="fsdp", use_dynamic_bsz=True, rollout_n=1, policy_loss=inner, **config)
    actor.global_batch_info.update(info)
    fn = get_policy_loss_fn(name)
    mask = data.mask.double()
    return theirs(
        data,
        lambda x: fn(
            old_log_prob=data.old, log_prob=x, advantages=data.advantage.clone(), response_mask=mask,
            loss_agg_mode=mode, config=actor, rollout_is_weights=weights,
        )[0],
    )  # fmt: skip


def aggregated(data: Data, mode: str, **info: Any) -> Answer:
    """verl's agg_loss of -A log pi."""
    from verl.trainer.ppo.core_algos import agg_loss

    mask = data.mask.double()
    return theirs(data, lambda x: agg_loss(-data.advantage * x, mask, mode, **info))


def rl(surrogate: Any, normalizer: str = TOKEN, ratio: Any = "token", old: str = "given", **more: Any) -> pg.LossSpec:
    """A spec of one policy gradient."""
    part = ps.PolicyGradient(
        surrogate=surrogate, ratio=ratio, normalizer=normalizer, count_rejected=more.pop("count_rejected", True)
    )
    return pg.LossSpec(components=[part], old=old, **more)


def plain(normalizer: str) -> pg.LossSpec:
    """-A log pi."""
    return rl(ps.Reinforce(), normalizer, "none", "policy")


def kl_only(**form: Any) -> pg.LossSpec:
    """One KL term."""
    return pg.LossSpec(components=[pg.KL(**form)])


@dataclass(frozen=True)
class Row:
    """One line of the table.

    ``same``: ``value`` and ``gradient``, ``gradient`` alone, or ``no``.
    """

    verl: str
    here: str
    same: str
    pair: Callable[[Data], tuple[Answer, Answer]]
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)
