"""Corrections from frozen log-probs: what each says about every token of this rank. `T` tokens.

A data-parallel rank holds whole sequences, so statistics over sequences and turns need no other rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import UnitSums
from megatron_pgloss.planning.units import turns_of
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.rules import corrections
from megatron_pgloss.spec import LossSpec, Staleness, TruncatedIS


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one correction says, whichever component it acts on."""

    weight_T: Tensor | None = None
    """float64 [T], before normalisation; None where the rule does not weigh."""
    clipped_T: Tensor | None = None
    """bool [T]: the weight was clipped."""
    passes_T: Tensor | None = None
    """bool [T]; None where the rule does not reject."""


def verdicts(batch: TokenBatch, spec: LossSpec, version: int | None) -> list[Verdict | None]:
    """One entry per correction of ``spec``; None for those that act inside the loss.

    Args:
        version: the current version, for `Staleness`.

    Raises:
        DataError: versions or the current version are absent, or a token was sampled by a later version.
    """
    found: list[Verdict | None] = []
    units: dict[str, UnitSums] = {}
    for rule in spec.corrections:
        if spec.is_late(rule):
            found.append(None)
            continue
        units = units or unit_sums(batch)
        if isinstance(rule, Staleness):
            recent_T = corrections.stale(rule, lags(batch, version, "Staleness"), units, batch.action_T)
            found.append(Verdict(passes_T=recent_T))
            continue
        log_T, known_T = log_ratio(batch)
        voters_T = batch.action_T & known_T
        bound = spec.log_ratio_bound
        weight_T, passes_T = corrections.apply(rule, log_T, units, voters_T, bound)
        clipped = None
        if isinstance(rule, TruncatedIS):
            raw_T = corrections.raw_weight(rule, log_T, units, voters_T, bound)
            clipped = (raw_T > rule.high) | (raw_T < rule.low)
        found.append(Verdict(weight_T=weight_T, clipped_T=clipped, passes_T=passes_T))
    return found


def log_ratio(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """``log old - log mu`` float64 [T], 0 where either is not finite, and bool [T] where both are."""
    for name in ("old", "rollout"):
        if name not in batch.streams:
            raise DataError(f"{name} is absent", expected=f"{name}_logprobs=, read by the corrections")
    old_T, mu_T = batch.streams["old"], batch.streams["rollout"]
    known_T = old_T.isfinite() & mu_T.isfinite()
    # Select before arithmetic: what lies outside the components may be NaN or infinite.
    return torch.where(known_T, old_T, 0).double() - torch.where(known_T, mu_T, 0).double(), known_T


def unit_sums(batch: TokenBatch) -> dict[str, UnitSums]:
    """Sequences and turns of this rank's rows."""
    turn_T, turns = turns_of(batch)[:2]
    return {"sequence": UnitSums(batch.seq_T, len(batch)), "turn": UnitSums(turn_T, turns)}


def lags(batch: TokenBatch, version: int | None, reader: Any) -> Tensor:
    """int64 [T]: how many versions ago each action was sampled; 0 elsewhere.

    Raises:
        DataError: versions or the current version are absent, or a token was sampled by a later version.
    """
    versions_T = batch.streams.get("versions")
    if versions_T is None:
        raise DataError(
            "versions are absent", expected=f"versions=, read by {reader}", fix="give versions= [B] or [B, L]"
        )
    if version is None:
        raise DataError(
            "the current version is absent", expected=f"an integer, read by {reader}",
            fix="plan(..., version=V) or step.begin(..., version=V): the version of the weights being trained",
        )  # fmt: skip
    lag_T = torch.where(batch.action_T, version - versions_T, 0)
    ahead_T = lag_T < 0
    if bool(ahead_T.any()):
        at = int(ahead_T.to(torch.int8).argmax())
        raise DataError(
            "a token was sampled by a later version than the current one",
            expected=f"<= {version}", got=int(versions_T[at]), where=batch.where(at, "versions"),
            fix="version= is that of the weights being trained",
        )  # fmt: skip
    return lag_T
