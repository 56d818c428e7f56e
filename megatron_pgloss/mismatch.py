"""How far the trainer's log-probs of the sampled tokens lie from the sampler's own. `S` rows, `T` tokens.

It is measured from the batch's streams ``old`` and ``rollout`` alone, so that it is known before training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.advantages.exchange import exchange
from megatron_pgloss.advantages.inputs import merge
from megatron_pgloss.advantages.termination import EFFECTS
from megatron_pgloss.errors import DataError
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.spec.words import closed

_BOUND = 20.0
"""Log-ratios are bounded to plus or minus this before exp, as in a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The mismatch over all ranks. ``d = log old - log mu`` of an action token; a row's gap is its mean of ``-d``."""

    sequences: int
    """Rows with a scored action token."""
    tokens: int
    unscored: int
    """Action tokens without a sampler's log-prob (NaN); they enter none of the numbers."""
    rollout_ppl: float
    """Mean over rows of ``exp(-mean log mu)``."""
    old_ppl: float
    """Mean over rows of ``exp(-mean log old)``."""
    log_ppl_gap: float
    """Mean over rows of ``mean(log mu) - mean(log old)``: above 0 where the trainer finds the text less likely."""
    log_ppl_gap_abs: float
    """Mean over rows of the gap's magnitude."""
    log_ppl_gap_max: float
    """Largest magnitude of a row's gap."""
    k1: float
    """Mean over tokens of ``-d``: an estimate of KL(mu || old), as tokens are drawn from mu."""
    k3: float
    """Mean over tokens of ``exp(d) - 1 - d``, the same KL with less variance."""
    chi2_token: float
    """Mean over tokens of ``exp(2 d)``, less 1: the variance of token weights."""
    chi2_sequence: float
    """Mean over rows of ``exp(2 sum d)``, less 1: the variance of sequence weights."""

    def __str__(self) -> str:
        shown = (f"{item.name} {getattr(self, item.name):.6g}" for item in fields(self)[3:])
        return f"{self.tokens} tokens of {self.sequences} sequences, {self.unscored} unscored: {', '.join(shown)}"


@closed
def mismatch(batches: TokenBatch | Sequence[TokenBatch], *, group: Any = None) -> Mismatch:
    """The mismatch between trainer and sampler, the same on every rank. It takes one gather of a few numbers per row.

    Args:
        batches: rollouts with ``rollout_logprobs`` and ``old_logprobs``; rows that ended in an infrastructure fault are
            left out.
        group: process group of data-parallel ranks, as in `megatron_pgloss.advantages.group_relative`.

    Returns:
        The numbers of `Mismatch`; NaN where there is no token.

    Raises:
        DataError: a stream is absent, or ``old`` is not finite on a scored action token.
    """

    def make(rank: int) -> list[tuple[float, ...]]:
        batch = merge(batches)
        return [] if batch is None else _rows(batch)

    ranks, _ = exchange("mismatch", make, group)
    rows = [row for rows in ranks for row in rows]
    scored = [row for row in rows if row[0]]
    tokens = sum(int(row[0]) for row in scored)

    def over_rows(values: list[float]) -> float:
        return math.fsum(values) / len(values) if values else math.nan

    def over_tokens(place: int) -> float:
        return math.fsum(row[place] for row in scored) / tokens if tokens else math.nan

    gaps = [(mu - old) / n for n, _, mu, old, *_ in scored]
    return Mismatch(
        sequences=len(scored), tokens=tokens, unscored=sum(int(row[1]) for row in rows),
        rollout_ppl=over_rows([math.exp(min(-mu / n, 700.0)) for n, _, mu, *_ in scored]),
        old_ppl=over_rows([math.exp(min(-old / n, 700.0)) for n, _, _, old, *_ in scored]),
        log_ppl_gap=over_rows(gaps), log_ppl_gap_abs=over_rows([abs(gap) for gap in gaps]),
        log_ppl_gap_max=max(map(abs, gaps), default=math.nan),
        k1=math.fsum(mu - old for _, _, mu, old, *_ in scored) / tokens if tokens else math.nan,
        k3=over_tokens(4), chi2_token=over_tokens(5) - 1,
        chi2_sequence=over_rows([math.exp(2 * _near(old - mu)) for _, _, mu, old, *_ in scored]) - 1,
    )  # fmt: skip


def _near(log_ratio: float) -> float:
    return max(-_BOUND, min(_BOUND, log_ratio))


def _rows(batch: TokenBatch) -> list[tuple[float, ...]]:
    """For each row: the number of scored and of unscored action tokens, and sums over the scored ones of log mu, log
    old, k3 and squared weights.
    """
    for name in ("rollout", "old"):
        if name not in batch.streams:
            raise DataError(f"mismatch reads stream {name!r}, which the batch does not have", fix=f"{name}_logprobs=")
    states = batch.terminations or (None,) * len(batch)
    stays_S = torch.tensor([state is None or EFFECTS[state].votes for state in states], dtype=torch.bool)
    action_T = batch.action_T & stays_S[batch.seq_T]
    mu_T, old_T = batch.streams["rollout"].double(), batch.streams["old"].double()
    over_T = action_T & ~mu_T.isnan()
    bad_T = over_T & ~(old_T.isfinite() & mu_T.isfinite())
    if bool(bad_T.any()):
        at = int(bad_T.to(torch.int8).argmax())
        raise DataError("a log-prob is not finite where it is read", got=float(old_T[at]), where=batch.where(at))
    # Select before arithmetic: what lies outside may be NaN.
    mu_T, old_T = torch.where(over_T, mu_T, 0), torch.where(over_T, old_T, 0)
    d_T = (old_T - mu_T).clamp(-_BOUND, _BOUND)

    def total(value_T: Tensor) -> list[float]:
        picked_T = torch.where(over_T, value_T, 0)
        sums: list[float] = torch.zeros(len(batch), dtype=torch.float64).index_add(0, batch.seq_T, picked_T).tolist()
        return sums

    unscored_S = torch.zeros(len(batch), dtype=torch.int64).index_add(0, batch.seq_T, (action_T & ~over_T).long())
    ones_T = torch.ones_like(d_T)
    k3_T, square_T = d_T.expm1() - d_T, (2 * d_T).exp()
    columns = [total(ones_T), unscored_S.tolist(), *map(total, (mu_T, old_T, k3_T, square_T))]
    return list(zip(*columns, strict=True))
