"""Errors of the package: each says what is wrong, what was expected, what came, where, and how to mend it."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType
from typing import Self


class PGLossError(ValueError):
    """Base of every error the package raises on purpose.

    Args:
        what: one sentence that names the fault.
        expected: what a right input looks like.
        got: what came instead (a value, shape, dtype).
        where: the rank, sample, position or stream of the fault; whatever locates it.
        fix: how to mend it.

    The parts stay readable as attributes; ``str(error)`` joins them into one line.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        got: object = None,
        where: object = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.expected, self.got, self.where, self.fix = what, expected, got, where, fix
        parts = [what.rstrip(".")]
        parts += [f"expected {expected}"] if expected is not None else []
        parts += [f"got {got}"] if got is not None else []
        parts += [f"at {where}"] if where is not None else []
        line = "; ".join(parts)
        super().__init__(f"{line}. Fix: {fix}" if fix else line)

    def located(self, place: object) -> Self:
        """The same error with ``place`` (a file, a rank) in front of its ``where``."""
        where = place if self.where is None else f"{place}, {self.where}"
        return type(self)(self.what, expected=self.expected, got=self.got, where=where, fix=self.fix)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling of exceptions, and errors cross process borders.
        return (_rebuild, (type(self), self.what, self.expected, self.got, self.where, self.fix))


def _rebuild(
    kind: type[PGLossError], what: str, expected: object, got: object, where: object, fix: str | None
) -> PGLossError:
    return kind(what, expected=expected, got=got, where=where, fix=fix)


class SpecError(PGLossError):
    """A loss specification that is invalid: unknown key, value out of range, parts that contradict each other."""


class DataError(PGLossError):
    """Data that cannot be trained on: shapes, dtypes, alignment, non-finite values, missing streams."""


class LayoutError(PGLossError):
    """Ranks that disagree, or a layout that the data or the schedule cannot be cut for."""


class UnsupportedError(PGLossError):
    """A mode of Megatron-Core, or of the machine, that the loss refuses because it would be wrong there."""


class NonFiniteError(PGLossError):
    """A NaN or infinity inside a component at loss time."""


KINDS: dict[str, type[PGLossError]] = {
    kind.__name__: kind for kind in (PGLossError, SpecError, DataError, LayoutError, UnsupportedError, NonFiniteError)
}


class Caught:
    """Keeps an exception of the ``with`` body as an error of the package, whatever its type; an interrupt is not kept.

    It is for code that is followed by a collective: a rank that left before the collective would keep the others
    waiting for the whole timeout. The error that was kept is raised after the collective, on every rank.
    """

    def __init__(self) -> None:
        self.error: PGLossError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = as_error(error)
        return True


def as_error(error: Exception) -> PGLossError:
    """``error`` as an error of the package: itself if it is one, else an error with its type and the line it came
    from.
    """
    if isinstance(error, PGLossError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1:]
    found = DataError(
        f"{type(error).__name__}: {error}".strip().rstrip(":"),
        where=f"{Path(last[0].filename).name}, line {last[0].lineno}" if last else None,
        fix="an argument or a value has a form that was not expected; the faulty rank's log has the whole traceback",
    )
    found.__cause__ = error
    return found
