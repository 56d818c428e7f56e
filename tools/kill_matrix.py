#!/usr/bin/env python3
"""What every other rank prints, and after how long, when one rank fails, is killed, stops or is late.

    python tools/kill_matrix.py [--only WORDS] [--limit SECONDS] [--json kill_matrix.json] [--page FILE.md]

Cells: fault x layout x rank x phase, each a job of two gloo processes of its own, all groups with the same timeout.
The JSON is read first and written after every cell, so that a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

LAYOUTS = {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
FAULTS = ("raise", "kill", "stop", "late")
PHASES = ("begin", "forward", "backward", "finish", "score")
SLACK = 10.0
"""Seconds beyond the timeout within which every peer must have ended."""


def worker(fault: str, layout: str, guilty: int, phase: str, limit: float) -> None:
    """One rank of one cell: says how it ended in one line of JSON."""
    import torch.distributed as dist

    from megatron_pgloss import Split, presets
    from megatron_pgloss.megatron import PolicyLossStep
    from megatron_pgloss.verify.data.batches import batch_of, rows_of_step, share
    from megatron_pgloss.verify.layouts.models import build_gpt, init_parallel
    from megatron_pgloss.verify.run.drive import run_schedule

    rank = int(os.environ["RANK"])
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    # A slow start is no fault: only what comes after it has to end in time.
    port, patient = int(os.environ["MASTER_PORT"]), datetime.timedelta(seconds=120)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, 2, rank == 0, timeout=patient)
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{1 - rank}"], patient)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=limit)
    )  # fmt: skip
    where = init_parallel(**LAYOUTS[layout])
    chunks = build_gpt(vocab_size=32, seq_length=64, layers=2, hidden=16, ffn=16)
    happen = _fault(fault, guilty == rank, limit)
    seen: list[int] = []

    def run(model: Any, micro: Any, inputs: Any) -> Any:
        seen.append(micro.number)
        if phase in ("forward", "score") and micro.number == 1:
            happen()
        output = model(**inputs)
        if phase == "backward" and micro.number == 1 and output.requires_grad:
            output.register_hook(lambda grad: happen())
        return output

    step = PolicyLossStep(presets.reinforce(), chunks, split=Split(sequences=2), forward=run, patience=limit / 2)
    batches = [batch_of(share(rows_of_step(0), where.dp_rank, where.dp))]
    began, error = time.monotonic(), ""
    try:
        if phase == "score":
            step.score(batches, into="ref")
        if phase == "begin":
            happen()
        step.begin(batches)
        with step.watch.schedule():
            losses = run_schedule(step, chunks)
        if phase == "finish":
            happen()
        step.finish(losses)
    except (ValueError, RuntimeError) as caught:
        error = "; ".join([type(caught).__name__, *getattr(caught, "__notes__", [])])
    print(json.dumps({"rank": rank, "seconds": time.monotonic() - began, "error": error}), flush=True)
    os._exit(0 if not error else 1)  # not by way of groups that wait for a peer


def _fault(fault: str, here: bool, limit: float) -> Callable[[], None]:
    def happen() -> None:
        if not here:
            return
        if fault == "raise":
            raise ValueError("put in by tools/kill_matrix.py")
        if fault == "late":
            time.sleep(limit * 0.8)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    return happen


def cell(fault: str, layout: str, guilty: int, phase: str, limit: float) -> dict[str, Any]:
    """Run one cell: of the peer its error, its seconds and its lines; whether it ended in time and named the rank."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "WORLD_SIZE": "2",
                            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
        for rank in range(2):
            out, said = Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err"
            with out.open("w") as stdout, said.open("w") as stderr:
                command = [sys.executable, __file__, "--worker", fault, layout, str(guilty), phase, str(limit)]
                jobs.append(subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=stdout, stderr=stderr))
        peer = 1 - guilty
        with contextlib.suppress(subprocess.TimeoutExpired):  # told below: then nothing was printed
            jobs[peer].wait(timeout=limit + SLACK + 120)  # start-up included; the peer times itself
        for job in jobs:
            job.kill()
            job.wait()
        printed = (Path(folder) / f"{peer}.out").read_text().strip().splitlines()
        lines = [line for line in (Path(folder) / f"{peer}.err").read_text().splitlines() if f"rank {guilty}" in line]
    told = json.loads(printed[-1]) if printed and printed[-1].startswith("{") else {"seconds": None, "error": ""}
    named = any(f"rank {guilty}" in line for line in (*lines, told["error"]))
    gone = guilty == 0 and "the job's store" in told["error"]  # it held the store
    done = told["seconds"] is not None and told["seconds"] < limit + SLACK
    ended = done and (not told["error"] if fault == "late" else bool(told["error"]))
    return {"seconds": told["seconds"], "error": told["error"], "lines": lines[:3], "ok": ended and (named or gone)}


def _port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def page(found: dict[str, Any], limit: float) -> str:
    """The table of docs/reliability.md."""
    lines = ["| fault, layout, rank, phase | the peer ended after, s | what it said | ok |", "|---|---:|---|---|"]
    for name, one in found.items():
        said = (one["lines"] or [one["error"]])[-1].replace("|", "/")[:160]
        seconds = "-" if one["seconds"] is None else f"{one['seconds']:.1f}"
        lines.append(f"| {name} | {seconds} | {said} | {'yes' if one['ok'] else 'no'} |")
    return "\n".join([*lines, "", f"Timeout of every group: {limit:g} s; {datetime.date.today()}.", ""])


def main() -> int:
    """Run what is wanted and not there yet; 1 where a cell is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="words separated by commas: cells whose name holds all of them")
    parser.add_argument("--limit", type=float, default=10.0, help="timeout of every group, seconds")
    parser.add_argument("--json", type=Path, default=Path("kill_matrix.json"))
    parser.add_argument("--page", type=Path, help="write the table here")
    given = parser.parse_args()
    if given.worker:
        fault, layout, guilty, phase, limit = given.worker
        worker(fault, layout, int(guilty), phase, float(limit))
    found = json.loads(given.json.read_text()) if given.json.exists() else {}
    for fault, layout, guilty, phase in itertools.product(FAULTS, LAYOUTS, (0, 1), PHASES):
        name = f"{fault}, {layout}, rank {guilty}, {phase}"
        if name in found or not all(word in name for word in given.only.split(",")):
            continue
        found[name] = cell(fault, layout, guilty, phase, given.limit)
        given.json.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{'ok ' if found[name]['ok'] else 'NOT'} {name}: {found[name]['seconds']} s, {found[name]['lines'][-1:]}"
        )
    if given.page:
        given.page.write_text(page(found, given.limit))
    return int(not all(one["ok"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
