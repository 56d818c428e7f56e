"""Losses that Megatron adds to a step keep their configured weight beside ours: MoE auxiliary and z-loss, and MTP.

For one fixed composition of micro-batches, on every layout of ranks, with both values of ``calculate_per_token_loss``
and another normaliser for each, the total gradient minus the policy's alone is what Megatron gives beside its own loss.
For MoE it is the same on all layouts as well, but where the installed version is wrong: that factor is measured, and
stands in `megatron_pgloss.verify.run.own_losses.upstream_strength`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from support import jobs, layouts
from support.cover import pairs, visited
from support.jobs import Job
from support.layouts import DISTOPT, SP
from support.worlds import world_fixture

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]
MODERN = tuple(int(part) for part in version("megatron-core").split(".")[:2]) >= (0, 19)
AUX = dict(layers=2, experts=4, topk=2, moe_aux_coeff=0.1, moe_z_coeff=0.01)
MTP = dict(layers=2, extra=dict(mtp_num_layers=2, mtp_loss_scaling_factor=0.3))
THD = pg.Split(max_tokens=80)
PAIRS = pg.Split(sequences=2)
MOE_JOBS = {
    "dp4": Job(model=AUX),
    "ep4, distributed optimizer": Job(ep=4, model=AUX | DISTOPT),
    "ep2 pp2": Job(ep=2, pp=2, model=AUX),
    "ep2 tp2 sp": Job(ep=2, tp=2, model=AUX | SP),
    "ep2 cp2": Job(ep=2, cp=2, model=AUX),
    "cp4": Job(cp=4, model=AUX),
    "tp2 cp2 sp": Job(tp=2, cp=2, model=AUX | SP),
}
VARIABLE = "pp2, variable lengths"
MTP_JOBS = {
    "tp2 sp": Job(tp=2, model=MTP | SP),
    "pp2, loss scale": Job(pp=2, model=MTP, loss_scale=64.0),
    "pp2 vpp2, tied": Job(pp=2, vpp=2, model=MTP | dict(layers=4, tied=True)),
    "cp2 packed": Job(cp=2, model=MTP, split=THD),
    VARIABLE: Job(pp=2, model=MTP | dict(variable_seq_lengths=True)),
    "dp4, one rank empty": Job(model=MTP, empty_rank=True),
}
PATHS = {False: "mean(token)", True: "mean(prompt) > mean(episode) > mean(token)"}
"""By ``calculate_per_token_loss``."""


def cases(
    title: str, jobs: dict[str, Job], always: list[tuple[str, bool]], flagged: set[str]
) -> list[tuple[str, bool]]:
    """Jobs and the flag: every two axes and modes, and those of ``flagged`` with both values of the flag."""

    def shows(case: tuple[str, bool]) -> set[Any]:
        job = jobs[case[0]]
        modes = {"loss scale"} if job.loss_scale != 1 else {"empty rank"} if job.empty_rank else set()
        axes = {*layouts.axes(job), *modes}
        return pairs(axes) | pairs({*(axes & flagged), f"per token {case[1]}"})

    return visited(title, [(name, flag) for name in jobs for flag in PATHS], shows, always=always)


MOE_CASES = cases("MoE losses beside ours", MOE_JOBS, [("dp4", False), ("cp4", True)], {"tp", "pp", "cp", "ep"})
MTP_CASES = cases("multi-token prediction beside ours", MTP_JOBS, [], {"pp"})


@dataclass
class Rig:
    """A model on a layout, its step, and this rank's rows."""

    job: Job
    rows: list[dict[str, Any]]
    fixed: bool
    """Micro-batches of the same two rows on every layout, dealt out over data-parallel ranks."""

    def __post_init__(self) -> None:
        self.chunks, self.where = jobs.build(self.job)

    def step(self) -> Any:
        from megatron_pgloss import megatron as pgm

        spec = pg.LossSpec(components=[pg.PolicyGradient(normalizer=PATHS[self.job.per_token])])
        # The same on every layout, which the mask is not; that padding is left out is tests/test_routed_padding.py.
        return pgm.PolicyLossStep(spec, self.chunks, split=self.job.split, allow_routed_padding=True)

    def batches(self) -> list[pg.TokenBatch]:
        if not self.fixed:
            mine = jobs.share(self.rows, self.where.dp_rank, self.where.dp, self.job.empty_rank)
        else:
            pairs = [self.rows[i : i + 2] for i in range(0, 8, 2)]
            mine = [row for pair in pairs[self.where.dp_rank :: self.where.dp] for row in pair]
        return [jobs.batch_of(mine)] if mine else []

    def run(self, plan: Any, forward_step: Any, iterators: Any) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators, forward_only=False,
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0], num_microbatches=plan.num_microbatches,
            seq_length=plan.width, micro_batch_size=plan.rows_per_microbatch,
        )  # fmt: skip


