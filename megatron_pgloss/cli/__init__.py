"""The command line: one module of this package for each command, named as it.

A module has ``add(subparsers)``, which declares the command's arguments, and ``run(args) -> int``, which gives the exit
code. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from megatron_pgloss._version import __version__
from megatron_pgloss.errors import PGLossError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None: those of this process.

    Returns:
        The exit code: 0 where all is well, 1 where the command found something wrong, 2 where it could not run.
    """
    commands = _commands()
    parser = argparse.ArgumentParser(prog="python -m megatron_pgloss", description="Policy gradients on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"megatron_pgloss {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in commands.values():
        module.add(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(commands[args.command].run(args))
    except PGLossError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _commands() -> dict[str, ModuleType]:
    names = sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}
