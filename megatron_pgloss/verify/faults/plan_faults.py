"""Faults of plan, objective and metrics, which any trainer can have. `T` tokens, `N` positions of a micro-batch.

Each replacement is close to a mistake that some trainer had; none raises on one rank alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_pgloss.planning.agreement import FIELDS
from megatron_pgloss.planning.wire import SLOTS
from megatron_pgloss.rollouts import align
from megatron_pgloss.verify.faults.fault import DP, EVERYWHERE, SHARED, TEMPERATURE, Fault, Place


def _shift_twice(right: Any, at: Place) -> Any:
    return lambda self, stream_T, fill: right(self, right(self, stream_T, fill), fill)


def _next_row(right: Any, at: Place) -> Any:
    def wrong(self: align.Shift, lengths_S: torch.Tensor) -> None:
        right(self, lengths_S)
        self.predicts_T = torch.ones_like(self.predicts_T)

    return wrong


def _old_in_token_order(right: Any, at: Place) -> Any:
    return lambda row, stream_T, shift: stream_T if row.name == "old" else right(row, stream_T, shift)


def _masks_not_taken(right: Any, at: Place) -> Any:
    def wrong(mask: Any, batch: Any) -> Any:
        verdict = right(mask, batch)
        return replace(verdict, passes=torch.ones_like(verdict.passes))

    return wrong


def _numerator_unmasked(right: Any, at: Place) -> Any:
    def wrong(batch: Any, component: Any, spec: Any, *more: Any) -> Any:
        tokens = right(batch, component, spec, *more)
        # Only inside turns that still have a member: the divisor of an emptied turn is 0, which would be another fault.
        turn_T = batch.seq_T * (int(batch.turn_T.max()) + 2) + batch.turn_T
        member_T = tokens.base_T & torch.isin(turn_T, turn_T[tokens.member_T])
        return replace(tokens, member_T=member_T, factor_T=torch.where(tokens.member_T, tokens.factor_T, member_T))

    return wrong


def _denominator_unmasked(right: Any, at: Place) -> Any:
    return lambda tokens, units, present_S: right(
        replace(tokens, count_T=tokens.count_T | tokens.base_T), units, present_S
    )


def _no_importance(right: Any, at: Place) -> Any:
    def wrong(*args: Any) -> Any:
        found = right(*args)
        said = [
            one if one is None or one.weight is None else replace(one, weight=torch.ones_like(one.weight))
            for one in found.said
        ]
        return replace(found, said=said)

    return wrong


def _padding_counted(right: Any, at: Place) -> Any:
    def wrong(local: Any) -> Any:
        row = right(local)
        if local.batch is None:
            return row
        padding = int(local.batch.lengths_S.max()) * len(local.batch) - local.batch.tokens_T.numel()
        stride = row.numel() // len(local.counts)
        for c, part in enumerate(local.counts):
            if isinstance(part.totals["token"], int):
                row[c * stride + SLOTS.index("token")] += padding
        return row

    return wrong


def _own_counts(right: Any, at: Place) -> Any:
    def wrong(spec: Any, rows: torch.Tensor) -> Any:
        own = rows[at.dp_rank].expand_as(rows)  # dp times this rank's counts, as an averaging wrapper has it
        return right(spec, own if bool(own[0, FIELDS.index("rows")]) else rows)

    return wrong


def _own_weights(right: Any, at: Place) -> Any:
    def wrong(micro: Any, name: str) -> torch.Tensor:
        weight = right(micro, name)
        total = weight.sum()
        mean = weight / torch.where(total != 0, total, 1) / micro.shared.num_microbatches
        return torch.where(total != 0, mean, weight)

    return wrong


def _own_units(right: Any, at: Place) -> Any:
    return lambda text: right(f"{text} on rank {at.dp_rank}")


def _own_keyed_rows(right: Any, at: Place) -> Any:
    def wrong(self: Any, rows: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        every = right(self, rows, group, size)
        if rows.dim() < 2:
            return every
        own = torch.zeros_like(every)
        own[at.dp_rank] = rows
        return own

    return wrong


def _rows_as_episodes(right: Any, at: Place) -> Any:
    return lambda batch, row, unit: right(batch, row, unit) + (f" row {row}" if unit == "episode" else "")


def _first_denominator(right: Any, at: Place) -> Any:
    return lambda c, part, units, totals: right(0 if part.tokens.component.kind == "kl" else c, part, units, totals)


def _row_lost(right: Any, at: Place) -> Any:
    def wrong(parts: list[list[int]], count: int, packed: bool) -> list[list[int]]:
        cut = right(parts, count, packed)
        last = max((i for i, part in enumerate(cut) if part), default=None)
        return [part[:-1] if i == last else part for i, part in enumerate(cut)]

    return wrong


def _no_temperature(right: Any, at: Place) -> Any:
    return lambda self: None


def _swapped(right: Any, at: Place) -> Any:
    return lambda log_ratio_N, advantage_N, low, high, cap: right(log_ratio_N, advantage_N, high, low, cap)


def _ratio_one(right: Any, at: Place) -> Any:
    return lambda self: self.logp - self.logp.detach()


def _old_for_ref(right: Any, at: Place) -> Any:
    return lambda self, name: self.old


def _divided_again(right: Any, at: Place) -> Any:
    def wrong(lp: Any, micro: Any, **more: Any) -> Any:
        out = right(lp, micro, **more)
        return replace(out, loss=out.loss / micro.shared.num_microbatches)

    return wrong


def _mean_of_means(right: Any, at: Place) -> Any:
    def wrong(names: Any, packed: torch.Tensor) -> Any:
        value, count = packed.unbind(-1)
        mean = torch.where(count > 0, value / count.clamp(min=1), value)
        return right(names, torch.stack([mean, count.clamp(max=1)], -1))

    return wrong


PLAN_FAULTS = (
    Fault(
        name="off-by-one shift", target="megatron_pgloss.rollouts.align:Shift.__call__", make=_shift_twice,
        imitates="labels already moved are moved again", shows=EVERYWHERE,
    ),
    Fault(
        name="predicts into the next row", target="megatron_pgloss.rollouts.align:Shift.__init__", make=_next_row,
        imitates="a row's last position is trained on the first token of the row behind it", shows=EVERYWHERE,
    ),
    Fault(
        name="old in token order", target="megatron_pgloss.rollouts.build:align", make=_old_in_token_order,
        imitates="labels are shifted, the old log-probs are not", shows=EVERYWHERE,
    ),
    Fault(
        name="mask rules ignored", target="megatron_pgloss.rules.masks:apply", make=_masks_not_taken,
        imitates="truncated rows, zero advantages and user masks take nothing out", shows=EVERYWHERE,
    ),
    Fault(
        name="mask ignored in the numerator", target="megatron_pgloss.planning.members:component_set",
        make=_numerator_unmasked, imitates="masked tokens are trained, and not counted", shows=EVERYWHERE,
    ),
    Fault(
        name="mask ignored in the denominator", target="megatron_pgloss.planning.counts:local_counts",
        make=_denominator_unmasked, imitates="masked tokens are counted, and not trained", shows=EVERYWHERE,
    ),
    Fault(
        name="importance weight dropped", target="megatron_pgloss.planning.frozen:verdicts", make=_no_importance,
        imitates="a fused path takes fewer streams, and nobody notices", shows=EVERYWHERE,
    ),
    Fault(
        name="padded tokens counted", target="megatron_pgloss.planning.wire:body", make=_padding_counted,
        imitates="the divisor is the number of positions", shows=EVERYWHERE,
    ),
    Fault(
        name="local mean", target="megatron_pgloss.planning.wire:job_counts", make=_own_counts,
        imitates="each rank divides by its own counts, and the wrapper averages", shows=DP,
    ),
    Fault(
        name="micro-batch mean", target="megatron_pgloss.planning.microbatch:MicroBatch.weight", make=_own_weights,
        imitates="each micro-batch (or its shard) is averaged by itself", shows=EVERYWHERE,
    ),
    Fault(
        name="units keyed by rank", target="megatron_pgloss.planning.units:_hash", make=_own_units,
        imitates="an episode that straddles ranks counts once on each", shows=SHARED,
    ),
    Fault(
        name="units of this rank alone", target="megatron_pgloss.planning.agreement:Ranks.gather",
        make=_own_keyed_rows, imitates="prompts and episodes are counted without asking the other ranks", shows=SHARED,
    ),
    Fault(
        name="rows taken for episodes", target="megatron_pgloss.planning.units:_key", make=_rows_as_episodes,
        imitates="a rollout cut into several rows counts once for each", shows=EVERYWHERE,
    ),
    Fault(
        name="kl shares rl's denominator", target="megatron_pgloss.planning.token_weights:weights",
        make=_first_denominator, imitates="one denominator serves all components", shows=EVERYWHERE,
    ),
    Fault(
        name="a row lost in the split", target="megatron_pgloss.planning.split:refine", make=_row_lost,
        imitates="the last row of an uneven step falls out of its micro-batches", shows=EVERYWHERE,
    ),
    Fault(
        name="temperature ignored", target="megatron_pgloss.planning.microbatch:MicroBatch.temperature",
        make=_no_temperature, imitates="log-probs are those of temperature 1", shows=TEMPERATURE,
    ),
    Fault(
        name="clip bounds swapped", target="megatron_pgloss.objective.surrogates:_clip", make=_swapped,
        imitates="low is used for high", shows=EVERYWHERE,
    ),
    Fault(
        name="old is the policy", target="megatron_pgloss.objective.streams:Streams.token_log_ratio", make=_ratio_one,
        imitates="old log-probs are recomputed with the current weights: ratio 1", shows=EVERYWHERE,
    ),
    Fault(
        name="kl to old", target="megatron_pgloss.objective.streams:Streams.policy", make=_old_for_ref,
        imitates="the wrong log-prob stream is the reference", shows=EVERYWHERE,
    ),
    Fault(
        name="num_microbatches factor dropped", target="megatron_pgloss.objective.loss:policy_loss",
        make=_divided_again, imitates="a loss normalised over the step is divided by the schedule again",
        shows=EVERYWHERE,
    ),
    Fault(
        name="metrics as means of means", target="megatron_pgloss.metrics:fold", make=_mean_of_means,
        imitates="means of micro-batches and ranks are averaged without their counts", shows=EVERYWHERE,
    ),
)  # fmt: skip
