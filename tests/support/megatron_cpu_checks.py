"""Checks of Megatron-Core on CPU beside layouts; each runs on both ranks of a world of two and returns its findings."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

SMALL = dict(vocab_size=48, seq_length=16, hidden=16, ffn=24)
TOKENS = torch.arange(64).reshape(4, 16) * 7 % 48


def _step(layout: dict[str, int], model: dict[str, Any], *, seed: int = 3, finalize: bool = True) -> Any:
    """One step of ``mean over rows of sum tanh(z)^3``: (chunks, layout), gradients in place."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_pgloss.verify.layouts.models import build_gpt, init_parallel
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    at = init_parallel(**layout)
    chunks = build_gpt(**(SMALL | model))
    deterministic_weights(chunks, seed=seed)
    if not finalize:
        chunks[0].config.finalize_model_grads_func = None
    run = get_forward_backward_func()
    _run(run, chunks, at)
    return chunks, at


def _run(run: Any, chunks: list[Any], at: Any) -> None:
    def forward_step(iterator: Any, chunk: Any) -> Any:
        tokens = next(iterator)[None]
        out = chunk(tokens, torch.arange(16)[None], None)
        return out, lambda z: (z.float().tanh().pow(3).sum() if z.dtype != torch.float64 else z.tanh().pow(3).sum(), {})

    rows = TOKENS[at.dp_rank :: at.dp]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    iterators = [iter(rows) for _ in chunks]
    run(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(rows),
        seq_length=16,
        micro_batch_size=1,
        forward_only=False,
    )


def _grads(layout: dict[str, int], model: dict[str, Any]) -> dict[str, torch.Tensor]:
    from megatron_pgloss.verify.layouts.models import destroy_parallel
    from megatron_pgloss.verify.layouts.reshard import full_gradients

    chunks, _ = _step(layout, model)
    out = full_gradients(chunks)
    destroy_parallel()
    return out


def _error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert list(got) == list(want)
    largest = max(g.abs().max().item() for g in want.values())
    return max(
        (got[name] - g).abs().max().item() / max(g.abs().max().item(), 1e-3 * largest) for name, g in want.items()
    )


def gpt2_like(rank: int) -> float:
    """A model with LayerNorm, biases, GELU, learned positions, one head per group, and query and key norms."""
    model = dict(norm="LayerNorm", bias=True, gated=False, position="learned_absolute", query_groups=None)
    model["extra"] = dict(qk_layernorm=True)
    want = _grads({}, model)
    assert "decoder.final_layernorm.bias" in want and "embedding.position_embeddings.weight" in want
    return max(_error(_grads(dict(tp=2), model | dict(sequence_parallel=sp)), want) for sp in (False, True))


def own_layers_are_megatrons(rank: int) -> float:
    """The package's attention and norms equal Megatron's local ones, which support neither CP, SP nor packing."""
    from megatron_pgloss.verify.layouts.models import build_gpt, destroy_parallel, init_parallel
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    init_parallel()
    above = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    worst = 0.0
    for norm in ("RMSNorm", "LayerNorm"):
        out = []
        for kind, mask in (("own", None), ("local", above)):
            (chunk,) = build_gpt(**SMALL, norm=norm, layer_spec=kind, wrap=False)
            deterministic_weights(chunk)
            out.append(chunk(TOKENS, torch.arange(16).expand(4, 16), mask).detach())
        assert 0.3 < out[0].std().item() < 3.0  # logits worth testing a loss on
        worst = max(worst, (out[0] - out[1]).abs().max().item())
    destroy_parallel()
    return worst


def expert_losses(rank: int) -> float:
    """Aux and z-loss depend on what a micro-batch holds, so that is kept: only the ranks of the experts change."""
    model = dict(experts=4, moe_aux_coeff=0.1, moe_z_coeff=0.1)
    want = _grads({}, model)
    without = _grads({}, dict(experts=4))
    router = "decoder.layers.0.mlp.router.weight"
    assert (want[router] - without[router]).abs().max() > 1e-3 * want[router].abs().max()
    return _error(_grads(dict(ep=2), model), want)


def half_precision(rank: int) -> float:
    """bf16 and fp16 run through Float16Module with float32 gradients, near the float64 gradient."""
    want = _grads({}, {})
    worst = 0.0
    for layout, dtype in ((dict(tp=2), torch.bfloat16), (dict(pp=2), torch.bfloat16), (dict(pp=2), torch.float16)):
        got = _grads(layout, dict(dtype=dtype))
        dot = sum((got[n] * want[n]).sum() for n in want)
        size = [sum(g.square().sum() for g in grads.values()).sqrt() for grads in (got, want)]
        worst = max(worst, 1.0 - (dot / size[0] / size[1]).item())
    return worst


def loading(rank: int) -> float:
    """Weights read on one layout and loaded on another are the same, bit for bit, and so are fresh ones."""
    from megatron_pgloss.verify.layouts.models import build_gpt, destroy_parallel, init_parallel
    from megatron_pgloss.verify.layouts.reshard import full_parameters, load_full
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    model = SMALL | dict(experts=4, vocab_size=47)
    found = []
    for layout, more in (
        (dict(tp=2), dict(sequence_parallel=True)),
        (dict(pp=2, vpp=2), {}),
        (dict(ep=2), dict(distributed_optimizer=True)),
    ):
        init_parallel(**layout)
        chunks = build_gpt(**model, **more)
        deterministic_weights(chunks, seed=5)
        found.append(full_parameters(chunks))
        fresh = build_gpt(**model, **more)
        load_full(fresh, found[0])
        found.append(full_parameters(fresh))
        destroy_parallel()
    assert found[0]["output_layer.weight"].shape == (47, 16)
    assert found[0]["decoder.layers.3.mlp.experts.local_experts.3.linear_fc1.weight"].shape == (48, 16)
    assert all(list(other) == list(found[0]) for other in found)
    return max((other[name] - w).abs().max().item() for other in found for name, w in found[0].items())


