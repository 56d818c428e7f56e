"""Optional libraries, imported where they are used, with an error that says how to get them."""

from __future__ import annotations

import importlib
from types import ModuleType

from megatron_pgloss.errors import UnsupportedError


def require(module: str, purpose: str) -> ModuleType:
    """Import ``module`` (``"rich.console"``, for example), which ``purpose`` needs.

    Raises:
        UnsupportedError: the library is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.split(".", maxsplit=1)[0]
        raise UnsupportedError(
            f"{purpose} needs {library}, an optional library",
            expected=f"an importable {module}",
            got=str(error),
            fix="pip install 'megatron_pgloss[cli]'",
        ) from error
