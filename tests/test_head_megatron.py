"""The fused head on real Megatron-Core models, four ranks: every parameter's gradient against the oracle."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.planning import Split
from megatron_pgloss.verify.data.batches import batches_of
from megatron_pgloss.verify.layouts.reshard import full_gradients
from megatron_pgloss.verify.layouts.scenario import Scenario
from megatron_pgloss.verify.layouts.table import since
from megatron_pgloss.verify.run.compare import worst
from megatron_pgloss.verify.run.drive import build, leave, make_step, run_schedule
from megatron_pgloss.verify.run.visit import visit
from support import jobs, layouts
from support.cover import EXHAUSTIVE
from support.layouts import quiet
from support.worlds import world_fixture

MODES = ("keep", "recompute", "forward", "auto")
ROUNDING = ("keep32", "keep8")
THD = Split(max_tokens=80)
TURNS = 2 if EXHAUSTIVE else 1
"""Modes on each layout."""
WHERE: list[dict[str, Any]] = [
    dict(tp=2),
    dict(tp=2, sp=True, per_token=True),
    dict(tp=4, sp=True, vocab=30),
    dict(pp=2, vpp=2, tied=True, distributed_optimizer=True, per_token=True),
    dict(tied=True),
    dict(pp=2, empty_rank=True, per_token=True),
    dict(cp=2),
    dict(tp=2, cp=2, sp=True, split=THD, per_token=True),
    dict(tp=2, pp=2, temperature=True),
    dict(overlap=True, loss_scale=2.0**16, per_token=True),
    *since("0.18", dict(tp=2, pp=2, kind="hybrid")),
]


def tour(rank: int, world: int) -> list[tuple[str, float, float]]:
    """Layout by layout: one or two of the modes, two specs by turns."""
    quiet()
    judge, seen = jobs.judge_of({"rich": layouts.rich, "dapo": lambda: pg.presets.dapo(entropy=0.01)}), []
    for number, fields in enumerate(WHERE):
        for turn in (number, number + 1 + number // 4 % 2)[:TURNS]:
            mode = MODES[turn % 4]
            # Terms over units have no mode "forward"; nothing fits into no memory, so auto has to do without logits.
            spec = "dapo" if mode == "forward" or turn % 3 == 2 else "rich"
            options = {"head": mode} | ({"head_memory": 0} if mode == "auto" else {})
            (found,) = visit(Scenario(world=4, options=options, **fields), judge, [spec])
            assert not found.error, found.error
            name = f"{found.layout.name}, {spec}, {mode}, {found.parameter}"
            seen.append((name, found.gradient_error, max(found.loss_error, found.metric_error)))
    return seen


toured = world_fixture(tour, 4)


@pytest.mark.multiproc
@pytest.mark.slow
def test_gradients_equal_the_oracles(toured: Any, table: list[str]) -> None:
    found = toured[0]
    one = max(found, key=lambda row: max(row[1:]))
    table.append(f"fused head, {len(found)} steps on {len(WHERE)} layouts: worst {max(one[1:]):.1e} ({one[0]})")
    assert max(one[1:]) < 1e-10, one
    assert len({row[0] for row in found}) == len(WHERE) * TURNS
    for mode in MODES:
        assert sum(f", {mode}, " in row[0] for row in found) >= 2 * TURNS, mode


def _half(rank: int, world: int) -> dict[str, Any]:
    """float16 with a loss scale of 2^16 and overlapped reduction; an evaluation between two steps; scores."""
    quiet()
    layout = Scenario(tp=2, sp=True, overlap=True, loss_scale=2.0**16, model=dict(dtype=torch.float16))
    spec = pg.presets.dapo()
    judge = jobs.judge_of({"dapo": spec})
    judge.prepare(layout.data)
    scaled = {key: grad * layout.loss_scale for key, grad in judge.answer(layout.data, "dapo")[1].items()}
    chunks, where = build(layout)
    batches = batches_of(layout, where, spec, judge.rows(layout.data))
    found: dict[str, Any] = {}
    for head in ("given", *MODES, *ROUNDING):
        step, _ = make_step(layout, chunks, spec, head=head)
        step.begin(batches)
        step.finish(run_schedule(step, chunks))
        error, _ = worst(full_gradients(chunks), scaled)
        before = [buffer.grad_data.clone() for chunk in chunks for buffer in chunk.buffers]
        step.begin(batches)
        step.finish(_evaluate(step, chunks))
        after = [buffer.grad_data for chunk in chunks for buffer in chunk.buffers]
        found[head] = {
            "error": error,
            "untouched": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "scores": [batch.streams["old"] for batch in step.score(batches, into="old")],
        }
    leave(chunks)
    return found | {"said": _said(), "one byte": _one_byte()}


def _said() -> dict[str, list[str]]:
    """What steps of a bf16 model log of their heads, and what is refused of a note."""
    layout = Scenario(tp=2, sp=True, layers=2, model=dict(dtype=torch.bfloat16))
    spec = pg.presets.dapo()
    judge = jobs.judge_of({"dapo": spec})
    judge.prepare(layout.data)
    chunks, where = build(layout)
    batches, said = batches_of(layout, where, spec, judge.rows(layout.data)), {}
    log = logging.getLogger("megatron_pgloss.megatron")
    before = log.level
    log.setLevel(logging.INFO)
    for name, options in {
        "one-sided": dict(head="keep", head_dtype="fp32", sampler_head="bf16"),
        "alike": dict(head="keep", sampler_head="bf16"),
        "given, too coarse": dict(head="given", sampler_head="tf32"),
        "auto": dict(head="auto"),
    }.items():
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign, misc]
        log.addHandler(handler)
        step, _ = make_step(layout, chunks, spec, **options)
        for _ in range(2 if name == "one-sided" else 1):
            step.begin(batches)
            step.finish(run_schedule(step, chunks))
        log.removeHandler(handler)
        said[name] = lines
        if name == "alike":
            assert step.note == {"head": "keep", "head_dtype": "bf16", "sampler_head": "bf16"}
            step.check_note(step.note)
            try:
                step.check_note({"head": "keep8"})
            except pg.SpecError as error:
                said["note"] = [str(error)]
    log.setLevel(before)
    leave(chunks)
    return said


LAYOUTS: tuple[dict[str, Any], ...] = (
    dict(), dict(tp=2, sp=True, per_token=True), dict(cp=2, split=THD),
    dict(vocab=30), dict(tp=4, sp=True, vocab=30),
)  # fmt: skip
"""The first of each vocabulary is the one that the others are held to."""


def _one_byte() -> list[tuple[str, float, float]]:
    """``keep8`` in float64 over layouts: gradients against those of the first layout on the same data, where every
    process has the whole head.
    """
    spec = pg.presets.dapo(entropy=0.01)
    judge, found, first = jobs.judge_of({"dapo": spec}), [], {}
    for fields in LAYOUTS:
        layout = Scenario(world=4, **{"layers": 2, **fields})
        judge.prepare(layout.data)
        chunks, where = build(layout)
        step, more = make_step(layout, chunks, spec, head="keep8")
        step.begin(batches_of(layout, where, spec, judge.rows(layout.data)))
        step.finish(run_schedule(step, chunks, **more))
        grads = {name: grad.clone() for name, grad in full_gradients(chunks).items()}
        exact, _ = worst(grads, judge.answer(layout.data, "dapo")[1])
        same, _ = worst(grads, first.setdefault(layout.data, grads))
        found.append((layout.name, same, exact))
        leave(chunks)
    return found


def _evaluate(step: Any, chunks: list[Any]) -> Any:
    """Forward only, with the gradients of the step before still in their buffers."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=step.forward_step, data_iterator=step.data_iterator(), model=chunks[0],
        num_microbatches=step.num_microbatches, seq_length=step.seq_length, micro_batch_size=step.micro_batch_size,
        forward_only=True,
    )  # fmt: skip


