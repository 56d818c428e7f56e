"""In which numbers a head makes logits, and what a mode stores of them.

Shapes: `N` rows, `H` hidden, `V` vocabulary. References are float64 products of the same operands, or worked by hand.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron_pgloss as pg
from megatron_pgloss.logprobs import linear_token_logprobs
from megatron_pgloss.logprobs.head import gemm, stored
from megatron_pgloss.megatron import head_dtype
from support.steps import refused

MODES = ("keep", "keep32", "keep8", "recompute", "forward")


def operands(rows: int, hidden: int, vocab: int, height: float) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 hidden states of RMS 1 and a bf16 weight, whose largest logit of each row is near ``height``; targets among
    the likely tokens.
    """
    dice = torch.Generator().manual_seed(vocab)
    h_NH = torch.randn(rows, hidden, generator=dice)
    h_NH /= h_NH.square().mean(1, keepdim=True).sqrt()
    weight_VH = torch.randn(vocab, hidden, generator=dice) / math.sqrt(hidden)
    place_N = torch.randperm(vocab, generator=dice)[:rows]
    weight_VH[place_N] += h_NH * height / hidden
    other_N = torch.randint(0, vocab, (rows,), generator=dice)
    target_N = torch.where(torch.arange(rows) % 2 == 0, place_N, other_N)
    return h_NH.bfloat16(), weight_VH.bfloat16(), target_N


