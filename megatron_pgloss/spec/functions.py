"""A user's own function as part of a spec: held as a callable, written as ``"pkg.mod:name"``; and the statistics over
units that it declares.

A spec that is read from a file names functions, and reading never imports one: a name stands for what the caller says
that it stands for, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part
from megatron_pgloss.spec.words import nearest

__all__ = ["Statistic"]

StreamName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=32, strict=True)]
"""Key of ``TokenBatch``'s ``streams=``."""
Functions = Mapping[str, Callable[[Any], Any]]
"""Name in a file to the function that it stands for."""
DEEPEST = 16
"""How deep tables and lists may be nested in the data of a spec; a valid spec needs five levels."""


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

    ``needs`` names the optional streams that ``fn`` reads: streams of the table in docs/conventions.md (``advantage``
    for the advantages), or the user's own. The plan then reports one that is absent. ``"entropy"`` in ``needs`` has the
    entropy computed. ``statistics`` are taken before ``fn`` runs; it runs once per micro-batch.
    """

    fn: Callable[[Any], Any]
    needs: tuple[StreamName, ...] = ()
    statistics: tuple[Statistic, ...] = ()

    def __init__(self, fn: Any = None, /, **data: Any) -> None:
        super().__init__(**({} if fn is None else {"fn": fn}), **data)

    @field_validator("fn", mode="before")
    @classmethod
    def _callable(cls, fn: Any) -> Any:
        if isinstance(fn, str):
            raise _not_imported(fn)
        if not callable(fn):
            raise SpecError(f"{cls.__name__} takes a function", expected="fn(x) -> [T]", got=type(fn).__name__)
        return fn

    @field_serializer("fn")
    def _dump_fn(self, fn: Any) -> str:
        return self.to_import_path()

    def to_import_path(self) -> str:
        """``"pkg.mod:name"`` of the function."""
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


def looked_up(data: Any, functions: Functions | None, depth: int = 0) -> Any:
    """Plain data with every function's name replaced by the function that it stands for.

    Raises:
        SpecError: ``functions`` does not have a name, or tables are nested deeper than those of a spec.
    """
    if depth > DEEPEST:
        raise SpecError("a spec is not nested so deeply", expected=f"at most {DEEPEST} tables and lists in one another")
    if isinstance(data, Mapping):
        return {
            key: _function(value, functions)
            if key == "fn" and isinstance(value, str)
            else looked_up(value, functions, depth + 1)
            for key, value in data.items()
        }
    return [looked_up(item, functions, depth + 1) for item in data] if isinstance(data, list | tuple) else data


def _function(name: str, functions: Functions | None) -> Callable[[Any], Any]:
    if functions is None:
        raise _not_imported(name)
    if name not in functions:
        raise SpecError(
            f"the spec names the function {name[:64]!r}, which is not among those that were given",
            expected=", ".join(sorted(functions)) or "one at least",
            fix=nearest(name, sorted(functions)),
        )
    return functions[name]


def _not_imported(name: str) -> SpecError:
    return SpecError(
        f"the function {name[:64]!r} is given by its name, and nothing that a spec names is imported",
        expected="the function itself",
        fix="pass the function; for a file LossSpec.from_toml(path, functions={'pkg.mod:name': function}), on the "
        "command line --functions MODULE",
    )
