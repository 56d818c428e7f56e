"""Run programs as torchrun would, in ranks forked from the warm process: with its environment, without its imports.

Tests of what torchrun itself does (ending the peers of a failed rank, say) start the real one by `torchrun`.
"""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.worlds import FIXTURES, RUN, TIMEOUT, World

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended."""

    returncode: int
    stdout: str
    stderr: str
    files: Mapping[str, str]
    """Name to text of the requested files."""


def launch(processes: int, *program: str, folder: Path, timeout: float = TIMEOUT, **environment: str) -> Ended:
    """Run ``program`` (``-m MODULE ...`` or ``FILE ...``) on ``processes`` ranks in ``folder``, and wait for it."""
    world = World(_rank, processes, (program, str(folder), environment, ()), timeout, grouped=False)
    RUN.direct.append(world)
    return _ended(world.results())


def program_fixture(processes: int, *program: str, files: Sequence[str] = (), timeout: float = TIMEOUT) -> Any:
    """A module-scoped fixture: an `Ended` of the program, which runs in a folder of its own beside other tests."""
    world = World(_rank, processes, (program, None, {}, tuple(files)), timeout, grouped=False)

    def ended() -> Ended:
        return _ended(world.results())

    FIXTURES[ended] = world
    return pytest.fixture(scope="module")(ended)


def torchrun(processes: int, *program: str, folder: Path, timeout: float = TIMEOUT) -> Ended:
    """Run ``program`` by the real torchrun."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *program]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout)
    return Ended(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr, files={})


def _ended(ranks: list[tuple[int, str, str, dict[str, str]]]) -> Ended:
    codes, stdout, stderr, files = zip(*ranks, strict=True)
    worst = next((code for code in codes if code), 0)
    return Ended(returncode=worst, stdout="".join(stdout), stderr="".join(stderr), files=files[0])


def _rank(
    rank: int,
    size: int,
    program: Sequence[str],
    folder: str | None,
    environment: Mapping[str, str],
    files: Sequence[str],
) -> tuple[int, str, str, dict[str, str]]:
    """Run one rank of a program; return its exit code, its output, and the text of its files."""
    shared = Path(os.environ["PGLOSS_WORLD"])
    where = Path(folder) if folder else shared / "program"
    where.mkdir(exist_ok=True)
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_port(rank, shared)))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.chdir(where)
    sys.path[:0] = [str(ROOT), str(where)]
    printed = [shared / f"{rank}.{stream}" for stream in (1, 2)]
    for stream, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
    code = _run(program)
    sys.stdout.flush()
    sys.stderr.flush()
    # The store lives in the first rank; under torchrun, in a process that outlives all of them.
    (shared / f"{rank}.ended").touch()
    while rank == 0 and not all((shared / f"{peer}.ended").exists() for peer in range(size)):
        time.sleep(0.02)
    stdout, stderr = (path.read_text(errors="replace") for path in printed)
    return code, stdout, stderr, {name: (where / name).read_text() for name in files if (where / name).exists()}


def _run(program: Sequence[str]) -> int:
    """Run the program as ``__main__``, and return its exit code."""
    run: Callable[..., Any] = runpy.run_path
    if program[0] == "-m":
        run, program = runpy.run_module, program[1:]
    sys.argv = list(program)
    if run is runpy.run_path:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
    try:
        run(program[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter would: the traceback, and 1
        traceback.print_exc()
        return 1
    return 0


def _port(rank: int, shared: Path) -> int:
    """A free port, the same on every rank."""
    file = shared / "port"
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            (shared / "port.part").write_text(str(probe.getsockname()[1]))
        (shared / "port.part").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())
