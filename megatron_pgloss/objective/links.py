"""Statistics over units, taken before the loss runs: one collective for each link of the chain. `N` positions.

The spec alone says which statistics travel under context parallelism. The first link takes those that read the token's
own streams: ratios over a unit, means inside a surrogate, gates and corrections over a unit, statistics that users'
functions declare. The second link takes the statistics that users' functions declare over a ratio that is itself a
statistic of the first. Every rank asks for the same statistics in the same order, for empty micro-batches too; the
backward pass has one collective for each link as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

from torch import Tensor

from megatron_pgloss.maths import Asked, taken
from megatron_pgloss.objective import late, ratios, surrogates
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.planning.job_rows import JobRows
from megatron_pgloss.rules import gates
from megatron_pgloss.spec import Component, LossSpec, PolicyGradient
from megatron_pgloss.spec.functions import Function, Statistic
from megatron_pgloss.spec.kinds import Kind

_OF_RATIO = ("log_ratio", "ratio")
Question = tuple[Hashable, Asked, str | None]
"""The key of the answer, the statistic that is asked for, and its unit if that is a prompt or an episode."""
Asking = Sequence[tuple[Streams, list[Question]]]
"""What every component asks."""


def settle(streams: Sequence[Streams], micro: MicroBatch, spec: LossSpec, *, leaves: bool = False) -> None:
    """Give every component the statistics that it asks for, and its ratio. Statistics over prompts and episodes come
    from a statistics pass.

    Args:
        leaves: make every ratio over a unit a leaf of a new graph, to take derivatives by it.
    """
    answer(ask(streams, micro, spec), micro, spec, leaves=leaves)


def ask(streams: Sequence[Streams], micro: MicroBatch, spec: LossSpec) -> Asking:
    """The questions of the first link. No rank waits for another."""
    for x in streams:
        if not _joined(x.component):
            _set_ratio(x)
    return [(x, list(_first(x, micro, spec))) for x in streams]


def take(asking: Asking, rows: JobRows) -> list[dict[Hashable, Tensor]]:
    """Take the statistics over prompts and episodes, in one gather for all of them, in the statistics pass.

    Args:
        rows: this rank's rows, which the micro-batch holds, among those of the job.

    Returns:
        The answers of every component, by key: [N] or [2, N].
    """
    every = [(one, unit) for _, some in asking for _, one, unit in some if unit is not None]
    answers = rows.answers([one for one, _ in every], [unit for _, unit in every])
    # A rank without rows has the empty tensors of that form.
    left = iter(answers or [one.finish(one.part) for one, _ in every])
    told = []
    for x, some in asking:
        told.append({key: next(left) for key, _, unit in some if unit is not None})
        x.answers |= told[-1]
    return told


def answer(asking: Asking, micro: MicroBatch, spec: LossSpec, *, leaves: bool = False) -> None:
    """Answer the first link's questions, but for those of `take`; set the ratios that they are; then the second
    link.
    """
    _answer([(x, [one for one in some if one[2] is None]) for x, some in asking], micro)
    streams = [x for x, _ in asking]
    for x in streams:
        if _joined(x.component):
            _set_ratio(x)
            if leaves and x.axis is not None:
                x.log_ratio = x.axis.detach().requires_grad_()
    if any(link == 2 for x in streams for _, _, link in declared(x.component, spec)):
        _answer([(x, list(_second(x, spec))) for x in streams], micro)


def declared(part: Component, spec: LossSpec) -> Iterator[tuple[Hashable, Statistic, int]]:
    """The statistics that the users' functions of ``part`` declare: the key of the answer, the statistic, and its link
    of the chain.
    """
    for key, piece in _functions(part, spec):
        for statistic in piece.statistics:
            # The user's function of a ratio sees the token's own ratio, which is no statistic.
            later = _joined(part) and statistic.of in _OF_RATIO and key != ratios.KEY
            yield (key, statistic.name), statistic, 2 if later else 1


def _joined(part: Component) -> bool:
    """Whether the component's ratio is a statistic over a unit, or may ask for one."""
    return isinstance(part, PolicyGradient) and part.axis is not None and part.axis.asks_units


def _set_ratio(x: Streams) -> None:
    part = x.component
    if isinstance(part, PolicyGradient) and (part.has_ratio or part.ratio == "none"):
        x.log_ratio = ratios.log_ratio(part.axis, x)


def _functions(part: Component, spec: LossSpec) -> Iterator[tuple[Hashable, Function]]:
    owned: list[tuple[Hashable, Kind | None]] = [("term", part)]
    if isinstance(part, PolicyGradient):
        owned = [(ratios.KEY, part.axis), (surrogates.KEY, part.surrogate)]
    owned += [(late.gate_key(i), gate) for i, gate in enumerate(spec.gates) if gate.acts_on(part)]
    for key, piece in owned:
        if isinstance(piece, Function):
            yield key, piece


def _first(x: Streams, micro: MicroBatch, spec: LossSpec) -> Iterator[Question]:
    part = x.component
    found: list[tuple[Hashable, Kind | None, Callable[[], Asked | None]]] = []
    if isinstance(part, PolicyGradient):
        found.append((ratios.KEY, part.axis, partial(ratios.asked, part.axis, x)))
        found.append((surrogates.KEY, part.surrogate, partial(surrogates.asked, part.surrogate, x)))
    for i, gate in enumerate(spec.gates):
        if gate.acts_on(part) and micro.gate(part.name, i) is None:
            found.append((late.gate_key(i), gate, partial(gates.asked, gate, x)))
    for i, rule in late.rules(part, spec):
        found.append((late.correction_key(i), rule, partial(late.asked, rule, x)))
    found.append((late.CHI2, None, partial(late.asked_chi2, part, x, spec)))
    for key, statistic, link in declared(part, spec):
        if link == 1:
            found.append((key, None, partial(_declared, statistic, x)))
    for key, piece, ask in found:
        known = micro.told(part.name, key)
        if known is not None:
            x.answers[key] = known
        elif (one := ask()) is not None:
            yield key, one, piece.statistic_unit if piece is not None and piece.straddles else None


def _second(x: Streams, spec: LossSpec) -> Iterator[Question]:
    for key, statistic, link in declared(x.component, spec):
        if link == 2:
            yield key, _declared(statistic, x), None


def _declared(statistic: Statistic, x: Streams) -> Asked:
    value_N = getattr(x, statistic.of) if hasattr(type(x), statistic.of) or statistic.of == "logp" else None
    if value_N is None:
        value_N = x.stream(statistic.of)
    return x.ask(statistic.how, value_N, statistic.unit, statistic.over)


def _answer(questions: Asking, micro: MicroBatch) -> None:
    answers = iter(taken([one for _, some in questions for _, one, _ in some], micro.group))
    for x, some in questions:
        for key, _, _ in some:
            x.answers[key] = next(answers)
