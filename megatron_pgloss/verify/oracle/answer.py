"""The judge: the policy-gradient loss in plain torch and float64, the whole step at once.

    L = sum_c coef_c * average_c( u_ct * l_ct over the members t of component c )

Written from the formulas: one process, no schedule, no wrapper, no split. Nothing of the package is
used here but its errors, so that an agreement of the two means something; what vouches for the
oracle itself is the clarity of this text and the hand-computed numbers of its tests.

Data are plain dicts, one per row, in token order (index i is about ``tokens[i]``): ``tokens``,
``action``, ``observation``, ``advantages`` (list or one number), ``old``, ``rollout``, ``ref``,
``weights`` ({component: list}), ``temperature`` (number or list), ``prompt``, ``episode``,
``turn``, ``masks`` ({name: list}), ``termination``, ``version`` (number or list), ``values`` and
``returns`` of the critic, ``sampler`` and ``wide`` (`kept`), ``recorded`` (what an earlier update
noted down), ``streams`` ({name: list}).
The spec is a plain dict too: ``LossSpec.to_dict()``, or one like it.

Shapes: T all tokens of the step, rows end to end; L tokens of a row; V vocabulary; M members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.verify.oracle.average import NestedAverage, parse_path
from megatron_pgloss.verify.oracle.gates import gate_factor
from megatron_pgloss.verify.oracle.kept import on_kept_sets
from megatron_pgloss.verify.oracle.losses import chosen_logprobs, token_loss
from megatron_pgloss.verify.oracle.ratios import ratio_axis, statistic_of
from megatron_pgloss.verify.oracle.rules import corrected
from megatron_pgloss.verify.oracle.scene import Scene
from megatron_pgloss.verify.oracle.sets import (
    counted,
    members_of,
    named_components,
    without_empty_rows,
)
from megatron_pgloss.verify.oracle.step import LEVELS, Row, Step, choice, setting
from megatron_pgloss.verify.oracle.surrogates import clip_bounds


def oracle_logprobs(
    logits: Tensor, tokens: Sequence[int], temperature: float | Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token of a row and the entropy of the distribution it was drawn from.

    Args:
        logits: [L, V]; position i - 1 predicts token i.
        tokens: L ids.
        temperature: one number, or L numbers: entry i divides the logits that predict token i.

    Returns:
        (logprob, entropy), float64 [L] in nats, entry 0 being an unused 0.
        logprob[i] = log softmax(logits[i-1] / temperature[i])[tokens[i]];
        entropy[i] = -sum_v p_v log p_v.
        Logits of -inf (a padded vocabulary) have p = 0 and add nothing.

    Raises:
        DataError: a temperature that is not positive.
    """
    length = len(tokens)
    tau = torch.as_tensor(1.0 if temperature is None else temperature, dtype=torch.float64)
    tau = tau.expand(length)[1:].to(logits.device)
    if not bool((tau > 0).all()):
        raise DataError("a temperature is not positive", expected="> 0", got=tau.tolist())
    target = torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)[1:]
    logp_V = torch.log_softmax(logits[: length - 1].to(torch.float64) / tau[:, None], dim=-1)
    unused = logp_V.new_zeros(min(length, 1))
    chosen = logp_V.gather(-1, target[:, None]).squeeze(-1)
    # Selected before the product, for 0 * inf has neither value nor gradient.
    finite_V = logp_V.masked_fill(logp_V == -torch.inf, 0.0)
    entropy = -(logp_V.exp() * finite_V).sum(-1)
    return torch.cat([unused, chosen]), torch.cat([unused, entropy])


def oracle_step(
    model_fn: Callable[[Tensor], Tensor],
    rows: Sequence[Row],
    spec: Mapping[str, Any],
    coef: Mapping[str, float] | None = None,
    *,
    ref_fn: Callable[[Tensor], Tensor] | None = None,
    version: int | None = None,
) -> dict[str, Any]:
    """Run the model on each row by itself and build the loss of the step; the caller runs backward.

    Args:
        model_fn: tokens int64 [1, L] to logits float64 [1, L, V].
        rows, spec, coef, version: as in ``oracle_loss``.
        ref_fn: as ``model_fn``, of the reference, for the exact KL.

    Returns:
        What ``oracle_loss`` returns, with ``logprobs`` and ``entropies``, detached float64 [L] per
        row.
    """
    logprobs, entropies, kls, chosen = [], [], [], []
    for row in rows:
        if len(row["tokens"]) < 2:  # nothing to predict
            logprob = entropy = kl = torch.zeros(len(row["tokens"]), dtype=torch.float64)
        else:
            tokens = torch.as_tensor(row["tokens"], dtype=torch.int64)[None]
            logits, heat = model_fn(tokens)[0], row.get("temperature")
            logits = logits if spec.get("kept") is None else on_kept_sets(logits, row, spec["kept"])
            logprob, entropy = oracle_logprobs(logits, row["tokens"], heat)
            kl = entropy if ref_fn is None else oracle_kl(logits, ref_fn(tokens)[0].detach(), heat)
        chosen.append([] if len(row["tokens"]) < 2 or "wide" not in row else chosen_logprobs(logits, row))
        logprobs.append(logprob)
        entropies.append(entropy)
        kls.append(kl)
    result = oracle_loss(logprobs, entropies, rows, spec, coef, kls=None if ref_fn is None else kls, version=version,
                         chosen=chosen)  # fmt: skip
    detached = {"logprobs": logprobs, "entropies": entropies}
    return result | {key: [row.detach() for row in value] for key, value in detached.items()}


