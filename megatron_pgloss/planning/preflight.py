"""First stage of a plan: the caller's arguments, and this rank's rows, checked. `T` tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.planning import agreement, faults, recording
from megatron_pgloss.planning.arrangement import Arrangement
from megatron_pgloss.planning.frozen import lags
from megatron_pgloss.planning.members import ComponentSet
from megatron_pgloss.planning.split import Split, bins
from megatron_pgloss.rollouts import TokenBatch, concatenate
from megatron_pgloss.rules.corrections import interpolation
from megatron_pgloss.spec import LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a plan is asked for, the same on every rank."""

    spec: LossSpec | None
    """None: a forward-only pass."""
    split: Split
    arrangement: Arrangement
    coef: dict[str, float]
    """Coefficient of every component in this step."""
    interleaved: tuple[int, int] | None = None
    """Group size and pipeline size of an interleaved schedule."""
    vocab_size: int | None = None
    version: int | None = None
    """Version of the weights being trained."""

    @property
    def options(self) -> dict[str, Any]:
        """What must be the same on every rank beside the spec, by name, as errors call it. A bound of token ids need
        not be: each rank looks at its own rows, and one that knows none raises what another finds.
        """
        given = {"split": self.split, "coef": dict(sorted(self.coef.items())), "interleaved": self.interleaved}
        given |= {"version": self.version, "step": dict(self.arrangement.agreed)}
        return given | {"arrangement": replace(self.arrangement, agreed=())}

    @property
    def digest(self) -> int:
        """A hash of everything but the spec, which has its own."""
        return agreement.digest(repr(self.options).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """This rank's rows, in which nothing is wrong, and how they become micro-batches."""

    batch: TokenBatch
    parts: list[list[int]]
    """Rows of every micro-batch, before all ranks have agreed on the number of micro-batches."""
    streams: dict[str, Tensor] = field(default_factory=dict)
    """Streams [T] that the plan makes by itself: ``recorded``, ``interpolation``."""
    uncorrected: list[ComponentSet] = field(default_factory=list)
    """The tokens of every component, before corrections."""


def request(
    spec: LossSpec | None,
    split: Split,
    arrangement: Arrangement | None,
    coef: Mapping[str, float] | None,
    interleaved: tuple[int, int] | None,
    vocab_size: int | None,
    version: int | None,
) -> Request:
    """The arguments of `plan`, checked.

    Raises:
        SpecError: an argument of another type than it must have, an unknown component in ``coef``.
        DataError: a coefficient that is not a finite number.
    """
    if not isinstance(spec, LossSpec | None):
        fix = "LossSpec.from_dict(...), or pg.presets"
        raise SpecError("plan takes a LossSpec", got=type(spec).__name__, fix=fix)
    if not isinstance(split, Split):
        raise SpecError("plan takes a Split", got=type(split).__name__, fix="for example split=Split(sequences=4)")
    if not isinstance(coef, Mapping | None):
        expected, fix = "a mapping of component names to numbers", "for example coef={'kl': 0.02}"
        raise SpecError("coef is not a mapping", expected=expected, got=type(coef).__name__, fix=fix)
    for name, value in (("vocab_size", vocab_size), ("version", version)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise SpecError(f"{name} is not an integer", got=repr(value))
    return Request(
        spec=spec, split=split, arrangement=arrangement or Arrangement(multiple=split.multiple_of),
        coef=_coefficients(spec, coef or {}), interleaved=interleaved, vocab_size=vocab_size, version=version,
    )  # fmt: skip


def _coefficients(spec: LossSpec | None, given: Mapping[str, float]) -> dict[str, float]:
    """Coefficient of every component: the spec's, or this step's own."""
    if spec is None:
        return {}
    for name, value in given.items():
        spec.component(name)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"coef[{name!r}] is not a finite number", got=repr(value))
    return {part.name: float(given.get(part.name, part.coef)) for part in spec.components}


def preflight(batches: Sequence[TokenBatch], asked: Request) -> CheckedRows | None:
    """This rank's rows in one batch, checked; None where it has none.

    Raises:
        DataError: the first fault, see `faults.check`; ``batches`` is not a list of batches.
    """
    if not isinstance(batches, Sequence) or not all(isinstance(item, TokenBatch) for item in batches):
        got = [type(item).__name__ for item in batches] if isinstance(batches, Sequence) else type(batches).__name__
        raise DataError("plan takes a list of TokenBatch objects", got=got, fix="plan([batch], spec, ...)")
    batch, spec = concatenate(batches), asked.spec
    if batch is None:
        return None
    parts = bins(asked.split, batch.lengths_S.tolist(), asked.arrangement.multiple)
    if spec is None:
        faults.check_inputs(batch, vocab_size=asked.vocab_size)
        return CheckedRows(batch=batch, parts=parts)
    streams: dict[str, Tensor] = {}
    if spec.old == "record":
        batch, streams["recorded"] = recording.recalled(batch)
    uncorrected = faults.check(batch, spec, vocab_size=asked.vocab_size)
    if spec.old == "interpolate":
        streams["interpolation"] = interpolation(lags(batch, asked.version, "old='interpolate'"))
    return CheckedRows(batch=batch, parts=parts, streams=streams, uncorrected=uncorrected)
