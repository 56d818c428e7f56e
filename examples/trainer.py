"""One training run on one rank: model, optimizer, rollouts, and the work of an iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import options
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from optimizers import Optimizer, gradient_norm
from replay import Recorder, deal, gather, read
from rollouts import Policy, Rollout, sample, to_batches

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.verify.layouts.models import build_gpt, init_parallel
from megatron_pgloss.verify.layouts.weights import deterministic_weights


class Run:
    """One training run on this rank."""

    def __init__(self, args: Any) -> None:
        self.args, self.hunt = args, options.hunt_of(args)
        self.layout = options.layout_of(args, dist.get_world_size())
        self.ranks = init_parallel(**self.layout, seed=1 + args.seed)
        self.spec = options.spec_of(args, self.hunt)
        self.chunks = build_gpt(
            vocab_size=self.hunt.vocab_size, seq_length=64, hidden=args.hidden, heads=args.heads, query_groups=None,
            ffn=2 * args.hidden, layers=options.layers_of(args, self.layout), experts=args.experts,
            dtype=options.DTYPES[args.dtype], sequence_parallel=args.sequence_parallel,
            per_token_loss=args.per_token_loss, distributed_optimizer=args.distributed_optimizer,
        )  # fmt: skip
        deterministic_weights(self.chunks, seed=args.seed, std=args.init_std)
        self.step = pgm.PolicyLossStep(self.spec, self.chunks, split=options.split_of(args))
        self.policy = Policy(self.step, self.hunt)
        self.optimizer = Optimizer(
            args.optimizer,
            self.chunks,
            lr=args.lr,
            eps=args.adam_eps,
            clip=args.clip_grad,
            distributed=args.distributed_optimizer,
        )
        self.reference = [[param.detach().clone() for param in chunk.parameters()] for chunk in self.chunks]
        self.replayed = read(args.replay) if args.replay else None
        self.recorder = Recorder(args.record) if args.record else None
        self.iteration = self.steps = 0

    def rollouts(self, iteration: int) -> list[Rollout]:
        """This rank's rollouts of an iteration: from the file, or sampled now."""
        args = self.args
        if self.replayed is not None:
            return deal(self.replayed[iteration], self.ranks.dp_rank, self.ranks.dp)
        mine = sample(
            self.policy, self.hunt, iteration, seed=args.seed, prompts=args.prompts, group_size=args.group_size,
            valid_bonus=args.valid_bonus, scale=args.preset != "dr_grpo",
        )  # fmt: skip
        if self.recorder is not None:
            self.recorder.write(mine, self.step.layout)
        return mine

    @torch.no_grad()
    def score(self, batches: list[pg.TokenBatch]) -> list[pg.TokenBatch]:
        """Score old log-probs with the present weights, and reference log-probs with the initial ones where the loss
        reads them.
        """
        batches = self.step.score(batches, into="old")
        if "ref" not in self.spec.readers:
            return batches
        params = [list(chunk.parameters()) for chunk in self.chunks]
        present = [[param.detach().clone() for param in part] for part in params]
        self._load(self.reference)
        batches = self.step.score(batches, into="ref")
        self._load(present)
        return batches

    def _load(self, values: list[list[torch.Tensor]]) -> None:
        for chunk, part in zip(self.chunks, values, strict=True):
            for param, value in zip(chunk.parameters(), part, strict=True):
                param.data.copy_(value)

    def observations(self, batches: list[pg.TokenBatch], rollouts: list[Rollout]) -> dict[str, float]:
        """The mean cross entropy of the model on the environment's answers, and the environment's own entropy there."""
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            sums[0] -= torch.where(batch.observation_T, batch.streams["old"], 0).double().sum()
            sums[1] += batch.observation_T.sum()
        if rollouts:
            history = torch.full((len(rollouts), self.hunt.max_length), self.hunt.token("pad"))
            for row, rollout in enumerate(rollouts):
                history[row, : len(rollout.tokens)] = torch.tensor(rollout.tokens)
            sums[2] = self.hunt.observation_surprisal(history).entropy.sum()
        sums = self._sum(sums)
        return {"observation_nll": float(sums[0] / sums[1]), "environment_entropy": float(sums[2] / sums[1])}

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        layout = self.step.layout
        if layout.dp is not None:
            values = values.to(layout.device)
            dist.all_reduce(values, group=layout.dp)
        return values.cpu()

    def update(self, mini: list[pg.TokenBatch]) -> tuple[dict[str, Any], pg.Plan]:
        """One optimizer step."""
        fading = self.fading
        self.optimizer.set_lr(self.args.lr * max(fading, 0.1))
        plan = self.step.begin(mini, coef={"entropy": self.args.entropy * fading} if self.args.entropy else None)
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self.step.forward_step, data_iterator=self.step.data_iterator(),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0], num_microbatches=self.step.num_microbatches,
            seq_length=self.step.seq_length, micro_batch_size=self.step.micro_batch_size, forward_only=False,
        )  # fmt: skip
        metrics = self.step.finish(losses)
        norm = gradient_norm(self.chunks, distributed=self.args.distributed_optimizer)
        if self.step.should_step:
            self.optimizer.step(norm)
        line = {
            "grad_norm": norm,
            "microbatches": plan.num_microbatches,
            "empty_microbatches": plan.job["empty_microbatches"],
            "rows": plan.job["rows"],
            **metrics,
        }
        if self.replayed is not None:
            names = [name for batch in mini for name in batch.sample_ids or ()]
            line["samples"] = sorted(name for part in gather(names, self.step.layout) for name in part)
        return line, plan

    def iterate(self) -> Iterator[tuple[dict[str, Any], pg.Plan, list[Rollout]]]:
        """One iteration: sample or read, score, then several optimizer steps; each step's figures, plan and rows."""
        args, iteration = self.args, self.iteration
        rollouts = self.rollouts(iteration)
        batches = self.score(to_batches(rollouts, self.hunt, self.spec))
        self.figures = self.observations(batches, rollouts) | self.outcome(rollouts)
        for update, mini in enumerate(
            pg.minibatches(batches, args.updates, by="prompt", seed=1_000_003 * args.seed + iteration)
        ):
            line, plan = self.update(mini)
            yield {"kind": "step", "iteration": iteration, "update": update, "step": self.steps, **line}, plan, rollouts
            self.steps += 1
            if self.spent and update + 1 < args.updates:
                return
        self.iteration += 1

    @property
    def fading(self) -> float:
        """A factor that falls from 1 to 0 over the run; it stays 1 where rollouts are replayed."""
        return 1.0 if self.replayed is not None else 1 - self.iteration / self.args.iterations

    @property
    def ended(self) -> bool:
        """Whether the run is at its end."""
        last = len(self.replayed) if self.replayed is not None else self.args.iterations
        return self.spent or self.iteration >= min(last, self.args.iterations)

    @property
    def spent(self) -> bool:
        """Whether ``--max-steps`` is reached."""
        return self.args.max_steps is not None and self.steps >= self.args.max_steps

    def outcome(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Means over the rollouts of all ranks; the entropy is the mean of -log pi of the sampled tokens."""
        rows = torch.tensor(
            [(r.success, r.reward, -sum(r.logprobs), len(r.logprobs), 1) for r in rollouts], dtype=torch.float64
        )
        success, reward, surprise, tokens, count = self._sum(rows.reshape(-1, 5).sum(0)).tolist()
        return {"success": success / count, "reward": reward / count, "entropy": surprise / tokens}
