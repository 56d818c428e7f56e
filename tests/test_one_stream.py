"""A new stream is one row of one table: added in a copied tree, it travels from every constructor to a user's function;
and whatever is left out beside the row is named by a test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BEFORE = "    kept_sets: Annotated["
ROW = """    scores: Annotated[Floats | None, StreamSpec(
        name="score", dtype="float", fill=0.5, help="how well the token was judged",
    )]
"""
TRIP = """
import torch
import megatron_pgloss as pg
from megatron_pgloss.planning import agreement
from megatron_pgloss.rollouts import concatenate

# Two rows: c A A | c A. Scores are about the tokens themselves: 7 2 3 | 8 4.
form = dict(advantages=[1.0, 1.0], lengths=[3, 2])
packed = pg.TokenBatch.from_packed(
    tokens=[1, 2, 3, 4, 5], action_mask=[False, True, True, False, True], scores=[7.0, 2.0, 3.0, 8.0, 4.0], **form)
padded = pg.TokenBatch.from_padded(
    tokens=[[1, 2, 3], [4, 5, 0]], action_mask=[[False, True, True], [False, True, False]],
    scores=[[7.0, 2.0, 3.0], [8.0, 4.0, 99.0]], **form)
span = lambda author, tokens, **more: pg.Span(role="r", author=author, tokens=tokens, **more)
traced = pg.TokenBatch.from_traces([
    pg.Trace(advantage=1.0, spans=[span("harness", [1]), span("policy", [2, 3], streams={"scores": [2.0, 3.0]})]),
    pg.Trace(advantage=1.0, spans=[span("harness", [4]), span("policy", [5], streams={"scores": [4.0]})])])
want = [2.0, 3.0, 0.5, 4.0, 0.5]
for batch in (packed, padded, traced):
    assert batch.streams["score"].tolist() == want, batch.streams["score"]
assert packed.select([1]).streams["score"].tolist() == [4.0, 0.5]
assert concatenate([packed, padded]).streams["score"].tolist() == want * 2
assert packed.with_stream("score", torch.ones(5)).streams["score"].tolist() == [1.0] * 5

bare = pg.TokenBatch.from_packed(tokens=[1, 2], action_mask=[False, True], lengths=[2])
assert agreement.presence(packed) ^ agreement.presence(bare)

# Through a plan, cut and packed, to a function: the sum of score times log-prob over the three actions.
spec = pg.LossSpec(components=[pg.Term("t", lambda x: x.stream("score") * x.logp, normalizer="sum(token)",
                                       needs=("score",))])
for batch in (packed, padded, traced):
    for split in (pg.Split(sequences=1), pg.Split(sequences=2), pg.Split(max_tokens=8, multiple_of=4)):
        total = torch.zeros(())
        for micro in pg.plan([batch], spec, split=split).microbatches():
            logp = torch.full(micro.shape, -1.0)
            total += pg.policy_loss(pg.TokenLogprobs(logprob=logp), micro).loss
        assert total == -9.0, (split, total)

# A context-parallel rank's slice of the packed row: chunks 0 and 3 of four; padding holds the fill.
micro = next(iter(pg.plan([packed], spec, split=pg.Split(max_tokens=8, multiple_of=4)).microbatches()))
whole = micro.stream("score")[0]
assert sorted(whole.tolist()) == sorted([2.0, 3.0, 0.5, 4.0, 0.5, 0.5, 0.5, 0.5]), whole
picked = torch.tensor([0, 1, 6, 7])
part = micro.take(picked, (1, 4), torch.tensor([0, 0, 3, 3]), 4, None)
assert torch.equal(part.stream("score")[0], whole[picked])

# A rank without rows has it too; where it is absent it is asked for by its keyword.
assert pg.plan([], spec, split=pg.Split(sequences=1)).table["score"].shape == (0,)
try:
    pg.plan([bare], spec, split=pg.Split(sequences=1))
except pg.DataError as error:
    assert "give scores=" in str(error), error
print("travelled")
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, its tests and docs with one more row in the table of streams."""
    folder = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("megatron_pgloss", "tests", "docs", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    table = folder / "megatron_pgloss" / "rollouts" / "streams.py"
    text = table.read_text(encoding="utf-8")
    assert text.count(BEFORE) == 1
    table.write_text(text.replace(BEFORE, ROW + BEFORE), encoding="utf-8")
    return folder


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests")])}
    command = [sys.executable, "-B", *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=250)


def test_one_row_carries_a_stream_from_every_constructor_to_a_function(tree: Path) -> None:
    done = run(tree, "-c", TRIP)
    assert done.returncode == 0 and done.stdout == "travelled\n", done.stderr


def test_docs_test_and_oracle_that_were_left_out_are_named(tree: Path) -> None:
    """Beside the row there are the generated docs, the case of the test, and the oracle's own list."""
    wanted = {
        "tests/test_docs_tables.py::test_page_is_up_to_date[conventions.md]",
        "tests/test_stream_table.py::test_every_stream_of_the_table_has_a_case",
        "tests/test_stream_table.py::test_the_oracle_s_own_list_is_the_table_s",
    }
    files = ["tests/test_stream_table.py", "tests/test_docs_tables.py"]
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not test_page or conventions", *files)
    failed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == wanted, done.stdout[-3000:]
    assert "['score'] == []" in done.stdout, done.stdout[-3000:]
