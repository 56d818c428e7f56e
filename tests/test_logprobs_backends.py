"""Every backend of the row passes against the one float64 reference, by the same tests.

Here run `eager` and `compiled`; `test_logprobs_triton.py` runs this very file again for `triton`, in a process whose
Triton interprets its kernels (PGLOSS_TEST_BACKENDS).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss import TokenLogprobs, UnsupportedError, token_logprobs
from megatron_pgloss.logprobs.rows import backends, eager
from megatron_pgloss.logprobs.rows.backends import backend_problem, backend_report
from support.cover import EXHAUSTIVE
from support.logprob_cases import INF, Case, assert_one_rounding, cases, dense
from support.worlds import run_world

# Ranks that each start a pool of compilers would bring a small machine to its knees.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
BACKENDS = os.environ.get("PGLOSS_TEST_BACKENDS", "eager compiled").split()
if BACKENDS == ["triton"]:  # NumPy, which interprets it, warns of NaN and inf - inf
    pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
_CHUNK: dict[str, dict[str, int]] = {"eager": {}, "triton": {}, "compiled": {"chunk_elements": 80}}
LOW = [torch.bfloat16, torch.float16, torch.float32]


def names() -> list[Any]:
    problems = {name: backend_problem(name) for name in BACKENDS}
    return [
        pytest.param(name, marks=[pytest.mark.skip(reason=problem)] if problem else [])
        for name, problem in problems.items()
    ]


@pytest.fixture(params=names())
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend, with blocks and pieces small enough for the cases to need several."""
    shrink(request.param, monkeypatch)
    return request.param


def shrink(backend: str, patch: pytest.MonkeyPatch) -> None:
    if backend == "compiled":
        patch.setattr("megatron_pgloss.logprobs.rows.compiled.PIECE", 8)
    if backend == "triton":
        for name in ("FORWARD_BLOCK", "BACKWARD_BLOCK"):
            patch.setattr(f"megatron_pgloss.logprobs.rows.triton.{name}", 16)
        round_as_hardware_does(patch)


