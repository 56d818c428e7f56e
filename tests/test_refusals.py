"""Modes the loss refuses, each reached on a real model; and the factors it measures and reads.

One world of two processes. Every row of ``modes.REFUSED`` has a case here, and every supported one names its test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.megatron import factors, modes
from megatron_pgloss.megatron.layout import Layout
from support import jobs, layouts
from support.faulty import outcome
from support.jobs import Job
from support.worlds import world_fixture

SPLIT = pg.Split(sequences=2)
Chunks = list[Any]


def config_of(chunks: Chunks) -> Any:
    """The one config that chunks and wrappers share."""
    return chunks[0].config


def setting(**values: Any) -> Callable[[Chunks], Chunks]:
    """Set fields of the config; refused names are a mistake in the test."""

    def change(chunks: Chunks) -> Chunks:
        for name, value in values.items():
            assert hasattr(config_of(chunks), name), name
            setattr(config_of(chunks), name, value)
        return chunks

    return change


def gather_output(chunks: Chunks) -> Chunks:
    model = chunks[0].module
    model.parallel_output = False
    model.output_layer.gather_output = True
    return chunks


def two_configs(chunks: Chunks) -> Chunks:
    chunks[0].module.config = copy.copy(config_of(chunks))
    chunks[0].module.config.calculate_per_token_loss = True
    return chunks


def whole_graph(chunks: Chunks) -> Chunks:
    config = config_of(chunks)
    modern = hasattr(config, "cuda_graph_modules")  # from 0.17: an implementation of its own; before, a scope
    config.cuda_graph_impl = "full_iteration" if modern else "local"
    if not modern:
        config.cuda_graph_scope = "full_iteration"
    return chunks


def wrapped_by(name: str) -> Callable[[Chunks], Chunks]:
    """The real wrapper's class around the model; its constructor wants CUDA, and nothing of it is run here."""

    def change(chunks: Chunks) -> Chunks:
        if name == "torch":
            from megatron.core.distributed.torch_fully_sharded_data_parallel import (
                TorchFullyShardedDataParallel as Kind,
            )
        else:
            from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel as Kind
        wrapper = Kind.__new__(Kind)
        torch.nn.Module.__init__(wrapper)
        wrapper.config, wrapper.module = config_of(chunks), chunks[0].module
        return [wrapper]

    return change


def old_prediction(chunks: Chunks) -> Chunks:
    """Multi-token prediction in a config without the hook that 0.19 brought."""
    config_of(chunks).mtp_num_layers = 1
    vars(config_of(chunks)).pop("mtp_grad_scale_func", None)
    return chunks


def as_it_is(chunks: Chunks) -> Chunks:
    return chunks


def output_layer(**values: Any) -> Callable[[Chunks], Chunks]:
    """Another output layer: one of a class of its own, as Transformer Engine's is, or one with a bias."""

    def change(chunks: Chunks) -> Chunks:
        layer = chunks[0].module.output_layer
        if "kind" in values:
            layer.__class__ = type(values["kind"], (type(layer),), {})
        else:
            layer.bias = torch.nn.Parameter(torch.zeros(jobs.VOCAB))
        return chunks

    return change


def other_names(chunks: Chunks) -> Chunks:
    """A model that calls its tokens something else."""
    chunks[0].module.forward = lambda tokens, position_ids, attention_mask: None
    return chunks


def headed(head: str, *components: Any, **parts: Any) -> dict[str, Any]:
    """Keywords of a step with a head, and a spec of its own."""
    components = components or (pg.PolicyGradient(),)
    return {"head": head, "spec": pg.LossSpec(components=list(components), **parts)}


def changed_layer(what: str) -> Callable[[Chunks], Chunks]:
    """An output layer that computes something else than its class says, as patches for float32 heads do."""

    def change(chunks: Chunks) -> Chunks:
        layer = chunks[0].module.output_layer
        if what == "hook":
            layer.register_forward_hook(lambda module, args, output: None)
        else:
            ours = getattr(layer, what)
            setattr(layer, what, lambda *args, **more: ours(*args, **more))
        return chunks

    return change


