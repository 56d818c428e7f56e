"""Layouts and specs that worlds of processes visit, and what one visit brings home."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass, replace
from typing import Any

import jobs
import torch
from jobs import Job

import megatron_pgloss as pg

SP = dict(sequence_parallel=True)
DISTOPT = dict(distributed_optimizer=True)
OVERLAP = dict(overlap_grad_reduce=True, bucket_size=2000)
TIED = dict(tied=True)
THD = pg.Split(max_tokens=80)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which model and rows a layout is compared on."""

    tied: bool = False
    temperature: bool = False
    vocab: int = jobs.VOCAB


@dataclass(frozen=True)
class Layout:
    """One layout of the table."""

    job: Job
    data: Data = Data()
    flags: tuple[bool, ...] = (False, True)
    """Values of ``calculate_per_token_loss``."""


FOUR = {
    "dp4": Layout(Job()),
    "dp4, one rank empty": Layout(Job(empty_rank=True)),
    "dp4 overlap_grad_reduce": Layout(Job(model=OVERLAP)),
    "dp4 distributed optimizer": Layout(Job(model=DISTOPT)),
    # Megatron-Core forbids averaging collectives in per-token mode.
    "dp4 average_in_collective": Layout(Job(model=dict(average_in_collective=True)), flags=(False,)),
    "tp2": Layout(Job(tp=2)),
    "tp2 sp": Layout(Job(tp=2, model=SP)),
    "tp2 sp, full recompute": Layout(Job(tp=2, model=SP | dict(recompute="full"))),
    "tp4, padded vocabulary": Layout(Job(tp=4, model=dict(vocab_size=30), options=dict(vocab_size=30)), Data(vocab=30)),
    "pp2": Layout(Job(pp=2, split=pg.Split(sequences=1))),
    "pp2, one rank empty": Layout(Job(pp=2, empty_rank=True)),
    "pp2, loss scale": Layout(Job(pp=2, loss_scale=1024.0)),
    "pp2, variable lengths": Layout(Job(pp=2, model=dict(variable_seq_lengths=True))),
    "pp2 vpp2": Layout(Job(pp=2, vpp=2)),
    "pp2 vpp2, one rank empty": Layout(Job(pp=2, vpp=2, empty_rank=True)),
    # Three micro-batches, which the interleaved schedule does not accept: a fourth is made.
    "pp2 vpp2 overlap_grad_reduce": Layout(Job(pp=2, vpp=2, model=OVERLAP, split=pg.Split(sequences=3))),
    "cp2": Layout(Job(cp=2)),
    "cp2, one rank empty": Layout(Job(cp=2, empty_rank=True)),
    "cp2, selective recompute": Layout(Job(cp=2, model=dict(recompute="selective"))),
    "cp2 packed": Layout(Job(cp=2, split=THD)),
    "cp4": Layout(Job(cp=4, split=pg.Split(microbatches=3))),
    "cp4 packed": Layout(Job(cp=4, split=THD)),
    "tp2 pp2": Layout(Job(tp=2, pp=2)),
    "tp2 cp2": Layout(Job(tp=2, cp=2)),
    "tp2 cp2 sp packed": Layout(Job(tp=2, cp=2, model=SP, split=THD)),
    "cp2 pp2 packed, variable lengths": Layout(Job(cp=2, pp=2, split=THD, model=dict(variable_seq_lengths=True))),
    "cp2 pp2, pg_collection": Layout(Job(cp=2, pp=2, collection=True)),
    "tp2, tied": Layout(Job(tp=2, model=TIED), Data(tied=True)),
    "pp2 vpp2, tied, distributed optimizer": Layout(Job(pp=2, vpp=2, model=TIED | DISTOPT), Data(tied=True)),
    "tp2 pp2, temperature": Layout(Job(tp=2, pp=2), Data(temperature=True)),
    "cp2 packed, temperature": Layout(Job(cp=2, split=THD), Data(temperature=True)),
}
TWO = {
    "dp2": Layout(Job()),
    "tp2 alone": Layout(Job(tp=2)),
    "pp2 alone": Layout(Job(pp=2)),
    "cp2 alone": Layout(Job(cp=2)),
    "pp2 vpp2 alone": Layout(Job(pp=2, vpp=2)),
}


def shaping(x: Any) -> torch.Tensor:
    """A user's term through every unit statistic, each with a gradient."""
    drift = x.unit_mean(x.log_ratio, "sequence").square() + 0.1 * x.prefix_sum(x.log_ratio).tanh()
    return drift + 0.01 * x.unit_sum(x.logp, "turn")


