#!/usr/bin/env python3
"""How many collectives a log-prob costs under tensor parallelism, and what they carry: ours beside the peers'.

    python tools/bench/collectives.py

One world of four gloo processes on the CPU, as TP 4 and then as two replicas of TP 2. Every function of
torch.distributed that communicates is wrapped before anything else is imported, and the wrappers count outermost calls
and the bytes of the tensor that a rank hands to each. All figures are measured: a peer that is not installed is skipped
with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tools/
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # runs from a checkout that is not installed

import torch
import torch.distributed as dist

SIZES, TOKENS, VOCAB, HIDDEN = (2, 4), 64, 512, 16
NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "reduce", "broadcast",
         "reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "send", "recv", "barrier")  # fmt: skip


class Calls:
    """Outermost calls of `NAMES` since last `taken`, and the bytes handed to them."""

    def __init__(self) -> None:
        self.number, self.bytes, self.depth = 0, 0, 0
        for name in NAMES:
            self._wrap(name)

    def _wrap(self, name: str) -> None:
        inner = getattr(dist, name)
        # Of two tensors the smaller is counted: a gather's input, or a scatter's output.
        pick = max if name.startswith("reduce_scatter") else min

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return inner(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
                    self.number += 1
                    self.bytes += pick((x.numel() * x.element_size() for x in given), default=0)

        setattr(dist, name, counted)

    def taken(self) -> tuple[int, float]:
        """Calls, and bytes a token."""
        found = (self.number, self.bytes / TOKENS)
        self.number = self.bytes = 0
        return found


def implementations(group: Any) -> Any:
    """(name, what runs on this rank's logits or hidden states and weight, whether it is a head)."""
    from bench import peers
    from megatron_pgloss import token_logprobs
    from megatron_pgloss.logprobs import linear_token_logprobs

    def ours(logits: Any, targets: Any) -> Any:
        out = token_logprobs(logits, targets, entropy=True, group=group, vocab_size=VOCAB, backend="eager")
        return out.logprob, out.entropy

    def head(hidden: Any, weight: Any, targets: Any) -> Any:
        out = linear_token_logprobs(hidden, weight, targets, entropy=True, group=group, vocab_size=VOCAB)
        return out.logprob, out.entropy

    yield "ours", ours, False
    yield "ours, fused head", head, True
    for name, run in peers.logits_given([], None):
        if name.startswith(("Megatron", "verl", "Liger")):
            yield name, run, False


def visit(rank: int, size: int, calls: Calls) -> dict[str, Any]:
    """Every implementation on TP ``size``: calls and bytes, forward and backward."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    group = parallel_state.get_tensor_model_parallel_group()
    torch.manual_seed(0)
    width, place = VOCAB // size, rank % size
    targets, hidden = torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS, HIDDEN)
    logits, weight = torch.randn(TOKENS, VOCAB), torch.randn(VOCAB, HIDDEN)
    found: dict[str, Any] = {}
    for name, run, head in implementations(group):
        if isinstance(run, str):
            found[name] = run
            continue
        shard = slice(place * width, (place + 1) * width)
        given = [hidden.clone(), weight[shard].clone()] if head else [logits[:, shard].clone()]
        given = [x.requires_grad_() for x in given]
        calls.taken()
        logprob, entropy = run(*given, targets)
        forward = calls.taken()
        (logprob.sum() if entropy is None else logprob.sum() + 0.1 * entropy.sum()).backward()
        found[name] = {"forward": forward, "backward": calls.taken(), "entropy": entropy is not None}
    parallel_state.destroy_model_parallel()
    return found


def child(rank: int, folder: Path) -> None:
    """Run as one process of the world; the first process writes the counts."""
    calls = Calls()
    torch.set_num_threads(1)
    world = max(SIZES)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    found = {str(size): visit(rank, size, calls) for size in SIZES}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def collectives(limit: float = 120) -> dict[str, Any] | str:
    """TP size to implementation to what it called; or why nothing could be counted."""
    with tempfile.TemporaryDirectory() as folder:
        # Nothing is timed, so nothing need be compiled.
        env = os.environ | {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--folder", folder, "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for rank in range(max(SIZES))
        ]
        try:
            errors = [rank.communicate(timeout=limit)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            return f"not finished after {limit:.0f} s"
        finally:
            for rank in ranks:
                rank.kill()
        bad = [error for rank, error in zip(ranks, errors, strict=True) if rank.returncode]
        if bad:
            return (bad[0].strip().splitlines() or ["a process died"])[-1]
        return json.loads((Path(folder) / "found.json").read_text())  # type: ignore[no-any-return]


def lines(found: dict[str, Any]) -> list[list[str]]:
    """The table, its heading first, with one row per implementation."""
    head = ["", *(f"TP {size}: {way}" for size in found for way in ("forward", "backward"))]
    first = next(iter(found.values()))
    rows = []
    for name in (name for name, row in first.items() if not isinstance(row, str)):
        cells = [found[size][name][way] for size in found for way in ("forward", "backward")]
        note = "" if first[name]["entropy"] else " (log-prob only)"
        rows.append([name + note, *(f"{n} ({size:g} B)" if n else "0" for n, size in cells)])
    return [head, *rows]


def markdown(found: dict[str, Any] | str) -> str:
    """The table as a part of a page."""
    if isinstance(found, str):
        return f"Collectives were not counted: {found}."
    head, *rows = lines(found)
    table = "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])
    skipped = [f"Not run: {name} ({row})." for name, row in next(iter(found.values())).items() if isinstance(row, str)]
    title = (
        "**Collectives** of a micro-batch over tensor-parallel ranks, counted: calls, and in brackets the bytes a "
        f"token that a rank hands to them (float32 logits; {HIDDEN} hidden columns, so the head's dX is {4 * HIDDEN})."
    )
    return "\n\n".join([title, table, *skipped])


def show(found: dict[str, Any] | str) -> None:
    """Print the table on the terminal."""
    print("\ncollectives: calls (bytes a token)", flush=True)
    if isinstance(found, str):
        print(f"not counted: {found}", flush=True)
        return
    for line in lines(found):
        print(f"{line[0]:36}" + "".join(f"{cell:>18}" for cell in line[1:]), flush=True)
    for name, row in next(iter(found.values())).items():
        if isinstance(row, str):
            print(f"{name:36}skipped: {row}", flush=True)


def main() -> None:
    """Count the collectives; in a rank's process, run as that rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        show(collectives())
    else:
        child(options.rank, options.folder)


if __name__ == "__main__":
    main()
