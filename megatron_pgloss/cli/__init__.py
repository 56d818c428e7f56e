"""The command line: one module of this package for each command, with the command's name.

A module has ``add(subparsers)``, which declares the command's arguments, and ``run(args) -> int``, which gives the exit
code. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megatron_pgloss._version import __version__
from megatron_pgloss.errors import PGLossError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None: those of this process.

    Returns:
        The exit code: 0 where nothing is wrong, 1 where the command found something wrong, 2 where it could not run.
    """
    commands = _commands()
    called = Path(sys.argv[0]).name
    prog = called if called == "pgloss" else "python -m megatron_pgloss"
    parser = argparse.ArgumentParser(prog=prog, description="Policy gradients on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"megatron_pgloss {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in commands.items():
        if module is None:
            subparsers.add_parser(name, help="not here: see doctor", add_help=False).add_argument("rest", nargs="...")
        else:
            module.add(subparsers)
    args = parser.parse_args(argv)
    chosen = commands[args.command]
    if chosen is None:
        print(f"{args.command} needs what is not installed here; see {prog} doctor", file=sys.stderr)
        return 2
    try:
        code = int(chosen.run(args))
        sys.stdout.flush()
        return code
    except PGLossError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. The rest of the buffer must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _commands() -> dict[str, ModuleType | None]:
    """The commands' modules; None for one that needs a library which is not installed."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))
    return {name: _command(name) for name in names}


def _command(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name in ("torch", "pydantic"):
            return None
        raise
