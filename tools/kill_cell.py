"""Run one cell of tools/kill_matrix.py: a launcher and two ranks, forks of this process, which has imported all.

With ``cut`` each rank has a network of its own (Linux's network namespaces, a cable between them), which needs the
rights of root; the launcher with the store is on the innocent rank's side.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kill_rank import LAYOUTS, Cell, run_rank

__all__ = ["LAYOUTS", "SLACK", "Cell", "TooSlowError", "judge", "run_cell"]

SLACK = 10.0
"""Seconds beyond the timeout within which every peer must have ended."""
_START = 90.0
"""Seconds that a cell may take until its fault happens: the machine may be busy."""
_ADDRESS = ("10.213.7.1", "10.213.7.2")


class TooSlowError(RuntimeError):
    """The cell's fault was never reached: the machine is too busy for this timeout, and nothing was learnt."""


def run_cell(cell: Cell, limit: float, *, show: bool = False) -> dict[str, Any]:
    """Run the cell: what the peer said, and how long after the fault it ended; ``show``: print all that was said.

    Returns:
        ``seconds`` from the fault to the peer's end (of both ranks, if the network was cut), None where it did not end;
        ``error``, the peer's exception with its notes, empty where its step went through; ``lines`` of its log that
        speak of the guilty rank or the store, and ``own``, those of the guilty rank; ``ok``, as `judge` has it.

    Raises:
        TooSlowError: try again, or with a longer timeout.
    """
    with tempfile.TemporaryDirectory(prefix="pgloss-kill-") as name:
        folder = Path(name)
        launcher = _fork(lambda: _launch(cell, limit, folder), folder / "launcher.log")
        os.waitpid(launcher, 0)
        if not (folder / "ready").exists():
            raise RuntimeError(f"{cell.name}: no start\n{(folder / 'launcher.log').read_text()}")
        found = _found(cell, folder)
        happened = (folder / "fault").exists()
        if show:
            for file in sorted(folder.glob("*.log")):
                print(f"---- {file.name}\n{file.read_text()}")
    if not happened:
        raise TooSlowError(f"{cell.name}: the groups' {limit:g} s were over before the fault; {found['error'][:200]}")
    return found | {"ok": judge(cell, found, limit)}


def judge(cell: Cell, found: dict[str, Any], limit: float) -> bool:
    """Whether the peer ended in time, as it should, and named the guilty rank for what it is."""
    in_time = found["seconds"] is not None and found["seconds"] < limit + SLACK
    ended = bool(found["error"]) != (cell.fault == "late")
    return in_time and ended and any(WORDS[cell.fault](cell, line) for line in (*found["lines"], found["error"]))


def _named(pattern: str, gone: str = "") -> Callable[[Cell, str], bool]:
    def said(cell: Cell, line: str) -> bool:
        if gone and cell.store == "rank 0" and cell.guilty == 0 and gone in line:
            return True
        return re.search(pattern.format(rank=cell.guilty), line) is not None

    return said


_SILENT = _named(r"rank {rank} gives no sign of life", gone="the job's store")
WORDS: dict[str, Callable[[Cell, str], bool]] = {
    "raise": _named(r"rank {rank}\b.*put in by|put in by.*rank {rank}\b"),
    "kill": _SILENT,
    "stop": _SILENT,
    "cut": _SILENT,
    "late": _named(r"rank {rank} is behind"),
}
"""Fault to whether a line names the guilty rank for it."""


def _found(cell: Cell, folder: Path) -> dict[str, Any]:
    peer = 1 - cell.guilty
    ends = [json.loads(file.read_text()) for file in folder.glob(f"ended{peer}")]
    both = [json.loads(file.read_text()) for file in folder.glob("ended?")] if cell.fault == "cut" else ends
    happened = json.loads((folder / "fault").read_text()) if (folder / "fault").exists() else None
    whole = happened is not None and len(both) == (2 if cell.fault == "cut" else 1)
    seconds = round(max(end["at"] for end in both) - happened, 1) if whole else None
    return {
        "seconds": seconds,
        "error": ends[0]["error"] if ends else "",
        "lines": _lines(folder, peer, rf"rank {cell.guilty}\b|the job's store"),
        "own": _lines(folder, cell.guilty, r"rank \d|the job's store"),
    }