def gradients(logprob_N: Tensor, entropy_N: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of sum(logprob) + sum(entropy)."""
    return torch.ones_like(logprob_N), None if entropy_N is None else torch.ones_like(entropy_N)


# ---- log-prob and entropy come from float32 logits ------------------------------------------------------------------


@pytest.mark.parametrize("shape, height", [((16, 256, 4096), 12.0), ((8, 64, 151_936), 12.0), ((16, 512, 4096), 25.0)])
def test_logprob_and_entropy_are_those_of_exact_products_in_every_mode(
    shape: tuple[int, int, int], height: float
) -> None:
    """1e-5 of float64 products of the same bf16 operands, for logits within 16 at V = 151,936 and within
    29 at V = 4,096. Logits rounded to bf16 are a thousand times further off.
    """
    hidden, weight, target_N = operands(*shape, height)
    z_NV = hidden.double() @ weight.double().t()
    assert height - 4 < float(z_NV.abs().max()) < height + 4
    table_NV = z_NV.log_softmax(1)
    want, heat = table_NV.gather(1, target_N[:, None])[:, 0], -(table_NV.exp() * table_NV).sum(1)
    for mode in MODES if shape[2] < 10_000 else ("keep8",):
        leaf = hidden.clone().requires_grad_()
        lp = linear_token_logprobs(leaf, weight, target_N, entropy=True, mode=mode, upstream=gradients)  # type: ignore[arg-type]
        assert lp.entropy is not None and lp.logprob.dtype == torch.float32
        assert float((lp.logprob.detach().double() - want).abs().max()) <= 1e-5, mode
        assert float((lp.entropy.detach().double() - heat).abs().max()) <= 1e-5, mode
    rounded = linear_token_logprobs(hidden, weight, target_N, head_dtype="bf16")
    assert float((rounded.logprob.double() - want).abs().max()) > 1e-3


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_head_that_rounds_gives_the_logprobs_of_rounded_logits(
    name: Any, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """All products and sums here are exact in float32: multiples of 1/64 below 2^17. So the logits are known."""
    dice = torch.Generator().manual_seed(1)
    hidden = (torch.randint(-16, 17, (6, 8), generator=dice) / 8).to(weight_dtype)
    weight = (torch.randint(-16, 17, (50, 8), generator=dice) / 8).to(weight_dtype)
    target_N = torch.randint(0, 50, (6,), generator=dice)
    z_NV = (hidden.double() @ weight.double().t()).to(dtype).double()
    want = z_NV.log_softmax(1).gather(1, target_N[:, None])[:, 0]
    for mode in ("keep", "keep32", "keep8", "recompute"):
        found = linear_token_logprobs(hidden, weight, target_N, head_dtype=name, mode=mode)  # type: ignore[arg-type]
        assert float((found.logprob.double() - want).abs().max()) < 1e-6, mode


def test_tf32_has_ten_bits_and_16_bit_operands_lose_nothing() -> None:
    """1 + 2^-11 lies between 1 and 1 + 2^-10 and goes to the even 1; 1 + 3 2^-11 goes to 1 + 2^-9."""
    x = torch.tensor(
        [
            1 + 2**-11,
            1 + 3 * 2**-11,
            1 + 2**-11 + 2**-20,
            -(1 + 2**-10),
            0.0,
            math.inf,
            math.nan,
            torch.finfo(torch.float32).max,
        ]
    )
    want = torch.tensor([1.0, 1 + 2**-9, 1 + 2**-10, -(1 + 2**-10), 0.0, math.inf, math.nan, math.inf])
    assert torch.equal(gemm.round_to_tf32(x).nan_to_num(7.0), want.nan_to_num(7.0))
    hidden, weight, target_N = operands(4, 64, 100, 8.0)
    one, other = (linear_token_logprobs(hidden, weight, target_N, head_dtype=name) for name in ("fp32", "tf32"))  # type: ignore[arg-type]
    assert torch.equal(one.logprob, other.logprob)
    fine = torch.tensor([[1 + 2**-11, 1.0]])
    z = torch.empty(1, 2)
    gemm.write_logits(fine, torch.tensor([[1.0, 0.0], [2.0, 0.0]]), "tf32", z)
    assert torch.equal(z, torch.tensor([[1.0, 2.0]]))
    gemm.write_logits(fine, torch.tensor([[1.0, 0.0], [2.0, 0.0]]), "fp32", z)
    assert torch.equal(z, torch.tensor([[1 + 2**-11, 2 + 2**-10]]))
    assert gemm.same_numbers("fp32", "tf32", torch.bfloat16) and not gemm.same_numbers("fp32", "tf32", torch.float32)


@pytest.fixture
def coarse() -> Iterator[None]:
    """A host that lets float32 GEMMs round their operands."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def test_what_a_host_allows_its_own_gemms_does_not_reach_the_head(
    coarse: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, mm = [], torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *a, **more: (seen.append(torch.backends.mkldnn.matmul.fp32_precision), mm(*a, **more))[1]
    )
    gemm.write_logits(torch.ones(2, 4), torch.ones(3, 4), "fp32", torch.empty(2, 3))
    gemm.write_logits(torch.ones(2, 4).bfloat16(), torch.ones(3, 4).bfloat16(), "fp32", torch.empty(2, 3))
    assert seen == ["ieee", "ieee"]
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # the host's again


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16])
def test_the_gemm_of_a_gpu_takes_16_bit_operands_and_gives_float32(weight: torch.dtype) -> None:
    """On tensors without values: that torch has this GEMM, not that its numbers are right. No GPU has run it."""
    with FakeTensorMode():
        hidden, w, z = (
            torch.empty(4, n, dtype=d, device="cuda") for n, d in ((8, weight), (8, weight), (4, torch.float32))
        )
        gemm.write_logits(hidden, w, "fp32", z)
        assert z.dtype == torch.float32 and z.shape == (4, 4)


# ---- what is stored between forward and backward --------------------------------------------------------------------


