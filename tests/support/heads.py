"""Models with a value head, and steps of them or with an exact KL on a layout, compared with the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import megatron_pgloss as pg
from megatron_pgloss.verify.layouts import models
from megatron_pgloss.verify.layouts.reshard import full_gradients, placements
from megatron_pgloss.verify.layouts.weights import deterministic_weights
from megatron_pgloss.verify.oracle import oracle_kl, oracle_logprobs, oracle_loss
from megatron_pgloss.verify.run.compare import worst
from megatron_pgloss.verify.run.drive import BUILDERS, leave, make_step, run_schedule
from megatron_pgloss.verify.run.judge import plain
from support import jobs
from support.data import Dice
from support.jobs import Job

REFERENCE_SEED = 9


def critic(*args: Any) -> Any:
    """A GPTModel whose output layer is replaced by a value head, as trainers do it."""
    from megatron_pgloss import megatron as pgm

    model = models._gpt(*args)
    if model.post_process:
        model.output_layer = pgm.ValueHead(model.config, bias=True)
    return model


def actor_critic(*args: Any) -> Any:
    """A GPTModel that returns (logits, values), both from the last hidden states."""
    from megatron_pgloss import megatron as pgm

    model = models._gpt(*args)
    if not model.post_process:
        return model
    model.value_head = pgm.ValueHead(model.config)
    forward, seen = model.forward, []
    model.decoder.register_forward_hook(lambda module, given, hidden: seen.append(hidden))

    def both(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return output, model.value_head(seen.pop())[0].transpose(0, 1)

    model.forward = both
    return model


for _name, _make in (("critic", critic), ("actor critic", actor_critic)):
    BUILDERS[_name] = lambda make=_make, **fields: models._build(models.ModelConfig(**fields), make)


def values_spec() -> pg.LossSpec:
    """A spec that trains a policy and its value head, each under its own normaliser."""
    return pg.LossSpec(
        components=[
            pg.PolicyGradient(normalizer="mean(sequence) > mean(token)"),
            pg.Entropy(coef=0.05),
            pg.Value(clip=0.2, coef=0.5, normalizer="mean(prompt) > mean(token)"),
        ]
    )


def exact_spec() -> pg.LossSpec:
    """A spec with a policy gradient and the exact KL to a reference."""
    return pg.LossSpec(
        components=[
            pg.PolicyGradient(),
            pg.KL(estimator="exact", to="ref", coef=0.3, normalizer="mean(sequence) > mean(token)"),
            pg.Entropy(coef=0.05),
        ]
    )


SPECS = {
    "critic": ("critic", pg.presets.critic),
    "both": ("actor critic", values_spec),
    "exact": ("gpt", exact_spec),
}
"""Name to the kind of model and the spec."""


class Truth:
    """The oracle's answers, each computed once. Building the models is a collective."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def of(self, name: str, job: Job) -> tuple[list[Any], float, dict[str, torch.Tensor], list[torch.Tensor]]:
        """Rows, loss, gradients by global name, and values by row."""
        key = name, job.temperature, job.depth
        if key not in self._found:
            self._found[key] = _answer(*key)
        return self._found[key]


def _answer(name: str, temperature: bool, layers: int) -> Any:
    kind, make = SPECS[name]
    chunks, _ = jobs.oracle_model(kind, layers=layers)
    reference = BUILDERS["gpt"](vocab_size=jobs.VOCAB, seq_length=64, layer_spec="own", layers=layers)
    deterministic_weights(reference, seed=REFERENCE_SEED)
    rows, dice = jobs.rows_of_step(0, temperature=temperature), Dice(5)
    said: dict[str, list[torch.Tensor]] = {"logp": [], "entropy": [], "value": [], "kl": []}
    for row in rows:
        tokens, heat, size = torch.tensor(row["tokens"])[None], row["temperature"], len(row["tokens"])
        output = chunks[0].module(tokens, torch.arange(size)[None], None)
        logits, value = {"critic": (None, output), "exact": (output, None)}.get(name) or output
        zeros = torch.zeros(size, dtype=torch.float64)
        logp, entropy = (zeros, zeros) if logits is None else oracle_logprobs(logits[0], row["tokens"], heat)
        said["logp"].append(logp)
        said["entropy"].append(entropy)
        row["old"] = (logp.detach() + dice.normal(size, 0.25)).clamp(max=-1e-3).tolist()
        if value is not None:
            said["value"].append(torch.cat([zeros[:1], value[0, :-1, 0]]))  # entry i: of the state before token i
            for stream, scale in (("values", 0.3), ("returns", 0.5)):
                row[stream] = (said["value"][-1].detach() + dice.normal(size, scale)).tolist()
        else:
            ref = reference[0].module(tokens, torch.arange(size)[None], None)
            said["kl"].append(oracle_kl(logits[0], ref[0].detach(), heat))
        row["weights"] = {part: w for part, w in row["weights"].items() if part in make().names}
    answer = oracle_loss(
        said["logp"], said["entropy"], rows, plain(make()), values=said["value"] or None, kls=said["kl"] or None
    )
    places = placements(chunks)
    grads = torch.autograd.grad(answer["loss"], [place.param for place in places])
    named = {place.name: grad for place, grad in zip(places, grads, strict=True)}
    reference.clear()
    leave(chunks)
    return rows, float(answer["loss"].detach()), named, [value.detach() for value in said["value"]]


