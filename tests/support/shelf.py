"""The oracle's answers, each computed once per test run and stored in a folder that all worlds of the run share.

The key of an answer is a hash of everything that it depends on: the model's parameters and config, rows and spec.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_pgloss.spec import LossSpec
from megatron_pgloss.verify.data.rows import Row
from megatron_pgloss.verify.run.judge import FLOAT64, Answer, Judge, Precision, oracle_answer, plain

FOLDER = "PGLOSS_SHELF"
"""Name of an environment variable: the folder of this run's answers. Without it no answer is stored."""


def answer(chunks: Any, model_fn: Any, rows: Sequence[Row], spec: LossSpec) -> Answer:
    """The answer of `oracle_answer`, or the stored one to the same question."""
    folder = os.environ.get(FOLDER)
    functions = [part["fn"] for part in plain(spec)["components"] if part["kind"] == "term"]
    if folder is None or any(fn.__closure__ for fn in functions):  # the values in a closure are no part of the key
        return oracle_answer(chunks, model_fn, rows, spec)
    file = Path(folder) / f"{_question(chunks, rows, spec, functions)}.pt"
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        # By torch.save, because pickle takes milliseconds per tensor.
        torch.save(_detached(oracle_answer(chunks, model_fn, rows, spec)), part)
        part.rename(file)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def judge_of(specs: Mapping[str, LossSpec | Callable[[], LossSpec]], precision: Precision = FLOAT64) -> Judge:
    """A `Judge` that stores the oracle's answers and finds them again."""
    return Judge(specs, precision, answer)


def _question(chunks: Any, rows: Sequence[Row], spec: LossSpec, functions: Sequence[Callable[..., Any]]) -> str:
    digest = hashlib.sha256()
    for function in functions:
        digest.update(inspect.getsource(function).encode())
    module = chunks[0].module
    plain = {key: value for key, value in vars(module.config).items() if isinstance(value, int | float | str | None)}
    digest.update(f"{type(module).__name__} {sorted(plain.items())}".encode())
    for name, param in module.named_parameters():
        digest.update(f"{name} {param.dtype} {tuple(param.shape)}".encode())
        digest.update(param.detach().contiguous().view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps(spec.to_dict(), sort_keys=True, default=str).encode())
    digest.update(repr([sorted(row.items()) for row in rows]).encode())
    return digest.hexdigest()


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_detached(item) for item in value)
    return value
