"""A user's own function as part of a spec: held as a callable, written as ``"pkg.mod:name"``; and the statistics over
units that it declares.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part

__all__ = ["Statistic"]

StreamName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=32)]
"""Key of ``TokenBatch``'s ``streams=``."""


class Statistic(Part):
    """A statistic over units that a user's function declares; it reads the answer as ``x.statistic(name)``.

    Under context parallelism a declared statistic travels with those of all other components, in one collective; one
    that the function asks for when it runs (``x.unit_mean``) costs a collective of its own, forward and backward.
    """

    name: StreamName
    of: StreamName = "log_ratio"
    """A stream of ``x``: ``log_ratio``, ``logp``, ``entropy``, ``advantage``, ``old``, one of the user's own, ..."""
    how: Literal["mean", "sum", "prefix"] = "mean"
    unit: Literal["sequence", "turn"] = "sequence"
    over: Literal["sampled", "members"] = "sampled"


class Function(Part):
    """A part that calls ``fn(x)``; ``x`` holds the streams of one micro-batch (`megatron_pgloss.objective.Streams`).

    ``needs`` names the optional streams that ``fn`` reads (of the table in docs/conventions.md, ``advantage`` among
    them, or of the user's own): absent ones are then reported when the step is planned. ``entropy`` there has the
    entropy computed. ``statistics`` are taken before ``fn`` runs, which it does once per micro-batch.
    """

    fn: Callable[[Any], Any] | str
    needs: tuple[StreamName, ...] = ()
    statistics: tuple[Statistic, ...] = ()

    def __init__(self, fn: Any = None, /, **data: Any) -> None:
        super().__init__(**({} if fn is None else {"fn": fn}), **data)

    @field_validator("fn")
    @classmethod
    def _resolvable(cls, fn: Any) -> Any:
        if isinstance(fn, str):
            resolve(fn)
        return fn

    @field_serializer("fn")
    def _dump_fn(self, fn: Any) -> str:
        return self.to_import_path()

    def to_import_path(self) -> str:
        """``"pkg.mod:name"`` of the function."""
        if isinstance(self.fn, str):
            return self.fn
        # An object that is called (a partial, a module) has no name of its own.
        name = getattr(self.fn, "__qualname__", f"<{type(self.fn).__qualname__}>")
        return f"{getattr(self.fn, '__module__', type(self.fn).__module__)}:{name}"

    @property
    def needed(self) -> tuple[str, ...]:
        """``needs`` by the names that `Kind.reads` uses."""
        return tuple("advantages" if name == "advantage" else name for name in self.needs)

    @property
    def asks_units(self) -> bool:
        """Whatever a user's function does, it may ask for a statistic over units."""
        return True

    @property
    def function(self) -> Callable[[Any], Any]:
        """The callable itself."""
        return resolve(self.fn) if isinstance(self.fn, str) else self.fn


def resolve(path: str) -> Callable[[Any], Any]:
    """Import ``"pkg.mod:name"``.

    Raises:
        SpecError: the form is wrong, the module or the name does not exist, or it is not callable.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise SpecError("a function of your own must be written 'pkg.mod:name'", got=path)
    try:
        target: Any = importlib.import_module(module)
        for step in name.split("."):
            target = getattr(target, step)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"cannot import the function {path!r}: {error}", fix="name a module-level function") from error
    if not callable(target):
        raise SpecError(f"{path!r} is not callable", got=type(target).__name__)
    return target  # type: ignore[no-any-return]
