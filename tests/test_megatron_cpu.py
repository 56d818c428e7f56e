"""A real Megatron-Core model on CPU gives the same logits and the same gradient on every layout.

Reference: the model in one process, no schedule, no DDP, each row (or document) whole. The loss is a sum over logits,
`sum W tanh(z)`, nonlinear so that a wrong logit changes the gradient, and separable so that no rank needs another's
logits. Megatron's schedule and DDP divide by dp and by the number of micro-batches, which the loss multiplies back.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from support.cover import pairs, visited
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

VOCAB, SEQ, ROWS = 50, 16, 8
DOCS = [[8, 16], [16, 8], [24], [8, 8, 8], [16, 8], [24], [8, 16], [8, 8, 8]]  # packs of 24 tokens, cut by 2 * cp = 8
UNEVEN = [[8, 16], [8], [24, 8], [16], [16], [32], [8, 8], [8, 16]]
SMALL = dict(vocab_size=VOCAB, seq_length=SEQ, hidden=16, ffn=24)
MOE = dict(experts=4, topk=2)
SP = dict(sequence_parallel=True)
DISTOPT = dict(distributed_optimizer=True)
OVERLAP = dict(overlap_grad_reduce=True, bucket_size=2000)

# name: (layout, model, rows per micro-batch or a packing). All worlds are of 4 ranks; what is left is data parallel.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], Any]] = {
    "dp4": ({}, {}, 1),
    "dp4 distopt": ({}, DISTOPT, 2),
    "dp4 distopt overlap": ({}, DISTOPT | OVERLAP, 1),
    "dp4 average": ({}, dict(average_in_collective=True), 1),
    "tp2": (dict(tp=2), {}, 2),
    "tp2 sp": (dict(tp=2), SP, 2),
    "tp4": (dict(tp=4), {}, 2),  # two query groups on four ranks, 50 words padded to 52
    "tp2 sp distopt": (dict(tp=2), SP | DISTOPT, 1),
    "tp2 sp full recompute": (dict(tp=2), SP | dict(recompute="full"), 1),
    "pp2": (dict(pp=2), {}, 2),
    "pp4": (dict(pp=4), {}, 1),
    "pp2 vpp2": (dict(pp=2, vpp=2), {}, 1),
    "pp2 vpp2 overlap": (dict(pp=2, vpp=2), OVERLAP, 1),
    "pp2 tp2 sp": (dict(tp=2, pp=2), SP, 1),
    "pp2 tp2 per-token": (dict(tp=2, pp=2), dict(per_token_loss=True), 1),
    "cp2": (dict(cp=2), {}, 2),
    "cp4": (dict(cp=4), {}, 1),
    "cp2 tp2 sp": (dict(cp=2, tp=2), SP, 2),
    "cp2 pp2 distopt": (dict(cp=2, pp=2), DISTOPT, 1),
    "cp2 selective recompute": (dict(cp=2), dict(recompute="selective"), 1),
    "thd": ({}, {}, DOCS),
    "thd cp2": (dict(cp=2), {}, DOCS),
    "thd cp4": (dict(cp=4), {}, DOCS),
    "thd cp2 tp2 sp": (dict(cp=2, tp=2), SP, DOCS),
    "thd cp2 pp2 uneven": (dict(cp=2, pp=2), dict(variable_seq_lengths=True), UNEVEN),
    "tied tp2": (dict(tp=2), dict(tied=True), 1),
    "tied pp2 distopt": (dict(pp=2), dict(tied=True) | DISTOPT, 1),
    "tied pp2 vpp2 tp2": (dict(tp=2, pp=2, vpp=2), dict(tied=True), 1),
    "moe dp4": ({}, MOE, 1),
    "moe ep2": (dict(ep=2), MOE, 1),
    "moe ep4": (dict(ep=4), MOE, 2),
    "moe ep2 distopt": (dict(ep=2), MOE | DISTOPT, 1),
    "moe ep2 alltoall": (dict(ep=2), MOE | dict(moe_dispatcher="alltoall"), 1),
    "moe ep2 pp2": (dict(ep=2, pp=2), MOE, 1),
    "moe ep2 tp2 sp": (dict(ep=2, tp=2), MOE | SP, 1),
    "moe ep2 etp1 tp2 sp": (dict(ep=2, tp=2, etp=1), MOE | SP, 1),
    "moe cp2 ep2 per-token": (dict(cp=2, ep=2), MOE | dict(per_token_loss=True), 1),
}


def shown(name: str) -> set[Any]:
    """Axes, modes of the model and whether rows are packed: each, and every two together."""
    layout, model, form = LAYOUTS[name]
    words = name.split()
    axes = {axis for axis, size in layout.items() if size > 1} | ({"dp"} if "dp4" in words else set())
    modes = {f"{key} {value}" for key, value in model.items()} | ({"packed"} if isinstance(form, list) else set())
    return {*words} | pairs({*axes, *modes})


VISITED = visited("logits and gradients of the model", list(LAYOUTS), shown)


def _documents(packs: list[list[int]] | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    lengths = [SEQ] * ROWS if packs is None else [n for pack in packs for n in pack]
    return [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]


def _loss_weight(document: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + document)
    return torch.randn(length, VOCAB, dtype=torch.float64, generator=generator)


def _zeros_on_padding(columns: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(columns, (0, max(0, width - columns.shape[-1])))


def _reference(packs: Any, model: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of each document, and the gradient, from the whole model in this process."""
    from megatron_pgloss.verify.layouts.models import build_gpt, destroy_parallel, init_parallel
    from megatron_pgloss.verify.layouts.reshard import full_gradients
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    keep = {k: v for k, v in model.items() if k in ("tied", "experts", "topk")}
    init_parallel()
    (chunk,) = build_gpt(**SMALL, **keep, wrap=False)
    deterministic_weights(chunk, seed=3)
    logits = []
    for index, tokens in enumerate(_documents(packs)):
        out = chunk(tokens[None], torch.arange(len(tokens))[None], None)[0]
        (out.tanh() * _loss_weight(index, len(tokens))).sum().backward()
        logits.append(out.detach())
    grads = full_gradients(chunk)
    destroy_parallel()
    return logits, grads


