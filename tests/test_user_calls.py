"""mypy checks a user's call of the constructors: the right ones pass, each wrong one is an error on its own line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the package imports is left out, so that it takes seconds: torch is this much of it, the rest is Any.
TORCH = """
from typing import Any
class Tensor: ...
class device: ...
class dtype: ...
def __getattr__(name: str) -> Any: ...
"""
SETTINGS = """
[mypy]
strict = True
follow_imports = skip
[mypy-megatron_pgloss,megatron_pgloss.rollouts.*,torch]
follow_imports = silent
"""
USER = """
import torch
import megatron_pgloss as pg

class Column:
    def __array__(self, dtype: object = None) -> object: ...

def right(tensor: torch.Tensor, column: Column) -> pg.TokenBatch:
    pg.TokenBatch.from_padded(tokens=tensor, lengths=[3, 2], action_mask=tensor, advantages=1.0, temperature=0.7,
        old_logprobs=column, versions=3, kept_sets=[[[1], [2]]], prompt_ids=["a", "b"], episode_ids=[0, 1],
        masks={"m": [[True, False]]}, streams={"mine": tensor}, terminations=["success", "failure"])
    pg.TokenBatch.from_padded(tokens=[[1, 2]], attention_mask=column, action_mask=[[False, True]], advantages=[1, -1])
    span = pg.Span(role="user", author="policy", tokens=[1], logprobs=tensor, streams={"old_logprobs": [-1.0]})
    pg.TokenBatch.from_traces([pg.Trace(spans=[span])], roles=None)
    return pg.TokenBatch.from_packed(tokens=column, lengths=tensor, action_mask=[False, True], top_k=None)

def wrong(tensor: torch.Tensor) -> None:
    make = pg.TokenBatch
"""
PADDED, PACKED = "make.from_padded(tokens=tensor, ", "make.from_packed(tokens=tensor, action_mask=tensor, "
WRONG = {
    PADDED
    + "lengths=[1], action_mask=tensor, old_logprob=tensor)": 'keyword argument "old_logprob" .*mean "old_logprobs"',
    PADDED + "lengths=[1])": 'Missing named argument "action_mask"',
    PACKED[:-2] + ")": 'Missing named argument "lengths"',
    PACKED + "lengths=[1], attention_mask=tensor)": 'Unexpected keyword argument "attention_mask"',
    PACKED + "lengths=[1], advantages='high')": '"advantages" .*incompatible type "str"',
    PACKED + "lengths=[1], old_logprobs=-1.0)": '"old_logprobs" .*incompatible type "float"',
    PACKED + "lengths=[1], versions=1.5)": '"versions" .*incompatible type "float"',
    PACKED + "lengths=[1], masks=tensor)": '"masks" .*incompatible type "Tensor"',
    "make.from_packed(tokens='abc', action_mask=tensor, lengths=[1])": '"tokens" .*incompatible type "str"',
    "make.from_packed(tokens=[1.5], action_mask=tensor, lengths=[1])": '"tokens" .*incompatible type "list\\[float]"',
    "make.from_packed(tensor, tensor, [1])": "Too many positional arguments",
    "make.from_traces([1])": 'List item 0 has incompatible type "int"; expected "Trace"',
    "make.from_traces([], role=None)": 'Unexpected keyword argument "role"',
}
"""Calls, and what mypy says of each."""


def test_mypy_knows_the_keywords_and_their_types(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text(TORCH)
    (tmp_path / "settings.ini").write_text(SETTINGS)
    first = USER.count("\n") + 1
    (tmp_path / "user.py").write_text(USER + "".join(f"    {call}\n" for call in WRONG))
    command = [sys.executable, "-m", "mypy", "--config-file", "settings.ini", "--cache-dir", "cache", "user.py"]
    environment = {"MYPYPATH": f"{tmp_path}:{ROOT}", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    said: dict[int, str] = {}
    for number, text in re.findall(r"^user\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        said[int(number)] = said.get(int(number), "") + text
    assert sorted(said) == list(range(first, first + len(WRONG))), done.stdout + done.stderr
    for number, (call, pattern) in enumerate(WRONG.items(), first):
        assert re.search(pattern, said[number]), (call, said[number])
