#!/usr/bin/env python3
"""What each mode of the fused head costs in accuracy: errors of log-prob, dZ, dX and dW, and bytes a stored logit.

    python tools/head_errors.py [--rows 128 --hidden 512 --vocab 16384] [--page docs/performance.md]

Everything is compared with float64 products of the same bf16 operands. The head is synthetic and drawn anew from a
seed: RMS-normed hidden states with a few loud channels, a weight in which every row has eight planted continuations.
Tokens are drawn from the head itself (on-policy) or uniformly among the row's fifty likeliest (off-policy).

Shapes: `N` rows, `H` hidden, `V` vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

import torch
from torch import Tensor

from megatron_pgloss.logprobs.head.forward import HeadJob, WantedRows, logit_gradient, run_forward
from megatron_pgloss.logprobs.head.gemm import HeadDtype, logit_dtype, write_logits
from megatron_pgloss.logprobs.head.linear import MODES, Mode
from megatron_pgloss.logprobs.head.stored import Readable, decode
from megatron_pgloss.logprobs.upstream import upstream_factors
from megatron_pgloss.logprobs.vocab.shard import find_shard

BEGIN, END = "<!-- head errors: begin -->", "<!-- head errors: end -->"
SETTINGS = (("peaked, loud channels x16", 30.0, 16.0), ("peaked", 30.0, 1.0), ("flat", 10.0, 1.0))
"""Name, height of the planted continuations in nats, factor of the loud channels."""


class Synthetic(NamedTuple):
    """Operands in bf16, sampled tokens, a gradient for each, and the truth in float64."""

    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    g_N: Tensor
    logprob_N: Tensor
    dz_NV: Tensor
    z_NV: Tensor


def draw(rows: int, hidden: int, vocab: int, peak: float, loud: float, on_policy: bool, seed: int = 0) -> Synthetic:
    """A head, tokens and the truth about them."""
    dice = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice)

    gain_H = torch.exp(0.5 * normal(hidden))
    gain_H[torch.randperm(hidden, generator=dice)[: max(1, hidden // 256)]] *= loud
    h_NH = normal(rows, hidden)
    h_NH = h_NH / h_NH.square().mean(1, keepdim=True).sqrt() * gain_H
    weight_VH = normal(vocab, hidden) * torch.exp(0.25 * normal(vocab, 1)) / (hidden * gain_H.square().mean()).sqrt()
    height_N1 = peak * torch.rand(rows, 1, generator=dice)
    for k in range(8):
        place_N = torch.randint(0, vocab, (rows,), generator=dice)
        weight_VH.index_add_(0, place_N, h_NH * (height_N1 * 0.75**k / h_NH.square().sum(1, keepdim=True)))
    h_NH, weight_VH = h_NH.bfloat16(), weight_VH.bfloat16()
    z_NV = h_NH.double() @ weight_VH.double().t()
    table_NV = z_NV.log_softmax(1)
    if on_policy:
        target_N = torch.multinomial(table_NV.exp(), 1, generator=dice)[:, 0]
    else:
        target_N = z_NV.topk(50, 1).indices.gather(1, torch.randint(0, 50, (rows, 1), generator=dice))[:, 0]
    g_N = normal(rows).double()
    dz_NV = -g_N[:, None] * table_NV.exp()
    dz_NV[torch.arange(rows), target_N] = -g_N * torch.expm1(table_NV.gather(1, target_N[:, None])[:, 0])
    return Synthetic(h_NH, weight_VH, target_N, g_N, table_NV.gather(1, target_N[:, None])[:, 0], dz_NV, z_NV)


def found(head: Synthetic, mode: Mode, head_dtype: HeadDtype = "fp32") -> tuple[Tensor, Tensor, float]:
    """Log-probs [N], dZ [N, V] in the weight's dtype and bytes a stored logit, by the package's own passes."""
    weight = head.weight_VH
    job = HeadJob(
        find_shard(weight.size(0), None, None), False, None, None, False, False, 4096, 2**20, MODES[mode], head_dtype
    )
    rows = WantedRows(head.hidden_NH, head.target_N, None)
    whole, stored = run_forward(rows, weight, job)
    if stored is None:
        z_NV = weight.new_empty(head.dz_NV.shape, dtype=logit_dtype(weight.dtype, head_dtype))
        write_logits(head.hidden_NH, weight, head_dtype, z_NV)
        read, held = Readable(z_NV, whole.lse, None), 0.0
    else:
        held = sum(part.numel() * part.element_size() for part in stored if part is not None) / head.dz_NV.numel()
        read = decode(stored, slice(None), whole.lse, None, torch.float32)
    factors = upstream_factors(head.g_N, None, whole, None)
    return whole.logprob, logit_gradient(read, head.target_N, factors, job, weight.dtype), held


def steps_of_an_eighth(head: Synthetic) -> Tensor:
    """dZ from one byte a logit in even steps of 1/8 below the row's largest, rounded to the weight's dtype."""
    peak_N1 = head.z_NV.amax(1, keepdim=True)
    z_NV = peak_N1 - ((peak_N1 - head.z_NV) * 8).round().clamp(max=255) / 8
    dz_NV = -head.g_N[:, None] * (z_NV - head.z_NV.logsumexp(1, keepdim=True)).exp()
    place = torch.arange(len(dz_NV)), head.target_N
    dz_NV[place] = head.dz_NV[place]
    return dz_NV.to(head.weight_VH.dtype)


def relative(one: Tensor, truth: Tensor) -> float:
    """|one - truth| / |truth|, in the Frobenius norm."""
    return float((one.double() - truth).norm() / truth.norm())


def table(rows: int, hidden: int, vocab: int) -> Iterator[tuple[str, ...]]:
    """A line per head, way to draw tokens, and mode."""
    for name, peak, loud in SETTINGS:
        for on_policy in (True, False):
            head = draw(rows, hidden, vocab, peak, loud, on_policy)
            wide_VH, wide_NH = head.weight_VH.double(), head.hidden_NH.double()
            where = f"{name}, {'on-policy' if on_policy else 'uniform in the top 50'}"
            ways: dict[str, tuple[Mode, HeadDtype] | None] = {
                "`keep32`, `recompute`, `forward`": ("keep32", "fp32"), "`keep`": ("keep", "fp32"),
                "`keep8`": ("keep8", "fp32"), "one byte in even steps of 1/8 (not used)": None,
                "`keep`, `head_dtype=\"bf16\"`": ("keep", "bf16"),
            }  # fmt: skip
            for way, chosen in ways.items():
                if chosen is None:
                    dlogp, dz_NV, held = "", steps_of_an_eighth(head), 1.0
                else:
                    logprob_N, dz_NV, held = found(head, *chosen)
                    dlogp = f"{float((logprob_N - head.logprob_N).abs().max()):.1e}"
                # dX and dW of exact products: what is compared is dZ, seen through W and h.
                dx = relative(dz_NV.double() @ wide_VH, head.dz_NV @ wide_VH)
                dw = relative(dz_NV.double().t() @ wide_NH, head.dz_NV.t() @ wide_NH)
                numbers = (relative(dz_NV, head.dz_NV), dx, dw)
                yield (where, way, f"{held:.2f}", dlogp, *(f"{x:.1e}" for x in numbers))


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--page", type=Path, help="a Markdown page whose part between the markers is replaced")
    given = parser.parse_args()
    header = ("head and tokens", "mode", "bytes a logit", "largest error of log-prob", "dZ", "dX", "dW")
    lines = [header, ("---",) * len(header), *table(given.rows, given.hidden, given.vocab)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    command = f"python tools/head_errors.py --rows {given.rows} --hidden {given.hidden} --vocab {given.vocab}"
    text = f"`{command}`, bf16 operands, torch {torch.__version__.split('+')[0]} on a CPU:\n\n{text}"
    if given.page is None:
        print(text)
        return
    before, rest = given.page.read_text(encoding="utf-8").split(BEGIN)
    page = f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"
    given.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
