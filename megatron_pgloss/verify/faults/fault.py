"""A fault: one named function of the package made wrong on purpose, and the layouts on which that must show.

The package's own functions are replaced where they are looked up, on every rank alike, for the length of one step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_pgloss.errors import SpecError

PACKAGE = "megatron_pgloss"
_JUDGES = f"{PACKAGE}.verify"  # the judging code is never patched


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The facts about one rank of one layout that a fault's conditions and its replacement may need."""

    tp: int
    cp: int
    pp: int
    vpp: int
    dp: int
    tp_rank: int
    cp_rank: int
    dp_rank: int
    workers: int
    """Data-parallel ranks that have rows."""
    per_token: bool
    packed: bool
    averaging: bool
    """DDP averages inside its collective."""
    experts: bool
    auxiliary: bool
    """Megatron's own losses (MoE auxiliary and z-loss) are on."""
    learned_positions: bool
    temperature: bool
    padded_vocabulary: bool


@dataclass(frozen=True, slots=True)
class Where:
    """A set of layouts, in words and as a condition; ``&``, ``|`` and ``~`` combine them."""

    words: str
    holds: Callable[[Place], bool]

    def __and__(self, other: Where) -> Where:
        return Where(f"{self.words}, {other.words}", lambda at: self.holds(at) and other.holds(at))

    def __or__(self, other: Where) -> Where:
        return Where(f"{self.words} or {other.words}", lambda at: self.holds(at) or other.holds(at))

    def __invert__(self) -> Where:
        return Where(f"not {self.words}", lambda at: not self.holds(at))


EVERYWHERE = Where("everywhere", lambda at: True)
NOWHERE = Where("nowhere", lambda at: False)
TP = Where("tp > 1", lambda at: at.tp > 1)
CP = Where("cp > 1", lambda at: at.cp > 1)
PP = Where("pp > 1", lambda at: at.pp > 1)
DP = Where("dp > 1", lambda at: at.dp > 1)
SUMMED = Where("dp x cp > 1", lambda at: at.dp * at.cp > 1)
SHARED = Where("rows on several dp ranks", lambda at: at.workers > 1)
PER_TOKEN = Where("calculate_per_token_loss", lambda at: at.per_token)
PACKED = Where("packed rows", lambda at: at.packed)
AVERAGING = Where("average_in_collective", lambda at: at.averaging)
EXPERTS = Where("experts", lambda at: at.experts)
AUXILIARY = Where("MoE aux or z-loss", lambda at: at.auxiliary)
LEARNED = Where("learned positions", lambda at: at.learned_positions)
TEMPERATURE = Where("temperature given", lambda at: at.temperature)
PADDED_VOCABULARY = Where("padded vocabulary", lambda at: at.padded_vocabulary)

Make = Callable[[Callable[..., Any], Place], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake, made in one function of the package.

    Args:
        name: the fault's name in tables.
        target: ``module:qualified.name`` of a function, method, property or static method of the package.
        imitates: the mistake, in one line.
        make: a function from the right function (of a property its getter) and the place to the wrong function.
        shows: the layouts on which the fault must be seen; on all others the step must stay as exact as without it.
        skip: the layouts on which the fault is not tried.
        why: the reason why it is not tried there.
    """

    name: str
    target: str
    imitates: str
    make: Make
    shows: Where
    skip: Where = NOWHERE
    why: str = ""


class Calls:
    """Counts how often a replaced function ran."""

    def __init__(self) -> None:
        self.count = 0


@contextlib.contextmanager
def injected(fault: Fault, at: Place) -> Iterator[Calls]:
    """Put in the fault for the length of the block, wherever the package looks up its target.

    Raises:
        SpecError: the target does not exist.
    """
    owner, name, original = find(fault.target)
    calls = Calls()
    wrong = _like(original, lambda function: _counted(function, fault.make(function, at), calls))
    places = [(owner, name)] if inspect.isclass(owner) else _names_of(original)
    try:
        for holder, key in places:
            setattr(holder, key, wrong)
        yield calls
    finally:
        for holder, key in places:
            setattr(holder, key, original)


def find(target: str) -> tuple[Any, str, Any]:
    """Owner, name and raw value (a property is not evaluated) of ``module:qualified.name``.

    Raises:
        SpecError: no such module, attribute or kind of function.
    """
    module, _, qualified = target.partition(":")
    *path, name = qualified.split(".")
    try:
        owner = functools.reduce(getattr, path, importlib.import_module(module))
        original = vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise SpecError(
            f"a fault's target does not exist: {target}",
            expected="module:function or module:Class.method of the package",
            got=f"{type(error).__name__}: {error}",
            fix="name the function that replaced it",
        ) from error
    if not (inspect.isfunction(original) or isinstance(original, property | staticmethod | classmethod)):
        raise SpecError("a fault's target is not a function", expected=target, got=type(original).__name__)
    return owner, name, original


def _like(original: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Change the function, and wrap the result as the original is wrapped (property, static or class method)."""
    if isinstance(original, property):
        assert original.fget is not None
        return property(change(original.fget))
    if isinstance(original, staticmethod | classmethod):
        return type(original)(change(original.__func__))
    return change(original)


def _counted(function: Callable[..., Any], wrong: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        return wrong(*args, **kwargs)

    return call


def _names_of(function: Any) -> list[tuple[Any, str]]:
    """Every (module of the package, name in it) under which ``function`` is looked up."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(PACKAGE) and not name.startswith(_JUDGES)
    ]
    return [(module, key) for module in modules for key, value in list(vars(module).items()) if value is function]