def _lines(folder: Path, rank: int, words: str) -> list[str]:
    file = folder / f"rank{rank}.log"
    text = file.read_text(errors="replace") if file.exists() else ""
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if re.search(words, line)))


# ---- processes ----------------------------------------------------------------------------------------------------


def _fork(work: Callable[[], None], log: Path) -> int:
    """A child that runs ``work``, prints into ``log`` and ends with this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        said = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        work()
        code = 0
    except BaseException:  # noqa: BLE001  as the interpreter would
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # not by way of groups that wait for a peer
    return child


def _launch(cell: Cell, limit: float, folder: Path) -> None:
    """Start the ranks and what lies between them, wait for those that should end, and end the rest."""
    import torch.distributed as dist

    cut = cell.fault == "cut"
    if cut:
        _own_network()
    ranks = [
        _fork(lambda rank=rank: _rank(cell, limit, folder, rank), folder / f"rank{rank}.log")  # type: ignore[misc]
        for rank in range(2)
    ]
    try:
        if cut:
            _wait(folder / "apart")
            _cable(ranks[cell.guilty])
        port = _free_port()
        if cell.store == "launcher":
            patient = datetime.timedelta(seconds=60)
            store = dist.TCPStore("0.0.0.0", port, None, is_master=True, timeout=patient, wait_for_workers=False)
        (folder / "part").write_text(str(port))
        (folder / "part").rename(folder / "ready")
        must = [1 - cell.guilty, *([cell.guilty] if cut else [])]
        began, late = time.time(), None
        while not all((folder / f"ended{rank}").exists() for rank in must):
            if late is None and (folder / "fault").exists():
                late = time.time() + limit + SLACK + 5
            if time.time() > (late or began + _START) or all(_over(pid) for pid in ranks):
                break
            time.sleep(0.05)
        if cell.store == "launcher":
            del store
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _over(pid: int) -> bool:
    """Whether the child has ended; it stays a zombie, so that its number is not given to another process."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _rank(cell: Cell, limit: float, folder: Path, rank: int) -> None:
    address = "127.0.0.1"
    if cell.fault == "cut":
        if rank == cell.guilty:
            _own_network()
            (folder / "apart").touch()
        address = _ADDRESS[0]
        os.environ["GLOO_SOCKET_IFNAME"] = "veth0"
    _wait(folder / "ready")
    os.environ.update(
        MASTER_ADDR=address, MASTER_PORT=(folder / "ready").read_text(), RANK=str(rank), WORLD_SIZE="2",
        LOCAL_RANK=str(rank), TORCHELASTIC_USE_AGENT_STORE=str(cell.store == "launcher"),
        TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    run_rank(cell, limit, folder, rank)


def _wait(file: Path) -> None:
    late = time.monotonic() + _START
    while not file.exists():
        if time.monotonic() > late:
            raise TimeoutError(f"{file.name} did not come")
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _own_network() -> None:
    """A network namespace for this process alone.

    Raises:
        OSError: without root's rights.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "a cut link needs network namespaces, and so root's rights")
    _ip("link set lo up")


def _cable(other: int) -> None:
    """A cable from this process's network to that of process ``other``; ``veth0`` at both ends."""
    there = ["nsenter", "-t", str(other), "-n"]
    _ip(f"link add name veth0 type veth peer name veth0 netns {other}")
    for before, address in (([], _ADDRESS[0]), (there, _ADDRESS[1])):
        _ip(f"addr add {address}/30 dev veth0", before)
        _ip("link set veth0 up", before)


def _ip(words: str, before: list[str] | None = None) -> None:
    subprocess.run([*(before or []), "ip", *words.split()], check=True)
