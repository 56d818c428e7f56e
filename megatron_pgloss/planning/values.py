"""Plan-time checks of the values that a component reads at its members, and statistics over units beside them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.planning import kept_sets
from megatron_pgloss.planning.members import ComponentSet
from megatron_pgloss.planning.presence import present_rows
from megatron_pgloss.planning.units import turns_of
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.rollouts.streams import BY_NAME
from megatron_pgloss.spec import Component, LossSpec
from megatron_pgloss.spec.functions import Function
from megatron_pgloss.spec.levels import KEYED

ABOVE_ZERO = 2.0**-10
"""How far above 0 rounding can put a log-prob. In float32, log p = z - lse carries two roundings of half a unit in the
last place, which add up to this for logits of 2^13. A float64 stream has the same bound: it often holds numbers that
were computed in float32 (numpy and JSON widen them). Rounding gives no probability above 1.001, and a negative
log-likelihood that was given in place of a log-prob lies far above the bound."""


def check(batch: TokenBatch, spec: LossSpec, sets: list[ComponentSet]) -> None:
    """Refuse the first value that is not finite, or a log-prob above 0, where a component or a statistic reads it.

    Raises:
        DataError: the value, its token and its stream.
    """
    for tokens in sets:
        part = tokens.component
        _weights(batch, tokens)
        if part.name in batch.weights:
            _judge(batch, tokens, f"weights[{part.name!r}]", batch.weights[part.name], tokens.member_T, math.inf)
        streams = {stream: tokens.member_T for stream in _read_at_members(spec, part)}
        for stream, looked_T in _read_by_statistics(batch, spec, tokens).items():
            streams[stream] = streams.get(stream, torch.zeros_like(looked_T)) | looked_T
        for name, looked_T in streams.items():
            stream_T = batch.streams[name]
            if stream_T.dim() > 1:
                continue  # `_teachers` judges it together with the ids beside it
            of_policy = name in spec.references or (name in BY_NAME and BY_NAME[name].dtype == "log-prob")
            limit = ABOVE_ZERO if of_policy else math.inf
            _judge(batch, tokens, name, stream_T, looked_T, limit)
        _teachers(batch, tokens)


def _read_at_members(spec: LossSpec, part: Component) -> list[str]:
    """Names of the streams whose values at the component's members are read."""
    names = list(spec.streams_of(part))
    for rule in spec.corrections:
        if rule.ratio_of is not None and rule.acts_on(part):
            names += ["rollout", *(["old"] if rule.ratio_of == "old" and spec.old == "given" else [])]
    names += ["old"] if spec.old == "record" and part.over == "action" else []  # 0 in a row's first update
    return list(dict.fromkeys(names))


def _read_by_statistics(batch: TokenBatch, spec: LossSpec, tokens: ComponentSet) -> dict[str, Tensor]:
    """Stream to bool [T]: the action tokens, trained or not, at which a statistic over a unit reads it, in the units
    that hold a member (over prompts and episodes: in all rows that count). A statistic runs over the tokens as sampled:
    without one of them it would be another number.
    """
    part, found = tokens.component, dict[str, Tensor]()
    rules = [rule for rule in (*spec.gates, *spec.corrections) if rule.acts_on(part)]
    asked: list[tuple[str, tuple[str, ...]]] = []
    for piece in (*part.parts, *rules):
        if piece.statistic_unit is not None and getattr(piece, "over", None) != "members":
            asked.append((piece.statistic_unit, spec.statistic_streams(piece)))
        if isinstance(piece, Function):
            asked += [(one.unit, spec.declared_streams(one)) for one in piece.statistics if one.over == "sampled"]
    for unit, names in asked:
        looked_T = _sampled_in_held_units(batch, spec, part, tokens.member_T, unit)
        for name in names:
            if name in batch.streams:
                found[name] = found.get(name, torch.zeros_like(looked_T)) | looked_T
    return found


def _sampled_in_held_units(
    batch: TokenBatch, spec: LossSpec, part: Component, member_T: Tensor, unit: str
) -> Tensor:  # fmt: skip
    """bool [T]: the action tokens, trained or not, of the sequences or turns that hold a member; of prompts and
    episodes, those of all rows that are there.
    """
    if unit in KEYED:
        # Whether a member lies in another row of the unit, other ranks know.
        looked_T = batch.action_T & present_rows(batch, spec)[batch.seq_T]
    else:
        unit_T, units = (batch.seq_T, len(batch)) if unit == "sequence" else turns_of(batch)[:2]
        held_U = torch.zeros(units + 1, dtype=torch.bool).index_fill_(0, unit_T[member_T] + 1, True)
        held_U[0] = False  # the place of tokens that belong to no turn
        looked_T = batch.action_T & held_U[unit_T + 1]
    gone_T = kept_sets.leaving(batch, spec, part)
    return looked_T if gone_T is None else looked_T & ~gone_T