def rich() -> pg.LossSpec:
    """Every kind of component and rule, each under its own normaliser, every level named."""
    return pg.LossSpec(
        components=[
            pg.PolicyGradient(
                surrogate=pg.Clip(low=0.2, high=0.28, dual=1.3),
                normalizer="mean(prompt) > mean(episode) > mean(turn) > mean(token)",
            ),
            pg.KL(estimator="k3", coef=0.1, normalizer="mean(episode) > mean(token)"),
            pg.Entropy(coef=0.05, normalizer="mean(sequence) > sum(token)/avg"),
            pg.CrossEntropy(coef=0.3, normalizer="mean(sequence) > mean(token)", count="observations", units="all"),
            pg.Term("shape", shaping, coef=0.1, needs=("old",), normalizer="mean(prompt) > mean(token)"),
        ],
        corrections=[pg.TruncatedIS(high=1.1)],
        masks=[pg.DropTruncated(), pg.DropZeroAdvantage(), pg.UserMask(name="keep", on=("kl",))],
    )


SPECS = {"rich": rich, "dapo": pg.presets.dapo}


def quiet() -> None:
    """Warnings of libraries, in a spawned process, are not the test's."""
    warnings.simplefilter("ignore")


def leave(chunks: list[Any]) -> None:
    """End a layout, so that the next can begin in the same world."""
    from megatron_pgloss.verify.models import destroy_parallel

    chunks.clear()
    destroy_parallel()
    gc.collect()
    gc.freeze()  # what is left are modules and functions: the next collection need not walk them again


class Judge:
    """The oracle's answers, one per data and spec, made when first asked for."""

    def __init__(self) -> None:
        self._rows: dict[Data, list[dict[str, Any]]] = {}
        self._answers: dict[tuple[Data, str], tuple[float, dict[str, torch.Tensor], dict[str, Any]]] = {}

    def prepare(self, data: Data) -> None:
        """Collective: builds the whole model in every process."""
        if data in self._rows:
            return
        chunks, model_fn = jobs.oracle_model(tied=data.tied, vocab_size=data.vocab)
        rows = jobs.rows_of_step(0, model_fn, vocab=data.vocab, temperature=data.temperature)
        for name, make in SPECS.items():
            self._answers[data, name] = jobs.oracle_answer(chunks, model_fn, rows, make())
        self._rows[data] = rows
        leave(chunks)

    def rows(self, data: Data) -> list[dict[str, Any]]:
        """The step's rows."""
        return self._rows[data]

    def answer(self, data: Data, spec: str) -> tuple[float, dict[str, torch.Tensor], dict[str, Any]]:
        """Loss, gradients, and the oracle's numbers."""
        return self._answers[data, spec]


def expected_metrics(answer: dict[str, Any]) -> dict[str, float]:
    """What `finish` must say, by the oracle's numbers."""
    want = {"loss": float(answer["loss"])}
    want |= {f"{name}/loss": float(value) for name, value in answer["components"].items()}
    stats = answer["ratio_stats"]["rl"]
    want |= {"rl/ratio": stats["mean"], "rl/ratio_min": stats["min"], "rl/ratio_max": stats["max"]}
    return want | {f"rl/clip_{side}": stats[side] / stats["tokens"] for side in ("low", "high", "dual")}


def visit(layout: Layout, per_token: bool, judge: Judge) -> dict[str, dict[str, Any]]:
    """Both specs on one layout: errors against the oracle, and what the data looked like."""
    judge.prepare(layout.data)
    rows = judge.rows(layout.data)
    job = replace(layout.job, per_token=per_token)
    chunks, where = jobs.build(job)
    found = {}
    for name, make in SPECS.items():
        loss, reference, answer = judge.answer(layout.data, name)
        metrics, grads, plan = jobs.one_step(job, chunks, where, make(), rows)
        scaled = {key: grad * job.loss_scale for key, grad in reference.items()}
        error, parameter = jobs.worst(grads, scaled)
        want = expected_metrics(answer)
        gaps = {key: abs(metrics[key] - value) / max(abs(value), 1e-3) for key, value in want.items()}
        found[name] = {
            "loss": abs(metrics["loss"] - loss) / abs(loss),
            "gradient": error,
            "parameter": parameter,
            "largest": max(float(grad.abs().max()) for grad in reference.values()),
            "metrics": metrics,
            "metric_gap": max(gaps.items(), key=lambda item: item[1]),
            "microbatches": plan.num_microbatches,
            "empty": plan.job["empty_microbatches"],
            "dp": where.dp,
        }
    leave(chunks)
    return found


def tour(rank: int, world: int, names: list[str]) -> dict[tuple[str, bool], dict[str, dict[str, Any]]]:
    """For `worlds.run_world`: all named layouts, one after another."""
    quiet()
    judge, table = Judge(), FOUR if world == 4 else TWO
    return {
        (name, per_token): visit(table[name], per_token, judge) for name in names for per_token in table[name].flags
    }
