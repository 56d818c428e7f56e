"""The loop around a `Run`, with its output: an introduction, metrics on the way, and a report at the end."""

from __future__ import annotations

import time
from typing import Any

import checkpoints
import torch
import torch.distributed as dist
from logbook import Logbook
from rollouts import greedy_success, sample, to_batches
from trainer import Run


def introduce(run: Run, log: Logbook) -> dict[str, float]:
    """Print layout, loss and task; return the success rates with which the policy is compared."""
    at, hunt = run.ranks, run.hunt
    sizes = " x ".join(f"{axis} {getattr(at, axis)}" for axis in ("tp", "pp", "vpp", "cp", "ep", "dp"))
    log.say(
        f"world size {dist.get_world_size()}: {sizes}; {run.step.layout.device.type}, {run.args.dtype}, "
        f"optimizer {run.args.optimizer}"
    )
    log.say(f"loss: {run.args.preset}\n{run.spec}")
    levels = {"best strategy": hunt.optimal_success(), "random policy": hunt.random_success()}
    log.say(
        f"task: one of {hunt.numbers} numbers is hidden, {hunt.turns} guesses of two base-{hunt.base} digits; "
        f"guessing blindly finds {levels['random policy']:.1%} "
        f"({hunt.random_success('valid'):.1%} if every guess were valid), the best strategy "
        f"{levels['best strategy']:.1%}"
    )
    return levels


def teaches(plan: Any) -> bool:
    """Whether this rank has a row with something to learn: an advantage other than 0 at a sampled token."""
    return plan.batch is not None and bool((plan.batch.streams["advantages"][plan.batch.action_T] != 0).any())


def train(run: Run, log: Logbook) -> tuple[Any, Any, str]:
    """The loop; returns plan and rollouts of the last step that teaches, and which it is: the very last steps of a
    solved task do not teach, and their page would have nothing in colour.
    """
    args = run.args
    shown: tuple[Any, Any, str] | None = None
    while not run.ended:
        started, iteration, steps = time.perf_counter(), run.iteration, []
        for line, plan, rollouts in run.iterate():
            if shown is None or teaches(plan) or not teaches(shown[0]):
                shown = plan, rollouts, f"iteration {iteration + 1} of {args.iterations}, step {line['update'] + 1}"
            log.write(line)
            steps.append(line)
        line = {"kind": "iteration", "iteration": iteration, **run.figures, **summary(steps)}
        if iteration % args.eval_every == args.eval_every - 1:
            line["greedy"] = greedy_success(run.policy, run.hunt)
        line["seconds"] = time.perf_counter() - started
        log.write(line)
        log.progress(line, every=args.eval_every)
    assert shown is not None  # a run has an iteration
    return shown


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """An iteration's figures from its steps: means over the steps, but the ratio of the last step."""

    def mean(*names: str) -> float:
        return sum(step.get(name, 0.0) for step in steps for name in names) / len(steps)

    found = {
        "loss": mean("loss"),
        "grad_norm": mean("grad_norm"),
        "clipped": mean("rl/clip_low", "rl/clip_high", "rl/clip_dual"),
    }
    if "rl/ratio" in steps[-1]:
        found |= {"ratio": steps[-1]["rl/ratio"], "ratio_max": max(step["rl/ratio_max"] for step in steps)}
    return found


def report(
    run: Run, log: Logbook, levels: dict[str, float], before: float, seconds: float, last: tuple[Any, Any, str]
) -> None:
    """Play the final games, write the files, and print the results."""
    args, hunt = run.args, run.hunt
    after = greedy_success(run.policy, hunt)
    fresh = sample(
        run.policy, hunt, -1, seed=args.seed, prompts=hunt.numbers, group_size=8, valid_bonus=0.0, scale=True
    )
    observed = run.observations(run.score(to_batches(fresh, hunt, run.spec)), fresh) | run.outcome(fresh)
    cpu = torch.tensor([time.process_time()], dtype=torch.float64, device=run.step.layout.device)
    dist.all_reduce(cpu)
    if args.save:
        checkpoints.save(args.save, run.chunks, run.optimizer, {"iteration": run.iteration, "steps": run.steps})
    if not log.active:
        return
    steps = log.lines("step")
    moved = [
        sum(step.get(f"rl/clip_{side}") or 0 for side in ("low", "high", "dual")) for step in steps if step["update"]
    ]
    clipped = sum(moved) / max(len(moved), 1)
    norms = [step["grad_norm"] for step in steps]
    log.write(
        {"kind": "end", "greedy_before": before, "greedy_after": after, "train_seconds": seconds, **levels, **observed}
    )
    log.say(f"""
success over all {hunt.numbers} hidden numbers, likeliest tokens
  random policy     {levels["random policy"]:7.1%}
  before training   {before:7.1%}
  after training    {after:7.1%}
  best strategy     {levels["best strategy"]:7.1%}
answers of the environment, on fresh rollouts, in nats
  observation nll      {observed["observation_nll"]:.3f}
  environment entropy  {observed["environment_entropy"]:.3f}
clipped tokens after the first update: {min(moved, default=0):.1%} to {max(moved, default=0):.1%}, mean {clipped:.1%}
gradient norm: {min(norms):.3g} to {max(norms):.3g} over {len(norms)} steps
training took {seconds:.0f} s ({float(cpu):.0f} s of processor time over all processes, start-up included)
metrics     {log.metrics}
curve       {log.curve(levels)}
token page  {log.page(*last, hunt, title=f"Number hunt, {args.preset}: what the loss trains")}""")


def run(args: Any) -> None:
    """A whole training run, from the process group to the last line of the report."""
    job = Run(args)
    if args.load:
        progress = checkpoints.load(args.load, job.chunks, job.optimizer)
        job.iteration, job.steps = progress["iteration"], progress["steps"]
    log = Logbook(
        args.out, active=dist.get_rank() == 0, append=bool(args.load), total=args.iterations, plain=args.plain
    )
    levels = introduce(job, log)
    before = greedy_success(job.policy, job.hunt)
    log.start()
    started = time.perf_counter()
    last = train(job, log)
    seconds = time.perf_counter() - started
    log.close()
    report(job, log, levels, before, seconds, last)
