#!/usr/bin/env python3
"""Time of the loss beyond the log-probs: a step's plan, and one micro-batch's streams, terms and metrics.

    python tools/bench/plan.py --tokens 100000 400000 --rounds 9

A floor stands beside each stage: how many passes over the tokens it makes (operations that read or write a number for
each of them, counted as they are dispatched), times what one product of two float32 streams takes. On a GPU a stage is
timed with the device's own events; on a CPU times are those of one thread, without waits for a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tools/
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # runs from a checkout that is not installed

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_pgloss as pg
from megatron_pgloss.objective import loss as composition

STAGES = ("plan, once a step", "arrange", "streams and terms", "metrics", "backward")


class Passes(TorchDispatchMode):
    """Counts the operations on at least ``least`` numbers, views aside."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.found = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
        if not func.is_view and any(x.numel() >= self.least for x in tensors):
            self.found += 1
        return out


def batch_of(tokens: int) -> pg.TokenBatch:
    """About ``tokens`` tokens in rows of uneven length, eight to a prompt, with all that GRPO reads."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(500, 2001, (tokens // 1250,), generator=generator)
    rows, width = lengths.numel(), int(lengths.max())
    draw = torch.randn(2, rows, width, generator=generator) * 0.1 - 1
    return pg.TokenBatch.from_padded(
        tokens=torch.randint(0, 1000, (rows, width), generator=generator), lengths=lengths,
        action_mask=(torch.arange(width) > 200).expand(rows, width) & (torch.arange(width) < lengths[:, None]),
        advantages=torch.randn(rows, generator=generator), old_logprobs=draw[0], ref_logprobs=draw[1],
        prompt_ids=torch.arange(rows) // 8,
    )  # fmt: skip


class Clock:
    """Milliseconds between marks; on a GPU by its events, read once at the end."""

    def __init__(self, device: str) -> None:
        self.cuda, self.marks = device == "cuda", [] if device == "cuda" else [time.process_time()]
        if self.cuda:
            self.mark()

    def mark(self) -> None:
        """Mark this point in time."""
        if not self.cuda:
            self.marks.append(time.process_time())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        self.marks.append(event)

    def spans(self) -> list[float]:
        """Milliseconds from each mark to the next."""
        pairs = list(itertools.pairwise(self.marks))
        if not self.cuda:
            return [1e3 * (b - a) for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


def step(batch: pg.TokenBatch, device: str, mark: Callable[[], None]) -> None:
    """Plan and one micro-batch of GRPO; ``mark`` is called after every one of `STAGES` but metrics."""
    spec = pg.presets.grpo()
    micro = next(iter(pg.plan([batch], spec, split=pg.Split(max_tokens=batch.tokens_T.numel())).microbatches(device)))
    logp = torch.full(micro.shape, -1.0, device=device).requires_grad_()
    entropy = torch.ones(micro.shape, device=device)
    mark()
    for name in (
        "action",
        "old",
        "ref",
        "advantages",
        *(f"{k}/{part}" for k in ("weight", "member") for part in spec.names),
    ):
        micro.stream(name)
    mark()
    out = pg.policy_loss(pg.TokenLogprobs(logprob=logp, entropy=entropy), micro)
    mark()
    out.loss.backward()
    mark()


def once(batch: pg.TokenBatch, device: str) -> dict[str, float]:
    """Milliseconds of every stage, metrics taken out of the terms."""
    clock, inner, right = Clock(device), [], composition.measure

    def measured(*args: Any) -> Any:
        own = Clock(device)
        found = right(*args)
        own.mark()
        inner.append(own)
        return found

    composition.measure = measured
    try:
        step(batch, device, clock.mark)
    finally:
        composition.measure = right
    plan, arrange, terms, backward = clock.spans()
    metrics = sum(own.spans()[0] for own in inner)
    return dict(zip(STAGES, (plan, arrange, terms - metrics, metrics, backward), strict=True))


def passes(batch: pg.TokenBatch) -> dict[str, int]:
    """Operations over all tokens in every stage."""
    right, counted, inner = composition.measure, [0], [0]

    def measured(*args: Any) -> Any:
        before = mode.found
        found = right(*args)
        inner[0] += mode.found - before
        return found

    composition.measure = measured
    try:
        with Passes(int(batch.cu_S1[-1]) // 2) as mode:
            step(batch, "cpu", lambda: counted.append(mode.found))
    finally:
        composition.measure = right
    plan, arrange, terms, backward = (b - a for a, b in itertools.pairwise(counted))
    return dict(zip(STAGES, (plan, arrange, terms - inner[0], inner[0], backward), strict=True))


def one_pass(tokens: int, device: str, rounds: int) -> float:
    """Milliseconds of one product of two float32 streams."""
    a, b, taken = torch.ones(tokens, device=device), torch.ones(tokens, device=device), []
    for _ in range(10 * rounds + 1):
        clock = Clock(device)
        torch.mul(a, b)
        clock.mark()
        taken.append(clock.spans()[0])
    return statistics.median(taken[1:])


def rest_of_the_loss(rounds: int, sizes: tuple[int, ...] = (100_000, 400_000), device: str = "cpu") -> dict[str, Any]:
    """For each number of tokens and each stage: milliseconds per 100k tokens, passes, and the floor in milliseconds."""
    found: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for size in sizes:
        batch = batch_of(size)
        share = int(batch.cu_S1[-1]) / 100_000
        runs = [once(batch, device) for _ in range(rounds + 1)][1:]
        number, unit = passes(batch), one_pass(int(batch.cu_S1[-1]), device, rounds) / share
        found[f"{size // 1000}k"] = {
            name: {
                "ms": statistics.median(run[name] for run in runs) / share, "passes": number[name],
                "floor": number[name] * unit,
            }
            for name in STAGES
        }  # fmt: skip
    torch.set_num_threads(threads)
    return found


def lines(found: dict[str, Any]) -> list[list[str]]:
    """The table, its heading first."""
    sizes = list(found)
    head = ["stage", *(f"ms per 100k tokens, {size}" for size in sizes), "passes", "floor, ms"]
    rows = [
        [name, *(f"{found[size][name]['ms']:.2f}" for size in sizes), str(found[sizes[0]][name]["passes"]),
         f"{found[sizes[0]][name]['floor']:.2f}"]
        for name in STAGES
    ]  # fmt: skip
    micro = STAGES[1:]
    total = [f"{sum(found[size][name]['ms'] for name in micro):.2f}" for size in sizes]
    number = sum(found[sizes[0]][name]["passes"] for name in micro)
    floor = sum(found[sizes[0]][name]["floor"] for name in micro)
    return [head, *rows, ["a micro-batch, all", *total, str(number), f"{floor:.2f}"]]


def markdown(found: dict[str, Any]) -> str:
    """The table as a part of a page."""
    head, *rows = lines(found)
    table = "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])
    return (
        "**The rest of the loss**: GRPO (clipped ratio, k3 to a reference, all metrics), one packed micro-batch of "
        "uneven rows, float32; on a CPU the time of one thread. Passes: operations over all tokens; floor: as many "
        f"products of two streams.\n\n{table}"
    )


def show(found: dict[str, Any]) -> None:
    """Print the table on the terminal."""
    print("\nthe rest of the loss: GRPO, one micro-batch of uneven rows", flush=True)
    for line in lines(found):
        print(f"{line[0]:22}" + "".join(f"{cell:>28}" for cell in line[1:]), flush=True)


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[100_000, 400_000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    show(rest_of_the_loss(options.rounds, tuple(options.tokens), options.device))


if __name__ == "__main__":
    main()
