"""A rank that fails, is killed, stops or is late is named by its peer, within the timeout of the groups that it waits
in. Cells of tools/kill_matrix.py, each a job of two ranks of its own; docs/reliability.md has all of them.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pgloss.megatron.job_store import ask
from megatron_pgloss.megatron.watch import Watch
from megatron_pgloss.megatron.whereabouts import State, look
from support import layouts
from support.worlds import world_fixture

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import kill_cell
from kill_cell import Cell

LIMIT = 4.0
"""Seconds: timeout of every group."""
WORDS = {
    Cell(fault="raise", layout="tp2", guilty=1, phase="finish"): "DataError: ValueError: put in by tools/",
    Cell(fault="raise", layout="pp2", guilty=1, phase="loss"): "rank 1 failed in the loss of micro-batch 1, step 1: ",
    Cell(fault="raise", layout="dp2", guilty=1, phase="backward"): "rank 1 failed in the schedule, after micro-batch ",
    Cell(fault="raise", layout="dp2", guilty=0, phase="score"): "rank 0 failed in score, step 0: ",
    Cell(fault="kill", layout="dp2", guilty=1, phase="begin"): "rank 1 gives no sign of life for ",
    Cell(fault="stop", layout="cp2", guilty=0, phase="backward"): "rank 0 gives no sign of life for ",
    Cell(fault="stop", layout="tp2", guilty=0, phase="forward", store="rank 0"): "the job's store does not answer: ",
    Cell(fault="late", layout="pp2", guilty=0, phase="backward"): "rank 0 is behind: in the schedule, after ",
}
"""Cell to what the peer says of it."""
CELLS = {cell.name: cell for cell in WORDS}
RAISED = [name for name, cell in CELLS.items() if cell.fault == "raise" and cell.phase != "finish"]
LATE = [name for name, cell in CELLS.items() if cell.fault == "late"]


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    return {name: kill_cell.run_cell(CELLS[name], LIMIT) for name in list(CELLS)[rank::world]}


ran = world_fixture(tour, 2, grouped=False, early=True)


@pytest.fixture(scope="module")
def found(ran: Any) -> dict[str, Any]:
    return ran[0] | ran[1]


@pytest.mark.multiproc
@pytest.mark.parametrize("name", list(CELLS))
def test_the_peer_of_a_faulty_rank_ends_in_time_and_names_it(name: str, found: Any) -> None:
    one = found[name]
    assert one["seconds"] is not None and one["seconds"] < LIMIT + 10, one
    assert any(WORDS[CELLS[name]] in line for line in one["lines"]), one
    assert one["ok"], one


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RAISED)
def test_the_rank_that_fails_says_so_in_one_line(name: str, found: Any) -> None:
    (line,) = [line for line in found[name]["own"] if WORDS[CELLS[name]] in line]
    assert line.startswith("rank ") and line.endswith("ValueError: put in by tools/kill_matrix.py")


@pytest.mark.multiproc
@pytest.mark.parametrize("name", [name for name in CELLS if name not in LATE])
def test_the_error_of_the_peers_collective_has_the_name_as_a_note(name: str, found: Any) -> None:
    assert WORDS[CELLS[name]] in found[name]["error"]


@pytest.mark.multiproc
@pytest.mark.parametrize("name", LATE)
def test_a_late_rank_is_named_while_the_others_wait_and_nothing_fails(name: str, found: Any) -> None:
    (line,) = [line for line in found[name]["lines"] if "has waited" in line]
    assert found[name]["error"] == "" and line.startswith("rank 1 has waited ") and "in the schedule, after" in line
    assert not [line for line in found[name]["own"] if "has waited" in line]  # it does not wait: it is late


# ---- who is behind, by hand ----------------------------------------------------------------------------------------

STORE = dist.HashStore()
SCHEDULE = dict(step=3, phase="schedule")


def watch(**state: Any) -> Watch:
    one = Watch(0, 1)
    one._state = State(**state)
    return one


def test_in_one_phase_whoever_does_not_wait_is_late() -> None:
    known = {1: State(step=3, phase="begin", waits=True), 2: State(step=3, phase="begin")}
    assert watch(step=3, phase="begin")._late(known) == [2]


def test_under_pipelines_the_late_stage_may_have_begun_more_microbatches_than_those_that_wait() -> None:
    known = {1: State(**SCHEDULE, micro=5), 2: State(**SCHEDULE, micro=2, waits=True)}
    assert watch(**SCHEDULE, micro=2)._late(known) == [1]


def test_a_busy_rank_further_on_is_not_late() -> None:
    known = {1: State(step=4, phase="begin"), 2: State(**SCHEDULE, micro=2, waits=True)}
    assert watch(step=3, phase="finish")._late(known) == [2]


def test_where_no_rank_is_known_to_wait_the_place_decides() -> None:
    """On a GPU: ranks wait for their devices."""
    known = {1: State(**SCHEDULE, micro=1), 2: State(**SCHEDULE, micro=2), 3: State(step=3, phase="finish")}
    assert watch(step=3, phase="finish")._late(known) == [1]
    assert watch(**SCHEDULE, micro=1)._late(known) == []


def test_a_failure_counts_in_the_next_step_too_until_its_rank_goes_on() -> None:
    failing, waiting = watch(step=2, phase="score"), watch(step=3, phase="begin")
    failing.rank = 1
    for one in (failing, waiting):
        one._store, one._key = STORE, "key"
    failing.fail(ValueError("no memory\nand more"))
    assert waiting._failure() == "rank 1 failed in score, step 2: ValueError: no memory"
    failing.note("idle")
    failing._write()
    assert waiting._failure().startswith("rank 1 failed")
    failing.note("begin", opens=True)
    failing._write()
    assert waiting._failure() == ""


class Work:
    """Waits in C, as torch's."""

    wait = staticmethod(time.sleep)


def test_a_thread_that_waits_is_told_from_one_that_works() -> None:
    over, seen = threading.Event(), {}

    def works() -> None:
        while not over.is_set():
            sum(range(100))

    def waits() -> None:
        Work.wait(1)

    def sleeps() -> None:
        over.wait()  # for another thread, in lines of the standard library

    for work in (works, waits, sleeps):
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.05)
        seen[work.__name__] = look(thread.ident)
    over.set()
    here = Path(__file__).name
    assert seen["works"][0].startswith(f"{here}:") and not seen["works"][1]
    assert seen["waits"] == (f"{here}:{waits.__code__.co_firstlineno + 1}", True)
    assert seen["sleeps"] == (f"{here}:{sleeps.__code__.co_firstlineno + 1}", False)
    assert look(threading.get_ident()) == ("", False)  # the one that asks


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    over, began = threading.Event(), time.monotonic()
    assert ask(lambda: over.wait() and "late", 0.05) is None
    assert time.monotonic() - began < 5
    over.set()

    def gone() -> str:
        raise dist.DistNetworkError("Broken pipe")

    assert ask(gone, 5) is None and raised == []
    assert ask(lambda: "here", 5) == "here"


def test_patience_without_a_world_is_two_minutes() -> None:
    """With one it is half of the world's timeout, if that is less: else no peer above would speak in time."""
    assert Watch(0, 1).patience == 120