def _micro_batches(packs: Any, rows: int, at: Any, width: int, logits: list[torch.Tensor]) -> list[dict[str, Any]]:
    """This rank's micro-batches, with the reference logits and loss weights cut as its own logits will be."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_pgloss.megatron.cpu.attention import rank_positions

    documents = _documents(packs)
    groups = [[*range(i, i + rows)] for i in range(0, ROWS, rows)] if packs is None else []
    if packs is not None:
        first = 0
        for pack in packs:
            groups.append([*range(first, first + len(pack))])
            first += len(pack)
    columns = slice(at.tp_rank * width, (at.tp_rank + 1) * width)
    out = []
    for group in groups[at.dp_rank :: at.dp]:
        lengths = [len(documents[d]) for d in group]
        index = [rank_positions(n, at.cp, at.cp_rank) for n in lengths]
        cut: dict[str, list[torch.Tensor]] = {"tokens": [], "positions": index, "want": [], "weight": []}
        for d, where in zip(group, index, strict=True):
            cut["tokens"].append(documents[d][where])
            cut["want"].append(_zeros_on_padding(logits[d], width * at.tp)[where, columns])
            cut["weight"].append(_zeros_on_padding(_loss_weight(d, len(documents[d])), width * at.tp)[where, columns])
        join = torch.stack if packs is None else lambda parts: torch.cat(parts)[None]
        micro: dict[str, Any] = {name: join(parts) for name, parts in cut.items()}
        micro["packed"] = None
        if packs is not None:
            cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
            longest = max(lengths)
            micro["packed"] = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
            )
        out.append(micro)
    return out


def _visit(layout: dict[str, int], model: dict[str, Any], form: Any, want: Any) -> tuple[float, float]:
    """Largest relative error of logits, and of a parameter's gradient, on one layout through Megatron's schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_pgloss.verify.layouts.models import ModelConfig, build_gpt, destroy_parallel, init_parallel
    from megatron_pgloss.verify.layouts.reshard import full_gradients
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    want_logits, want_grads = want
    packs = form if isinstance(form, list) else None
    at = init_parallel(**layout)
    shape = ModelConfig(**(SMALL | model | dict(seq_length=24 if packs else SEQ)))
    chunks = build_gpt(shape)
    deterministic_weights(chunks, seed=3)
    rows = 1 if packs else form
    micros = _micro_batches(packs, rows, at, shape.padded_vocab(at.tp) // at.tp, want_logits)
    worst = [0.0]

    def forward_step(iterator: Any, chunk: Any, *_: Any) -> Any:
        micro = next(iterator)
        out = chunk(micro["tokens"], micro["positions"], None, packed_seq_params=micro["packed"])

        def loss_func(logits: torch.Tensor) -> Any:
            live = slice(0, max(0, min(logits.shape[-1], VOCAB - at.tp_rank * logits.shape[-1])))
            gap = (logits - micro["want"])[..., live].abs().max().item()
            worst.append(gap / micro["want"].abs().max().item())
            loss = (logits.tanh() * micro["weight"]).sum()
            if shape.per_token_loss:  # any counts will do: the schedule divides by their sum over dp and cp
                count = torch.tensor(1 + at.dp_rank + 2 * at.cp_rank, dtype=torch.int32)
                total = sum(1 + d + 2 * c for d in range(at.dp) for c in range(at.cp)) * len(micros)
                return loss * total, count, {}
            return loss * at.dp * len(micros), {}

        return out, loss_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
    iterators = [iter(micros) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(micros),
        seq_length=shape.seq_length,
        micro_batch_size=rows,
        forward_only=False,
    )
    grads = full_gradients(chunks)
    assert list(grads) == list(want_grads)
    largest = max(g.abs().max().item() for g in want_grads.values())
    error = max(
        (grads[name] - g).abs().max().item() / max(g.abs().max().item(), 1e-3 * largest)
        for name, g in want_grads.items()
    )
    destroy_parallel()
    return max(worst), error


def _all_layouts(rank: int, world: int) -> dict[str, tuple[float, float]]:
    warnings.simplefilter("ignore")
    # Megatron divides by the token count, and scales expert losses, in torch's default dtype.
    torch.set_default_dtype(torch.float64)
    references: dict[str, Any] = {}
    results = {}
    for name in VISITED:
        layout, model, form = LAYOUTS[name]
        packs = form if isinstance(form, list) else None
        key = f"{packs} {model.get('tied')} {model.get('experts')}"
        if key not in references:
            references[key] = _reference(packs, model)
        results[name] = _visit(layout, model, form, references[key])
    return results


results = world_fixture(_all_layouts, 4)


@pytest.mark.parametrize("name", VISITED)
def test_logits_and_gradient_do_not_depend_on_the_layout(name: str, results: Any) -> None:
    logits = max(per_rank[name][0] for per_rank in results)
    gradient = max(per_rank[name][1] for per_rank in results)
    print(f"{name}: logits {logits:.1e}, gradient {gradient:.1e}")
    assert logits < 1e-12
    assert gradient < 1e-12
