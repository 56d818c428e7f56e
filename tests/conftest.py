"""What holds for every test: one thread a process, the gpu marker, hypothesis without deadlines."""

from __future__ import annotations

import importlib.util
import os

# Before anything imports torch: ranks share few cores, and sums must not depend on thread counts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

if importlib.util.find_spec("hypothesis"):  # a bare GPU machine runs tests/test_gpu.py without it
    from hypothesis import settings

    # A busy machine must not fail a test, and CI must not draw other examples than the run before.
    settings.register_profile("pgloss", deadline=None, derandomize=bool(os.environ.get("CI")))
    settings.load_profile("pgloss")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Docs last, and tests marked ``gpu`` skipped where there is no CUDA device.

    Two pages run Megatron-Core in this process, which patches ``torch.cuda`` for good: nothing else should come after.
    """
    items.sort(key=lambda item: item.path.name.startswith("test_docs"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        reason = "needs a CUDA device, and torch.cuda.is_available() is False here"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


_TABLE = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[str]:
    """Lines to print at the end of the run: measured figures that a reader wants to see even when all is well."""
    return pytestconfig.stash.setdefault(_TABLE, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the tests put into ``table``."""
    lines = config.stash.get(_TABLE, [])
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
