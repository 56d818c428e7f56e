"""The verdicts of plan-time corrections on every token of this rank, from frozen log-probs or versions. `T` tokens.

A data-parallel rank holds whole sequences, so statistics over sequences and turns need no other rank. Statistics over
episodes and prompts do: their corrections are `Open` until the numbers of all ranks have been gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.maths import Asked, UnitSums
from megatron_pgloss.planning.units import turns_of
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.rules import Verdict, corrections
from megatron_pgloss.rules.corrections import Evidence
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.corrections import Correction


@dataclass(frozen=True, slots=True)
class Open:
    """A correction over prompts or episodes, with its statistic: this rank has the parts of its own rows."""

    rule: Correction
    evidence: Evidence
    asked: Asked

    @property
    def unsaid(self) -> Verdict:
        """The verdict that stands in until the real one is known: nothing is rejected, and nothing is weighed."""
        every_T = torch.ones_like(self.evidence.voters_N)
        one_T = every_T.double()
        weighs = self.rule.weighs
        return Verdict(
            passes=every_T if self.rule.rejects else None, weight=one_T if weighs else None,
            raw=one_T if weighs else None, truncated=~every_T if weighs else None,
        )  # fmt: skip

    def said(self, joined_2T: Tensor) -> Verdict:
        """Its verdict, from the answer to what was `asked`."""
        return corrections.judged(self.rule, self.evidence, joined_2T)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The verdicts of the plan-time corrections."""

    said: list[Verdict | None]
    """One entry per correction of the spec; None for those that act inside the loss."""
    open: dict[int, Open]
    """The corrections over prompts and episodes, by their index in the spec."""

    def completed(self, answers: list[Tensor]) -> list[Verdict | None]:
        """``said`` with the verdicts of the open corrections.

        Args:
            answers: the answer to the statistic of each open correction, in order; [2, T].
        """
        found = list(self.said)
        for (i, one), joined_2T in zip(self.open.items(), answers, strict=True):
            found[i] = one.said(joined_2T)
        return found


def verdicts(batch: TokenBatch, spec: LossSpec, version: int | None) -> Verdicts:
    """The verdicts of the plan-time corrections of ``spec``, from the rows of this rank.

    Args:
        version: the current version, for `Staleness`.

    Raises:
        DataError: versions or the current version are absent, or a token was sampled by a later version.
    """
    found = Verdicts([], {})
    units: dict[str, UnitSums] = {}
    for i, rule in enumerate(spec.corrections):
        if spec.is_late(rule):
            found.said.append(None)
            continue
        units = units or unit_sums(batch)
        evidence = _evidence(rule, batch, units, spec.log_ratio_bound, version)
        if not rule.straddles:
            found.said.append(corrections.apply(rule, evidence))
            continue
        asked = corrections.asked(rule, evidence)
        assert asked is not None
        found.open[i] = Open(rule, evidence, asked)
        found.said.append(found.open[i].unsaid)
    return found


def _evidence(
    rule: Correction, batch: TokenBatch, units: dict[str, UnitSums], bound: float, version: int | None
) -> Evidence:
    """The evidence of a plan-time correction: frozen log-probs, or versions where it reads no ratio."""
    if rule.ratio_of is None:
        lag_T = lags(batch, version, type(rule).__name__)
        return Evidence(units=units, voters_N=batch.action_T, bound=bound, lag_N=lag_T)
    log_T, known_T = log_ratio(batch)
    return Evidence(units=units, voters_N=batch.action_T & known_T, bound=bound, log_N=log_T)


def log_ratio(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """``log old - log mu`` float64 [T], 0 where either is not finite, and bool [T] where both are."""
    for name in ("old", "rollout"):
        if name not in batch.streams:
            fix = f"give {name}_logprobs="
            if name == "old":
                fix += ", or score first (step.score(..., into='old')), then ask for voters and advantages"
            raise DataError(f"{name} is absent", expected=f"{name}_logprobs=, read by the corrections", fix=fix)
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
