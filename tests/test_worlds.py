"""The worlds that other tests run in: what ends badly is named, the rest goes on, and nothing is left for the next."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.cover import cover, paired, pairs
from support.programs import launch
from support.worlds import SEATS, run_world, world_fixture

pytestmark = pytest.mark.multiproc


def added(rank: int, size: int, more: float) -> tuple[float, int, int]:
    """A collective's result, this process, and the signal that it gets when its parent ends."""
    total = torch.tensor([rank + more])
    dist.all_reduce(total)
    at_parents_end = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(at_parents_end))  # PR_GET_PDEATHSIG
    return float(total), os.getpid(), at_parents_end.value


three = world_fixture(added, 3, 0.5)


def test_a_world_brings_what_each_rank_returned(three: Any) -> None:
    assert [total for total, *_ in three] == [0 + 1 + 2 + 1.5] * 3
    assert len({process for _, process, _ in three}) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_run_that_is_killed_leaves_no_rank_behind(three: Any) -> None:
    assert [signal_ for *_, signal_ in three] == [signal.SIGKILL] * 3
    child = (
        "from support.orphans import end_with_parent as e; e(); import time; print('here', flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, cwd=Path(__file__).parent) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"here\n"
        run.kill()
        assert run.stdout.read() == b""  # the child held the other end of the pipe, for a minute


def failing(rank: int, size: int) -> None:
    if rank == 1:
        print("the last thing it said")
        raise KeyError("mine alone")
    dist.barrier()


def test_the_rank_that_failed_first_is_named_with_its_traceback_and_what_it_printed() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of test_worlds.failing on 3 failed") as caught:
        run_world(failing, 3)
    for words in ("KeyError: 'mine alone'", "in failing", "the last thing it said"):
        assert words in str(caught.value)


def killed(rank: int, size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_without_a_word_is_named() -> None:
    # Whoever waits for it may say first that a connection was closed.
    with pytest.raises(AssertionError, match=r"rank [01] of test_worlds.killed on 2 (died with exit code -9|failed)"):
        run_world(killed, 2)


def sleeping(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def test_a_hang_ends_at_its_deadline_and_says_where_each_rank_stood() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"hang: ranks \[0, 1\] of test_worlds.sleeping") as caught:
        run_world(sleeping, 2, timeout=3)
    assert time.monotonic() - started < 30
    assert "in sleeping" in str(caught.value) and "barrier" in str(caught.value)


def patched(rank: int, size: int) -> None:
    """Leave everything in disorder."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    torch.cuda.synchronize = None
    dist.all_reduce = None
    os.environ["PGLOSS_LEFT_BEHIND"] = "1"
    os.chdir("/")
    import megatron_pgloss

    megatron_pgloss.plan = None


def state(rank: int, size: int) -> list[Any]:
    import megatron_pgloss

    return [
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.initial_seed(),
        callable(torch.cuda.synchronize), callable(dist.all_reduce), os.environ.get("PGLOSS_LEFT_BEHIND"),
        Path.cwd() == Path("/"), callable(megatron_pgloss.plan), "megatron.core" in sys.modules,
    ]  # fmt: skip


def test_nothing_that_a_world_changes_reaches_the_next() -> None:
    before = run_world(state, 1)
    run_world(patched, 2)
    assert run_world(state, 1) == before
    assert before[0][-1], "ranks are forked from a process that has Megatron-Core"


def test_a_world_of_more_ranks_than_seats_is_refused() -> None:
    with pytest.raises(ValueError, match=f"needs more than PGLOSS_SEATS={SEATS}"):
        run_world(state, SEATS + 1)
    assert run_world(state, 1)  # and the next one is not held up by it


def test_a_program_has_torchruns_environment_and_an_exit_code(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(dist.get_rank(), dist.get_world_size(), sys.argv[1:], __name__)\n"
        "dist.destroy_process_group()\n"
        "sys.exit(3 if os.environ['RANK'] == '1' else 0)\n"
    )
    done = launch(2, str(program), "--x", folder=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["0 2 ['--x'] __main__", "1 2 ['--x'] __main__"]
    assert done.returncode == 3


# ---- what is visited -------------------------------------------------------------------------------------------------


def test_a_cover_shows_all_with_few_and_keeps_what_is_asked_for() -> None:
    cases = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]

    def shows(case: tuple[int, int, int]) -> set[Any]:
        return pairs(f"{axis}{value}" for axis, value in zip("abc", case, strict=True))

    chosen = cover(cases, shows, always=[(2, 2, 2)])
    assert set().union(*map(shows, chosen)) == set().union(*map(shows, cases))
    assert 9 <= len(chosen) <= 12 and (2, 2, 2) in chosen  # nine pairs of any two axes, at most one a case
    assert chosen == [case for case in cases if case in chosen]


def test_triples_are_shown_where_they_are_named() -> None:
    assert ("tp", "pp", "cp") in pairs({"tp", "pp", "cp", "dp"}, [("tp", "pp", "cp")])
    assert ("tp", "pp", "cp") not in pairs({"tp", "cp"}, [("tp", "pp", "cp")])


@pytest.mark.parametrize("case", paired("a test of pairs", x=[1, 2, 3], y=["a", "b"], z=[True, False]))
def test_pairs_of_independent_axes(case: tuple[int, str, bool]) -> None:
    assert case in [(x, y, z) for x in (1, 2, 3) for y in "ab" for z in (True, False)]


def test_pairs_are_all_there() -> None:
    found = paired("a test of pairs", x=[1, 2, 3], y=["a", "b"], z=[True, False])
    assert {case[:2] for case in found} == {(x, y) for x in (1, 2, 3) for y in "ab"}
    assert {case[1:] for case in found} == {(y, z) for y in "ab" for z in (True, False)}
    assert {(case[0], case[2]) for case in found} == {(x, z) for x in (1, 2, 3) for z in (True, False)}
