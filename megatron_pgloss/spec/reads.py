"""What a spec reads of the batch and of the log-prob pass, who reads it, and over what."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_pgloss.spec.component import Component
from megatron_pgloss.spec.kinds import COMPUTED, Kind
from megatron_pgloss.spec.ratios import RatioKind
from megatron_pgloss.spec.spec_fields import SpecFields

BASE: dict[str, str | None] = {
    "given": "old", "policy": None, "record": None, "rollout": "rollout", "interpolate": "rollout",
}  # fmt: skip
"""Source of ``old`` to the batch's stream it is made from."""
_FIRST = ("old", "rollout", "ref", "advantages")
"""The order in which readers are listed; other streams follow."""


def stream_readers(spec: SpecFields) -> dict[str, tuple[str, ...]]:
    """Every stream of the batch that is read, with the names of components and rules that read it."""
    found: dict[str, list[str]] = {name: [] for name in _FIRST}
    for reader, part in _readers(spec):
        for name in _streams(spec, part):
            if reader not in found.setdefault(name, []):
                found[name].append(reader)
    return {stream: tuple(names) for stream, names in found.items() if names}


def references(spec: SpecFields) -> tuple[str, ...]:
    """Streams that hold another policy's log-probs, in the order in which components name them."""
    pieces = [piece for part in spec.components for piece in part.parts]
    return tuple(dict.fromkeys(name for piece in pieces for name in piece.references if name != "old"))


def field_readers(spec: SpecFields) -> dict[str, tuple[str, ...]]:
    """Every field of the batch beside its streams that a component or rule reads, with the names of those who do."""
    found: dict[str, list[str]] = {}
    for reader, part in _readers(spec):
        for name in part.reads_fields:
            found.setdefault(name, []).append(reader)
    if spec.old == "interpolate":
        found.setdefault("versions", []).append("old='interpolate'")
    return {name: tuple(readers) for name, readers in found.items()}


def unit_readers(spec: SpecFields) -> dict[str, tuple[str, ...]]:
    """``prompt`` or ``episode`` to the names of components and rules that take a statistic over it."""
    found: dict[str, list[str]] = {}
    for reader, part in _readers(spec):
        for piece in part.parts if isinstance(part, Component) else (part,):
            if piece.straddles:
                found.setdefault(str(piece.statistic_unit), []).append(reader)
    return {unit: tuple(readers) for unit, readers in found.items()}


def streams_of(spec: SpecFields, component: Component) -> tuple[str, ...]:
    """The batch's streams that ``component`` and the gates on it read at its members."""
    parts = [component, *(gate for gate in spec.gates if gate.acts_on(component))]
    return tuple(dict.fromkeys(name for part in parts for name in _streams(spec, part)))


def _readers(spec: SpecFields) -> Iterator[tuple[str, Kind]]:
    yield from ((part.name, part) for part in spec.components)
    yield from ((type(rule).__name__, rule) for rule in (*spec.gates, *spec.corrections, *spec.masks))


def _streams(spec: SpecFields, part: Kind) -> tuple[str, ...]:
    names = [BASE[spec.old] if name == "old" else name for name in part.reads if name not in COMPUTED]
    return tuple(name for name in names if name is not None)


def statistic_streams(spec: SpecFields, part: Kind) -> tuple[str, ...]:
    """The batch's streams that the statistic of ``part`` reads at every token of a unit; of a ratio to ``old``, what
    ``old`` is made from.
    """
    ratio = ("old",) if isinstance(part, RatioKind) else ()
    names = (*ratio, *("old" if name == "ratio" else name for name in part.statistic_reads))
    sources = (BASE[spec.old] if name == "old" else name for name in names)
    return tuple(name for name in dict.fromkeys(sources) if name is not None)


def reads_computed(spec: SpecFields, what: str) -> bool:
    """Whether any component or gate reads ``what`` of the model's outputs: `COMPUTED`."""
    return any(what in part.reads for part in (*spec.components, *spec.gates))


def reads_turns(spec: SpecFields, component: Component) -> bool:
    """Whether a ratio, surrogate or gate of ``component`` is a statistic of turns."""
    parts = [*component.parts, *(gate for gate in spec.gates if gate.acts_on(component))]
    return any(part.statistic_unit == "turn" for part in parts)


def by_token(spec: SpecFields) -> bool:
    """Whether each component's term at a token, with its ratio, gates and late corrections, depends on the model
    through that token's own log-prob and entropy alone: no statistic of a unit, no user function, no value head.
    """
    late = [rule for rule in spec.corrections if spec.is_late(rule) and any(map(rule.acts_on, spec.components))]
    parts: list[Kind] = [piece for part in spec.components for piece in part.parts]
    computed = {"kl", "chosen", "value"} & {name for part in spec.components for name in part.reads}
    return not computed and not any(part.asks_units for part in (*parts, *spec.gates, *late))
