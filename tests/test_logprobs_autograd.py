"""The log-prob node under autograd: consumers, strides, reused memory, what it keeps."""

from __future__ import annotations

import pytest
import torch
from test_logprobs import BOTH, call, gradient, weigh
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pgloss import PGLossError, UnsupportedError, token_logprobs
from megatron_pgloss.logprobs.rows.eager import ChunkedRows
from megatron_pgloss.logprobs.vocab.order import RowOrder
from support.logprob_cases import INF, Case, cases, dense

EXACT = dict(rtol=1e-12, atol=1e-12)


@pytest.fixture(params=["rows skipped", "rows selected"])
def skipping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on both ways to leave rows out; accelerators take the second."""
    if request.param == "rows selected":
        monkeypatch.setattr(ChunkedRows, "_fill_live", ChunkedRows._fill_all)
    return request.param


@pytest.mark.parametrize("broken", [float("nan"), INF, -INF])
@pytest.mark.parametrize("chunk_elements", [16, 48, 2**20])
def test_rows_without_upstream_gradient_are_zero_whatever_they_hold(
    skipping: str, chunk_elements: int, broken: float
) -> None:
    idle = torch.tensor([0, 3, 4, 5, 9, 15])
    g, h, z = BOTH.g.clone(), BOTH.h.clone(), BOTH.logits.clone()
    g[idle], h[idle], z[idle] = 0, 0, broken
    targets = BOTH.targets.clone()
    targets[idle] = -100
    for reuse in (False, True):
        grad = gradient(Case(z, targets, g, h), z, reuse_logits=reuse, chunk_elements=chunk_elements)
        clean = gradient(Case(BOTH.logits, BOTH.targets, g, h), BOTH.logits)
        assert torch.equal(grad[idle].view(torch.int64), torch.zeros(6, 16, dtype=torch.int64))
        torch.testing.assert_close(grad, clean, **EXACT)


def test_rows_with_only_one_upstream_gradient_are_not_skipped(skipping: str) -> None:
    g, h = BOTH.g.clone(), BOTH.h.clone()
    g[::2], h[1::2] = 0, 0
    grad = gradient(Case(BOTH.logits, BOTH.targets, g, h), BOTH.logits)
    torch.testing.assert_close(grad, dense(BOTH.logits, BOTH.targets, g, h)[2], **EXACT)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    "g, h",
    [
        (torch.ones(()).double().expand(16), torch.full((), 0.5).double().expand(16)),
        (torch.randn(16, 3).double()[:, 1], torch.randn(48).double()[::3]),
        (torch.zeros(16).double(), torch.randn(16).double()),
        (torch.randn(16).double(), torch.zeros(16).double()),
    ],
    ids=["stride 0", "strided", "zero logprob", "zero entropy"],
)
def test_any_upstream_gradient_is_right(g: Tensor, h: Tensor, reuse: bool) -> None:
    logits = BOTH.logits.clone().requires_grad_()
    out = call(BOTH, logits, reuse_logits=reuse)
    torch.autograd.backward([out.logprob, out.entropy], [g, h])
    torch.testing.assert_close(logits.grad, dense(BOTH.logits, BOTH.targets, g, h)[2], **EXACT)


def layouts() -> dict[str, Tensor]:
    """[3, 4, 16] logits that lie in memory in different ways."""
    z = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {
        "contiguous": z,
        "transposed": z.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced tokens": torch.cat([z, z], 1)[:, :4],
        "sliced columns": torch.cat([z, z], 2)[..., :16],
        "every second": torch.stack([z, z], 2)[:, :, 1],
        "vocabulary outermost": z.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "sliced, transposed": torch.cat([z, z], 0).transpose(0, 1).contiguous()[:, :3].transpose(0, 1),
        "reversed dims": z.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    }


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("name", layouts())
def test_any_strides_of_the_logits_give_the_same_numbers(name: str, reuse: bool) -> None:
    base = layouts()[name]
    draw = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 16, (3, 4), generator=draw)
    tau = torch.rand(3, 4, generator=draw) + 0.5
    g, h = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    g[1], h[1] = 0, 0
    lp, entropy, grad = dense(base, targets, g, h, tau)
    logits = base.detach().requires_grad_()
    out = token_logprobs(logits, targets, temperature=tau, entropy=True, reuse_logits=reuse, chunk_elements=40)
    assert out.logprob.shape == targets.shape and out.entropy.shape == targets.shape
    torch.testing.assert_close(out.logprob, lp, **EXACT)
    torch.testing.assert_close(out.entropy, entropy, **EXACT)
    (got,) = torch.autograd.grad(weigh(out, g, h), logits)
    torch.testing.assert_close(got, grad, **EXACT)


def test_blocks_of_rows_are_views_and_as_few_as_memory_allows() -> None:
    blocks = dict.fromkeys(layouts(), 1)
    blocks |= {"sliced tokens": 3, "sliced, transposed": 4}
    for name, z in layouts().items():
        parts = list(RowOrder.of(z).blocks(z))
        assert len(parts) == blocks[name], name
        assert sum(part.size(0) for _, part in parts) == 12
        storage = z.untyped_storage().data_ptr()
        assert all(part.untyped_storage().data_ptr() == storage for _, part in parts)


@pytest.mark.parametrize("shape", [(), (0,), (5, 0), (0, 5), (1, 1, 1), (2, 1, 3)])
@pytest.mark.parametrize("reuse", [False, True])
def test_any_leading_shape_and_no_tokens_at_all(shape: tuple[int, ...], reuse: bool) -> None:
    logits = torch.randn(*shape, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, shape)
    lp, entropy, grad = dense(logits, targets, torch.ones(shape), torch.ones(shape))
    out = token_logprobs(logits, targets, entropy=True, reuse_logits=reuse)
    assert out.logprob.shape == shape and out.entropy.shape == shape and out.logprob.requires_grad
    torch.testing.assert_close(out.logprob, lp, **EXACT)
    torch.testing.assert_close(out.entropy, entropy, **EXACT)
    (out.logprob.sum() + out.entropy.sum()).backward()
    torch.testing.assert_close(logits.grad, grad, **EXACT)


def test_a_view_of_the_models_output_works_and_its_base_stays() -> None:
    # VERL-25: base [2, 4], logits a view of two columns, temperature 0.5.
    base = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    before = base.detach().clone()
    t, g = torch.tensor([0, 1]), torch.ones(2)
    token_logprobs(base[:, 1:3], t, temperature=0.5).logprob.sum().backward()
    assert torch.equal(base.detach(), before) and not base.grad[:, [0, 3]].any()
    expected = dense(before[:, 1:3], t, g, None, 0.5)[2]
    torch.testing.assert_close(base.grad[:, 1:3], expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_logits_are_never_written_to_unless_given_away(dtype: torch.dtype) -> None:
    # MLM-13: a cross entropy that exponentiates in place leaves garbage for the entropy after it.
    case = cases(dtype)["both"]
    logits = case.logits.clone().requires_grad_()
    version = logits._version
    first = call(case, logits)
    second = call(case, logits)
    assert torch.equal(first.entropy, second.entropy)
    weigh(first, case.g, case.h).backward(retain_graph=True)
    once = logits.grad.clone()
    weigh(first, case.g, case.h).backward()  # a second backward is fine without reuse
    assert torch.equal(logits.detach(), case.logits) and logits._version == version
    assert torch.equal(logits.grad, once + once)


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "non-leaf"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reused_logits_become_the_gradient(dtype: torch.dtype, leaf: bool) -> None:
    case = cases(dtype)["one temperature"]
    weight = case.logits.clone().requires_grad_()
    logits = weight if leaf else weight * 1
    addresses: list[int] = []
    logits.register_hook(lambda grad: addresses.append(grad.data_ptr()))
    out = call(case, logits, reuse_logits=True)
    assert torch.equal(logits.detach(), case.logits)  # forward alone writes nothing
    weigh(out, case.g, case.h).backward()
    assert torch.equal(weight.grad, gradient(case, case.logits))
    assert torch.equal(logits.detach(), weight.grad)
    assert addresses == [logits.data_ptr()]
    if leaf:
        assert weight.grad.data_ptr() == weight.data_ptr()


def test_second_backward_through_reused_logits_is_refused() -> None:
    for retain in (True, False):
        loss = call(BOTH, BOTH.logits.clone().requires_grad_(), reuse_logits=True).logprob.sum()
        loss.backward(retain_graph=retain)
        with pytest.raises(UnsupportedError, match=r"second backward.*reuse_logits=True.*Fix"):
            loss.backward()


def test_others_who_need_reused_logits_unchanged_are_refused_by_torch() -> None:
    logits = (BOTH.logits * 1).requires_grad_()
    first = call(BOTH, logits, reuse_logits=True).logprob.sum()
    second = call(BOTH, logits).logprob.sum()
    squared = logits.square().sum()
    first.backward()
    for other in (second, squared):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()


def test_reuse_writes_nothing_where_there_is_no_gradient() -> None:
    for logits in (BOTH.logits.clone(), BOTH.logits.clone().requires_grad_()):
        with torch.no_grad():
            out = call(BOTH, logits, reuse_logits=True)
        assert not out.logprob.requires_grad and not out.entropy.requires_grad
        assert torch.equal(logits.detach(), BOTH.logits)
    assert not call(BOTH, BOTH.logits.clone(), reuse_logits=True).logprob.requires_grad
    logits = BOTH.logits.clone().requires_grad_()
    out = call(BOTH, logits, reuse_logits=True)
    (out.logprob.detach().sum() + logits.sum()).backward()  # the node's backward is not part of it
    assert torch.equal(logits.detach(), BOTH.logits)


def test_reused_logits_whose_rows_share_memory_are_refused() -> None:
    row = torch.randn(1, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(PGLossError, match="rows overlap"):
        token_logprobs(row.expand(16, 16), BOTH.targets, reuse_logits=True)
    overlapping = torch.randn(40, dtype=torch.float64, requires_grad=True).as_strided((4, 16), (8, 1))
    with pytest.raises(PGLossError, match="rows overlap"):
        token_logprobs(overlapping, BOTH.targets[:4], reuse_logits=True)
    token_logprobs(row.expand(16, 16), BOTH.targets).logprob.sum().backward()
    expected = dense(row.expand(16, 16), BOTH.targets, torch.ones(16))[2].sum(0, keepdim=True)
    torch.testing.assert_close(row.grad, expected, **EXACT)


class Largest(TorchDispatchMode):
    """Remembers the largest memory, in bytes, that any tensor but the logits stood in."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits, self.bytes = logits.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() != self.logits:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("reuse", [True, False])
