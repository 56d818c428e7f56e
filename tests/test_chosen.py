"""Log-probs at chosen ids: values and gradients against float64 autograd, on one shard; more of them in
tests/test_logprobs_parallel.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_pgloss import DataError, UnsupportedError, token_logprobs
from support.logprob_cases import assert_one_rounding
from support.steps import near, refused


def dense_chosen(
    logits: Tensor, targets: Tensor, ids: Tensor, c: Tensor, g: Tensor, h: Tensor, tau: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """(log-probs at ids, gradient of sum c logp(ids) + sum g logp(target) + sum h H) in float64; -1 adds nothing."""
    z = logits.detach().double().requires_grad_()
    logp = (z[..., :vocab] / tau[..., None]).log_softmax(-1)
    some = ids >= 0
    at = logp.gather(-1, ids.clamp(min=0))
    total = (
        torch.where(some, c.double() * at, 0).sum() + (g.double() * logp.gather(-1, targets[..., None])[..., 0]).sum()
    )
    (total - (h.double() * (logp.exp() * logp).sum(-1)).sum()).backward()
    assert z.grad is not None
    return torch.where(some, at, -math.inf).detach(), z.grad


def drawn(rows: tuple[int, ...] = (3, 4), columns: int = 23, k: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Everything at once: temperature, -1 among the ids, a target among them, a row that nothing reaches."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    vocab = columns - 3
    ids = torch.rand(*rows, vocab, generator=random).argsort(-1)[..., :k]
    ids[..., 0, -2:] = -1
    targets = torch.randint(0, vocab, rows, generator=random)
    targets[..., 1] = ids[..., 1, 2]
    found = {
        "logits": normal(*rows, columns) * 2, "targets": targets, "ids": ids, "c": normal(*rows, k), "g": normal(*rows),
        "h": normal(*rows), "tau": 0.5 + normal(*rows).abs(),
    }  # fmt: skip
    for name in "cgh":
        found[name][..., 2, :] = 0 if name == "c" else found[name][..., 2, :]
    for name in "gh":
        found[name][:, 2] = 0
    found["c"][:, 3] -= found["c"][:, 3].mean(-1, keepdim=True)  # G = 0, and the row is live all the same
    found["g"][:, 3] = found["h"][:, 3] = 0
    return found


def scored(x: dict[str, Tensor], dtype: torch.dtype, **more: object) -> tuple[Tensor, Tensor]:
    leaf = x["logits"].to(dtype).requires_grad_()
    out = token_logprobs(
        leaf, x["targets"], temperature=x["tau"], entropy=True, vocab_size=x["logits"].size(-1) - 3,
        chosen_ids=x["ids"], **more,  # type: ignore[arg-type]
    )  # fmt: skip
    assert out.chosen is not None and out.entropy is not None
    kind = out.logprob.dtype
    total = torch.where(x["ids"] >= 0, out.chosen * x["c"].to(kind), 0).sum() + (out.logprob * x["g"].to(kind)).sum()
    (total + (out.entropy * x["h"].to(kind)).sum()).backward()
    assert leaf.grad is not None
    return out.chosen.detach(), leaf.grad


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_equal_autograds(dtype: torch.dtype, reuse: bool) -> None:
    x = drawn()
    x["logits"] = x["logits"].to(dtype).double()
    want, gradient = dense_chosen(**x, vocab=20)
    got, mine = scored(x, dtype, reuse_logits=reuse, chunk_elements=60)
    if dtype == torch.float64:
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(mine, gradient, rtol=1e-12, atol=1e-13)
    else:
        torch.testing.assert_close(got.double(), want, rtol=3e-7, atol=3e-7)
        assert_one_rounding(mine.reshape(12, 23), gradient.reshape(12, 23), noise=4e-6)
    assert not mine[:, 2].any() and not mine[..., 20:].any() and bool(mine[:, 3].any())


def test_worked_by_hand() -> None:
    """p = 1/2, 1/4, 1/4 at logits log 2, 0, 0. Upstream 1 at id 0 and -3 at id 2: G = -2, dz = 2 p + (1, 0, -3)."""
    leaf = torch.tensor([[math.log(2), 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    out = token_logprobs(leaf, torch.tensor([1]), chosen_ids=torch.tensor([[0, -1, 2]]))
    assert out.chosen is not None
    near(out.chosen, [[math.log(1 / 2), -math.inf, math.log(1 / 4)]], 1e-14)
    (out.chosen[0, 0] - 3 * out.chosen[0, 2]).backward()
    near(leaf.grad, [[2.0, 0.5, -2.5]], 1e-14)


def test_where_policy_and_teacher_agree_a_bf16_gradient_is_exact() -> None:
    """Forward KL to oneself, on every id: -G p_v and g_v cancel; sums of rounded parts would leave 2^-9 of p."""
    leaf = torch.randn(1, 8, dtype=torch.float64).to(torch.bfloat16).requires_grad_()
    out = token_logprobs(leaf, torch.tensor([0]), chosen_ids=torch.arange(8)[None])
    assert out.chosen is not None
    (-(out.chosen.detach().exp() * out.chosen).sum()).backward()
    assert leaf.grad is not None and float(leaf.grad.abs().max()) < 1e-7


def test_ids_that_say_nothing_give_nan_and_only_where_they_are_used() -> None:
    logits = torch.randn(5, 6, dtype=torch.float64)
    logits[3, 2] = -math.inf
    ids = torch.tensor([[0, 1], [6, 1], [0, 0], [2, 1], [-1, -1]])
    leaf = logits.clone().requires_grad_()
    out = token_logprobs(leaf, torch.zeros(5, dtype=torch.int64), chosen_ids=ids)
    assert out.chosen is not None
    assert out.chosen.isnan().tolist() == [[False] * 2, [True, False], [True] * 2, [False] * 2, [False] * 2]
    assert out.chosen[3, 0] == -math.inf and out.chosen[4].tolist() == [-math.inf] * 2
    out.chosen.backward(torch.tensor([[1.0, 0], [0, 1], [0, 1], [1, 0], [1, 1]], dtype=torch.float64))
    assert leaf.grad is not None
    assert [row.isnan().any().item() for row in leaf.grad] == [False, False, True, True, False]
    assert not leaf.grad[4].any()


def test_an_id_named_twice_is_found_wherever_it_stands() -> None:
    ids = torch.tensor([[1, 5, 3, 5], [1, 5, 3, -1], [0, 4, -1, 0], [-1, 2, -1, -1]])
    out = token_logprobs(torch.randn(4, 6), torch.zeros(4, dtype=torch.int64), chosen_ids=ids)
    assert out.chosen is not None
    assert out.chosen.isnan().any(1).tolist() == [True, False, True, False]


def test_a_chosen_id_that_cannot_be_drawn_has_no_gradient_of_the_entropy() -> None:
    leaf = torch.tensor([[0.5, -math.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    out = token_logprobs(leaf, torch.tensor([0]), chosen_ids=torch.tensor([[1, 2]]), entropy=True)
    assert out.chosen is not None and out.entropy is not None
    (out.chosen[0, 1] + out.entropy[0]).backward()
    free = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)
    logp = free.log_softmax(0)
    (logp[1] - (logp.exp() * logp).sum()).backward()
    assert leaf.grad is not None and free.grad is not None
    near(leaf.grad, [[float(free.grad[0]), 0.0, float(free.grad[1])]], 1e-13)


def test_ids_that_do_not_fit_are_refused() -> None:
    logits, targets = torch.randn(2, 3, 6), torch.zeros(2, 3, dtype=torch.int64)
    for ids in (torch.zeros(2, 3), torch.zeros(2, 4, 1, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)):
        refused(DataError, lambda ids=ids: token_logprobs(logits, targets, chosen_ids=ids), "[2, 3, 'k']")  # type: ignore[misc]
    ids = torch.zeros(2, 3, 1, dtype=torch.int64)
    refused(UnsupportedError, lambda: token_logprobs(logits, targets, chosen_ids=ids, ref_logits=logits), "in one pass")
