"""The command line of train_rl.py, and the layout, loss and task that follow from it."""

from __future__ import annotations

import argparse

import torch
from hunt import Hunt

import megatron_pgloss as pg

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}
LAYOUT = ("tp", "pp", "vpp", "cp", "ep")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments of one run."""
    parser = argparse.ArgumentParser(
        prog="train_rl.py",
        description="Train a Megatron-Core model by policy gradient to hunt a hidden number.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _loss(parser.add_argument_group("loss"))
    _layout(parser.add_argument_group("layout"))
    _task(parser.add_argument_group("task and model"))
    _training(parser.add_argument_group("training"))
    _files(parser.add_argument_group("files"))
    args = parser.parse_args(argv)
    if args.record and args.replay:
        parser.error("--record writes what was sampled, --replay samples nothing: give one of them")
    if args.save and args.distributed_optimizer:
        parser.error("--save: the distributed optimizer's state cannot be written on every device, leave one out")
    if args.save and (args.max_steps or 0) % args.updates:
        parser.error(
            "--save: a checkpoint lies between rollout batches, so --max-steps must be a multiple of --updates"
        )
    if args.optimizer == "megatron" and args.dtype == "float64":
        parser.error("Megatron's optimizers refuse float64: use --optimizer sgd or adam")
    if args.optimizer != "megatron" and (args.dtype == "bf16" or args.distributed_optimizer):
        parser.error("bf16 and --distributed-optimizer need --optimizer megatron")
    return args


def _loss(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--preset", choices=sorted(pg.presets.PRESETS), default="grpo")
    group.add_argument("--kl", type=float, help="coefficient of the KL to the initial policy; None: 0")
    group.add_argument("--entropy", type=float, default=0.05, help="coefficient of the entropy bonus; falls to 0")
    group.add_argument("--normalizer", help="e.g. 'mean(token)'; None: the preset's own")
    group.add_argument("--ce", type=float, help="echo: coefficient of the cross entropy")
    group.add_argument("--echo-variant", choices=("paper", "prime_rl"), default="paper")


def _layout(group: argparse._ArgumentGroup) -> None:
    said = "; without any layout flag, 4 processes are tp 2 x pp 2"
    group.add_argument("--tp", type=int, help=f"tensor parallel{said}")
    group.add_argument("--pp", type=int, help="pipeline parallel")
    group.add_argument("--vpp", type=int, help="model chunks per pipeline rank")
    group.add_argument("--cp", type=int, help="context parallel")
    group.add_argument("--ep", type=int, help="expert parallel (with --experts)")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--per-token-loss", action="store_true", help="Megatron's calculate_per_token_loss")
    group.add_argument("--distributed-optimizer", action="store_true")
    group.add_argument("--sequences", type=int, help="rows per micro-batch (padded)")
    group.add_argument("--max-tokens", type=int, help="tokens per micro-batch (packed), instead")


def _task(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--numbers", type=int, default=12, help="how many numbers may be hidden")
    group.add_argument("--base", type=int, default=4, help="of the two digits of a guess")
    group.add_argument("--turns", type=int, default=4, help="guesses per episode")
    group.add_argument("--valid-bonus", type=float, default=0.2, help="reward for the share of valid guesses")
    group.add_argument("--layers", type=int, help="None: 2, or one per pipeline chunk if more")
    group.add_argument("--hidden", type=int, default=64)
    group.add_argument("--heads", type=int, default=4)
    group.add_argument("--experts", type=int, help="mixture of experts instead of dense layers")
    group.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    group.add_argument("--init-std", type=float, default=0.05, help="deviation of initial weights")


def _training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--iterations", type=int, default=250, help="rollout batches")
    group.add_argument("--max-steps", type=int, help="end after this many optimizer steps")
    group.add_argument("--prompts", type=int, default=12, help="hidden numbers per iteration")
    group.add_argument("--group-size", type=int, default=16, help="rollouts per hidden number")
    group.add_argument("--updates", type=int, default=4, help="optimizer steps per rollout batch")
    group.add_argument("--optimizer", choices=("megatron", "adam", "sgd"), default="megatron")
    group.add_argument("--lr", type=float, default=1e-3, help="falls to a tenth; with --replay, lr and entropy stay")
    group.add_argument("--adam-eps", type=float, default=1e-8, help="Adam's epsilon")
    group.add_argument("--clip-grad", type=float, default=1.0, help="0: off")
    group.add_argument("--eval-every", type=int, default=10, help="iterations between greedy games")


def _files(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", default="runs/hunt", help="folder for metrics, curve, token page")
    group.add_argument("--record", metavar="FILE", help="write the rollouts, one JSON object per line")
    group.add_argument("--replay", metavar="FILE", help="read rollouts instead of sampling them")
    group.add_argument("--save", metavar="DIR", help="write a distributed checkpoint at the end")
    group.add_argument("--load", metavar="DIR", help="go on from a checkpoint")
    group.add_argument("--plain", action="store_true", help="lines instead of a progress bar")


def layout_of(args: argparse.Namespace, world: int) -> dict[str, int]:
    """Sizes by axis; without any layout flag, 4 processes become tp 2 x pp 2."""
    given = {axis: getattr(args, axis) for axis in LAYOUT}
    if world == 4 and not any(given.values()):
        given |= {"tp": 2, "pp": 2}
    return {axis: size or 1 for axis, size in given.items()}


def spec_of(args: argparse.Namespace, hunt: Hunt) -> pg.LossSpec:
    """The preset with the parts that the flags change."""
    parts: dict[str, object] = {"entropy": args.entropy}
    if args.kl is not None or args.preset == "grpo":
        parts["kl"] = args.kl or 0.0
    if args.normalizer:
        parts["normalizer"] = args.normalizer
    if args.preset == "dr_grpo":
        parts["budget"] = float(2 * hunt.turns)  # the most action tokens that an episode can have
    if args.preset == "echo":
        parts |= {"variant": args.echo_variant, "ce": args.ce}
    return pg.presets.get(args.preset, **parts)


def split_of(args: argparse.Namespace) -> pg.Split:
    """How rows become micro-batches: 48 rows each unless a flag says otherwise."""
    if args.max_tokens:
        return pg.Split(max_tokens=args.max_tokens)
    return pg.Split(sequences=args.sequences or 48)


def hunt_of(args: argparse.Namespace) -> Hunt:
    """The environment."""
    return Hunt(numbers=args.numbers, base=args.base, turns=args.turns)


def layers_of(args: argparse.Namespace, layout: dict[str, int]) -> int:
    """Transformer layers: each pipeline chunk needs one."""
    return args.layers or max(2, layout["pp"] * layout["vpp"])
