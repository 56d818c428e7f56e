"""The process that every world is forked from imports this module once per test run (`support.worlds`).

Nothing here may start a thread, open a process group or change a library: forks must inherit imports and nothing else.
"""

from __future__ import annotations

import gc
import importlib
import warnings

from support.orphans import end_with_parent

MODULES = (
    "pytest",
    "hypothesis",
    "sybil",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron_pgloss.verify.faults.self_test",
    "megatron_pgloss.verify.run.command",
    "megatron_pgloss.megatron",
)


def load() -> None:
    """Import the modules that take seconds. Modules that are not installed are skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            if importlib.util.find_spec(name.partition(".")[0]):
                importlib.import_module(name)
    # Frozen objects are not searched for garbage in the ranks, so that their memory stays shared.
    gc.collect()
    gc.freeze()


end_with_parent()
load()
