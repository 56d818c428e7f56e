"""The end of a step in a training loop of your own: one gather of metrics and faults.

`megatron_pgloss.megatron.PolicyLossStep.finish` does the same for Megatron-Core's schedules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, LayoutError, NonFiniteError
from megatron_pgloss.metrics import Metric, fold
from megatron_pgloss.objective import LossOutput
from megatron_pgloss.planning import Plan
from megatron_pgloss.planning.agreement import of_words, to_words
from megatron_pgloss.spec.words import closed

_TEXT = 32
"""int64 words of text for the place of a fault."""
_HEAD = 3 + _TEXT  # reports beyond the plan's, whether a gradient is not finite, length of the text, the text


@closed
def finish(
    plan: Plan,
    outputs: Sequence[LossOutput],
    *,
    parameters: Iterable[Tensor] | None = None,
    on_nonfinite: Literal["raise", "report"] = "raise",
) -> dict[str, float]:
    """The numbers of a whole step, the same on every rank. A collective over the plan's group, after backward and
    before the optimizer steps.

    Args:
        plan: the plan of the step.
        outputs: what `policy_loss` returned for every micro-batch of this rank; their graphs are not needed any more.
        parameters: the parameters whose gradients are checked (``model.parameters()``); None: no gradient is.
        on_nonfinite: ``report``: ``fault`` counts what is not finite, and the caller decides.

    Returns:
        ``loss`` (coefficients times components), ``COMPONENT/NAME`` for every metric, ``COMPONENT/ess`` (the share of
        member tokens that the ratios are worth, ``(sum r)^2 / (n sum r^2)``), ``COMPONENT/n_LEVEL`` for the counts that
        the plan divides by, and ``fault``: tokens that were not finite, and 1 more where a gradient is not.

    Raises:
        LayoutError: a rank has another number of outputs than the plan has micro-batches; on every rank.
        NonFiniteError: a token's log-prob or term, or a gradient, is not finite; on every rank. Do not step.
    """
    if on_nonfinite not in ("raise", "report"):
        raise DataError(f"on_nonfinite={on_nonfinite!r}", expected="raise, report")
    names = sorted({name for output in outputs for name in output.metrics})
    mine = _folded(names, [output.metrics for output in outputs])
    row = torch.zeros(_HEAD + 2 * len(names), dtype=torch.int64)
    row[0] = len(outputs) - plan.num_microbatches
    row[1] = int(parameters is not None and not _finite(parameters))
    text = place_of_fault(mine, plan).encode()[: 8 * _TEXT]
    row[2] = len(text)
    row[3:_HEAD] = to_words(text, _TEXT)
    row[_HEAD:] = torch.cat([mine[name].pack().cpu() for name in names] or [torch.zeros(0, dtype=torch.float64)]).view(
        torch.int64
    )
    ranks = plan.ranks
    sizes = ranks.gather(torch.tensor([row.numel(), int(row[0])]), ranks.world, ranks.world_size)
    for rank, (size, more) in enumerate(sizes.tolist()):
        if more or size != int(sizes[0, 0]):
            raise LayoutError(
                "finish got another number of micro-batch outputs than planned",
                expected=plan.num_microbatches, got=plan.num_microbatches + more, where=f"rank {rank}",
                fix="collect what policy_loss returns for every micro-batch of plan.microbatches(), and pass all of it",
            )  # fmt: skip
    rows = ranks.gather(row, ranks.world, ranks.world_size)
    whole = fold(names, rows[:, _HEAD:].contiguous().view(torch.float64).reshape(len(rows), len(names), 2))
    found = results(whole, plan)
    broken = rows[:, 1].nonzero().flatten().tolist()
    found["fault"] = sum(value for name, value in found.items() if name.endswith("/fault")) + float(bool(broken))
    if found["fault"] and on_nonfinite == "raise":
        what = f"gradients of rank {broken[0]}" if broken else "log-probs or terms inside a component"
        raise NonFiniteError(
            f"{what} are not finite", expected="finite values", got=f"{found['fault']:g} faults", where=_place(rows),
            fix="leave this step out: optimizer.zero_grad(); or on_nonfinite='report', and look at found['fault']. An "
            "id for which the logits have no column is scored NaN: plan(vocab_size=...) refuses it by name",
        )  # fmt: skip
    return found


def results(metrics: Mapping[str, Metric], plan: Plan) -> dict[str, float]:
    """The step's numbers by name: metrics, the plan's counts, effective sample sizes, the loss with coefficients."""
    found = {name: metric.result() for name, metric in metrics.items() if not name.endswith("/fault_at")}
    for name, counts in plan.counts.items():
        found |= {f"{name}/n_{what.replace(' ', '_')}": float(count) for what, count in counts.items()}
        if f"{name}/ratio_sq" in found:
            # The share of the member tokens that the ratios are worth, were they weighted equally.
            found[f"{name}/ess"] = found[f"{name}/ratio"] ** 2 / found[f"{name}/ratio_sq"]
        if f"{name}/is_weight_sq" in found:
            spread = found[f"{name}/is_weight_sq"] - found[f"{name}/is_weight"] ** 2
            found[f"{name}/is_weight_std"] = math.sqrt(max(spread, 0.0))
    found |= _units_not_named(plan)
    found["loss"] = sum(coef * found[f"{name}/loss"] for name, coef in plan.coef.items())
    return found


def _units_not_named(plan: Plan) -> dict[str, float]:
    """The numbers of counted prompts and episodes that the batch has ids for and no normaliser names, where one rank
    holds all the data.

    With several data-parallel ranks a unit may lie on more than one, and counting it once would take one gather more.
    """
    if plan.ranks.data_size > 1 or plan.batch is None:
        return {}
    given = {"prompt": plan.batch.prompt_ids, "episode": plan.batch.episode_ids}
    return {
        f"{part.tokens.component.name}/n_{unit}": float(part.alive[unit].sum())
        for part in plan.local.counts
        for unit, ids in given.items()
        if ids is not None and unit not in plan.counts[part.tokens.component.name]
    }


def _folded(names: Sequence[str], reports: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    packed = [torch.stack([report[name].pack() for name in names]) for report in reports if names]
    return fold(names, torch.stack(packed)) if packed else {}


def largest(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The infinity norm of all gradients, 0-d float64 on ``device``: NaN where one is NaN, 0 where there is none. No
    gradient is copied.
    """
    found = [torch.stack(torch.aminmax(grad.detach())) for grad in gradients if grad.numel()]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=device)
    extremes = torch.stack([pair.to(device, torch.float64) for pair in found])
    return extremes.abs().amax()  # keeps NaN, as aminmax does


def _finite(parameters: Iterable[Tensor]) -> bool:
    grads: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    return bool(largest(local, local[0].device if local else torch.device("cpu")).isfinite())


def place_of_fault(mine: Mapping[str, Metric], plan: Plan) -> str:
    """Where this rank's first faulty token is, or the empty string."""
    for name, metric in mine.items():
        if name.endswith("/fault_at") and math.isfinite(float(metric.value)) and plan.batch is not None:
            at = int(metric.value)
            token = f"token id {int(plan.batch.targets_T[at])}"
            holes = [stream for stream, one in plan.batch.streams.items() if one.dim() == 1 and not one[at].isfinite()]
            beside = f", where {', '.join(holes)} is not finite" if holes else ""
            return f"component {name.split('/')[0]}, {plan.batch.where(at, 'logits')}, of {token}{beside}"
    return ""


def _place(rows: Tensor) -> str | None:
    """The place of the faulty token of the first rank that has one; None without any."""
    for rank, row in enumerate(rows):
        if row[2]:
            text = of_words(row[3:_HEAD], int(row[2]))
            return f"rank {rank}, {text.decode(errors='ignore')}"  # cut in bytes, which may split a character
    return None
