"""The fused head against given logits: the same numbers from hidden states and weight, in every mode.

Shapes: `T` tokens, `H` hidden, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.logprobs import linear_token_logprobs
from megatron_pgloss.logprobs.head.forward import HeadJob, WantedRows, run_forward
from megatron_pgloss.logprobs.head.linear import MODES as MODES_STORE
from megatron_pgloss.logprobs.vocab.shard import find_shard
from support.steps import refused
from support.worlds import run_world

T, H, V = 24, 8, 37
MODES = ("keep", "keep32", "recompute", "forward")


def draw(seed: int = 0, vocab: int = V) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets; float64."""
    dice = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=dice, dtype=torch.float64)
    weight = torch.randn(vocab, H, generator=dice, dtype=torch.float64)
    return hidden, weight, torch.randint(0, min(vocab, V), (T,), generator=dice)


def loss_of(lp: pg.TokenLogprobs) -> Tensor:
    """Curved in both streams; every third token has no part in it."""
    part_T = torch.arange(lp.logprob.numel()) % 3 != 0
    logprob = torch.where(part_T, lp.logprob, 0)
    loss = (logprob.square() / 7 - logprob).sum()
    return loss if lp.entropy is None else loss + torch.where(part_T, lp.entropy, 0).sin().sum()


