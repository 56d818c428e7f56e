"""Spawn a world of gloo processes for a test, with a deadline that ends in a clear failure."""

from __future__ import annotations

import datetime
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _child(rank: int, world: int, folder: str, timeout: float, fn: Callable, args: tuple) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    out = Path(folder) / f"{rank}.pkl"
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world)
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        result = ("ok", fn(rank, world, *args))
    except BaseException as error:  # noqa: BLE001  the parent re-raises it with the traceback
        result = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    part = out.with_suffix(".part")
    part.write_bytes(pickle.dumps(result))
    part.rename(out)
    if result[0] == "ok":
        dist.destroy_process_group()
    else:
        os._exit(1)


def run_world(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call ``fn(rank, world, *args)`` in ``world`` spawned gloo processes; return the results by rank.

    The first failing rank's traceback is raised here; past ``timeout`` seconds all processes are killed and
    the ranks that had not finished are named.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_child, args=(rank, world, folder, timeout, fn, args), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        results: dict[int, tuple[str, Any]] = {}
        try:
            while len(results) < world:
                for rank, process in enumerate(processes):
                    file = Path(folder) / f"{rank}.pkl"
                    if rank not in results and file.exists():
                        results[rank] = pickle.loads(file.read_bytes())
                        if results[rank][0] == "error":
                            raise AssertionError(f"rank {rank} of {world} failed:\n{results[rank][1]}")
                    elif rank not in results and process.exitcode not in (None, 0):
                        raise AssertionError(f"rank {rank} of {world} died with exit code {process.exitcode}")
                if time.monotonic() > deadline:
                    late = sorted(set(range(world)) - set(results))
                    raise AssertionError(f"hang: ranks {late} of {world} had not finished after {timeout} s")
                time.sleep(0.02)
            for process in processes:
                process.join(10)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
    return [results[rank][1] for rank in range(world)]