def batches(job: Job, where: Any, spec: pg.LossSpec, rows: list[Any]) -> list[pg.TokenBatch]:
    """This rank's batches, with the streams that a critic reads."""
    mine = jobs.share(rows, where.dp_rank, where.dp, job.empty_rank, shuffle=job.shuffle)
    if not mine:
        return []
    batch = jobs.batch_of(mine, list(mine[0]["weights"]))
    for name in ("values", "returns"):
        if name in mine[0]:
            parts = [torch.tensor([*row[name][1:], 0.0], dtype=torch.float64) for row in mine]
            batch = batch.with_stream(name, torch.cat(parts))
    return [batch]


def visit(job: Job, name: str, truth: Truth, own_forward_step: bool = False) -> SimpleNamespace:
    """Run one step, and return its errors. A collective.

    Args:
        own_forward_step: hand reference logits to ``loss_func``, instead of a reference model to the step.
    """
    kind, make = SPECS[name]
    rows, loss, grads, values = truth.of(name, job)
    spec = make()
    chunks, where = jobs.build(replace(job, kind=kind))
    reference: list[Any] = []
    if name == "exact":
        reference = BUILDERS["gpt"](**job.config)
        deterministic_weights(reference, seed=REFERENCE_SEED)
    options = {"reference": reference} if reference and not own_forward_step else {}
    step, more = make_step(job, chunks, spec, **options)
    if own_forward_step:

        def forward_step(iterator: Any, model: Any) -> Any:
            micro = next(iterator)
            with torch.no_grad():
                logits = step.run_model(micro, reference[0])
            return step.run_model(micro, model), step.loss_func(micro, ref_logits=logits)

        more["forward_step_func"] = forward_step
    given = batches(job, where, spec, rows)
    found = SimpleNamespace(spec=name, error="", metric="loss", scored=0.0)
    if name != "exact":
        for batch in step.score(given, into="values"):
            lines = batch.streams["values"].split(batch.lengths_S.tolist())
            mine = {row["name"]: value.detach() for row, value in zip(rows, values, strict=True)}
            gaps = [
                (line[:-1] - mine[who][1:]).abs().max() for line, who in zip(lines, batch.sample_ids or (), strict=True)
            ]
            found.scored = max(found.scored, *map(float, gaps))
    step.begin(given)
    metrics = step.finish(run_schedule(step, chunks, **more))
    found.loss_error = abs(metrics["loss"] - loss) / abs(loss)
    found.metric_error = found.loss_error
    found.gradient_error, found.parameter = worst(full_gradients(chunks), grads)
    found.least = min(float(grad.abs().max()) for grad in grads.values())
    found.metrics = metrics
    reference.clear()
    leave(chunks)
    return found


def refusals() -> dict[str, str]:
    """Refused uses of value heads and references to their messages. A collective over four data-parallel ranks."""
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss.megatron import outputs

    found: dict[str, str] = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except pg.PGLossError as error:
            found[name] = f"{type(error).__name__}: {error}"

    job = Job(world=4)
    chunks, where = jobs.build(job)
    rows = jobs.rows_of_step(0)
    split = job.split
    exact = pgm.PolicyLossStep(exact_spec(), chunks, split=split)
    exact.begin([jobs.batch_of(jobs.share(rows, where.dp_rank, where.dp))])
    micro = next(iter(exact.data_iterator()))
    logits = torch.zeros(*micro.shape, jobs.VOCAB, dtype=torch.float64)
    refused("no reference", lambda: exact.loss_func(micro)(logits))
    refused("other logits", lambda: exact.loss_func(micro, ref_logits=logits[..., 1:])(logits))
    exact.close()
    refused("reference unread", lambda: pgm.PolicyLossStep(pg.presets.ppo(), chunks, split=split, reference=chunks))
    refused("chunks", lambda: pgm.PolicyLossStep(exact_spec(), chunks, split=split, reference=[*chunks, *chunks]))
    refused("fused", lambda: pgm.PolicyLossStep(exact_spec(), chunks, split=split, head="auto"))
    refused("forward", lambda: pgm.PolicyLossStep(values_spec(), chunks, split=split, head="forward"))
    refused("logits for a value", lambda: outputs.values(micro, logits, beside=False))
    refused("one output", lambda: outputs.values(micro, logits[..., :1], beside=True))
    half = outputs.values(micro, logits[..., 0].bfloat16(), beside=False)
    found["half"] = f"{half.dtype} {list(half.shape) == list(micro.shape)}"
    leave(chunks)
    chunks, _ = jobs.build(replace(job, tied=True))
    refused("tied", lambda: pgm.PolicyLossStep(pg.presets.critic(), chunks, split=split))
    chunks[0].module.share_embeddings_and_output_weights = False
    chunks[0].config.mtp_num_layers = 1
    refused("mtp", lambda: pgm.PolicyLossStep(pg.presets.critic(), chunks, split=split))
    leave(chunks)
    return found
