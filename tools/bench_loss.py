#!/usr/bin/env python3
"""Time and memory of log-probs with entropy beside every peer that can be found; and the time of the rest of the loss.

    python tools/bench_loss.py --shapes 2048x32768 512x151936 --dtypes bf16 fp32 --json bench.json --picture bench.png

Every implementation runs once per round, in turn, on the same logits; medians over rounds are printed, with the ratio
to the fastest peer that gives an entropy gradient and to the copy of the logits timed in the same rounds. Peak memory
beyond the logits comes from a fresh process each. The loss is sum(logp) + 0.1 sum(H); where a peer gives no entropy it
is sum(logp), and the table says so. The gradient is dropped where the layer before the logits would take it, because
adding it to a leaf would copy it. `bench/phases.py` then measures the phases of this package's own pass.

On a GPU (``--device cuda``) times are those of its own events, the L2 cache is emptied before each, and peak memory is
the allocator's. ``--sweep 1024 2048`` adds the fused head's modes over chunk sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

import torch
import torch.distributed as dist
from bench import collectives, peers, phases, plan, view

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = ("keep", "forward", "recompute")


def start_megatron(folder: str) -> str | None:
    """Set up tensor parallelism of size 1 for Megatron's and verl's functions; return the reason where that fails."""
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        return f"megatron-core does not import: {error}"
    store = dist.FileStore(str(Path(folder) / "store"), 1)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    return None


def timed(work: Callable[[], Any]) -> float:
    """Seconds that ``work`` takes; on a GPU measured by its events, from a cold L2 cache."""
    if DEVICE == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    torch.empty(2**28, dtype=torch.int8, device=DEVICE).zero_()  # several times the L2 cache
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def timed_median(work: Callable[[], Any], rounds: int) -> float:
    """Milliseconds, the median after one call to warm up."""
    work()
    return 1e3 * statistics.median(timed(work) for _ in range(rounds))


def once(run: peers.Run, inputs: list[torch.Tensor], targets: torch.Tensor) -> bool:
    """Run forward and backward; return whether the implementation gives an entropy."""
    logprob, entropy = run(*[phases.Model.apply(x) for x in inputs], targets)
    (logprob.sum() if entropy is None else logprob.sum() + 0.1 * entropy.sum()).backward()
    return entropy is not None


def data(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logits [T, V], or hidden [T, H] and weight [V, H]; and targets [T]."""
    torch.manual_seed(0)
    vocab = shape[-1]
    if len(shape) == 2:
        inputs = [(3 * torch.randn(shape, device=DEVICE)).to(dtype)]
    else:
        tokens, hidden, _ = shape
        inputs = [torch.randn(tokens, hidden, device=DEVICE), torch.randn(vocab, hidden, device=DEVICE) / hidden**0.5]
        inputs = [x.to(dtype) for x in inputs]
    return [x.requires_grad_() for x in inputs], torch.randint(0, vocab, (shape[0],), device=DEVICE)