def oracle_kl(logits: Tensor, ref_logits: Tensor, temperature: float | Sequence[float] | None = None) -> Tensor:
    """Exact KL(pi || ref) of the distributions that predict each token, float64 [L], entry 0 being an unused 0.

    ``sum_v pi_v (log pi_v - log ref_v)``, both logits [L, V] divided by the temperature; columns of -inf add nothing.
    """
    length = len(logits)
    tau = torch.as_tensor(1.0 if temperature is None else temperature, dtype=torch.float64).expand(length)[1:, None]
    logp_V = torch.log_softmax(logits[:-1].to(torch.float64) / tau, dim=-1)
    logq_V = torch.log_softmax(ref_logits[:-1].to(torch.float64) / tau, dim=-1)
    gap_V = logp_V.masked_fill(logp_V == -torch.inf, 0.0) - logq_V.masked_fill(logp_V == -torch.inf, 0.0)
    return torch.cat([logp_V.new_zeros(1), (logp_V.exp() * gap_V).sum(-1)])


def oracle_loss(
    logprobs: Sequence[Tensor],
    entropies: Sequence[Tensor] | None,
    rows: Sequence[Row],
    spec: Mapping[str, Any],
    coef: Mapping[str, float] | None = None,
    *,
    values: Sequence[Tensor] | None = None,
    kls: Sequence[Tensor] | None = None,
    chosen: Sequence[Sequence[Tensor]] | None = None,
    version: int | None = None,
) -> dict[str, Any]:
    """The loss of a whole optimizer step.

    Args:
        logprobs: per row float64 [L], entry i the policy's log-prob of token i; entry 0 and what
            lies outside the members may be anything, NaN included. Gradients flow to it.
        entropies: alike, or None where no component reads them.
        rows: the data, one dict per row (see the module).
        spec: components, corrections, masks, ``old``, ``log_ratio_bound``, ``empty_sequences``.
        coef: coefficients by component name, over those of the spec.
        values, kls: what the critic says, and the exact KL to the reference, as ``entropies``.
        chosen: per row and token the policy's log-probs [k] at the row's ``wide["teacher_ids"]``.
        version: number of the current policy, where the spec reads versions.

    Returns:
        ``loss``: 0-d, with grad. The rest by component name. ``components``: 0-d, before the
        coefficient. ``weights``: float64 [L] per row, the derivative of the average by each token's
        value, so without user weights and corrections; 0 outside the members. ``token_losses``: the
        same shape, l itself. ``counts``: ``members`` that enter the sum, ``outside_path`` members
        in no turn under a path that names turns, ``masks`` the tokens that each mask by itself
        takes, and the count of each level whose ids are there. For policy gradients
        ``ratio_stats`` (raw ratios; tokens on each flat side of the clip) and ``clip_fraction``.

    Raises:
        SpecError: a kind or name that the oracle does not know.
        DataError: data that are misaligned, missing or not finite inside a component.
    """
    step = without_empty_rows(Step.of(rows), spec)
    logp_T = _joined(logprobs, step, "log-probs")
    entropy_T, value_T, kl_T = (
        None if parts is None else _joined(parts, step, what)
        for parts, what in ((entropies, "entropies"), (values, "values"), (kls, "exact KLs"))
    )
    components, override = named_components(spec), dict(coef or {})
    if unknown := set(override) - set(components):
        raise SpecError("a coefficient for no component", expected=sorted(components), got=sorted(unknown))
    tables = "components counts weights token_losses ratio_stats clip_fraction"
    result: dict[str, Any] = {table: {} for table in tables.split()}
    loss = logp_T[:0].sum()
    for name, component in components.items():
        masked_T, taken = members_of(name, component, spec, step)
        scene = Scene(
            step=step, spec=spec, component=component, name=name, logp_T=logp_T, entropy_T=entropy_T, value_T=value_T,
            kl_T=kl_T, member_T=masked_T, version=version, chosen=chosen,
        )  # fmt: skip
        verdict = corrected(scene)
        scene = replace(scene, member_T=masked_T & verdict.early_T)
        index_M = scene.index_M
        gate_M = gate_factor(scene) * verdict.late_T[index_M]
        zero_T = torch.zeros(len(step.where), dtype=torch.float64)
        left_T = verdict.early_T & (zero_T.index_put((index_M,), gate_M) != 0)
        average, counts = _average(scene, masked_T, left_T)
        loss_M = token_loss(scene)
        user_M = step.finite(step.weights(name)[index_M], index_M, f"weights of {name}")
        kept_M = torch.where(gate_M != 0, user_M * verdict.weight_T[index_M] * gate_M * loss_M, 0.0)
        value = average(zero_T.index_put((index_M,), kept_M))
        loss = loss + float(setting(override, name, setting(component, "coef", 1.0))) * value
        result["components"][name] = value
        result["counts"][name] = counts | {"masks": taken}
        result["weights"][name] = step.split(_derivative(average, len(step.where)))
        result["token_losses"][name] = step.split(zero_T.index_put((index_M,), loss_M.detach()))
        if component["kind"] == "policy_gradient":
            stats = _ratio_stats(scene)
            result["ratio_stats"][name] = stats
            clipped = stats["low"] + stats["high"] + stats["dual"]
            result["clip_fraction"][name] = clipped / max(stats["tokens"], 1)
    return result | {"loss": loss}


