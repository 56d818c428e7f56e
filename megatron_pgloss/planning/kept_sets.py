"""Kept sets at plan time: what the batch says of them, and sampled tokens that lie outside. `T` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.rollouts.streams import BY_NAME, OFF
from megatron_pgloss.spec import Component, LossSpec


def check_present(batch: TokenBatch, spec: LossSpec) -> None:
    """Raise where the spec reads kept sets that the batch lacks, or where the batch has some that the spec ignores."""
    given = [name for name in OFF if name in batch.streams]
    if spec.kept is None:
        if given:
            raise DataError(
                f"the sampler could not draw every token ({', '.join(given)}), and the spec scores them all",
                expected="LossSpec(kept=...)",
                fix="kept=pg.KeptSet(source='recorded' or 'recomputed'), or leave the batch's arguments out",
            )
        return
    wanted = ["kept"] if spec.kept.source == "recorded" else ["top_k", "top_p", "min_p"]
    if not any(name in wanted for name in given):
        arguments = "kept_sets=" if spec.kept.source == "recorded" else "top_k=, top_p= or min_p="
        raise DataError(
            f"kept sets are to be {spec.kept.source}, and the batch has nothing to make them of",
            expected=arguments,
            fix=f"give the TokenBatch {arguments}, or set kept=None in the spec",
        )


def check_values(batch: TokenBatch, vocab_size: int | None = None) -> None:
    """Raise the first kept id, ``top_p`` or ``min_p`` that is off its range, where the policy sampled."""
    ids_TK, top_p, min_p = (batch.streams.get(name) for name in ("kept", "top_p", "min_p"))
    judged: list[tuple[str, str, Tensor]] = []
    if ids_TK is not None and vocab_size is not None:
        judged.append(("kept", f"token ids below {vocab_size}", (ids_TK < vocab_size).all(1)))
    if top_p is not None:
        judged.append(("top_p", "0 < top_p <= 1", (top_p > 0) & (top_p <= 1)))
    if min_p is not None:
        judged.append(("min_p", "0 <= min_p <= 1", (min_p >= 0) & (min_p <= 1)))
    for name, expected, fits_T in judged:
        bad_T = batch.action_T & ~fits_T
        if bool(bad_T.any()):
            at = int(bad_T.to(torch.int8).argmax())
            got = batch.streams[name][at]
            raise DataError(
                f"{BY_NAME[name].argument} is off its range", expected=expected,
                got=int(got.max()) if name == "kept" else float(got), where=batch.where(at, name),
            )  # fmt: skip


def outside(batch: TokenBatch, spec: LossSpec) -> Tensor:
    """bool [T]: sampled tokens outside their recorded set, and those that a scoring pass has found outside: they have a
    log-prob of -inf in a stream that the spec reads.
    """
    assert spec.kept is not None
    out_T = torch.zeros_like(batch.action_T)
    if spec.kept.source == "recorded" and "kept" in batch.streams:
        ids_TK = batch.streams["kept"]
        out_T = (ids_TK >= 0).any(1) & ~(ids_TK == batch.targets_T[:, None]).any(1)
    read = {*spec.readers, *(["old"] if spec.old == "record" else [])}
    for name in read & BY_NAME.keys() & batch.streams.keys():
        if BY_NAME[name].dtype == "log-prob":
            out_T = out_T | (batch.streams[name] == -torch.inf)
    return out_T & batch.action_T


def leaving(batch: TokenBatch, spec: LossSpec, component: Component) -> Tensor | None:
    """bool [T]: the tokens that leave ``component`` because they lie outside their sets; None where none can."""
    if spec.kept is None or spec.kept.outside != "drop" or component.over != "action":
        return None
    return outside(batch, spec)


def check_inside(batch: TokenBatch, spec: LossSpec, member_T: Tensor) -> None:
    """Raise for a trained token outside its recorded set, where the spec refuses such tokens."""
    if spec.kept is None or spec.kept.outside != "refuse" or spec.kept.source != "recorded":
        return
    bad_T = member_T & outside(batch, spec)
    if bool(bad_T.any()):
        at = int(bad_T.to(torch.int8).argmax())
        raise DataError(
            "a sampled token is outside the set that it was drawn from",
            expected="the target among its kept_sets",
            got=f"token {int(batch.targets_T[at])} ({int(bad_T.sum())} such tokens)",
            where=batch.where(at, "kept_sets"),
            fix="mend the record, or KeptSet(outside='drop') or 'add'",
        )


def at_actions(batch: TokenBatch) -> dict[str, Tensor]:
    """The batch's streams of what the sampler could draw (`OFF`), switched off where the policy did not sample."""
    found: dict[str, Tensor] = {}
    for name, off in OFF.items():
        stream = batch.streams.get(name)
        if stream is not None:
            action = batch.action_T if stream.dim() == 1 else batch.action_T[:, None]
            found[name] = torch.where(action, stream, torch.full_like(stream, off))
    return found
