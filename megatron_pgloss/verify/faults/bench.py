"""The self-test's layouts: few and small, chosen so that every fault has a layout where it must show.

One model is built per layout and used for all faults. The reference is the float64 oracle's answer; where Megatron's
own losses are on, the gradient that they have on this layout beside Megatron's own cross entropy is added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_pgloss.planning import Split
from megatron_pgloss.verify.data.batches import batches_of, rows_of_step
from megatron_pgloss.verify.data.rows import Row
from megatron_pgloss.verify.faults.fault import Place
from megatron_pgloss.verify.layouts.scenario import Scenario
from megatron_pgloss.verify.run.compare import metric_gap, worst
from megatron_pgloss.verify.run.drive import build, leave, make_step, one_step
from megatron_pgloss.verify.run.judge import Answer, oracle_answer, oracle_model
from megatron_pgloss.verify.run.own_losses import own_gradient
from megatron_pgloss.verify.run.specs import rich

SMALL = dict(layers=2, hidden=16, ffn=16)
MOE = dict(experts=4, topk=2)
PAIRS = Split(sequences=2)
"""Of few rows it makes several micro-batches: with one alone, the schedule has nothing to divide by."""
AUX = dict(moe_aux_coeff=0.1, moe_z_coeff=0.01)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One layout of the self-test."""

    name: str
    layout: Scenario
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's config that change its mathematics; the oracle's model gets them too."""
    own: Mapping[str, float] = field(default_factory=dict)
    """Coefficients of losses that Megatron itself adds."""


BENCHES = (
    Bench(name="dp2 cp2 packed", layout=Scenario(cp=2, split=Split(max_tokens=32))),
    Bench(name="cp4 per-token", layout=Scenario(cp=4, split=Split(sequences=3), per_token=True)),
    Bench(name="dp2 tp2 temperature", layout=Scenario(tp=2, vocab=29, temperature=True, split=PAIRS)),
    Bench(name="dp2 pp2 empty rank per-token", layout=Scenario(pp=2, empty_rank=True, per_token=True, split=PAIRS)),
    Bench(
        name="dp4 packed learned", layout=Scenario(split=Split(max_tokens=40)), model=dict(position="learned_absolute")
    ),
    Bench(
        name="dp2 cp2 ep2 averaging aux",
        layout=Scenario(cp=2, ep=2, average=True, experts=4, split=PAIRS),
        model=MOE,
        own=AUX,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A layout whose model is built, with its rows and the right answer."""

    layout: Scenario
    chunks: list[Any]
    where: Any
    rows: list[Row]
    answer: Answer
    place: Place

    def step(self) -> dict[str, float]:
        """Run one whole step, and return the largest relative errors of loss, gradient and metrics. A collective."""
        loss, reference, numbers = self.answer
        config = self.chunks[0].config
        scale = config.grad_scale_func
        try:
            metrics, gradients, _ = one_step(self.layout, self.chunks, self.where, rich(), self.rows)
        finally:
            config.grad_scale_func = scale
        return {
            "loss": abs(metrics["loss"] / loss - 1),
            "gradient": worst(gradients, reference)[0],
            "metric": metric_gap(metrics, numbers, rich())[0],
        }


@contextlib.contextmanager
def opened(one: Bench) -> Iterator[Opened]:
    """Build the layout for the length of the block. A collective."""
    fields = {**SMALL, "vocab_size": one.layout.vocab, **one.model}
    layout = replace(
        one.layout, model={**fields, **one.own}, world=dist.get_world_size(),
        options={"vocab_size": one.layout.vocab, "allow_routed_padding": True},
    )  # fmt: skip
    default = torch.get_default_dtype()
    # Megatron creates learned positions and the scale of its own losses in torch's default dtype.
    torch.set_default_dtype(torch.float64)
    try:
        rows, answer = _asked(one, fields)
        chunks, where = build(layout)
        if one.own:
            own = _own(layout, chunks, where, rows)
            answer = (answer[0], {name: grad + own[name] for name, grad in answer[1].items()}, answer[2])
        place = _place(one, layout, where)
        yield Opened(layout=layout, chunks=chunks, where=where, rows=rows, answer=answer, place=place)
        leave(chunks)
    finally:
        torch.set_default_dtype(default)


def _asked(one: Bench, fields: Mapping[str, Any]) -> tuple[list[Row], Answer]:
    """Rows and the oracle's answer, which the first rank sends to all. A collective."""
    chunks, model_fn = oracle_model(**fields)
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        rows = rows_of_step(
            0, model_fn, vocab=one.layout.vocab, temperature=one.layout.temperature, n_prompts=2, max_length=24
        )
        # In every other row the first token is marked as an observation, although nothing predicts it.
        rows = [row | {"observation": [i % 2 == 0, *row["observation"][1:]]} for i, row in enumerate(rows)]
        loss, gradients, numbers = oracle_answer(chunks, model_fn, rows, rich())
        parts = {name: float(value) for name, value in numbers["components"].items()}
        told = {"loss": loss, "components": parts, "ratio_stats": numbers["ratio_stats"]}
        found = [(rows, (loss, gradients, told))]
    dist.broadcast_object_list(found, src=0)
    leave(chunks)
    return found[0]  # type: ignore[no-any-return]


def _own(layout: Scenario, chunks: list[Any], where: Any, rows: list[Row]) -> dict[str, torch.Tensor]:
    """Gradient of the losses that Megatron itself adds on this layout."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    step, more = make_step(layout, chunks, rich())

    def run(made: Any, forward_step: Any, iterators: Any) -> None:
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators, model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=made.num_microbatches, seq_length=made.width, micro_batch_size=made.rows_per_microbatch,
            forward_only=False, **more,
        )  # fmt: skip

    return own_gradient(step, lambda: batches_of(layout, where, rich(), rows), run, beside="cross entropy")


def _place(one: Bench, layout: Scenario, where: Any) -> Place:
    """The facts about layout and rank that the faults' conditions read."""
    return Place(
        tp=where.tp, cp=where.cp, pp=where.pp, vpp=where.vpp, dp=where.dp, tp_rank=where.tp_rank,
        cp_rank=where.cp_rank, dp_rank=where.dp_rank, workers=where.dp - layout.empty_rank,
        per_token=layout.per_token, packed=layout.packed, averaging=layout.average, experts=layout.experts > 0,
        auxiliary=bool(one.own), learned_positions=one.model.get("position") == "learned_absolute",
        temperature=layout.temperature, padded_vocabulary=layout.vocab % where.tp > 0,
    )  # fmt: skip
