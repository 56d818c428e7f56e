"""What the log-prob pass refuses at the door, with an error that says what to do."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron_pgloss import DataError, LayoutError, PGLossError, TokenLogprobs, token_logprobs
from megatron_pgloss.logprobs.inputs import inverse_temperature, reciprocal
from megatron_pgloss.logprobs.logits.node import GivenJob, GivenLogits
from megatron_pgloss.logprobs.vocab.order import RowOrder
from megatron_pgloss.logprobs.vocab.shard import find_shard

Z, T = torch.randn(2, 3, 8), torch.randint(0, 8, (2, 3))


@pytest.mark.parametrize("bad", [0, 0.0, -0.7, math.nan, math.inf, -math.inf])
def test_temperature_that_is_not_positive_and_finite_is_refused(bad: float) -> None:
    per_token = torch.ones(2, 3)
    per_token[1, 2] = bad
    for temperature in (bad, torch.tensor(float(bad)), per_token):
        with pytest.raises(PGLossError, match="positive and finite"):
            token_logprobs(Z, T, temperature=temperature)
    with pytest.raises(PGLossError, match=r"position \(1, 2\)"):
        token_logprobs(Z, T, temperature=per_token)


@pytest.mark.parametrize(
    "bad",
    [
        torch.ones(3),  # [3] against [2, 3] would broadcast: over tokens or over rows?
        torch.ones(2),
        torch.ones(2, 3, 1),
        torch.ones(3, 2),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.ones(2, 3, dtype=torch.int64),
        True,
        "0.7",
    ],
    ids=repr,
)
def test_temperature_of_another_shape_or_kind_is_refused(bad: object) -> None:
    with pytest.raises(PGLossError, match="temperature"):
        token_logprobs(Z, T, temperature=bad)


def test_temperature_may_have_size_one_where_it_does_not_vary() -> None:
    tau = torch.tensor([[0.5], [2.0]])
    full = token_logprobs(Z, T, temperature=tau.expand(2, 3)).logprob
    assert torch.equal(token_logprobs(Z, T, temperature=tau).logprob, full)
    one = token_logprobs(Z, T, temperature=torch.tensor(0.5)).logprob
    assert torch.equal(one[0], full[0])
    assert torch.equal(token_logprobs(Z, T, temperature=0.5).logprob, one)
    assert torch.equal(token_logprobs(Z, T, temperature=1).logprob, token_logprobs(Z, T).logprob)


def test_temperature_is_a_constant() -> None:
    tau, z = torch.ones(2, 3, requires_grad=True), Z.clone().requires_grad_()
    token_logprobs(z, T, temperature=tau).logprob.sum().backward()
    assert tau.grad is None and z.grad.any()
    assert not token_logprobs(Z, T, temperature=tau).logprob.requires_grad


def test_bad_temperature_on_an_accelerator_is_nan_at_its_token() -> None:
    # The meta device stands in for one: no value can be read there, so nothing may try to.
    tau = torch.ones(2, 3, device="meta")
    assert inverse_temperature(tau, T.to("meta")).shape == (2, 3)
    tau = torch.tensor([[1.0, 0.0, -0.5], [math.nan, math.inf, 2.0]])
    bad = torch.tensor([[False, True, True], [True, True, False]])
    inverse = reciprocal(tau)
    assert torch.equal(inverse.isnan(), bad)
    job = GivenJob(find_shard(8, None, None), RowOrder.of(Z), True, False, False, "eager", 2**18)
    z = Z.clone().requires_grad_()
    logprob, entropy, *_ = GivenLogits.apply(z, T, inverse, None, job)
    assert torch.equal(logprob.isnan(), bad) and torch.equal(entropy.isnan(), bad)
    (logprob + entropy).sum().backward()
    assert torch.equal(z.grad.isnan(), bad[..., None].expand_as(z))


@pytest.mark.parametrize(
    "logits, targets",
    [
        (Z, T[0]),
        (Z, T[..., None]),
        (Z[..., 0], T),
        (Z.reshape(6, 8), T),
        (Z.to(torch.int64), T),
        (Z.to(torch.complex64), T),
        (Z, T.to(torch.int32)),
        (Z, T.float()),
        (Z[..., :0], T),
        (Z, T.to("meta")),
    ],
    ids=lambda x: f"{x.dtype} {tuple(x.shape)} {x.device}",
)
def test_logits_and_targets_that_do_not_fit_are_refused(logits, targets) -> None:
    with pytest.raises(DataError):
        token_logprobs(logits, targets)


def test_chunk_elements_must_be_positive() -> None:
    with pytest.raises(PGLossError, match="chunk_elements"):
        token_logprobs(Z, T, chunk_elements=0)


@pytest.mark.parametrize("vocab_size", [0, -1, 9])
def test_vocabulary_that_the_logits_do_not_cover_is_refused(vocab_size: int) -> None:
    with pytest.raises(LayoutError, match="cover the vocabulary"):
        token_logprobs(Z, T, vocab_size=vocab_size)


def test_result_is_frozen_and_may_be_made_by_hand() -> None:
    out = TokenLogprobs(logprob=torch.zeros(2))
    assert out.entropy is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        out.logprob = torch.ones(2)