def doubtful(batch: TokenBatch, spec: LossSpec, part: Component, member_T: Tensor) -> dict[str, Tensor]:
    """Unit to bool [T]: masked action tokens of units that hold a member, at which some stream of the batch is not
    finite. What a user's function reads is only known when it runs, so the loss looks there (`UnitStatistics`). Empty
    where there is no such function or token.
    """
    rules = [gate for gate in spec.gates if gate.acts_on(part)]
    if not any(isinstance(piece, Function) for piece in (*part.parts, *rules)):
        return {}
    numbers = [one for one in batch.streams.values() if one.dim() == 1 and one.is_floating_point() and one.numel()]
    holes = [one for one in numbers if not bool(torch.stack(one.aminmax()).isfinite().all())]
    if not holes:
        return {}
    hole_T = functools.reduce(torch.logical_or, (~one.isfinite() for one in holes)) & ~member_T
    found = {unit: hole_T & _sampled_in_held_units(batch, spec, part, member_T, unit) for unit in ("sequence", "turn")}
    return {unit: hole_T for unit, hole_T in found.items() if bool(hole_T.any())}


def _judge(
    batch: TokenBatch, tokens: ComponentSet, name: str, stream_T: Tensor, looked_T: Tensor, limit: float
) -> None:
    """Refuse a value that is not finite, or above ``limit``, at the tokens ``looked_T``."""
    if not stream_T.numel():
        return
    ends = torch.stack(stream_T.aminmax())
    if bool(ends.isfinite().all() & (ends <= limit).all()):
        return
    part, member_T = tokens.component, tokens.member_T
    bad_T = looked_T & ~stream_T.isfinite()
    if bool(bad_T.any()):
        inside = bool((bad_T & member_T).any())
        bad_T = bad_T & member_T if inside else bad_T
        at = int(bad_T.to(torch.int8).argmax())
        raise DataError(
            f"a non-finite value inside component {part.name!r}" if inside
            else f"a non-finite value that a statistic of component {part.name!r} reads",
            expected="finite values at its members" if inside
            else "finite values at all action tokens of a unit that is trained on, masked or not",
            got=f"{float(stream_T[at])} ({int(bad_T.sum())} such tokens)",
            where=batch.where(at, name),
            fix="mend the source, or mask the token; values outside a component never matter" if inside
            else "mend the source, or take the whole unit out",
        )  # fmt: skip
    above_T = looked_T & (stream_T > limit)
    if bool(above_T.any()):
        at = int(above_T.to(torch.int8).argmax())
        raise DataError(
            f"a log-prob above 0 inside component {part.name!r}",
            expected=f"at most 0, but for rounding ({ABOVE_ZERO:g})",
            got=f"{float(stream_T[at])} ({int(above_T.sum())} such tokens)",
            where=batch.where(at, name),
            fix="give log-probs, not negative log-likelihoods; values outside a component never matter",
        )


def _weights(batch: TokenBatch, tokens: ComponentSet) -> None:
    part = tokens.component
    if part.divide_by != "weights" or part.name not in batch.weights:
        return
    weight_T = batch.weights[part.name]
    unfit_T = tokens.count_T & ~((weight_T >= 0) & weight_T.isfinite())
    if bool(unfit_T.any()):
        at = int(unfit_T.to(torch.int8).argmax())
        raise DataError(
            f"{part.name} divides by its weights, and one is negative or not finite",
            expected=">= 0 at every counted token",
            got=float(weight_T[at]),
            where=batch.where(at, f"weights[{part.name!r}]"),
        )


def _teachers(batch: TokenBatch, tokens: ComponentSet) -> None:
    """Refuse a teacher's number that is no log-prob, at an id that the teacher lists for a member."""
    part = tokens.component
    if part.chosen_ids is None:
        return
    ids_Tk = batch.streams[part.chosen_ids]
    for name in part.reads:
        stream_Tk = batch.streams.get(name)
        if stream_Tk is None or not stream_Tk.is_floating_point() or stream_Tk.shape != ids_Tk.shape:
            continue  # a stream of another shape is refused by its reader
        bad_Tk = tokens.member_T[:, None] & (ids_Tk >= 0) & ~(stream_Tk <= ABOVE_ZERO)
        bad_Tk |= tokens.member_T[:, None] & (ids_Tk >= 0) & ~stream_Tk.isfinite()
        if bool(bad_Tk.any()):
            at, place = divmod(int(bad_Tk.reshape(-1).to(torch.int8).argmax()), max(ids_Tk.size(1), 1))
            raise DataError(
                f"a teacher's log-prob inside component {part.name!r} is none",
                expected="a finite number of at most 0 at every listed id",
                got=f"{float(stream_Tk[at, place])} for id {int(ids_Tk[at, place])} ({int(bad_Tk.sum())} such ids)",
                where=batch.where(at, name),
                fix="list the ids that the teacher gave a log-prob, and -1 in the other places",
            )
