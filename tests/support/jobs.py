"""A training step on a real Megatron-Core model, on any layout: short names for `megatron_pgloss.verify`."""

from __future__ import annotations

from megatron_pgloss.verify.data.batches import batch_of, batches_of, rows_of_step, share
from megatron_pgloss.verify.data.rows import VOCAB, WIDTH
from megatron_pgloss.verify.layouts.scenario import Scenario as Job
from megatron_pgloss.verify.run.compare import worst
from megatron_pgloss.verify.run.drive import build, one_step, run_schedule
from megatron_pgloss.verify.run.judge import oracle_model
from support.shelf import answer as oracle_answer
from support.shelf import judge_of

__all__ = [
    "VOCAB", "WIDTH", "Job", "batch_of", "batches_of", "build", "judge_of", "one_step", "oracle_answer",
    "oracle_model",
    "rows_of_step", "run_schedule", "share", "worst",
]  # fmt: skip
