"""Plan-time checks of data against the spec: the first fault of a rank, as an error that names its place."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, PGLossError
from megatron_pgloss.planning import kept_sets, values
from megatron_pgloss.planning.members import ComponentSet, component_set
from megatron_pgloss.planning.presence import empty_rows
from megatron_pgloss.planning.units import index_of
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.rollouts.streams import BY_NAME, OPTIONAL, argument_of
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.levels import INSIDE, KEYED, LEVEL
from megatron_pgloss.spec.words import nearest


def check(batch: TokenBatch, spec: LossSpec, *, vocab_size: int | None = None) -> list[ComponentSet]:
    """Raise the first fault of ``batch`` under ``spec``, in a fixed order.

    Returns:
        The tokens of every component, before corrections.

    Raises:
        DataError: names outside the spec, absent streams and ids, an action on a first token, tokens off the
            vocabulary, temperature not positive, non-finite values or log-probs above 0 inside a component, a
            sequence without a member of any component, a second on-policy update.
    """
    _names(batch, spec)
    _present(batch, spec)
    kept_sets.check_present(batch, spec)
    _first_tokens(batch)
    check_inputs(batch, vocab_size=vocab_size)
    # Corrections are left out: they read streams whose values are judged only below.
    plain = spec.replace(corrections=())
    sets = [component_set(batch, part, plain) for part in spec.components]
    for tokens in sets:
        kept_sets.check_inside(batch, spec, tokens.member_T)
    values.check(batch, spec, sets)
    _empty_sequences(batch, spec)
    _in_no_unit(batch, spec, sets)
    _updated(batch, spec)
    return sets


def check_inputs(batch: TokenBatch, *, vocab_size: int | None = None) -> None:
    """Raise the first fault of what the model and the log-prob pass read. A forward-only pass has no other checks.

    Raises:
        DataError: tokens off the vocabulary, temperature not positive, a kept id or sampling limit off its range.
    """
    _vocabulary(batch, vocab_size)
    _temperature(batch)
    kept_sets.check_values(batch, vocab_size)


def _names(batch: TokenBatch, spec: LossSpec) -> None:
    for name in batch.weights:
        if name not in spec.names:
            raise DataError(f"weights for {name!r}, which is not a component", expected=", ".join(spec.names))
    for name in sorted(spec.masks_read - set(batch.masks)):
        raise DataError(
            f"the spec reads a mask {name!r} that the batch does not have",
            expected=f"masks={{{name!r}: bool tensor}}",
            got=", ".join(batch.masks) or "no masks",
        )


def _present(batch: TokenBatch, spec: LossSpec) -> None:
    for stream, readers in spec.readers.items():
        if stream not in batch.streams:
            if stream in BY_NAME and stream not in OPTIONAL:
                raise DataError(
                    f"needs= names {stream!r}, which every batch has", expected=f"{', '.join(OPTIONAL)}, or your own",
                    got=f"needs=({stream!r},) of {', '.join(readers)}", fix=f"leave {stream!r} out of needs=",
                )  # fmt: skip
            argument = argument_of(stream)
            expected, fix = f"{argument.rstrip('=')}, read by {', '.join(readers)}", f"give {argument}"
            if stream in spec.references and stream not in BY_NAME:
                close = nearest(stream, [name for name in batch.streams if batch.streams[name].is_floating_point()])
                fix = close or f"{fix}, or score them (step.score(batches, TEACHER, into={stream!r}))"
            if stream == "old":
                fix += ", score them (step.score(..., into='old')), or set old='policy' in the spec"
            if stream == "ref":
                fix += ", or score them with the reference's weights loaded (step.score(..., into='ref'))"
            raise DataError(f"{stream} is absent", expected=expected, fix=fix)
        row = BY_NAME.get(stream)
        if stream in spec.references and (row is None or row.dtype != "log-prob"):
            _reference(batch.streams[stream], stream, own=row is None, readers=readers)
    for name, readers in spec.field_readers.items():
        if name != "versions" and getattr(batch, name) is None:  # `frozen.lags` looks at versions
            raise DataError(f"{name} are absent", expected=f"{name}=, read by {', '.join(readers)}")
    check_units(batch, spec)
    for part in spec.components:
        for unit in part.path.units:
            if unit in KEYED and getattr(batch, f"{unit}_ids") is None:
                raise DataError(
                    f"{unit}_ids are absent", expected=f"{unit}_ids=, named by {part.name}'s {part.normalizer!r}"
                )


def _reference(stream: Tensor, name: str, *, own: bool, readers: tuple[str, ...]) -> None:
    if not own or stream.dim() > 1 or not stream.is_floating_point():
        raise DataError(
            f"stream {name!r} holds no log-probs, but {', '.join(readers)} compares the policy with it",
            expected="one float a token: the log-prob of another policy", got=f"{stream.dtype} {list(stream.shape)}",
            fix="to='ref', or streams={'teacher': ...} and to='teacher'",
        )  # fmt: skip


def check_units(batch: TokenBatch, spec: LossSpec) -> None:
    """Refuse a batch without the ids of the prompts or episodes over which the spec takes a statistic.

    Raises:
        DataError: they are absent.
    """
    for unit, readers in spec.unit_readers.items():
        if getattr(batch, f"{unit}_ids") is None:
            raise DataError(f"{unit}_ids are absent", expected=f"{unit}_ids=, read by {', '.join(readers)}")


def _first_tokens(batch: TokenBatch) -> None:
    if bool(batch.first_action_S.any()):
        first = int(batch.cu_S1[int(batch.first_action_S.to(torch.int8).argmax())])
        raise DataError(
            "the first token of a sequence is marked as an action, but nothing predicts it",
            where=batch.where(first, "action_mask", read=True),
            fix="put a beginning-of-sequence token before it, or unmark it; masks are about tokens[i] itself",
        )


def _vocabulary(batch: TokenBatch, vocab_size: int | None) -> None:
    if not batch.tokens_T.numel():
        return
    top = int(batch.tokens_T.max())
    if int(batch.tokens_T.min()) < 0 or (vocab_size is not None and top >= vocab_size):
        bad_T = (batch.tokens_T < 0) | (batch.tokens_T >= (top + 1 if vocab_size is None else vocab_size))
        at = int(bad_T.to(torch.int8).argmax())
        limit = "" if vocab_size is None else f" below {vocab_size}"
        raise DataError(
            "a token lies off the vocabulary",
            expected=f"0 or more{limit}",
            got=int(batch.tokens_T[at]),
            where=batch.where(at, "tokens", read=True),
        )


def _temperature(batch: TokenBatch) -> None:
    if "temperature" not in batch.streams:
        return
    heat_T = batch.streams["temperature"]
    bad_T = (batch.action_T | batch.target_T) & ~((heat_T > 0) & heat_T.isfinite())
    if bool(bad_T.any()):
        at = int(bad_T.to(torch.int8).argmax())
        raise DataError(
            "temperature must be positive",
            expected="> 0 where the policy sampled",
            got=float(heat_T[at]),
            where=batch.where(at, "temperature"),
            fix="greedy sampling has no log-prob to train on",
        )


def _empty_sequences(batch: TokenBatch, spec: LossSpec) -> None:
    empty_S = empty_rows(batch, spec)
    if spec.empty_sequences == "refuse" and bool(empty_S.any()):
        row = int(empty_S.to(torch.int8).argmax())
        raise DataError(
            "a sequence has no member of any component",
            expected="at least one action or target token",
            got=f"{int(empty_S.sum())} such sequences",
            where=batch.sample_name(row),
            fix="check its masks, or set empty_sequences='exclude'",
        )


def _in_no_unit(batch: TokenBatch, spec: LossSpec, sets: list[ComponentSet]) -> None:
    for tokens in sets:
        part = tokens.component
        finest = next((level for level in reversed(part.path.units) if level in INSIDE), None)
        if finest is not None:  # what lies in one of its units lies in one of each level above
            level, lost_T = finest, tokens.count_T & (index_of(batch, finest) < 0)
            what = f"normalizer names {LEVEL[level].plural}, but a counted token"
        elif spec.reads_turns(part):
            level, lost_T = "turn", tokens.member_T & (batch.turn_T < 0)
            what = "ratio or gate runs over turns, but a trained token"
        else:
            continue
        if bool(lost_T.any()):
            at = int(lost_T.to(torch.int8).argmax())
            raise DataError(
                f"{part.name}'s {what} belongs to none",
                expected=f"a {level} for every such token",
                got=f"{int(lost_T.sum())} tokens in no {level}",
                where=batch.where(at, "turn_ids"),
                fix="give turn_ids= (without them, what comes before the first policy turn is in none), or take those "
                "tokens out of the component",
            )


def _updated(batch: TokenBatch, spec: LossSpec) -> None:
    if spec.old != "policy":
        return
    for row, record in enumerate(batch.records_S):
        if record.plan is not None:
            raise DataError(
                "a second update on the same rollouts with old='policy': the ratio is no longer 1",
                where=batch.sample_name(row),
                fix="score the rollouts once (step.score(..., into='old')) and use old='given', or sample anew; after "
                "a step that an error ended before finish, step.close()",
            )


def as_fault(error: PGLossError, rank: int) -> PGLossError:
    """The same error with the rank in front of its place."""
    place = f"rank {rank}" + (f", {error.where}" if error.where is not None else "")
    return type(error)(error.what, expected=error.expected, got=error.got, where=place, fix=error.fix)
