"""The exact KL to a reference in `token_logprobs`: values and gradients against plain torch, and in a loss.

Shapes: `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_pgloss as pg
from support.steps import refused
from support.worlds import world_fixture

T, V = 13, 29
G = torch.linspace(-1, 1, T, dtype=torch.float64)


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    z, w = (torch.randn(T, V, generator=dice, dtype=torch.float64) * 3 for _ in range(2))
    return z, w, torch.randint(0, V, (T,), generator=dice)


def mixed(lp: pg.TokenLogprobs) -> Tensor:
    """Every output with gradients of its own; the third row in four has none at all."""
    part_T = torch.where(torch.arange(T) % 4 == 2, 0.0, G)
    total = (part_T * lp.logprob).sum() + (part_T.square() * lp.kl).sum()  # type: ignore[operator]
    return total if lp.entropy is None else total + (part_T.exp() * (part_T != 0) * lp.entropy).sum()


def plain(z: Tensor, w: Tensor, targets: Tensor, tau: Any = 1.0) -> tuple[Tensor, ...]:
    z = z.detach().clone().requires_grad_()
    tau = tau[:, None] if isinstance(tau, Tensor) else tau
    log_p, log_q = (z / tau).log_softmax(-1), (w / tau).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    lp = pg.TokenLogprobs(log_p.gather(1, targets[:, None])[:, 0], entropy, kl=kl)
    mixed(lp).backward()
    return lp.logprob.detach(), kl.detach(), z.grad  # type: ignore[return-value]


def ours(z: Tensor, w: Tensor, targets: Tensor, **more: Any) -> tuple[Tensor, ...]:
    leaf = z.detach().clone().requires_grad_()
    lp = pg.token_logprobs(leaf, targets, ref_logits=w, entropy=True, **more)
    mixed(lp).backward()
    return lp.logprob.detach(), lp.kl.detach(), leaf.grad  # type: ignore[union-attr, return-value]


def near(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float = 1e-12) -> None:
    for one, other in zip(got, want, strict=True):
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("tau", [None, 0.7, torch.linspace(0.5, 2, T, dtype=torch.float64)])
@pytest.mark.parametrize("chunk", [1, 4 * V, 10**6])
def test_values_and_gradients(reuse: bool, tau: Any, chunk: int) -> None:
    z, w, targets = draw()
    got = ours(z, w, targets, temperature=tau, reuse_logits=reuse, chunk_elements=chunk)
    near(got, plain(z, w, targets, 1.0 if tau is None else tau))


def test_equal_models_have_kl_zero_and_no_gradient() -> None:
    z, _, targets = draw()
    leaf = z.clone().requires_grad_()
    lp = pg.token_logprobs(leaf, targets, ref_logits=z)
    assert lp.kl is not None and not lp.kl.detach().any()
    lp.kl.sum().backward()
    assert leaf.grad is not None and float(leaf.grad.abs().max()) < 1e-15


def test_a_small_kl_keeps_its_digits_in_float32() -> None:
    """KL of 1e-7 is not the difference of two entropies of 3 nats."""
    z, w, targets = draw()
    z, w = z.float(), (z + 1e-3 * w).float()  # rounded first: the question is what becomes of these very numbers
    exact = plain(z.double(), w.double(), targets)[1]
    got = pg.token_logprobs(z, targets, ref_logits=w).kl
    assert got is not None and float((got - exact).abs().max()) < 2e-7 and float(exact.max()) < 1e-4


def test_columns_that_neither_model_can_draw() -> None:
    z, w, targets = draw()
    keep = torch.arange(V) != 5
    logprob, kl, grad = plain(z[:, keep], w[:, keep], targets.clamp(max=4))
    z[:, 5] = w[:, 5] = -torch.inf
    got = ours(z, w, targets.clamp(max=4))
    near((got[0], got[1], got[2][:, keep]), (logprob, kl, grad))
    assert not got[2][:, 5].any()


def test_padded_columns_strided_logits_and_rows_without_gradient() -> None:
    z, w, targets = draw()
    wide = torch.full((V + 3, T), 7.0, dtype=torch.float64)
    wide[:V] = z.t()
    broken = torch.where(torch.arange(T)[:, None] % 4 == 2, torch.nan, torch.cat([w, w[:, :3]], 1))
    got = ours(wide.t(), broken, targets, vocab_size=V)
    want = plain(z, w, targets)
    live = torch.arange(T) % 4 != 2
    near((got[2][:, :V][live],), (want[2][live],))
    assert not got[2][~live].any() and not got[2][:, V:].any()


def test_refusals() -> None:
    z, w, targets = draw()
    refused(pg.DataError, lambda: pg.token_logprobs(z, targets, ref_logits=w[:, 1:]), "do not belong")
    refused(pg.DataError, lambda: pg.token_logprobs(z, targets, ref_logits=w.long()), "unusable dtype")
    refused(pg.UnsupportedError, lambda: pg.token_logprobs(z, targets, ref_logits=w, backend="compiled"), "exact KL")
    lp = pg.token_logprobs(z.requires_grad_(), targets, ref_logits=w, reuse_logits=True)
    lp.kl.sum().backward(retain_graph=True)  # type: ignore[union-attr]
    refused(pg.UnsupportedError, lambda: lp.logprob.sum().backward(), "second backward")


def _parallel(rank: int, world: int) -> list[float]:
    z, w, targets = draw()
    pad = world * 8 * 4 // world - V if world * 8 > V else 0
    z, w = (torch.nn.functional.pad(x, (0, pad), value=9.0) for x in (z, w))
    shard = z.size(1) // world
    mine = slice(rank * shard, (rank + 1) * shard)
    got = ours(z[:, mine], w[:, mine], targets, group=dist.group.WORLD, vocab_size=V)
    want = plain(z[:, :V], w[:, :V], targets)
    grad = torch.nn.functional.pad(want[2], (0, pad))[:, mine]
    errors = [float((got[i] - want[i]).abs().max()) for i in (0, 1)]
    return [*errors, float((got[2] - grad).abs().max())]


everyone = world_fixture(_parallel, 4)


@pytest.mark.multiproc
def test_tensor_parallel_with_a_shard_of_padding(everyone: Any) -> None:
    for errors in everyone:
        assert max(errors) < 1e-12, errors


def test_in_a_loss() -> None:
    """`KL(estimator="exact")` is the weighted mean of it, and its gradient reaches the logits."""
    dice = torch.Generator().manual_seed(1)
    z, w = (torch.randn(2, 5, V, generator=dice, dtype=torch.float64) for _ in range(2))
    spec = pg.LossSpec(old="policy", components=[pg.KL(estimator="exact", coef=0.5)])
    batch = pg.TokenBatch.from_padded(
        tokens=torch.randint(0, V, (2, 5), generator=dice), lengths=torch.tensor([5, 4]),
        advantages=torch.ones(2, dtype=torch.float64),  # a float64 stream: so are the weights
        action_mask=torch.tensor([[False, True, True, False, True], [False, False, True, True, False]]),
    )  # fmt: skip
    (micro,) = pg.plan([batch], spec, split=pg.Split(sequences=2)).microbatches()
    leaf = z.clone().requires_grad_()
    out = pg.policy_loss(pg.token_logprobs(leaf, micro.targets, ref_logits=w, entropy=False), micro)
    log_p, log_q = z.log_softmax(-1), w.log_softmax(-1)
    want = (log_p.exp() * (log_p - log_q)).sum(-1)[micro.members("kl")].mean()
    assert abs(float(out.loss.detach()) - 0.5 * float(want)) < 1e-14
    out.loss.backward()
    assert leaf.grad is not None and bool(leaf.grad[micro.members("kl")].any(-1).all())
    assert not leaf.grad[~micro.members("kl")].any()