def test_a_byte_by_hand() -> None:
    """q = round(48 sqrt(m - u)): distances 0, 1/2304, 1, 4, 9 and 27.5 give 0, 1, 48, 96, 144 and 252 (251.7); from
    (254.5/48)^2 = 28.1 on, and at -inf, the probability is 0. Read back: 0, 1/2304, 1, 4, 9, 27.5625.
    """
    weight = torch.empty(8, 1, dtype=torch.bfloat16)
    store = stored.empty_store(1, weight, torch.float32, "byte")
    assert store is not None and store.code_NV.dtype == torch.uint8
    u = torch.tensor([[3.0, 3 - 1 / 2304, 2.0, -1.0, -6.0, 3 - 27.5, 3 - 28.2, -math.inf]])
    stored.encode(store.code_NV, u, torch.tensor([3.0], dtype=torch.float64))
    assert store.lse_N is not None
    store.lse_N[:] = 0.25
    assert store.code_NV.tolist() == [[0, 1, 48, 96, 144, 252, 255, 255]]
    read = stored.decode(store, slice(None), torch.tensor([3.25], dtype=torch.float64), None, torch.float32)
    want = [0.0, -1 / 2304, -1.0, -4.0, -9.0, -27.5625, -math.inf, -math.inf]
    assert torch.allclose(read.z_RV, torch.tensor([want]), rtol=1e-6, atol=0) and read.lse_R.tolist() == [0.25]


def test_logits_in_16_bits_are_stored_from_the_peak() -> None:
    """bf16 has 8 bits: 40.125 becomes 40.25 (a step is 1/4 there), its distance 0.125 to 40.25 none the less exact."""
    weight = torch.empty(3, 1, dtype=torch.bfloat16)
    store = stored.empty_store(1, weight, torch.float32, "model")
    assert store is not None
    stored.encode(store.code_NV, torch.tensor([[40.25, 40.125, 0.0]]), torch.tensor([40.25]).double())
    assert store.code_NV.tolist() == [[0.0, -0.125, -40.25]]
    exact = stored.empty_store(1, weight.double(), torch.float64, "model")
    assert exact is not None and exact.lse_N is None and exact.code_NV.dtype == torch.float64


