"""``--functions MODULE``: the functions that a spec file may name, from the one module that the user names.

Nothing else that a user names is imported by the command line, and a spec file cannot name the module.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from typing import Any

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.functions import Functions


def add(parser: Any) -> None:
    """Declare the option."""
    parser.add_argument(
        "--functions", type=_module, metavar="MODULE",
        help="import this module of yours, and let a TOML file name the functions that are defined in it",
    )  # fmt: skip


def _module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise argparse.ArgumentTypeError(f"{name!r} is no module; write it as in an import: my_package.my_losses")
    return name


def offered(module: str | None) -> Functions | None:
    """``"MODULE:name"`` to each function that is defined in the module, not to those it imported; None: no module.

    Raises:
        SpecError: there is no such module.
    """
    if module is None:
        return None
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another
        raise SpecError(f"--functions {module}: no such module", fix="run where it can be imported from") from error
    return {
        f"{module}:{name}": value
        for name, value in vars(found).items()
        if inspect.isfunction(value) and value.__module__ == found.__name__
    }