def upstream(logprob: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of `loss_of`, as mode "forward" asks for them."""
    leaves = [x.detach().requires_grad_() for x in (logprob, entropy) if x is not None]
    grads = torch.autograd.grad(
        loss_of(pg.TokenLogprobs(leaves[0], leaves[1] if entropy is not None else None)), leaves
    )
    return grads[0], grads[1] if entropy is not None else None


def expected(hidden: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0, **more: Any) -> tuple[Tensor, ...]:
    """Log-probs, dX, dW by plain torch."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    scale, tau, entropy, rows = (more.get(key) for key in ("scale", "temperature", "entropy", "rows"))
    logits = hidden @ weight.t() * (scale or 1.0)
    if tau is not None:
        logits = logits / (tau[:, None] if isinstance(tau, Tensor) else tau)
    table = logits[:, : more.get("vocab_size")].log_softmax(-1)
    wanted = (
        torch.ones(T, dtype=torch.bool) if rows is None else torch.zeros(T, dtype=torch.bool).index_fill(0, rows, True)
    )
    logprob = torch.where(wanted, table.gather(1, targets[:, None])[:, 0], 0)
    heat = torch.where(wanted, -(table.exp() * table).sum(-1), 0)
    (factor * loss_of(pg.TokenLogprobs(logprob, heat if entropy else None))).backward()
    return logprob.detach(), hidden.grad, weight.grad  # type: ignore[return-value]


def found(hidden: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0, **more: Any) -> tuple[Tensor, ...]:
    """The same by the fused head."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    lp = linear_token_logprobs(hidden, weight, targets, upstream=upstream, **more)
    (factor * loss_of(lp)).backward()
    return lp.logprob.detach(), hidden.grad, weight.grad  # type: ignore[return-value]


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float = 1e-12) -> None:
    for one, other in zip(got, want, strict=True):
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy": {"entropy": True},
    "one row a chunk": {"entropy": True, "chunk_tokens": 1},
    "ragged chunks": {"entropy": True, "chunk_tokens": 7},
    "temperature": {"entropy": True, "temperature": torch.linspace(0.5, 2.0, T, dtype=torch.float64)},
    "muP": {"scale": 0.3, "temperature": 1.7, "entropy": True},
    "wanted rows": {"rows": torch.tensor([0, 1, 4, 5, 9, 23]), "entropy": True, "chunk_tokens": 4},
    "padded vocabulary": {"vocab_size": V - 5, "entropy": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_equals_given_logits(case: str, mode: str) -> None:
    more = CASES[case]
    hidden, weight, targets = draw()
    targets = targets.clamp(max=more.get("vocab_size", V) - 1)
    close(
        found(hidden, weight, targets, factor=-512.5, mode=mode, **more),
        expected(hidden, weight, targets, -512.5, **more),
    )


@pytest.mark.parametrize("mode", MODES)
def test_no_wanted_row_is_a_zero_that_stays_in_the_graph(mode: str) -> None:
    hidden, weight, targets = draw()
    logprob, dx, dw = found(hidden, weight, targets, mode=mode, rows=torch.zeros(0, dtype=torch.int64))
    assert not logprob.any() and not dx.any() and not dw.any()


@pytest.mark.parametrize("mode", MODES)
def test_rows_without_gradient_enter_no_backward_gemm(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN hidden states in rows that nobody wants change nothing, by a bit."""
    hidden, weight, targets = draw()
    rows = torch.arange(0, T, 2)
    clean = found(hidden, weight, targets, mode=mode, rows=rows, entropy=True)
    broken = torch.where(torch.arange(T)[:, None] % 2 == 0, hidden, float("nan"))
    for one, other in zip(found(broken, weight, targets, mode=mode, rows=rows, entropy=True), clean, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("mode", MODES)
def test_lower_precisions(mode: str, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = (x.to(dtype) if x.is_floating_point() else x for x in draw())
    logprob, dx, dw = found(hidden, weight, targets, mode=mode, entropy=True)
    wide = expected(hidden.double(), weight.double(), targets, entropy=True)
    assert logprob.dtype == torch.float32 and dx.dtype == dw.dtype == dtype
    # Logits are rounded to bfloat16 once, the gradient of them once, the products once.
    close((dx.double(), dw.double()), wide[1:], 4 * tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_main_grad_is_added_to_and_the_parameter_marked(mode: str) -> None:
    hidden, weight, targets = draw()
    want = expected(hidden, weight, targets, entropy=True)
    for zero_out in (False, True):
        param = torch.nn.Parameter(weight.clone())
        param.main_grad, param.grad_added_to_main_grad = torch.ones_like(weight), False
        param.zero_out_wgrad = zero_out
        leaf = hidden.clone().requires_grad_()
        lp = linear_token_logprobs(
            leaf, param, targets, entropy=True, mode=mode, upstream=upstream, into_main_grad=True
        )
        assert torch.equal(param.main_grad, torch.ones_like(weight)), "the forward pass left a trace"
        loss_of(lp).backward()
        assert param.grad_added_to_main_grad
        close((lp.logprob.detach(), leaf.grad, param.main_grad - 1), want)  # type: ignore[arg-type]
        assert param.grad is not None and (not zero_out or not param.grad.any())


def test_forward_mode_refuses_a_gradient_it_did_not_take() -> None:
    hidden, weight, targets = draw()
    lp = linear_token_logprobs(hidden.requires_grad_(), weight, targets, mode="forward", upstream=upstream)
    error = refused(pg.UnsupportedError, lambda: lp.logprob.exp().sum().backward(), "not the one that the forward pass")
    assert "keep" in str(error)


def test_forward_mode_keeps_gradients_that_only_a_loss_scale_makes_visible() -> None:
    """Upstream of 1e-9 is below float16's range; a loss scale of 2^16 comes later."""
    hidden, weight, targets = (x.half() if x.is_floating_point() else x for x in draw())
    small = 1e-9

    def tiny(logprob: Tensor, entropy: Tensor | None) -> tuple[Tensor, None]:
        return torch.full_like(logprob, -small), None

    leaf = hidden.clone().requires_grad_()
    lp = linear_token_logprobs(leaf, weight, targets, mode="forward", upstream=tiny)
    (-small * 2.0**16 * lp.logprob).sum().backward()
    want = hidden.double().clone().requires_grad_()
    table = (want @ weight.double().t()).log_softmax(-1)
    (-small * 2.0**16 * table.gather(1, targets[:, None])).sum().backward()
    assert leaf.grad is not None and want.grad is not None
    assert float((leaf.grad.double() - want.grad).abs().max()) < 0.02 * float(want.grad.abs().max())


def test_nothing_is_kept_without_autograd() -> None:
    hidden, weight, targets = draw()
    want = expected(hidden, weight, targets, entropy=True)[:1]
    with torch.no_grad():
        for mode in MODES:
            lp = linear_token_logprobs(hidden, weight, targets, mode=mode, upstream=upstream, entropy=True)
            assert lp.logprob.grad_fn is None
            close((lp.logprob,), want)


def test_refusals() -> None:
    hidden, weight, targets = draw()
    refused(pg.SpecError, lambda: linear_token_logprobs(hidden, weight, targets, mode="best"), "no head mode")  # type: ignore[arg-type]
    refused(pg.SpecError, lambda: linear_token_logprobs(hidden, weight, targets, mode="forward"), "upstream=")
    refused(pg.LayoutError, lambda: linear_token_logprobs(hidden, weight, targets, sequence_parallel=True), "group")
    refused(pg.DataError, lambda: linear_token_logprobs(hidden, weight.float(), targets), "differ in dtype")
    refused(pg.DataError, lambda: linear_token_logprobs(hidden, weight[:, 1:], targets), "[Vl, H]")
    refused(pg.DataError, lambda: linear_token_logprobs(hidden, weight, targets[1:]), "targets do not belong")
    lp = linear_token_logprobs(hidden.requires_grad_(), weight, targets)
    lp.logprob.sum().backward(retain_graph=True)
    refused(pg.UnsupportedError, lambda: lp.logprob.sum().backward(), "second backward")


def _parallel(rank: int, world: int) -> list[tuple[str, list[float]]]:
    """Every mode with and without sequence parallelism; errors of log-prob, dX, dW."""
    hidden, weight, targets = draw(vocab=40)
    more: dict[str, Any] = {"entropy": True, "vocab_size": 37, "rows": torch.arange(1, T), "chunk_tokens": 9}
    want = expected(hidden, weight, targets, 3.0, **more)
    mine = weight.chunk(world)[rank]
    table = []
    for mode in MODES:
        for sequence_parallel in (False, True):
            part = hidden.chunk(world)[rank] if sequence_parallel else hidden
            got = found(
                part, mine, targets, 3.0, mode=mode, group=dist.group.WORLD, sequence_parallel=sequence_parallel, **more
            )
            wanted = (want[0], want[1].chunk(world)[rank] if sequence_parallel else want[1], want[2].chunk(world)[rank])
            errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True)]
            table.append((f"{mode}, {'sequence' if sequence_parallel else 'plain'}", errors))
    return table + _rounded(rank, world, more)


def _rounded(rank: int, world: int, more: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """One byte a logit against the same head in one process, chunks of another size; and 16-bit logits, whose stored
    codes must be equal bits: operands here are multiples of 1/8, so that every float32 sum is exact. (The log-sum-exp
    comes from float32 exponentials, whose sums know the shards.)
    """
    hidden, weight, targets = draw(vocab=40)
    table = []
    for tau in (None, torch.linspace(0.5, 2.0, T, dtype=torch.float64)):
        given = more | {"mode": "keep8", "temperature": tau}
        want = found(hidden, weight, targets, 3.0, **given | {"chunk_tokens": 4})
        for sequence_parallel in (False, True):
            got = found(
                hidden.chunk(world)[rank] if sequence_parallel else hidden, weight.chunk(world)[rank], targets, 3.0,
                group=dist.group.WORLD, sequence_parallel=sequence_parallel, **given,
            )  # fmt: skip
            dx = want[1].chunk(world)[rank] if sequence_parallel else want[1]
            wanted = (want[0], dx, want[2].chunk(world)[rank])
            table.append(
                ("keep8", [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True)])
            )
    coarse, fine = ((x.clamp(-2, 2) * 8).round().div(8).bfloat16() for x in (hidden, weight))
    for mode in ("keep", "keep8"):
        whole = _codes(coarse, fine, targets, None, mode)
        mine = _codes(coarse, fine.chunk(world)[rank].contiguous(), targets, dist.group.WORLD, mode)
        width = max(0, min(37 - rank * len(fine) // world, len(fine) // world))
        shard = whole.code_NV.chunk(world, 1)[rank]
        same = (
            torch.equal(mine.code_NV[:, :width], shard[:, :width])
            and float((mine.lse_N - whole.lse_N).abs().max()) < 1e-6
        )
        table.append((f"codes of {mode}", [float(not same)]))
    return table


def _codes(hidden: Tensor, weight: Tensor, targets: Tensor, group: Any, mode: str) -> Any:
    """What a forward pass stores."""
    job = HeadJob(
        find_shard(weight.size(0), group, 37), True, None, None, group, False, False, 9, 2**18,
        MODES_STORE[mode], "fp32",  # type: ignore[index]
    )  # fmt: skip
    return run_forward(WantedRows(hidden, targets, None), weight, job)[1]


@pytest.mark.multiproc
@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel(world: int) -> None:
    for table in run_world(_parallel, world):
        for name, errors in table:
            assert max(errors) < 1e-12, (name, errors)
        assert sum(name == "keep8" for name, _ in table) == 4