def dz_of(
    mode: str, hidden: Tensor, weight: Tensor, target_N: Tensor, tau: Tensor | None = None
) -> tuple[Tensor, float]:
    """dX [N, H] of sum(+-logprob), and the bytes that autograd holds a logit beside hidden states and weight."""
    held: list[int] = []

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in (hidden.data_ptr(), weight.data_ptr()):
            held.append(x.numel() * x.element_size())
        return x

    leaf = hidden.requires_grad_()
    sign_N = torch.where(torch.arange(len(target_N)) % 3 == 0, -1.0, 1.0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        lp = linear_token_logprobs(
            leaf,
            weight,
            target_N,
            mode=mode,  # type: ignore[arg-type]
            temperature=tau,
            upstream=lambda logprob, entropy: (sign_N, None),
        )
    (dx,) = torch.autograd.grad((sign_N * lp.logprob).sum(), leaf)
    return dx, sum(held) / (hidden.size(0) * weight.size(0))


def test_a_stored_logit_takes_as_many_bytes_as_its_mode_says() -> None:
    """Beside the N V logits: eight numbers of 8 bytes a row at most, 0.064 at V = 1,000."""
    hidden, weight, target_N = operands(8, 32, 1000, 8.0)
    for mode, size in {"keep": 2, "keep32": 4, "keep8": 1, "recompute": 0}.items():
        _, held = dz_of(mode, hidden.clone(), weight, target_N)
        assert size <= held <= size + 0.065, mode


@pytest.mark.parametrize("height, warm", [(5.0, False), (9.0, False), (5.0, True)])
def test_the_gradient_of_stored_logits(height: float, warm: bool) -> None:
    """dZ seen through an orthogonal weight, so that |dX - dX*| / |dX*| is that of dZ: 3e-3 with one byte, and with two
    little more than rounding dZ itself to bf16, which every mode does.
    """
    rows, vocab = 48, 256
    dice = torch.Generator().manual_seed(3)
    # A permuted, scaled identity: every product is one number, so dX has dZ's entries.
    weight = torch.eye(vocab)[torch.randperm(vocab, generator=dice)].bfloat16()
    hidden = torch.randn(rows, vocab, generator=dice)
    hidden[torch.arange(rows), torch.randint(0, vocab, (rows,), generator=dice)] += height
    hidden = hidden.bfloat16()
    z_NV = hidden.double() @ weight.double().t()
    target_N = torch.multinomial(z_NV.softmax(1), 1, generator=dice)[:, 0]
    leaf = hidden.double().requires_grad_()
    sign_N = torch.where(torch.arange(rows) % 3 == 0, -1.0, 1.0)
    tau_N = torch.linspace(0.7, 1.6, rows, dtype=torch.float64) if warm else None
    table_NV = (leaf @ weight.double().t() / (1 if tau_N is None else tau_N[:, None])).log_softmax(1)
    (want,) = torch.autograd.grad((sign_N * table_NV.gather(1, target_N[:, None])[:, 0]).sum(), leaf)
    error = {}
    for mode in MODES:
        dx, _ = dz_of(mode, hidden.clone(), weight, target_N, tau_N)
        error[mode] = float((dx.double() - want).norm() / want.norm())
    assert max(error.values()) <= 3e-3, error
    assert error["keep"] <= 1.1 * error["recompute"], error
    assert error["recompute"] == pytest.approx(error["keep32"], rel=0.05)


# ---- the sampler's head ---------------------------------------------------------------------------------------------


def test_the_head_takes_the_samplers_numbers_unless_told_otherwise() -> None:
    assert head_dtype.chosen("auto", None, None) == "fp32"
    assert head_dtype.chosen("keep", None, "bf16") == "bf16"
    assert head_dtype.chosen("keep", "fp32", "bf16") == "fp32"
    assert head_dtype.chosen("given", None, "bf16") is None
    refused(pg.SpecError, lambda: head_dtype.chosen("given", "fp32", None), "makes its logits itself")
    refused(pg.SpecError, lambda: head_dtype.chosen("keep", "float32", None), "head_dtype='float32'")  # type: ignore[arg-type]
    refused(pg.SpecError, lambda: head_dtype.chosen("keep", None, "e4m3"), "sampler_head='e4m3'")  # type: ignore[arg-type]
    hidden, weight, target_N = operands(2, 8, 10, 4.0)
    refused(pg.SpecError, lambda: linear_token_logprobs(hidden, weight, target_N, head_dtype="half"), "bf16")  # type: ignore[arg-type]


def test_a_one_sided_head_is_warned_of_once_with_the_k3_it_measures(caplog: pytest.LogCaptureFixture) -> None:
    """d = (ln 2, 0): k3 = mean(2 - 1 - ln 2, 0) = 0.1534; the largest |d| is 0.6931."""
    one = head_dtype.OneSided("bf16", speaks=True)
    assert one.pending("fp32", torch.bfloat16) and not one.pending("bf16", torch.bfloat16)
    own_N = torch.tensor([-1.0 + math.log(2), -2.0], dtype=torch.float64)
    with caplog.at_level(logging.WARNING, logger="megatron_pgloss"):
        one.say("fp32", own_N, lambda: torch.tensor([-1.0, -2.0], dtype=torch.float64))
    (record,) = caplog.records
    said = record.getMessage()
    assert "k3 is 1.53e-01" in said and "6.93e-01" in said and "head_dtype='bf16'" in said
    assert not one.pending("fp32", torch.bfloat16)
    assert not head_dtype.OneSided(None, speaks=True).pending("fp32", torch.bfloat16)  # not declared: nothing to say
    assert not head_dtype.OneSided("tf32", speaks=True).pending("fp32", torch.bfloat16)  # the same numbers


def test_a_checkpoint_in_other_numbers_is_refused() -> None:
    mine = {"head": "keep", "head_dtype": "fp32", "sampler_head": None}
    head_dtype.compare_notes(mine, mine)
    head_dtype.compare_notes(mine, {})  # of a time before there were notes
    error = refused(pg.SpecError, lambda: head_dtype.compare_notes(mine, mine | {"head": "keep8"}), "head")
    assert "keep8" in str(error)
