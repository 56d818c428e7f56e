"""Log-prob and entropy of given logits, values and gradients, in one process.

All is held against `logprob_cases.dense`: float64 torch that shares no code with the package.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_pgloss import TokenLogprobs, token_logprobs
from support.logprob_cases import INF, Case, assert_one_rounding, cases, dense

BOTH = cases()["both"]


def call(case: Case, logits: Tensor, **more: object) -> TokenLogprobs:
    return token_logprobs(
        logits,
        case.targets,
        temperature=case.temperature,
        entropy=case.entropy,
        vocab_size=case.vocab,
        **more,
    )


def weigh(out: TokenLogprobs, g: Tensor | None, h: Tensor | None) -> Tensor:
    parts = [] if g is None else [(out.logprob * g.to(out.logprob.dtype)).sum()]
    parts += [] if h is None else [(out.entropy * h.to(out.entropy.dtype)).sum()]
    return sum(parts)


def gradient(case: Case, logits: Tensor, **more: object) -> Tensor:
    logits = logits.detach().clone().requires_grad_()
    weigh(call(case, logits, **more), case.g, case.h).backward()
    return logits.grad


@pytest.mark.parametrize("chunk_elements", [1, 50, 2**20])
@pytest.mark.parametrize("name", cases())
def test_float64_equals_dense_for_every_consumer_and_chunk(name: str, chunk_elements: int) -> None:
    case = cases()[name]
    out = call(case, case.logits, chunk_elements=chunk_elements)
    tau = 1.0 if case.temperature is None else case.temperature
    lp, entropy, grad = dense(case.logits, case.targets, case.g, case.h, tau, case.vocab)
    torch.testing.assert_close(out.logprob, lp, rtol=1e-13, atol=1e-12)
    assert (out.entropy is None) is not case.entropy
    if case.entropy:
        torch.testing.assert_close(out.entropy, entropy, rtol=1e-13, atol=1e-12)
    got = gradient(case, case.logits, chunk_elements=chunk_elements)
    torch.testing.assert_close(got, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_values_are_float32_and_gradients_rounded_once(name: str, dtype: torch.dtype) -> None:
    case = cases(dtype)[name]
    out = call(case, case.logits)
    tau = 1.0 if case.temperature is None else case.temperature
    lp, entropy, grad = dense(case.logits, case.targets, case.g, case.h, tau, case.vocab)
    assert out.logprob.dtype == torch.float32
    # float32 cannot hold a log-prob more finely than its own step: 2e-6 at 30 nats.
    torch.testing.assert_close(out.logprob.double(), lp, rtol=2e-7, atol=3e-7)
    if case.entropy:
        assert out.entropy.dtype == torch.float32
        torch.testing.assert_close(out.entropy.double(), entropy, rtol=3e-7, atol=3e-7)
    got = gradient(case, case.logits)
    assert got.dtype == dtype
    assert_one_rounding(got, grad, noise=4e-6)


def test_gradcheck_of_both_outputs_under_temperature() -> None:
    logits = (2 * torch.randn(3, 5, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([0, 4, 2])
    tau = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)

    def outputs(z: Tensor) -> tuple[Tensor, Tensor]:
        out = token_logprobs(z, targets, temperature=tau, entropy=True, chunk_elements=5)
        return out.logprob, out.entropy

    assert torch.autograd.gradcheck(outputs, (logits,))


def test_wide_vocabulary_in_float32_keeps_its_last_digits() -> None:
    # torch.softmax adds up 150k numbers one after another and is off by 1e-5 here.
    z = 3 * torch.randn(8, 151_936, generator=torch.Generator().manual_seed(0))
    targets = z.argmax(-1)
    out = token_logprobs(z, targets, entropy=True)
    lp, entropy, grad = dense(z, targets, torch.ones(8), torch.ones(8))
    torch.testing.assert_close(out.logprob.double(), lp, rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=4e-7, atol=4e-7)
    got = gradient(Case(z, targets, torch.ones(8), torch.ones(8)), z)
    assert (got - grad).abs().max() < 4e-6


def test_underflow_costs_neither_value_nor_gradient() -> None:
    # MLM-11: log(softmax) would be -inf, log-sum-exp is not.
    z = torch.tensor([[0.0, -1000.0]])
    case = Case(z, torch.tensor([1]), torch.ones(1), torch.ones(1))
    out = call(case, z)
    assert out.logprob.item() == -1000.0 and out.entropy.item() == 0.0
    assert gradient(case, z).tolist() == [[-1.0, 1.0]]


def test_worked_numbers_of_two_logits() -> None:
    # MLM-13, SLIME-12: logits [1, 2], target 1: lp -0.3132617, H 0.5822031, and their gradients.
    z, t, one = torch.tensor([[1.0, 2.0]]), torch.tensor([1]), torch.ones(1)
    out = token_logprobs(z, t, entropy=True)
    assert out.logprob.item() == pytest.approx(-0.3132617, abs=1e-7)
    assert out.entropy.item() == pytest.approx(0.5822031, abs=1e-7)
    for g, h, expected in [(one, None, -0.2689414), (None, one, 0.1966119), (one, one, -0.0723295)]:
        grad = gradient(Case(z, t, g, h), z)
        torch.testing.assert_close(grad, torch.tensor([[expected, -expected]]), rtol=0, atol=1e-7)
    # VERL-12: sampled at temperature 0.5, scored at 0.5: lp -0.1269280, H 0.3653339.
    out = token_logprobs(torch.tensor([[0.0, 1.0]]), t, temperature=0.5, entropy=True)
    assert out.logprob.item() == pytest.approx(-0.1269280, abs=1e-7)
    assert out.entropy.item() == pytest.approx(0.3653339, abs=1e-7)


def test_confident_tokens_keep_their_gradient_in_bfloat16() -> None:
    # LIGER-03, TE-06: p rounded to bf16 before 1 is subtracted leaves 0; 1e-9 is a bf16 number.
    z = torch.tensor([[6.90625, 0.0], [5.8125, 0.0], [11.5, 0.0]], dtype=torch.bfloat16)
    targets, g = torch.zeros(3, dtype=torch.int64), torch.tensor([-1.0, -1.0, -1e-4])
    got = gradient(Case(z, targets, g), z)
    _, _, grad = dense(z, targets, g)
    assert_one_rounding(got, grad, noise=0.0)
    assert got[:, 0].tolist() == pytest.approx([-1.0004e-3, -2.98e-3, -1.013e-9], rel=0.01)


def test_rows_are_neither_reduced_nor_averaged() -> None:
    # TE-01, TE-02: each row has its own upstream gradient, and nothing divides by their number.
    z = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    t = torch.tensor([1, 1])
    p = 1 / (1 + math.e)
    for g in ([0.0, 1.0], [1.0, 1.0]):
        grad = gradient(Case(z, t, torch.tensor(g)), z)
        expected = torch.tensor([[-p * x, p * x] for x in g])
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-7)


def test_padded_columns_have_gradient_exactly_zero() -> None:
    for name in ("padding of -inf", "padding of -inf, entropy off", "one finite column"):
        case = cases()[name]
        grad = gradient(case, case.logits)
        assert torch.equal(grad[case.logits == -INF], torch.zeros(int((case.logits == -INF).sum())))
    # With vocab_size, whatever lies beyond it is never read.
    case = cases()["vocab_size"]
    case.logits[:, 11:] = math.nan
    out, grad = call(case, case.logits), gradient(case, case.logits)
    clean = cases()["vocab_size"]
    assert torch.equal(out.logprob, call(clean, clean.logits).logprob)
    assert torch.equal(grad, gradient(clean, clean.logits)) and not grad[:, 11:].any()


@pytest.mark.parametrize("label", [-100, -1, 16, 2**40])
def test_label_off_the_vocabulary_is_nan_where_used_and_harmless_where_not(label: int) -> None:
    targets = BOTH.targets.clone()
    targets[3] = label
    case = Case(BOTH.logits, targets, BOTH.g, BOTH.h)
    out, good = call(case, case.logits), call(BOTH, BOTH.logits)
    others = torch.arange(16) != 3
    assert out.logprob[3].isnan() and torch.equal(out.logprob[others], good.logprob[others])
    assert torch.equal(out.entropy, good.entropy)  # the entropy has no label
    assert gradient(case, case.logits)[3].isnan().all()
    unused = BOTH.g.clone()
    unused[3] = 0
    assert torch.equal(
        gradient(Case(BOTH.logits, targets, unused, BOTH.h), BOTH.logits),
        gradient(Case(BOTH.logits, BOTH.targets, unused, BOTH.h), BOTH.logits),
    )


def test_label_in_the_padding_is_off_the_vocabulary() -> None:
    out = token_logprobs(BOTH.logits, BOTH.targets, vocab_size=11)
    assert torch.equal(out.logprob.isnan(), BOTH.targets >= 11)


def test_broken_logits_are_never_plausible() -> None:
    z = BOTH.logits.clone()
    z[0, 2], z[1, 2], z[2] = math.nan, INF, -INF
    out = token_logprobs(z, BOTH.targets, entropy=True)
    for value in (out.logprob, out.entropy):
        assert value[:3].isnan().all() and value[3:].isfinite().all()
    assert gradient(Case(z, BOTH.targets, BOTH.g, BOTH.h), z)[:3].isnan().all()
    z = BOTH.logits.clone()
    z[4, 4] = -INF  # the target itself is masked: log-prob -inf, no gradient to believe in
    case = Case(z, BOTH.targets, BOTH.g)
    assert call(case, z).logprob[4] == -INF and gradient(case, z)[4].isnan().all()
    g = BOTH.g.clone()
    g[4] = 0  # unless that log-prob is not used: then the entropy's gradient is all there is
    got = gradient(Case(z, BOTH.targets, g, BOTH.h), z)
    torch.testing.assert_close(got, dense(z, BOTH.targets, g, BOTH.h)[2], rtol=1e-12, atol=1e-12)
