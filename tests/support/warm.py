"""Imported once a test run, by the process that every world is forked from (`support.worlds`).

Nothing here may start a thread, open a process group or change a library: what is forked is only what was imported.
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
    """Import what takes seconds. What is not installed is left to the test that needs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            if importlib.util.find_spec(name.partition(".")[0]):
                importlib.import_module(name)
    # Ranks need not look through what was imported for garbage, and so leave its memory shared.
    gc.collect()
    gc.freeze()


end_with_parent()
load()