def optimizers(rank: int) -> float:
    """Megatron's own optimizers, which sort parameters by CUDA type names, train alike on three layouts."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_pgloss.verify.layouts.models import destroy_parallel
    from megatron_pgloss.verify.layouts.reshard import full_parameters

    found = []
    for layout, sharded in (({}, False), ({}, True), (dict(tp=2), False)):
        model = dict(dtype=torch.float32, distributed_optimizer=sharded)
        chunks, at = _step(layout, model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            adam_eps=1e-2,  # with a small one, Adam turns the rounding of a gradient of zero into a full step
            clip_grad=1.0,
            use_distributed_optimizer=sharded,
            params_dtype=torch.float32,
        )
        optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        for _ in range(2):
            optimizer.zero_grad()  # the plain optimizer lends main_grad to param.grad
            _run(get_forward_backward_func(), chunks, at)
            assert optimizer.step()[0]
        found.append(full_parameters(chunks))
        destroy_parallel()
    moved = found[0]["output_layer.weight"].std().item()
    return max((other[name] - w).abs().max().item() / moved for other in found for name, w in found[0].items())


def order(rank: int) -> list[Any]:
    """Global rank counts tp, then cp, then dp, then pp."""
    from megatron_pgloss.verify.layouts.models import destroy_parallel, init_parallel

    out = []
    for layout in (dict(tp=2), dict(cp=2), dict(pp=2), {}):
        at = init_parallel(**layout)
        spelled = at.tp_rank + at.tp * (at.cp_rank + at.cp * (at.dp_rank + at.dp * at.pp_rank))
        out.append((spelled, at.is_first_stage, at.is_last_stage))
        destroy_parallel()
    return out


def groups_share_a_device(rank: int) -> dict[str, Any]:
    """Twenty groups poll with one thread, each still sums over its own ranks, and torch takes them for gloo's."""
    import torch.distributed as dist

    from megatron_pgloss.megatron.cpu import enable_cpu

    def polled() -> int:
        files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.path.islink(file) and "eventpoll" in os.readlink(file) for file in files)

    enable_cpu()
    dist.new_group()  # this group's device is shared
    before = polled()
    groups = [dist.new_group([at] if at < 2 else [0, 1]) for at in range(20)]
    after, sums = polled(), []
    for ranks, group in enumerate(groups):
        if ranks >= 2 or rank == ranks:
            value = torch.tensor([rank + 1.0])
            dist.all_reduce(value, group=group)
            sums.append(float(value))
    dist.monitored_barrier(groups[-1])  # only gloo has it
    for group in groups:
        dist.destroy_process_group(group)
    return {"sums": sums, "more devices": after - before}


def threads_stay(rank: int) -> list[int]:
    """Open gloo groups keep threads; a long visit of layouts must not pile them up."""
    from megatron_pgloss.verify.layouts.models import destroy_parallel, init_parallel

    counts = []
    for _ in range(3):
        init_parallel()
        destroy_parallel()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def _message(function: Callable[[], object]) -> str:
    from megatron_pgloss.errors import PGLossError

    try:
        function()
    except PGLossError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(rank: int) -> dict[str, str]:
    """Errors of a wrong setup, which are the same on every rank."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_pgloss.megatron.cpu.attention import rank_positions
    from megatron_pgloss.verify.layouts.models import build_gpt, destroy_parallel, init_parallel
    from megatron_pgloss.verify.layouts.reshard import full_gradients, load_full

    out = {"world": _message(lambda: init_parallel(tp=4)), "zigzag": _message(lambda: rank_positions(10, 2, 0))}
    chunks, _ = _step({}, {}, finalize=False)
    out["not reduced"] = _message(lambda: full_gradients(chunks))
    out["missing"] = _message(lambda: load_full(chunks, {}))
    cu = torch.tensor([0, 8], dtype=torch.int32)
    short = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=8, max_seqlen_kv=8)
    core = chunks[0].module.decoder.layers[0].self_attention.core_attention
    q = torch.zeros(16, 4, 4)
    out["cu_seqlens"] = _message(lambda: core(q, q, q, packed_seq_params=short))
    out["unknown field"] = _message(lambda: build_gpt(**SMALL, hiden=32))
    out["dropout"] = _message(lambda: build_gpt(**SMALL, extra=dict(attention_dropout=0.1)))
    destroy_parallel()
    return out


def torch_is_untouched(rank: int) -> dict[str, Any]:
    """Code outside Megatron sees an unchanged torch, and CUDA stays unavailable."""
    from megatron_pgloss.megatron.cpu import enable_cpu

    enable_cpu()
    enable_cpu()
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    x.exp().sum().backward()
    state = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(torch.zeros(1).type()))
    thread.start()
    thread.join()
    return {
        "cuda": torch.cuda.is_available(),
        "type": torch.zeros(1).type(),
        "type in a thread": seen[0],
        "convert": torch.zeros(1).type(torch.int64).dtype,
        "softmax": torch.softmax(x, -1, dtype=torch.float32).dtype,
        "device": torch.zeros(1, device="cuda").device.type,
        "cuda()": x.cuda() is x,
        "to": torch.zeros(1).to("cuda:0", torch.float64).dtype,
        "grad": x.grad is not None,
        "cpu generator kept": torch.equal(state, torch.get_rng_state()),
    }