def test_no_second_logits_tensor_is_made(reuse: bool, temperature: float | None, skipping: str) -> None:
    rows, columns, chunk = 512, 1024, 4 * 1024
    logits = torch.randn(rows, columns).bfloat16().requires_grad_()
    targets = torch.randint(0, columns, (rows,))
    idle = (torch.arange(rows) % 3 > 0).float()
    with Largest(logits) as seen:
        out = token_logprobs(
            logits,
            targets,
            entropy=True,
            temperature=temperature,
            reuse_logits=reuse,
            chunk_elements=chunk,
        )
        assert seen.bytes <= 2 * 4 * chunk
        ((out.logprob + out.entropy) * idle).sum().backward()
    assert seen.bytes <= 2 * 4 * chunk if reuse else seen.bytes == logits.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_operator_copies_the_logits_inside_itself(dtype: torch.dtype) -> None:
    # A dispatch mode does not see what an operator allocates: scatter_ on bfloat16 took two float32 copies.
    rows, columns, chunk = 512, 1024, 4 * 1024
    logits = torch.randn(rows, columns).to(dtype).requires_grad_()
    given = torch.randint(0, columns, (rows,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        out = token_logprobs(logits, given, entropy=True, reuse_logits=True, chunk_elements=chunk)
        (gradient,) = torch.autograd.grad((out.logprob + out.entropy).sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr()
    assert 0 < max(event.self_cpu_memory_usage for event in seen.events()) <= 2 * 4 * chunk


def test_what_is_kept_for_backward_is_the_logits_themselves_and_a_few_numbers_per_token() -> None:
    kept: list[Tensor] = []
    logits = torch.randn(64, 1024, requires_grad=True)
    targets = torch.randint(0, 1024, (64,))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_logprobs(logits, targets, temperature=0.7, entropy=True)
        assert [x.data_ptr() for x in kept if x.numel() > 64] == [logits.data_ptr()]
        assert len(kept) <= 6
        kept.clear()
        token_logprobs(logits.detach(), targets, entropy=True, reuse_logits=True)
        with torch.no_grad():
            token_logprobs(logits, targets, entropy=True, reuse_logits=True)
        assert kept == []


def test_caller_may_refill_targets_and_write_into_the_outputs() -> None:
    targets = BOTH.targets.clone()
    logits = BOTH.logits.clone().requires_grad_()
    out = token_logprobs(logits, targets, entropy=True)
    targets.fill_(-100)
    out.logprob.mul_(2)
    out.entropy.mul_(2)
    weigh(out, BOTH.g, BOTH.h).backward()
    expected = 2 * gradient(BOTH, BOTH.logits)
    torch.testing.assert_close(logits.grad, expected, **EXACT)


def test_double_backward_is_refused() -> None:
    # torch's own guard passes where the upstream gradient is a constant, as it is here: a gradient
    # penalty would then silently have no gradient.
    logits = BOTH.logits.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        torch.autograd.grad(call(BOTH, logits).logprob.sum(), logits, create_graph=True)


def test_autocast_does_not_lower_the_maths() -> None:
    case = cases(torch.float32)["temperature per token"]
    plain = gradient(case, case.logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, grad = call(case, case.logits), gradient(case, case.logits)
    assert out.logprob.dtype == torch.float32
    assert torch.equal(out.entropy, call(case, case.logits).entropy) and torch.equal(grad, plain)


def test_deterministic_mode_is_no_obstacle() -> None:
    plain = gradient(BOTH, BOTH.logits)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(gradient(BOTH, BOTH.logits), plain)
    finally:
        torch.use_deterministic_algorithms(False)
