"""``verify``: the same gradient on every layout, shown on the user's own machines.

``torchrun --nproc-per-node 8 -m megatron_pgloss verify --layouts all``
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_pgloss.cli import _functions


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "verify",
        help="hold the gradients of real Megatron-Core models, on many layouts, against a float64 oracle",
        description="Builds small real Megatron-Core models on layouts of the launched processes and holds loss and "
        "every parameter's gradient against one float64 computation of the whole step. Launch with torchrun. Exit code "
        "1 where a layout is off. Without a layout of your own, all of the built-in table that fit are visited.",
    )
    _add_layout(parser.add_argument_group("one layout of your own; data parallelism is what is left"))
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--layouts", metavar="all|WORDS", help="the built-in table; words separated by commas: the names that hold all"
    )
    what.add_argument(
        "--spec", action="append", default=[], metavar="NAME|FILE.toml",
        help="a built-in spec or a TOML file of your own, instead of all built-in ones; may be repeated",
    )  # fmt: skip
    _functions.add(what)
    what.add_argument("--precision", choices=("float64", "float32", "bf16"), help="default float64; float32 on GPUs")
    what.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo on CPU (default), or NCCL")
    what.add_argument("--self-test", action="store_true", help="break the product on purpose: every fault must be seen")
    parser.add_argument(
        "--timeout", type=_size, default=600, metavar="SECONDS",
        help="of every collective, Megatron's groups too: how long ranks wait for one that stopped (default 600)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")


def _add_layout(group: Any) -> None:
    for axis, text in {
        "tp": "tensor", "pp": "pipeline", "vpp": "virtual pipeline", "cp": "context", "ep": "expert",
    }.items():  # fmt: skip
        group.add_argument(f"--{axis}", type=_size, metavar="N", help=f"{text} parallel size")
    flags = {
        "sp": "sequence parallelism", "per-token": "calculate_per_token_loss=True", "tied": "tied embeddings",
        "distributed-optimizer": "Megatron's distributed optimizer", "variable-lengths": "variable_seq_lengths=True",
        "hybrid": "a HybridModel (megatron-core 0.18 on) instead of a GPTModel",
    }  # fmt: skip
    for flag, text in flags.items():
        group.add_argument(f"--{flag}", action="store_true", default=None, help=text)
    group.add_argument(
        "--head", choices=("auto", "keep", "keep32", "recompute", "forward"),
        help="the fused head, instead of logits; keep8 rounds on purpose, and has tests of its own",
    )  # fmt: skip
    group.add_argument("--experts", type=_size, metavar="N", help="mixture of experts; 4 where --ep is above 1")
    how = group.add_mutually_exclusive_group()
    how.add_argument("--packed", type=_size, nargs="?", const=80, metavar="TOKENS", help="packed rows (default 80)")
    how.add_argument("--sequences", type=_size, metavar="N", help="rows per micro-batch (default 2)")
    how.add_argument("--microbatches", type=_size, metavar="N", help="micro-batches per rank")


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 where a layout is off."""
    from megatron_pgloss.verify.run.quiet import hush

    hush()
    args.offered = _functions.offered(args.functions)
    from megatron_pgloss.verify.run.command import command, settle_device

    settle_device(args.device)
    if args.self_test:
        from megatron_pgloss.verify.faults import self_test

        return int(self_test(args))
    return command(args)