def dynamic(chunks: Chunks) -> Chunks:
    """The field of a development version, in which the installed config has no field of that name."""
    config_of(chunks).dynamic_context_parallel = True
    return chunks


def asks_for_float32(chunks: Chunks) -> Chunks:
    """A model that wants its logits in float32, as the constructor of a development version sets it."""
    chunks[0].module.logit_dtype = torch.float32
    return chunks


KEPT = pg.KeptSet(source="recomputed", outside="drop")
CRITIC: dict[str, Any] = {"spec": pg.presets.critic()}
REFUSED: dict[str, tuple[Any, ...]] = {
    "a model whose forward does not take what the step hands over": (
        Job(), other_names, {}, "input_ids (there: tokens)",
    ),
    "a fused head with kept sets": (Job(), as_it_is, headed("auto", kept=KEPT)),
    "a fused head with a teacher's ids": (Job(), as_it_is, headed("keep", pg.TopKDistill()), "teacher_ids"),
    "a fused head with an exact KL": (Job(), as_it_is, headed("auto", pg.KL(estimator="exact", to="ref"))),
    "head='forward' with a loss that reads more than one token": (
        Job(), as_it_is, headed("forward", pg.PolicyGradient(), pg.Value()),
    ),
    "a fused head on another output layer than ColumnParallelLinear": (
        Job(), output_layer(kind="TEColumnParallelLinear"), {"head": "auto"}, "TEColumnParallelLinear",
    ),
    "a fused head on an output layer with a bias": (Job(), output_layer(), {"head": "auto"}),
    "a fused head on an output layer whose forward was replaced": (Job(), changed_layer("forward"), {"head": "keep"}),
    "a fused head on an output layer whose GEMM was replaced": (
        Job(), changed_layer("_forward_impl"), {"head": "keep"},
    ),
    "a fused head on an output layer with hooks": (Job(), changed_layer("hook"), {"head": "keep"}, "forward hooks"),
    "a fused head that rounds logits of which the model asks for float32": (
        Job(), asks_for_float32, {"head": "keep", "head_dtype": "bf16"},
    ),
    "a fused head with defer_embedding_wgrad_compute": (
        Job(), setting(defer_embedding_wgrad_compute=True), {"head": "auto"},
    ),
    "a fused head with cpu_offloading": (Job(), setting(cpu_offloading=True), {"head": "auto"}),
    "a critic whose output layer is tied to the embedding": (Job(model={"tied": True}), as_it_is, CRITIC),
    "multi-token prediction in a critic": (Job(), setting(mtp_num_layers=1), CRITIC),
    "no finalize_model_grads_func": (Job(), setting(finalize_model_grads_func=None)),
    "overlap_grad_reduce without no_sync_func": (Job(model=layouts.OVERLAP), setting(no_sync_func=None)),
    "pipeline size 2 with virtual pipelining and batch_p2p_comm": (Job(pp=2, vpp=2), setting(batch_p2p_comm=True)),
    "gathered logits": (Job(tp=2), gather_output),
    "calculate_per_token_loss set differently in two configs": (Job(), two_configs),
    "on_nonfinite='skip' with delayed FP8 scaling": (
        Job(), setting(fp8="hybrid", fp8_recipe="delayed"), {"on_nonfinite": "skip"},
    ),
    "full-iteration CUDA graphs": (Job(), whole_graph),
    "torch FSDP2": (Job(), wrapped_by("torch")),
    "Megatron-FSDP": (Job(), wrapped_by("megatron")),
    "hybrid context parallelism": (Job(cp=2), setting(hybrid_context_parallel=True)),
    "dynamic context parallelism": (Job(cp=2), dynamic),
    "expert-parallel overlap (combined 1F1B)": (Job(), setting(overlap_moe_expert_parallel_comm=True)),
    "multi-token prediction before megatron-core 0.19": (Job(), old_prediction),
    "generalised tensor parallelism (gtp_remat)": (Job(), as_it_is),
}  # fmt: skip
"""Layout and change of the model; then, where they matter, the step's keywords and what it says that it got."""