everyone = world_fixture(_half, 4)


@pytest.mark.multiproc
def test_half_precision_loss_scale_evaluation_and_scores(everyone: Any) -> None:
    """As good as from given logits, no gradient lost to float16's range, and an evaluation leaves no trace."""
    for found in everyone:
        plain = found["given"]
        assert plain["error"] < 0.05
        for mode in MODES:
            assert found[mode]["error"] <= 1.2 * plain["error"], (mode, found[mode]["error"], plain["error"])
            assert found[mode]["untouched"], mode
            for one, other in zip(found[mode]["scores"], plain["scores"], strict=True):
                assert float((one - other).abs().max()) < 2e-2  # given logits are rounded to float16
        for mode in ROUNDING:
            assert found[mode]["error"] <= 1.2 * plain["error"] + (3e-3 if mode == "keep8" else 0), mode
            assert found[mode]["untouched"], mode


@pytest.mark.multiproc
def test_one_byte_a_logit_rounds_alike_on_every_layout(everyone: Any, table: list[str]) -> None:
    """1e-10 from the same head in one process, in float64; how far it is from the oracle is said."""
    found = everyone[0]["one byte"]
    table.append(f"head='keep8', {len(found)} layouts: {max(row[2] for row in found):.1e} from the oracle")
    for name, same, exact in found:
        assert same < 1e-10, name
        assert 1e-6 < exact < 2e-2, name  # it does round


@pytest.mark.multiproc
def test_a_head_says_its_numbers_and_a_one_sided_one_is_warned_of(everyone: Any) -> None:
    for rank, found in enumerate(everyone):
        said, speaks = found["said"], rank % 2 == 0  # the first tensor-parallel rank
        warned = {name: [line for line in lines if line.startswith("WARNING")] for name, lines in said.items()}
        assert len(warned["one-sided"]) == speaks and not warned["alike"] and not warned["auto"]
        assert len(warned["given, too coarse"]) == speaks
        if speaks:
            assert "fp32 and the sampler's bf16" in warned["one-sided"][0] and "k3 is " in warned["one-sided"][0]
            assert "cannot be measured" in warned["given, too coarse"][0]
        assert any("logits in fp32; the sampler's head: bf16" in line for line in said["one-sided"])
        assert any("not declared" in line for line in said["auto"])
        (saved,) = [line for line in said["auto"] if "head='keep8'" in line]
        assert "head='auto' takes keep32" in saved
        assert "keep8" in said["note"][0] and "check_note" in said["note"][0]
