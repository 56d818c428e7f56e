"""The loss as arguments of Megatron's own parser (``extra_args_provider``)."""

from __future__ import annotations

import argparse

from megatron_pgloss import presets
from megatron_pgloss.errors import SpecError
from megatron_pgloss.planning import Split
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.functions import Functions


def add_pgloss_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group ``pgloss`` to a parser; for ``extra_args_provider=add_pgloss_args``."""
    group = parser.add_argument_group(title="pgloss")
    group.add_argument("--pgloss-preset", choices=sorted(presets.PRESETS), help="a named recipe")
    group.add_argument("--pgloss-spec", metavar="FILE.toml", help="a LossSpec as TOML, instead of a preset")
    group.add_argument("--pgloss-normalizer", help="normaliser path for the preset, e.g. 'mean(token)'")
    group.add_argument("--pgloss-budget", type=float, help="token budget of the dr_grpo preset")
    group.add_argument("--pgloss-sequences", type=int, help="rows per micro-batch, padded")
    group.add_argument("--pgloss-max-tokens", type=int, help="tokens per micro-batch, packed")
    group.add_argument(
        "--pgloss-on-nonfinite", choices=("raise", "skip", "report"), default="raise",
        help="what to do with non-finite values inside a component",
    )  # fmt: skip
    return parser


def spec_from_args(args: argparse.Namespace, *, functions: Functions | None = None) -> LossSpec:
    """The spec that the arguments name.

    Args:
        functions: what the names of the user's own functions in a file stand for, as in `LossSpec.from_toml`.

    Raises:
        SpecError: the arguments give neither or both of preset and file, or one that does not fit the other, or the
            spec is refused.
    """
    if (args.pgloss_preset is None) == (args.pgloss_spec is None):
        raise SpecError("give either --pgloss-preset or --pgloss-spec", expected="one of the two")
    if args.pgloss_spec is not None:
        if args.pgloss_normalizer is not None or args.pgloss_budget is not None:
            raise SpecError("--pgloss-normalizer and --pgloss-budget go with a preset", fix="write them in the file")
        return LossSpec.from_toml(args.pgloss_spec, functions=functions)
    parts = {} if args.pgloss_normalizer is None else {"normalizer": args.pgloss_normalizer}
    if args.pgloss_preset == "dr_grpo":
        if args.pgloss_budget is None:
            raise SpecError("dr_grpo divides by a token budget", fix="--pgloss-budget 4096")
        parts["budget"] = args.pgloss_budget
    elif args.pgloss_budget is not None:
        raise SpecError("--pgloss-budget goes with --pgloss-preset dr_grpo")
    return presets.get(args.pgloss_preset, **parts)


def split_from_args(args: argparse.Namespace) -> Split:
    """The split that the arguments name. Where they name none, a micro-batch has Megatron's ``--micro-batch-size``
    rows, or one row where Megatron has not set it.
    """
    if args.pgloss_sequences is None and args.pgloss_max_tokens is None:
        return Split(sequences=getattr(args, "micro_batch_size", None) or 1)
    return Split(sequences=args.pgloss_sequences, max_tokens=args.pgloss_max_tokens)
