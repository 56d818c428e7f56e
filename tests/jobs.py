"""A training step on a real Megatron-Core model, on any layout, and the oracle's answer beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import megatron_pgloss as pg
from data import Row, attach_streams, make_rows

VOCAB, WIDTH = 32, 40


@dataclass(frozen=True, kw_only=True)
class Job:
    """One layout and how the data lies on it."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    per_token: bool = False
    split: pg.Split = field(default_factory=lambda: pg.Split(sequences=2))
    empty_rank: bool = False
    """The last data-parallel rank has no rows."""
    model: dict[str, Any] = field(default_factory=dict)
    """More fields of the model's config."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `PolicyLossStep`."""
    loss_scale: float = 1.0
    """fp16's, by ``config.grad_scale_func``."""
    collection: bool = False
    """Process groups are handed over as a ``pg_collection``, to the step and to the schedule."""

    @property
    def name(self) -> str:
        """For the tables of tests."""
        axes = [
            f"{axis}{getattr(self, axis)}" for axis in ("tp", "pp", "vpp", "cp", "ep") if (getattr(self, axis) or 1) > 1
        ]
        extra = [key for key, value in self.model.items() if value]
        tail = [*extra, "packed"] if self.split.packed else extra
        return " ".join(
            [*axes, *tail, "per_token" if self.per_token else "", "empty_rank" if self.empty_rank else ""]
        ).strip()


def rows_of_step(seed: int = 0, model_fn: Any = None, **more: Any) -> list[Row]:
    """Rows whose streams lie around the model's own log-probs, so that clips and corrections are active."""
    from megatron_pgloss.verify.oracle import oracle_logprobs

    rows = make_rows(seed, **(dict(vocab=VOCAB, max_length=WIDTH) | more))
    if model_fn is not None:
        with torch.no_grad():
            scored = [
                oracle_logprobs(model_fn(torch.tensor(row["tokens"])[None])[0], row["tokens"], row.get("temperature"))[
                    0
                ]
                for row in rows
            ]
        attach_streams(rows, scored, seed)
    # A name that does not depend on who holds the row.
    return [row | {"name": f"r{i}"} for i, row in enumerate(rows)]


def batch_of(rows: Sequence[Row], weights: Sequence[str] = (), dtype: torch.dtype = torch.float64) -> pg.TokenBatch:
    """The rows as a user would hand them over, packed, in token order."""

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in row[name]], dtype=dtype)

    def flags(name: str) -> torch.Tensor:
        return torch.tensor([bool(value) for row in rows for value in row[name]])

    heat = None if rows[0].get("temperature") is None else flat("temperature")
    return pg.TokenBatch.from_packed(
        tokens=torch.tensor([token for row in rows for token in row["tokens"]]),
        lengths=[len(row["tokens"]) for row in rows],
        action_mask=flags("action"),
        observation_mask=flags("observation"),
        advantages=flat("advantages"),
        old_logprobs=flat("old"),
        rollout_logprobs=flat("rollout"),
        ref_logprobs=flat("ref"),
        temperature=heat,
        prompt_ids=[row["prompt"] for row in rows],
        episode_ids=[row["episode"] for row in rows],
        sample_ids=[row["name"] for row in rows],
        terminations=[row["termination"] for row in rows],
        masks={"keep": torch.tensor([value for row in rows for value in row["masks"]["keep"]])},
        weights={
            name: torch.tensor([value for row in rows for value in row["weights"][name]], dtype=dtype)
            for name in weights
        },
    )


def share(rows: Sequence[Row], rank: int, size: int, empty_rank: bool = False) -> list[Row]:
    """A data-parallel rank's rows: uneven, dealt out so that prompts and episodes straddle ranks."""
    workers = size - 1 if empty_rank else size
    if rank >= workers:
        return []
    # The first rank has one row more than its part: uneven counts, and more micro-batches there.
    owner = [0 if i < 2 else i % workers for i in range(len(rows))]
    return [row for row, who in zip(rows, owner, strict=True) if who == rank]