def round_as_hardware_does(patch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts float32 off to bfloat16; every GPU, and compiled Triton, rounds to nearest even."""
    import triton.language as tl
    from triton.runtime import interpreter

    cut_off = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut_off(data, source, target, mode)
        return torch.from_numpy(data.copy()).bfloat16().view(torch.uint16).numpy()

    patch.setattr(interpreter, "_convert_float", rounded)


def call(case: Case, logits: Tensor, backend: str, **more: Any) -> TokenLogprobs:
    # Each dtype, layout and coincidence of sizes is compiled apart, for seconds: chunks of five rows are never square.
    more = {
        "temperature": case.temperature,
        "entropy": case.entropy,
        "vocab_size": case.vocab,
        **_CHUNK[backend],
    } | more
    return token_logprobs(logits, case.targets, backend=backend, **more)


def loss(out: TokenLogprobs, case: Case) -> Tensor:
    parts = [] if case.g is None else [(out.logprob * case.g.float()).sum()]
    parts += [] if case.h is None else [(out.entropy * case.h.float()).sum()]
    return sum(parts)


def gradient(case: Case, logits: Tensor, backend: str, **more: Any) -> Tensor:
    logits = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    loss(call(case, logits, backend, **more), case).backward()
    return logits.grad


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    tau = 1.0 if case.temperature is None else case.temperature
    return dense(case.logits, case.targets, case.g, case.h, tau, case.vocab)


def wide_case(dtype: torch.dtype, rows: int = 5, columns: int = 301) -> Case:
    """More columns than fit one block of the shrunk kernels, and no multiple of it."""
    draw = torch.Generator().manual_seed(7)
    logits = (3 * torch.randn(rows, columns, generator=draw)).to(dtype)
    g, h = torch.randn(2, rows, generator=draw, dtype=torch.float64)
    return Case(logits, torch.randint(0, columns, (rows,), generator=draw), g, h, torch.linspace(0.5, 2, rows))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_values_and_gradients_of_every_case_are_exact_but_for_one_rounding(dtype: torch.dtype, backend: str) -> None:
    every = {**cases(dtype), "wide": wide_case(dtype)}
    if backend == "compiled" and dtype == torch.float16:
        every = {"wide": every["wide"]}
    reused = (True,) if backend == "compiled" and dtype != torch.bfloat16 else (False, True)
    for name, case in every.items():
        lp, entropy, grad = expected(case)
        out = call(case, case.logits, backend)
        label = dict(msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(out.logprob.double(), lp, rtol=3e-7, atol=4e-7, **label)
        if case.entropy:
            torch.testing.assert_close(out.entropy.double(), entropy, rtol=4e-7, atol=6e-7, **label)
        for reuse in reused:
            got = gradient(case, case.logits, backend, reuse_logits=reuse)
            assert got.dtype == dtype
            assert_one_rounding(got, grad, noise=4e-6)
        assert not got[case.logits == -INF].any(), name


def test_log_sum_exp_has_its_value_and_gradient(backend: str) -> None:
    case = wide_case(torch.bfloat16)
    z, z64 = case.logits.clone().requires_grad_(), case.logits.double().requires_grad_()
    lse = call(case, z, backend, lse=True).lse
    exact = (z64 / case.temperature.double()[:, None]).logsumexp(-1)
    torch.testing.assert_close(lse.double(), exact, rtol=2e-7, atol=0)
    lse.square().sum().backward()  # a z-loss
    exact.square().sum().backward()
    assert_one_rounding(z.grad, z64.grad, noise=2e-6)
    assert call(case, z, backend).lse is None


@pytest.mark.parametrize("broken", [float("nan"), INF, -INF])
def test_dead_rows_are_zero_and_never_read_and_broken_rows_are_nan(broken: float, backend: str) -> None:
    case = cases(torch.bfloat16)["temperature per token"]
    idle = torch.tensor([0, 3, 4, 5, 9, 15])
    lost = Case(case.logits.clone(), case.targets.clone(), case.g.clone(), case.h.clone(), case.temperature)
    lost.logits[idle], lost.g[idle], lost.h[idle], lost.targets[idle] = broken, 0, 0, -100
    clean = Case(case.logits, case.targets, lost.g, lost.h, case.temperature)
    for chunk in (1, 80):
        got = gradient(lost, lost.logits, backend, chunk_elements=chunk)
        assert torch.equal(got, gradient(clean, clean.logits, backend, chunk_elements=chunk)) and not got[idle].any()
    out = call(lost, lost.logits, backend)
    assert out.entropy[idle].isnan().all() and out.logprob[idle].isnan().all()
    live = torch.ones(16, dtype=torch.bool).index_fill(0, idle, False)
    assert out.entropy[live].isfinite().all()
    one = Case(case.logits.clone(), case.targets, case.g, case.h)
    one.logits[2, 7] = float("nan")
    one.logits[5] = torch.where(torch.arange(16) == 3, float("nan"), -INF)
    out, got = call(one, one.logits, backend), gradient(one, one.logits, backend)
    for value in (out.logprob, out.entropy, got[:, 0]):
        assert value.isnan().nonzero()[:, 0].tolist() == [2, 5]


@pytest.mark.parametrize("name", ["stride 0", "strided", "no entropy gradient", "no gradient at all"])
def test_any_upstream_gradient_is_right(name: str, backend: str) -> None:
    case = cases(torch.bfloat16)["both"]
    g, h = {
        "stride 0": (torch.ones(()).expand(16), torch.full((), 0.5).expand(16)),
        "strided": (torch.randn(16, 3)[:, 1], torch.randn(48)[::3]),
        "no entropy gradient": (torch.randn(16), torch.zeros(16)),
        "no gradient at all": (torch.zeros(16), torch.zeros(16)),
    }[name]
    logits = case.logits.clone().requires_grad_()
    out = call(case, logits, backend)
    torch.autograd.backward([out.logprob, out.entropy], [g, h])
    assert_one_rounding(logits.grad, dense(case.logits, case.targets, g, h)[2], noise=2e-6)


@pytest.mark.parametrize("reuse", [False, True])
def test_strided_logits_of_any_leading_shape(reuse: bool, backend: str) -> None:
    z = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets = torch.arange(12).view(3, 4)
    tau, one = torch.linspace(0.5, 2, 12).view(3, 4), torch.ones(3, 4)
    layouts = {
        "transposed": z.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced tokens": torch.cat([z, z], 1)[:, :4],
        "sliced columns": torch.cat([z, z], 2)[..., :16],
        "vocabulary outermost": z.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    }
    for name, base in layouts.items():
        lp, entropy, grad = dense(base, targets, one, one, tau)
        logits = base.detach().requires_grad_()
        more = dict(temperature=tau, entropy=True, reuse_logits=reuse, backend=backend, **_CHUNK[backend])
        out = token_logprobs(logits, targets, **more)
        torch.testing.assert_close(out.logprob.double(), lp, rtol=1e-6, atol=1e-6, msg=name)
        torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-6, atol=1e-6, msg=name)
        (got,) = torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), logits)
        assert_one_rounding(got, grad, noise=2e-6)


@pytest.mark.parametrize("rows", [0, 1, 2, 4])
def test_few_rows_or_none(rows: int, backend: str) -> None:
    for columns in (33,) if backend == "compiled" else (1, 2, 33):
        case = wide_case(torch.bfloat16, rows, columns)
        lp, entropy, grad = expected(case)
        out = call(case, case.logits, backend)
        torch.testing.assert_close(out.logprob.double(), lp, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-6, atol=1e-6)
        assert_one_rounding(gradient(case, case.logits, backend), grad, noise=3e-6)


def test_second_backward_through_reused_logits_is_refused(backend: str) -> None:
    case = cases(torch.bfloat16)["both"]
    once = loss(call(case, case.logits.clone().requires_grad_(), backend, reuse_logits=True), case)
    once.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match=r"second backward.*reuse_logits=True.*Fix"):
        once.backward()


def test_the_same_bits_every_time_and_in_deterministic_mode(backend: str) -> None:
    case = wide_case(torch.bfloat16)
    first = gradient(case, case.logits, backend)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(gradient(case, case.logits, backend), first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(backend: str) -> None:
    if backend == "eager":
        pytest.skip("torch's flat loops end in scalar code, so a row's last bit depends on where in its chunk it lies")
    case = wide_case(torch.bfloat16, rows=7)
    whole = gradient(case, case.logits, backend)
    for chunk in (1, 1500):
        assert torch.equal(gradient(case, case.logits, backend, chunk_elements=chunk), whole)
    alone = Case(case.logits[3:4], case.targets[3:4], case.g[3:4], case.h[3:4], case.temperature[3:4])
    assert torch.equal(gradient(alone, alone.logits, backend), whole[3:4])


def test_float64_is_refused_by_name_and_eager_by_itself(backend: str) -> None:
    case = cases()["both"]
    assert backends.choose(case.logits, None) == "eager"
    if backend != "eager":
        with pytest.raises(UnsupportedError, match=r"these logits are float64.*Fix"):
            call(case, case.logits, backend)


# --- vocab-parallel ---------------------------------------------------------------------------------------------------


def over_shards(backend: str) -> dict[str, Case]:
    """Compiling is dear, and each rank does it: there, one dtype with a shard of padding, over two ranks."""
    found = cases(torch.bfloat16)
    if backend == "compiled":
        return {name: found[name] for name in ("both", "one finite column")}
    found |= {"in float32": cases(torch.float32)["temperature per token"]}
    if backend == "triton" and not EXHAUSTIVE:  # interpreted, a case takes seconds
        return {name: found[name] for name in ("both", "one finite column", "padding of -inf", "in float32")}
    return found


def child(rank: int, world: int, backend: str) -> dict[Any, Any]:
    patch = pytest.MonkeyPatch()
    if backend != "compiled":  # other pieces would be compiled once more
        shrink(backend, patch)
    sizes = [n for n in (2, 4) if n <= world]
    groups = {n: [dist.new_group(list(range(i, i + n))) for i in range(0, world, n)] for n in sizes}
    found: dict[Any, Any] = {}
    for size, made in groups.items():
        for name, case in over_shards(backend).items():
            columns = case.logits.size(1) // size
            first = rank % size * columns
            shard = case.logits[:, first : first + columns].clone().requires_grad_()
            out = call(case, shard, backend, group=made[rank // size], reuse_logits=True)
            loss(out, case).backward()
            values = [x.detach() for x in (out.logprob, out.entropy) if x is not None]
            found[size, name] = (values, shard.grad)
    patch.undo()
    return found


@pytest.mark.multiproc
def test_two_and_four_shards_equal_the_dense_computation_with_equal_bits(backend: str) -> None:
    brought = run_world(child, 2 if backend == "compiled" else 4, backend)
    for size, name in brought[0]:
        case = over_shards(backend)[name]
        lp, entropy, grad = expected(case)
        ranks = [r[size, name] for r in brought[-size:]]
        for i, exact in enumerate([lp, entropy][: len(ranks[0][0])]):
            torch.testing.assert_close(ranks[0][0][i].double(), exact, rtol=4e-7, atol=6e-7, msg=f"{name}, tp {size}")
            assert all(torch.equal(r[0][i].view(torch.int32), ranks[0][0][i].view(torch.int32)) for r in ranks), name
        assert_one_rounding(torch.cat([r[1] for r in ranks], 1), grad, noise=4e-6)


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_width_device_and_dtype_pick_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = torch.zeros(1, 16), torch.zeros(1, backends.COMPILE_FROM)
    for problem, picked in ((None, "compiled"), ("none here", "eager")):
        monkeypatch.setattr(backends, "backend_problem", lambda name, device, problem=problem: problem)
        assert backends.choose(wide, None) == picked
        assert backends.choose(narrow, None) == "eager"
        assert backends.choose(wide.double(), None) == "eager"


def test_unknown_and_unusable_backends_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown log-prob backend.*triton \| compiled \| eager"):
        backends.choose(torch.zeros(1, 2), "cuda")
    monkeypatch.setattr(backends, "backend_problem", lambda name, device: "no compiler")
    with pytest.raises(UnsupportedError, match=r"cannot run here.*no compiler.*backend='eager'"):
        backends.choose(torch.zeros(1, 2), "compiled")


def test_a_machine_without_a_usable_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from megatron_pgloss.logprobs.rows.compiler import cpp_compiler_problem

    probe = cpp_compiler_problem.__wrapped__
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler (g++ or clang++) on the PATH" in probe()
    for body, said in (
        ("exit 1", "cannot build"),
        ("echo 'omp.h: error: missing' >&2; exit 1", "omp.h: error: missing"),
    ):
        fake = tmp_path / "cxx"
        fake.write_text(f"#!/bin/sh\n{body}\n")
        fake.chmod(0o755)
        monkeypatch.setenv("CXX", "cxx")
        assert said in probe()


def test_the_report_names_what_runs_and_why_the_rest_does_not() -> None:
    cpu = backend_report()["cpu"]
    assert "eager" in cpu
    for name in ("triton", "compiled"):
        problem = backend_problem(name)
        assert f"no {name}: {problem}" in cpu if problem else name in cpu


def test_chunks_of_three_rows_or_more_leave_no_row_alone() -> None:
    for rows in range(2, 40):
        for step in range(3, 9):
            parts = list(eager._chunks(rows, step))
            assert [i for part in parts for i in range(part.start, part.stop)] == list(range(rows))
            assert all(2 <= part.stop - part.start <= step for part in parts)