def visit(job: Job, rows: list[Any], fixed: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Error of our difference against Megatron's own on this layout; and that difference itself."""
    from megatron_pgloss.verify.run.own_losses import own_gradient, upstream_strength

    rig = Rig(job, rows, fixed)
    step = rig.step()
    own = own_gradient(step, rig.batches, rig.run, beside="cross entropy")
    found: dict[str, Any] = {"upstream": upstream_strength(step)}
    found["largest"] = max(float(grad.abs().max()) for grad in own.values())
    found["error"] = jobs.worst(own_gradient(step, rig.batches, rig.run, beside="policy"), own)
    own = {name: grad / job.loss_scale for name, grad in own.items()}
    layouts.leave(rig.chunks)
    return found, own


def tour(rank: int, world: int) -> dict[str, Any]:
    from megatron_pgloss.verify.run.own_losses import strength

    layouts.quiet()
    # Megatron keeps the scales of its own losses in torch's default dtype.
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    chunks, model_fn = jobs.oracle_model()
    rows = jobs.rows_of_step(0, model_fn)
    layouts.leave(chunks)
    reference: dict[str, torch.Tensor] | None = None
    for name, flag in MOE_CASES:
        seen, own = visit(replace(MOE_JOBS[name], per_token=flag, split=PAIRS), rows, fixed=True)
        reference = reference or own
        seen["strength"] = strength(own, reference)
        by = seen["strength"]
        seen["same shape"] = jobs.worst(own, {key: grad * by for key, grad in reference.items()})
        found["moe", name, flag] = seen
    # Rows of their own width: no composition to compare with, but padding must count in Megatron's token count.
    odd = Job(pp=2, per_token=True, model=AUX | dict(variable_seq_lengths=True))
    found["moe", VARIABLE, True], _ = visit(odd, rows, fixed=False)
    for name, flag in MTP_CASES if MODERN else ():
        found["mtp", name, flag], _ = visit(replace(MTP_JOBS[name], per_token=flag), rows, fixed=False)
    return found | (hooks(rows) if MODERN else {})


def hooks(rows: list[Any]) -> dict[str, Any]:
    """``config.mtp_grad_scale_func`` before, during and after a step, and with one of the user's own."""
    rig = Rig(Job(per_token=True, model=MTP), rows, fixed=False)
    step, config = rig.step(), rig.chunks[0].config
    found: dict[str, Any] = {"hook": []}
    for given in (None, lambda: torch.tensor(5.0)):
        config.mtp_grad_scale_func = given
        seen = []
        for end in ("finish", "close", "begin"):
            plan = step.begin(rig.batches())
            inside, ratio = config.mtp_grad_scale_func, step._counted / plan.job["actions"]
            seen.append(inside is not given and abs(float(inside()) / (5.0 if given else 1.0) / ratio - 1) < 1e-12)
            if end == "finish":
                step.finish(jobs.run_schedule(step, rig.chunks))
            if end == "begin":  # a plan that fails must not leave the last one's scale behind
                with pytest.raises(pg.DataError):
                    step.begin([7])  # type: ignore[list-item]
            else:
                step.close()
            seen.append(config.mtp_grad_scale_func is given)
        found["hook"].append(seen)
    layouts.leave(rig.chunks)
    return found


everyone = world_fixture(tour, 4)


@pytest.fixture(scope="module")
def found(everyone: Any, table: list[str]) -> list[dict[str, Any]]:
    results = everyone
    for key, seen in results[0].items():
        if key == "hook":
            continue
        (kind, name, flag), (error, _) = key, seen["error"]
        factor = f", strength {seen['strength']:.4f}" if "strength" in seen else ""
        table.append(f"{kind} loss beside ours, {name}, per token {flag}: {error:.0e}{factor}")
    return results


@pytest.mark.parametrize(("name", "per_token"), [*MOE_CASES, (VARIABLE, True)])
def test_moe_losses_beside_ours_are_what_they_are_beside_megatrons(name: str, per_token: bool, found: Any) -> None:
    for seen in (by_rank["moe", name, per_token] for by_rank in found):
        error, parameter = seen["error"]
        assert error < 1e-10, parameter
        assert seen["largest"] > 1e-4


@pytest.mark.parametrize(("name", "per_token"), MOE_CASES)
def test_moe_losses_are_the_same_on_every_layout_but_for_the_factor_in_the_table(
    name: str, per_token: bool, found: Any
) -> None:
    for seen in (by_rank["moe", name, per_token] for by_rank in found):
        assert seen["strength"] == pytest.approx(seen["upstream"], rel=1e-10)
        error, parameter = seen["same shape"]
        assert error < 1e-10, parameter


def test_the_table_of_factors_says_what_this_version_does(found: Any) -> None:
    sizes = {"dp4": 1, "ep2 tp2 sp": 2, "cp4": 4, "tp2 cp2 sp": 4}
    seen = {key[1:]: one["upstream"] for key, one in found[0].items() if key[0] == "moe" and key[1] in sizes}
    for (name, per_token), strength in seen.items():
        assert strength == (1 if MODERN or not per_token else 1 / sizes[name]), name
    assert {per_token for _, per_token in seen} == {False, True}
    assert any(sizes[name] > 1 for name, per_token in seen if per_token)


@pytest.mark.skipif(not MODERN, reason="before megatron-core 0.19 multi-token prediction is refused")
@pytest.mark.parametrize(("name", "per_token"), MTP_CASES)
def test_mtp_beside_ours_is_what_it_is_beside_megatrons(name: str, per_token: bool, found: Any) -> None:
    for seen in (by_rank["mtp", name, per_token] for by_rank in found):
        error, parameter = seen["error"]
        assert error < 1e-10, parameter
        assert seen["largest"] > 1e-4


@pytest.mark.skipif(not MODERN, reason="before megatron-core 0.19 multi-token prediction is refused")
def test_the_scale_of_mtp_is_set_for_the_step_and_restored(found: Any) -> None:
    for by_rank in found:
        assert by_rank["hook"] == [[True] * 6] * 2