def build(job: Job, **changes: Any) -> tuple[list[Any], Any]:
    """Process groups and model of a job; call `megatron_pgloss.verify.models.destroy_parallel` after."""
    from megatron_pgloss.verify.models import build_gpt, init_parallel
    from megatron_pgloss.verify.weights import deterministic_weights

    where = init_parallel(tp=job.tp, pp=job.pp, vpp=job.vpp, cp=job.cp, ep=job.ep)
    fields = dict(vocab_size=VOCAB, seq_length=64, per_token_loss=job.per_token) | job.model | changes
    chunks = build_gpt(**fields)
    deterministic_weights(chunks, seed=3)
    if job.loss_scale != 1:
        chunks[0].config.grad_scale_func = lambda loss: loss * job.loss_scale
    return chunks, where


def run_schedule(step: Any, chunks: list[Any], forward_only: bool = False, **more: Any) -> Any:
    """Megatron's own schedule over the step's micro-batches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
    return get_forward_backward_func()(
        **dict(
            forward_step_func=step.forward_step,
            data_iterator=step.data_iterator(),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=step.num_microbatches,
            seq_length=step.seq_length,
            micro_batch_size=step.micro_batch_size,
            forward_only=forward_only,
        )
        | more
    )


def one_step(
    job: Job, chunks: list[Any], where: Any, spec: pg.LossSpec, rows: Sequence[Row], **options: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor], Any]:
    """Plan, schedule, finish; metrics and every parameter's whole gradient."""
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss.verify.reshard import full_gradients

    more: dict[str, Any] = {}
    if job.collection:
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.use_mpu_process_groups()
        options["pg_collection"] = more["pg_collection"] = groups
        if job.pp > 1:
            more["p2p_communicator"] = P2PCommunicator(groups.pp, chunks[0].config)
    step = pgm.PolicyLossStep(
        spec, chunks if len(chunks) > 1 else chunks[0], split=job.split, **(job.options | options)
    )
    plan = step.begin(batches_of(job, where, spec, rows))
    metrics = step.finish(run_schedule(step, chunks, **more))
    return metrics, full_gradients(chunks), plan


def batches_of(job: Job, where: Any, spec: pg.LossSpec, rows: Sequence[Row]) -> list[pg.TokenBatch]:
    """This data-parallel rank's share, with the weights of the spec's components."""
    mine = share(rows, where.dp_rank, where.dp, job.empty_rank)
    weights = [name for name in rows[0]["weights"] if name in spec.names]
    return [batch_of(mine, weights)] if mine else []


def oracle_model(**fields: Any) -> tuple[Any, Any]:
    """The whole model in this process, and a function from tokens to logits; collective only in building."""
    from megatron_pgloss.verify.models import build_gpt, init_parallel
    from megatron_pgloss.verify.weights import deterministic_weights

    init_parallel()
    chunks = build_gpt(**(dict(vocab_size=VOCAB, seq_length=64) | fields))
    deterministic_weights(chunks, seed=3)
    model = chunks[0]

    def model_fn(tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1])[None]
        return model.module(tokens, positions, None)

    return chunks, model_fn


def oracle_answer(
    chunks: Any, model_fn: Any, rows: Sequence[Row], spec: pg.LossSpec, terms: dict[str, Any] | None = None
) -> tuple[float, dict[str, torch.Tensor], dict]:
    """Loss and gradients by the oracle, for the parameters of the model in this process."""
    from megatron_pgloss.verify.oracle import oracle_step
    from megatron_pgloss.verify.reshard import placements

    module = chunks[0].module
    plain = spec.to_dict()
    for part, given in zip(plain["components"], spec.components, strict=True):
        if part["kind"] == "term":
            part["fn"] = given.function
    answer = oracle_step(model_fn, rows, plain)
    params = [p for p in module.parameters() if p.requires_grad]
    grads = torch.autograd.grad(answer["loss"], params)
    by_param = dict(zip(params, grads, strict=True))
    named = {place.name: by_param[place.param] for place in placements(chunks)}
    return float(answer["loss"]), named, answer


def worst(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest error of a parameter: max |g - g0| / max(max |g0|, 1e-3 of the largest over all parameters)."""
    largest = max(float(g.abs().max()) for g in reference.values())
    assert set(grads) == set(reference), set(grads) ^ set(reference)
    errors = {
        name: float((grads[name] - g).abs().max()) / max(float(g.abs().max()), 1e-3 * largest)
        for name, g in reference.items()
    }
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def barrier() -> None:
    """All ranks meet."""
    dist.barrier()
