"""A vocabulary that fits into one tensor-parallel shard: the same gradients as without tensor parallelism.

One world of two processes. Five tokens, padded to 16 columns: each of two shards has 8, the second none of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.verify.layouts.reshard import full_gradients
from support import jobs, layouts
from support.faulty import outcome
from support.jobs import Job
from support.worlds import world_fixture

TINY = dict(hidden=16, ffn=16)
SPEC = pg.LossSpec(components=[pg.PolicyGradient(), pg.Entropy(coef=0.1)])
HEADS = ("given", "keep", "recompute")


def visit(job: Job, rows: list[Any], head: Any) -> tuple[float, dict[str, Any]]:
    chunks, where = jobs.build(job)
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split, vocab_size=5, head=head)
    step.begin(jobs.batches_of(job, where, SPEC, rows))
    metrics = step.finish(jobs.run_schedule(step, chunks))
    found = metrics["loss"], full_gradients(chunks)
    layouts.leave(chunks)
    return found


def tour(rank: int, world: int) -> dict[str, Any]:
    layouts.quiet()
    rows = jobs.rows_of_step(0, max_length=13, vocab=5)
    loss, plain = visit(Job(vocab=5, model=TINY), rows, "given")
    found: dict[str, Any] = {"largest": max(float(grad.abs().max()) for grad in plain.values())}
    for head in HEADS:
        other, grads = visit(Job(tp=2, vocab=5, model=TINY | dict(vocab_multiple=8)), rows, head)
        found[head] = (abs(other - loss), *jobs.worst(grads, plain))
    chunks, _ = jobs.build(Job(tp=2, model=TINY))
    del chunks[0].module.vocab_size
    found["silent"] = outcome(lambda: pgm.PolicyLossStep(SPEC, chunks, split=pg.Split(sequences=2)))[:2]
    layouts.leave(chunks)
    found["off"] = off_the_vocabulary(rank)
    return found


class Wrapped(torch.nn.Module):
    """A model around a language model, as one with images is: it says nothing of a vocabulary."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config, self.model_type = inner, inner.config, inner.model_type
        self.post_process, self.pre_process = inner.post_process, inner.pre_process

    def set_input_tensor(self, given: Any) -> None:
        self.inner.set_input_tensor(given)

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any) -> Any:
        return self.inner(input_ids, position_ids, attention_mask)


def clamped(model: Any, micro: Any, inputs: Any) -> Any:
    """An embedding that does not mind: ids beyond the table read its last row."""
    return model(**{**inputs, "input_ids": micro.input_ids.clamp(max=7)})


def off_the_vocabulary(rank: int) -> dict[str, Any]:
    """Two replicas; the second's last row ends in id 9 of a vocabulary of 8, a trained token."""
    job, found = Job(vocab=8, model=TINY), {}
    chunks, where = jobs.build(job)
    batch = jobs.batches_of(job, where, SPEC, jobs.rows_of_step(0, max_length=13, vocab=8))[0]
    at = int((batch.action_T & (batch.targets_T >= 0)).nonzero()[-1]) + 1
    if rank:
        off = replace(batch, tokens_T=batch.tokens_T.clone(), targets_T=batch.targets_T.clone())
        off.tokens_T[at] = off.targets_T[at - 1] = 9
        batch = off
    found["where"] = batch.where(at, "tokens", read=True)
    found["too large"] = outcome(lambda: pgm.PolicyLossStep(SPEC, chunks, split=job.split, vocab_size=9))[:2]
    inner = chunks[0].module
    chunks[0].module = Wrapped(inner)
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split)
    found["wrapped"] = outcome(lambda: step.begin([batch]))[:2]
    found["wrapped, scored"] = outcome(lambda: step.score([batch], into="old"))[:2]
    # One rank alone knows how large the table is.
    del inner.vocab_size
    if rank == 0:
        del inner.embedding.vocab_size
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split)
    found["one rank knows"] = outcome(lambda: step.begin([batch]))[:2]
    if rank:
        del inner.embedding.vocab_size
    step = pgm.PolicyLossStep(SPEC, chunks, split=job.split, forward=clamped)
    step.begin([batch])
    losses = jobs.run_schedule(step, chunks)
    found["nobody knows"] = outcome(lambda: step.finish(losses))[:2]
    found["finite"] = all(bool(p.main_grad.isfinite().all()) for p in chunks[0].parameters())
    layouts.leave(chunks)
    return found


found = world_fixture(tour, 2)


@pytest.mark.multiproc
@pytest.mark.parametrize("head", HEADS)
def test_shards_as_wide_as_the_vocabulary_are_shards(head: str, found: Any) -> None:
    for by_rank in found:
        loss, gradient, parameter = by_rank[head]
        assert loss < 1e-12
        assert gradient < 1e-10, parameter
        assert by_rank["largest"] > 1e-3


@pytest.mark.multiproc
def test_a_model_that_does_not_say_its_vocabulary_is_asked_for_it(found: Any) -> None:
    for kind, text in (by_rank["silent"] for by_rank in found):
        assert kind == "SpecError"
        assert "vocab_size" in text


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["wrapped", "wrapped, scored", "one rank knows", "nobody knows", "too large"])
def test_a_token_off_a_vocabulary_that_nobody_gave_is_refused_everywhere_with_its_place(name: str, found: Any) -> None:
    ((kind, text),) = {by_rank["off"][name] for by_rank in found}
    place = found[1]["off"]["where"].rsplit(", ", 1)[0]
    if name == "too large":
        assert (kind, "at most 8; got 9" in text) == ("SpecError", True)
    elif name == "nobody knows":  # the head's NaN, which travels as every other
        assert kind == "NonFiniteError" and "got 2 such tokens" in text  # of both components
        assert f"rank 1, component rl, {place}, stream 'logits', of token id 9" in text
        assert all(by_rank["off"]["finite"] for by_rank in found)
    else:
        assert kind == "DataError" and "a token lies off the vocabulary; expected 0 or more below 8; got 9" in text
        assert f"rank 1, {place}, stream 'tokens'" in text