def race(runs: dict[str, peers.Run], shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> dict[str, dict]:
    """Median wall milliseconds of each implementation and of copying the logits, measured in turn."""
    inputs, targets = data(shape, dtype)
    base = [x.detach().clone() for x in inputs]
    logits = torch.zeros(shape[0], shape[-1], dtype=dtype, device=DEVICE)
    other = torch.zeros_like(logits)
    taken: dict[str, list[float]] = {"copy": []}
    entropy: dict[str, bool] = {}
    for turn in range(rounds + 1):  # the first warms up
        for name, run in runs.items():
            with torch.no_grad():  # some implementations write over their inputs
                for x, kept in zip(inputs, base, strict=True):
                    x.copy_(kept)
            seconds = timed(lambda run=run, name=name: entropy.update({name: once(run, inputs, targets)}))
            if turn:
                taken.setdefault(name, []).append(seconds)
        seconds = timed(lambda: other.copy_(logits))
        if turn:
            taken["copy"].append(seconds)
    return {name: {"ms": 1e3 * statistics.median(times), "entropy": entropy.get(name)} for name, times in taken.items()}


def resident(key: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def peak_extra(run: peers.Run, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Peak bytes of one pass beyond the inputs, per logit. A pass at a small shape compiles before."""
    if DEVICE == "cpu":
        small = (256, *shape[1:-1], 2**14 + 64)
        once(run, *data(small, dtype))
    inputs, targets = data(shape, dtype)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once(run, inputs, targets)
        return (torch.cuda.max_memory_allocated() - before) / (shape[0] * shape[-1])
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    once(run, inputs, targets)
    return (resident("VmHWM") - before) / (shape[0] * shape[-1])


def peaks(runs: dict[str, peers.Run], text: str, dtype: str, results: dict[str, dict]) -> None:
    """Measure the peak memory of each implementation, into ``results``."""
    shape = tuple(map(int, text.split("x")))
    for name, run in runs.items():
        on_gpu = DEVICE == "cuda"
        results[name]["extra"] = (
            peak_extra(run, shape, DTYPES[dtype]) if on_gpu else in_fresh_process(name, text, dtype)
        )


def in_fresh_process(name: str, shape: str, dtype: str) -> float | None:
    """`peak_extra` of one implementation; None where that process fails."""
    command = [sys.executable, __file__, "--peak-of", name, "--shapes", shape, "--dtypes", dtype]
    # Makes glibc return large blocks at once, so that the peak counts live memory only.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    return float(ran.stdout.split()[-1]) if ran.returncode == 0 else None


def usable(found: Any, skipped: dict[str, str]) -> dict[str, peers.Run]:
    """The implementations that can run; the others go into ``skipped`` with their reasons."""
    runs: dict[str, peers.Run] = {}
    for name, run in found:
        if isinstance(run, str):
            skipped[name] = run
        else:
            runs[name] = run
    return runs


def sweep(options: argparse.Namespace, text: str, dtype: str, report: dict[str, Any]) -> None:
    """Measure time and peak memory of the fused head's modes over sizes of chunk, as one table."""
    runs = {f"ours, {mode}, {chunk}": peers.our_head(mode, chunk) for mode in MODES for chunk in options.sweep}
    results = race(runs, tuple(map(int, text.split("x"))), DTYPES[dtype], options.rounds)
    if DEVICE == "cuda":
        peaks(runs, text, dtype, results)
    title = f"head {text} {dtype}, tokens a chunk"
    report["tables"][title] = {"results": results, "skipped": {}}
    view.show(title, results, {})


def main() -> None:
    """Run what the flags ask for."""
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["2048x32768", "512x151936"], help="TxV")
    parser.add_argument("--heads", nargs="*", default=["1024x1024x32768"], help="TxHxV; none: `--heads` alone")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=list(DTYPES))
    parser.add_argument("--head-dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--backends", nargs="+", default=["triton", "compiled", "eager"])
    parser.add_argument("--device", default=DEVICE, choices=["cpu", "cuda"])
    parser.add_argument("--sweep", nargs="*", type=int, default=[], help="chunk sizes of the fused head's modes")
    parser.add_argument("--tokens", nargs="+", type=int, default=[100_000, 400_000], help="of the rest of the loss")
    parser.add_argument(
        "--collectives", action=argparse.BooleanOptionalAction, default=True, help="count them in a world of four"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="peaks of the first shape and dtype"
    )
    parser.add_argument("--json")
    parser.add_argument("--picture")
    parser.add_argument("--page", help="a Markdown page whose part between the bench markers is replaced")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    DEVICE = options.device
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        megatron = start_megatron(folder)
        if options.peak_of:
            shape = tuple(map(int, options.shapes[0].split("x")))
            found = peers.logits_given(options.backends, megatron) if len(shape) == 2 else peers.heads()
            print(peak_extra(usable(found, {})[options.peak_of], shape, DTYPES[options.dtypes[0]]))
        else:
            measure(options, megatron)
        if dist.is_initialized():
            dist.destroy_process_group()


def measure(options: argparse.Namespace, megatron: str | None) -> None:
    """Measure all tables, print and write them."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": DEVICE, "threads": options.threads}
    flags = Path("/proc/cpuinfo").read_text() if DEVICE == "cpu" else ""
    machine = f"{platform.machine()}{', AVX-512' if 'avx512f' in flags else ''}, {os.cpu_count()} cores"
    report["machine"] = torch.cuda.get_device_name() if DEVICE == "cuda" else machine
    report |= {"versions": versions, "load": os.getloadavg()[0], "rounds": options.rounds, "tables": {}}
    print({name: report[name] for name in ("date", "machine", "threads", "load", "rounds", "versions")})
    for text in [*options.shapes, *options.heads]:
        shape = tuple(map(int, text.split("x")))
        dtypes = options.dtypes if len(shape) == 2 else options.head_dtypes
        for dtype in dtypes:
            found = peers.logits_given(options.backends, megatron) if len(shape) == 2 else peers.heads()
            skipped: dict[str, str] = {}
            runs = usable(found, skipped)
            results = race(runs, shape, DTYPES[dtype], options.rounds)
            if options.memory and (
                DEVICE == "cuda" or (dtype == dtypes[0] and text in (options.shapes[:1] + options.heads[:1]))
            ):
                peaks(runs, text, dtype, results)
            title = f"{'logits' if len(shape) == 2 else 'head'} {text} {dtype}"
            measured = phases.logits if len(shape) == 2 else phases.head
            profile = measured(*data(shape, DTYPES[dtype]), lambda work: timed_median(work, options.rounds))
            report["tables"][title] = {"results": results, "skipped": skipped, "profile": profile}
            view.show(title, results, skipped, profile)
            if options.sweep and len(shape) == 3:
                sweep(options, text, dtype, report)
    report["rest"] = plan.rest_of_the_loss(options.rounds, tuple(options.tokens), DEVICE)
    plan.show(report["rest"])
    if options.collectives:
        report["collectives"] = collectives.collectives()
        collectives.show(report["collectives"])
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.picture:
        view.draw(report, options.picture)
    if options.page:
        view.write_page(report, Path(options.page), " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
