"""Which optional inputs a spec reads, and who reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_pgloss.spec.components import Component, PolicyGradient, Value
from megatron_pgloss.spec.corrections import RatioMask, Reject, Staleness, TruncatedIS, Veto
from megatron_pgloss.spec.gates import SequenceGate
from megatron_pgloss.spec.ratios import Ratio
from megatron_pgloss.spec.rules import DropZeroAdvantage, KeepPositiveAdvantage
from megatron_pgloss.spec.surrogates import DRO, TOKEN_RATIO_ONLY, Surrogate

if TYPE_CHECKING:
    from megatron_pgloss.spec.loss_spec import LossSpec

BASE: dict[str, str | None] = {
    "given": "old", "policy": None, "record": None, "rollout": "rollout", "interpolate": "rollout",
}  # fmt: skip
"""Source of ``old`` to the batch's stream it is made from."""
COMPUTED = ("entropy", "kl", "chosen")
"""Read from the log-prob pass, not from the batch."""


def streams_of(spec: LossSpec, component: Component) -> tuple[str, ...]:
    """The batch's streams that ``component`` and the gates on it read at its members."""
    base = BASE[spec.old]
    found = list(component.reads)
    for gate in spec.gates:
        if component.name in gate.on:
            found += gate.reads
    streams = [base if name == "old" else name for name in found if name not in COMPUTED]
    return tuple(dict.fromkeys(name for name in streams if name is not None))


def readers(spec: LossSpec) -> dict[str, tuple[str, ...]]:
    """Every stream of the batch that is read, with the names of components and rules that read it."""
    found: dict[str, list[str]] = {"old": [], "rollout": [], "ref": [], "advantages": []}

    def add(stream: str | None, reader: str) -> None:
        if stream is not None and reader not in found.setdefault(stream, []):
            found[stream].append(reader)

    base = BASE[spec.old]
    for part in spec.components:
        for name in part.reads:
            if name not in COMPUTED:
                add(base if name == "old" else name, part.name)
    for gate in spec.gates:
        for name in gate.reads:
            if name not in COMPUTED:
                add(base if name == "old" else name, type(gate).__name__)
    for rule in spec.corrections:
        if isinstance(rule, Staleness):
            continue
        if rule.of == "old" and base == "old":
            add("old", type(rule).__name__)
        add("rollout", type(rule).__name__)
    for mask in spec.masks:
        if isinstance(mask, DropZeroAdvantage | KeepPositiveAdvantage):
            add("advantages", type(mask).__name__)
    return {stream: tuple(names) for stream, names in found.items() if names}


def reads_computed(spec: LossSpec, what: str) -> bool:
    """Whether any component or gate reads ``what`` (``entropy``, ``kl``) of the log-prob pass."""
    return any(what in part.reads for part in (*spec.components, *spec.gates))


def moved_by_advantage(component: Component) -> bool:
    """Whether a token with advantage 0 cannot move the policy through ``component``."""
    if not isinstance(component, PolicyGradient) or isinstance(component.surrogate, DRO | Surrogate):
        return False  # a penalty pulls whatever the advantage; of a user's own nothing is known
    return "advantages" in component.surrogate.reads


def reads_turns(spec: LossSpec, component: Component) -> bool:
    """Whether a ratio, surrogate or gate of ``component`` is a statistic of turns."""
    parts = [gate for gate in spec.gates if component.name in gate.on]
    if isinstance(component, PolicyGradient):
        if isinstance(component.axis, Ratio) and component.axis.level == "turn":
            return True
        return any(getattr(part, "unit", None) == "turn" for part in (component.surrogate, *parts))
    return any(getattr(part, "unit", None) == "turn" for part in parts)


def by_token(spec: LossSpec) -> bool:
    """Whether each component's term at a token, with its ratio, gates and late corrections, depends on the model
    through that token's own log-prob and entropy alone: no statistic of a unit, no user function, no value head.
    """
    if spec.functions or any(isinstance(gate, SequenceGate) for gate in spec.gates):
        return False
    return all(_by_token(spec, part) for part in spec.components)


def _by_token(spec: LossSpec, part: Component) -> bool:
    if isinstance(part, Value) or "kl" in part.reads or "chosen" in part.reads:
        return False
    if isinstance(part, PolicyGradient):
        own = part.ratio == "none" or (isinstance(part.axis, Ratio) and part.axis.level == "token")
        if not own or isinstance(part.surrogate, TOKEN_RATIO_ONLY):
            return False
    for rule in spec.corrections_on(part, late=True):
        if isinstance(rule, RatioMask | Veto):
            return False
        if isinstance(rule, TruncatedIS) and rule.level != "token":
            return False
        if isinstance(rule, Reject) and rule.unit != "token":
            return False
    return True