def _joined(parts: Sequence[Tensor], step: Step, what: str) -> Tensor:
    """Float64 [T] of one tensor per row."""
    lengths = [len(row["tokens"]) for row in step.rows]
    if [tuple(part.shape) for part in parts] != [(length,) for length in lengths]:
        raise DataError(
            f"{what} are not aligned with the tokens",
            expected=f"one [L] per row, L = {lengths}",
            got=[tuple(part.shape) for part in parts],
        )
    wrong = [part.dtype for part in parts if part.dtype != torch.float64]
    if wrong:
        raise DataError(f"{what} of the oracle are float64", got=wrong[0])
    return torch.cat([torch.zeros(0, dtype=torch.float64), *[part.cpu() for part in parts]])


def _average(scene: Scene, masked_T: Tensor, left_T: Tensor) -> tuple[NestedAverage, dict[str, Any]]:
    """The component's average, and what it divides by.

    ``masked_T``: what the masks left; ``left_T``: what corrections and gates left of it. With ``count_rejected=False``
    what they took is not counted.
    """
    step, component, name = scene.step, scene.component, scene.name
    count_T = counted(component, masked_T, step)
    if choice(str(setting(component, "count_rejected", True)), ["True", "False"], "count_rejected") == "False":
        count_T = count_T & ~(masked_T & ~left_T)
    measure_T = count_T.to(torch.float64)
    divide_by = setting(component, "divide_by", "tokens")
    if choice(divide_by, ["tokens", "weights"], "divisor") == "weights":
        index = count_T.nonzero().squeeze(1)
        weight = step.finite(step.weights(name)[index], index, f"weights of {name}")
        if bool((weight < 0).any()):
            raise DataError("weights that divide must not be negative", where=f"weights of {name}")
        measure_T = measure_T.index_put((index,), weight)
    path = parse_path(setting(component, "normalizer", "mean(token)"))
    units = choice(setting(component, "units", "counted"), ["counted", "all"], "rule for units")
    named = [level.unit for level in path]
    levels = [level for level in LEVELS if level in named or step.has_ids(level)]
    average = NestedAverage(
        path=path,
        keys={level: step.keys(level) for level in levels},
        present=step.present_T.nonzero().squeeze(1).tolist(),
        members=frozenset(scene.index_M.tolist()),
        counts=measure_T.tolist(),
        every_unit=units == "all",
    )
    counts: dict[str, Any] = {
        "members": len(average.members),
        "outside_path": len(scene.index_M) - len(average.members),
        "token": average.size(average.present),
    }
    above = [level for level in levels if level != "token"]
    return average, counts | {unit: len(average.units(unit, average.present)) for unit in above}


def _derivative(average: NestedAverage, length: int) -> Tensor:
    """d average / d value, float64 [T]: the weight that each token carries."""
    leaf = torch.zeros(length, dtype=torch.float64, requires_grad=True)
    (weight_T,) = torch.autograd.grad(average(leaf), leaf)
    return weight_T


def _ratio_stats(scene: Scene) -> dict[str, float]:
    """Raw ratios over the members where there is a ratio, and how many tokens lie on a flat side of the clip."""
    component = scene.component
    stats: dict[str, float] = {"tokens": len(scene.index_M), "low": 0, "high": 0, "dual": 0}
    level, statistic, _, over = ratio_axis(component)
    told = component["surrogate"]["kind"] not in ("reinforce", "nll", "custom") and level not in ("custom", "none")
    if not told or not stats["tokens"]:
        return stats
    raw_T, vote_T = scene.log_ratio_to(scene.constant_T("old"))
    if level != "token":
        raw_T = statistic_of(raw_T.detach(), scene.member_T if over == "members" else vote_T, level, statistic, scene)
    ratio_M = raw_T.detach()[scene.index_M].exp()
    if component["surrogate"]["kind"] == "clip":
        advantage_M = scene.constant("advantages")
        low, high, cap = clip_bounds(component["surrogate"], scene)
        stats |= {
            "low": int(((advantage_M < 0) & (ratio_M < 1 - low)).sum()),
            "high": int(((advantage_M > 0) & (ratio_M > 1 + high)).sum()),
            "dual": int(((advantage_M < 0) & (ratio_M > cap)).sum()),
        }
    spread = {"mean": ratio_M.mean(), "min": ratio_M.min(), "max": ratio_M.max()}
    return stats | {key: float(value) for key, value in spread.items()}
