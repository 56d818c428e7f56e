"""What only a CUDA device can show. `tools/gpu_check.sh` runs these; elsewhere they skip with their reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from support.jobs import batch_of, rows_of_step

pytestmark = pytest.mark.gpu


def _spec() -> pg.LossSpec:
    return pg.presets.grpo(entropy=0.01).add(pg.CrossEntropy(coef=0.1))


def _gradient(device: str, dtype: torch.dtype) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a table of logits, over padded micro-batches."""
    torch.manual_seed(0)
    table = torch.randn(32, 32, dtype=torch.float64).to(device, dtype).requires_grad_()
    batch = batch_of(rows_of_step(1), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    total = 0.0
    for micro in pg.plan([batch], _spec(), split=pg.Split(sequences=3)).microbatches(device):
        lp = pg.token_logprobs(table[micro.input_ids], micro.targets, entropy=True)
        out = pg.policy_loss(lp, micro)
        out.loss.backward()
        total += float(out.loss)
    assert table.grad is not None
    return total, table.grad.cpu().double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradient_on_cuda_equal_those_on_cpu(dtype: torch.dtype, tolerance: float) -> None:
    loss, grad = _gradient("cuda", dtype)
    reference, grad0 = _gradient("cpu", torch.float64)
    assert abs(loss - reference) <= tolerance * abs(reference)
    assert float((grad - grad0).abs().max()) <= tolerance * float(grad0.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_micro_batch_needs_no_host_sync(dtype: torch.dtype) -> None:
    batch = batch_of(rows_of_step(2), dtype=torch.float32)
    micro = next(pg.plan([batch], _spec(), split=pg.Split(sequences=4)).microbatches("cuda"))
    logits = torch.randn(*micro.shape, 32, device="cuda", dtype=dtype, requires_grad=True)

    def work() -> Any:
        lp = pg.token_logprobs(logits, micro.targets, temperature=micro.temperature, entropy=True)
        pg.policy_loss(lp, micro).loss.backward()

    work()  # allocations and first-use initialisation
    logits.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3000, 1000), (64, 19_001), (5, 151_936)])
def test_triton_kernels_on_cuda_equal_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from support.logprob_cases import assert_one_rounding, dense

    torch.manual_seed(0)
    rows, columns = shape
    logits = (3 * torch.randn(shape)).to(dtype)
    targets, tau = torch.randint(0, columns, (rows,)), torch.rand(rows) + 0.5
    g, h = torch.randn(2, rows)
    g[::3], h[::3] = 0, 0
    lp, entropy, grad = dense(logits, targets, g, h, tau)
    z = logits.cuda().requires_grad_()
    out = pg.token_logprobs(
        z, targets.cuda(), temperature=tau.cuda(), entropy=True, reuse_logits=True, backend="triton"
    )
    torch.testing.assert_close(out.logprob.double().cpu(), lp, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.entropy.double().cpu(), entropy, rtol=1e-6, atol=2e-6)  # type: ignore[union-attr]
    torch.autograd.backward([out.logprob, out.entropy], [g.cuda(), h.cuda()])  # type: ignore[list-item]
    assert_one_rounding(z.grad.cpu(), grad, noise=8e-6)  # type: ignore[union-attr]


def test_reuse_logits_allocates_less_than_a_tenth_of_a_byte_per_logit() -> None:
    logits = torch.randn(2048, 32768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 32768, (2048,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lp = pg.token_logprobs(logits, targets, entropy=True, reuse_logits=True, chunk_elements=2**18)
    (lp.logprob.sum() + lp.entropy.sum()).backward()  # type: ignore[union-attr]
    extra = torch.cuda.max_memory_allocated() - before
    assert extra / logits.numel() <= 0.1


def test_a_step_of_a_real_model_on_one_gpu_equals_the_oracle(tmp_path: Any) -> None:
    import torch.distributed as dist

    from megatron_pgloss.verify.layouts.models import destroy_parallel
    from support.jobs import Job, build, one_step, oracle_answer, worst

    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        job = Job(model={"dtype": torch.float32})
        chunks, where = build(job)

        def model_fn(tokens: torch.Tensor) -> torch.Tensor:
            tokens = tokens.cuda()
            positions = torch.arange(tokens.shape[1], device="cuda")[None]
            return chunks[0].module(tokens, positions, None).double().cpu()

        rows = rows_of_step(0, model_fn)
        loss, reference, _ = oracle_answer(chunks, model_fn, rows, _spec())
        metrics, grads, _ = one_step(job, chunks, where, _spec(), rows)
        assert abs(metrics["loss"] - loss) <= 1e-5 * abs(loss)
        assert worst(grads, {name: grad.cpu() for name, grad in reference.items()})[0] <= 1e-4
        destroy_parallel()
    finally:
        dist.destroy_process_group()
