"""Settings of every test: which tests run and in which order, one thread per process, worlds side by side."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch: ranks share few cores, and sums must not depend on thread counts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

if importlib.util.find_spec("hypothesis"):  # a bare GPU machine runs tests/test_gpu.py without it
    from hypothesis import settings

    # A busy machine must not make a test fail, and every run must draw the same examples.
    settings.register_profile("pgloss", deadline=None, derandomize=bool(os.environ.get("CI")))
    settings.load_profile("pgloss")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests and their order."""
    group = parser.getgroup("megatron_pgloss")
    group.addoption("--exhaustive", action="store_true", help="whole products of layouts, specs and dtypes, not covers")
    group.addoption("--lines", metavar="FILE", help="write which lines of the package each test runs (Python 3.12)")
    group.addoption("--shuffle", type=int, metavar="SEED", help="files in a random order, and the tests in each")


def pytest_configure(config: pytest.Config) -> None:
    """Set environment variables before test files are imported: their lists of cases depend on them."""
    if config.getoption("--exhaustive"):
        os.environ["PGLOSS_EXHAUSTIVE"] = "1"
    if config.getoption("--lines"):
        os.environ["PGLOSS_LINES"] = "1"
    shelf = tempfile.TemporaryDirectory(prefix="pgloss-shelf-")
    os.environ["PGLOSS_SHELF"] = shelf.name
    config.add_cleanup(shelf.cleanup)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.collectonly:
        from support.worlds import RUN

        RUN.warm()  # the whole suite: ranks will be needed, and their imports take as long as collecting the tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests of exhaustive runs, and of GPUs where there is none; order the others by what they wait for."""
    from support.worlds import worlds_of

    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    seed = config.getoption("--shuffle")
    if seed is not None:
        _shuffle(items, seed)
    for item in items:
        if waits := worlds_of([item]):
            # Each world has its own deadline from its start, but it may have to wait for seats first.
            item.add_marker(pytest.mark.timeout(600 + sum(world.timeout for world in waits)))
    # Slow tests without a world wait for programs of their own, and leave the machine to the worlds that are left.
    items.sort(key=lambda item: (bool(worlds_of([item])), item.get_closest_marker("slow") is not None))
    _skip_without_gpu(items)


def _shuffle(items: list[pytest.Item], seed: int) -> None:
    dice = random.Random(seed)
    files = sorted({item.path for item in items})
    place = {path: dice.random() for path in files}
    items.sort(key=lambda item: (place[item.path], dice.random()))


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        reason = "needs a CUDA device, and torch.cuda.is_available() is False here"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


# ---- worlds run beside the tests of one process --------------------------------------------------------------------


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the worlds that tests will wait for."""
    from support import lines
    from support.worlds import RARE, RUN, worlds_of

    gc.collect()
    gc.set_threshold(*RARE)
    gc.freeze()  # what was collected so far stays alive, and need not be searched for garbage during thousands of tests
    worlds = worlds_of(session.items)
    if worlds and not session.config.option.collectonly and RUN.method == "forkserver":
        for world in worlds:
            RUN.submit(world)
        RUN.pump_beside()
    if session.config.getoption("--lines"):
        session.config.stash[_LINES] = lines.Map(lines.Recorder())


_LINES = pytest.StashKey[Any]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Collect worlds that ended while a test ran, and start the next ones; note the lines that it ran, if asked to."""
    from support.worlds import RUN, worlds_of

    lines = item.config.stash.get(_LINES, None)
    if lines is not None:
        lines.begin()
    result = yield
    RUN.pump()
    if lines is not None:
        lines.end(item.nodeid, [*worlds_of([item]), *RUN.direct])
    RUN.direct.clear()
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End all worlds with the run."""
    from support.worlds import RUN

    RUN.close()
    if lines := session.config.stash.get(_LINES, None):
        lines.write(Path(session.config.getoption("--lines")))


# ---- what is printed at the end ------------------------------------------------------------------------------------

_TABLE = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[str]:
    """Lines to print at the end of the run: measured figures that are of interest even if all tests pass."""
    return pytestconfig.stash.setdefault(_TABLE, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the tests put into ``table``, what was covered, and what the worlds took."""
    from support import cover
    from support.worlds import RUN

    for title, lines in (
        ("measured", config.stash.get(_TABLE, [])),
        ("covered", cover.NOTES),
        ("worlds", RUN.summary()),
    ):
        if lines:
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)