def collection(**changes: Any) -> Any:
    """Megatron's own process groups as a collection."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    made = ProcessGroupCollection.use_mpu_process_groups()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def made(chunks: Chunks, spec: pg.LossSpec | None = None, **more: Any) -> pgm.PolicyLossStep:
    return pgm.PolicyLossStep(spec or pg.presets.dapo(), chunks, split=SPLIT, **more)


@contextmanager
def installed(function: Callable[..., Any]) -> Iterator[None]:
    """Another ``forward_step_calc_loss`` in Megatron's place, as a new version might bring."""
    from megatron.core.pipeline_parallel import schedules

    ours, schedules.forward_step_calc_loss = schedules.forward_step_calc_loss, function
    try:
        yield
    finally:
        schedules.forward_step_calc_loss = ours


def other_schedules(chunks: Chunks) -> dict[str, tuple[str, str]]:
    """Schedules that scale in ways which are not known: refused, not trusted."""
    from megatron.core.pipeline_parallel import schedules

    real = schedules.forward_step_calc_loss

    def scaled(by: Callable[[int, dict], float], tokens: int = 0) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            loss, count = real(*args, **kwargs)
            return loss * by(args[6], kwargs), count + tokens

        return function

    cases = {
        "another power": scaled(lambda count, _: count**0.5),
        "another fallback": scaled(lambda _, given: 1.0 if "cp_group_size" in given else 2.0),
        "another token count": scaled(lambda *_: 1.0, tokens=1),
    }
    found = {}
    for name, function in cases.items():
        with installed(function):
            found[name] = outcome(lambda: made(chunks))[:2]
    with installed(scaled(lambda *_: 3.0)):  # a constant factor is measured and undone
        found["another constant"] = (str(made(chunks).schedule_factor), "")
    return found


def measured(chunks: Chunks, per_token: bool) -> list[tuple[float, float]]:
    """What the installed function makes of a loss, and what the measured factor says it does."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    config, layout = copy.copy(config_of(chunks)), Layout.read(collection())
    config.calculate_per_token_loss = per_token
    pairs = []
    for cp in (1, 2, 3, 8):
        factor = factors.schedule_factor(config, replace(layout, cp_size=cp))
        for count in (1, 2, 5, 7):
            loss = torch.tensor(11.0, dtype=torch.float64)
            returned = (loss, torch.tensor(4, dtype=torch.int32), {}) if per_token else (loss, {})
            out, _ = forward_step_calc_loss(
                torch.nn.Identity(), torch.zeros(()), lambda _, r=returned: r, config, None, False, count, [],
                cp_group_size=cp, is_last_stage=True,
            )  # fmt: skip
            pairs.append((float(out), 11.0 * factor / (1 if per_token else count)))
    return pairs


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    found: dict[str, Any] = {}
    for mode, (job, change, *rest) in REFUSED.items():
        chunks, _ = jobs.build(job)
        found[f"{mode}: before"] = outcome(lambda chunks=chunks: made(chunks))[:2]
        more = {"pg_collection": collection(gtp_remat=dist.group.WORLD)} if "gtp" in mode else dict(*rest[:1])
        changed = change(list(chunks))
        found[mode] = outcome(lambda chunks=changed, more=more: made(chunks, **more))[:2]
        layouts.leave(chunks)

    chunks, _ = jobs.build(Job())
    found |= other_schedules(chunks)
    found["flag false"], found["flag true"] = measured(chunks, False), measured(chunks, True)
    found["bare model"] = outcome(lambda: made([chunks[0].module]))[:2]
    found["spread"] = outcome(lambda: spread(chunks))[:2]
    found["on_nonfinite"] = outcome(lambda: made(chunks, on_nonfinite="ignore"))[:2]
    found["wrapper"] = made(chunks).wrapper_factor
    found["collection"] = made(chunks, pg_collection=collection()).schedule_factor
    found["no dp_cp"] = outcome(lambda: made(chunks, pg_collection=collection(dp_cp=None)))[:2]
    alone = dist.new_group([rank], use_local_synchronization=True)
    found["not the world"] = outcome(lambda: made(chunks, pg_collection=collection(dp=alone)))[:2]
    layouts.leave(chunks)
    found["no parallel_state"] = outcome(Layout.read)[:2]
    return found


def spread(chunks: Chunks) -> None:
    """Two buffers that scale differently: here one of them is spoiled."""
    chunks[0].expert_parallel_buffers = [copy.copy(chunks[0].buffers[0])]
    chunks[0].expert_parallel_buffers[0].gradient_scaling_factor *= 2
    try:
        made(chunks)
    finally:
        chunks[0].expert_parallel_buffers = []


found = world_fixture(tour, 2)


def test_every_row_of_the_table_has_a_case() -> None:
    assert set(REFUSED) == {row.mode for row in modes.REFUSED}


def test_every_supported_mode_names_a_test_that_exists() -> None:
    root = Path(__file__).resolve().parent.parent
    assert [where for _, where in modes.SUPPORTED if not (root / where).is_file()] == []


@pytest.mark.multiproc
@pytest.mark.parametrize("mode", REFUSED)
def test_the_mode_is_refused_with_reason_and_cure(mode: str, found: Any) -> None:
    row = next(row for row in modes.REFUSED if row.mode == mode)
    for by_rank in found:
        assert by_rank[f"{mode}: before"] == ("fine", "")
        kind, text = by_rank[mode]
        assert kind == row.error.__name__
        there = f"; got {REFUSED[mode][3]}" if len(REFUSED[mode]) > 3 else ""
        assert text == f"{mode} is refused: {row.reason}{there}. Fix: {row.fix}"


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another power", "scales a loss in a way this package does not know"),
        ("another fallback", "differently with an explicit cp size"),
        ("another token count", "changes the token count"),
        ("bare model", "cannot read the gradient factor of GPTModel"),
        ("spread", "scales parameters differently"),
    ],
)
def test_a_factor_that_cannot_be_established_is_refused(name: str, words: str, found: Any) -> None:
    for kind, text in (by_rank[name] for by_rank in found):
        assert kind == "UnsupportedError"
        assert words in text


@pytest.mark.multiproc
@pytest.mark.parametrize("flag", ["flag false", "flag true"])
def test_the_measured_factor_is_what_the_installed_schedule_does(flag: str, found: Any) -> None:
    for did, said in found[0][flag]:
        assert did == pytest.approx(said, rel=1e-14)
    if flag == "flag false":
        assert [did for did, _ in found[0][flag]][:4] == pytest.approx([11.0, 5.5, 2.2, 11 / 7])
    assert found[0]["another constant"] == ("3.0", "")
    assert found[0]["wrapper"] == 0.5  # two data-parallel ranks, averaged
    assert found[0]["collection"] == 1.0


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no dp_cp", "pg_collection lacks dp_cp"),
        ("not the world", "groups do not make up the world"),
        ("no parallel_state", "parallel_state is not initialised"),
    ],
)
def test_groups_that_are_missing_are_named(name: str, words: str, found: Any) -> None:
    for kind, text in (by_rank[name] for by_rank in found):
        assert kind == "LayoutError"
        assert words in text


def test_a_world_is_needed() -> None:
    with pytest.raises(pg.LayoutError, match=r"torch\.distributed is not initialised"):
        Layout.read()


@pytest.mark.multiproc
def test_an_unknown_rule_for_faults_is_refused(found: Any) -> None:
    assert found[0]["on_nonfinite"][0] == "SpecError"
