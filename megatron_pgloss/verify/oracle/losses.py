"""Per-token losses of the oracle, from their formulas, over the members of one component.

Shapes: M the members of a component, selected before any arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.verify.oracle.scene import Scene
from megatron_pgloss.verify.oracle.step import Row, choice, setting
from megatron_pgloss.verify.oracle.surrogates import policy_gradient
from megatron_pgloss.verify.oracle.terms import call


def token_loss(scene: Scene) -> Tensor:
    """l of one component over its members, float64 [M], to be minimised."""
    return KINDS[scene.component["kind"]](scene)


def _entropy(scene: Scene) -> Tensor:
    return -scene.of_members(scene.entropy_T, "entropy")  # a bonus: the loss falls as the entropy rises


def _cross_entropy(scene: Scene) -> Tensor:
    return -scene.logp()


def _kl(scene: Scene) -> Tensor:
    """KL(pi || base) estimated at the sampled token, d = log pi - log base; and what of it is differentiated.

    Values: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1, abs = |d|. plain: the derivative of the value. k2: the value
    with the derivative of d^2 / 2, which is d. weighted: r times the value, r = pi / (the policy that sampled), all of
    it differentiated: r times (value + derivative), which for k3 is r d. What stands in an exp is bounded; a term with
    an exp beyond the bound is a constant.
    """
    component = scene.component
    estimator = choice(setting(component, "estimator", "k3"), ["k1", "k2", "k3", "abs", "exact"], "KL estimator")
    gradient = choice(setting(component, "gradient", "plain"), ["plain", "k2", "weighted"], "KL gradient")
    base = str(setting(component, "to", "ref"))  # any stream of log-probs, by its name
    if estimator == "exact":
        if (gradient, base) != ("plain", "ref"):
            raise SpecError("the exact KL is that to the reference", got=(gradient, base))
        return scene.of_members(scene.kl_T, "exact KL")
    d_M = scene.logp() - scene.constant(base)
    near_M = scene.bounded(d_M)
    value_M = {"k1": d_M, "k2": d_M.square() / 2, "k3": (-near_M).exp() + near_M - 1, "abs": d_M.abs()}[estimator]
    if gradient == "plain":
        return value_M
    if gradient == "k2":
        slope_M = d_M.square() / 2
        return value_M.detach() + (slope_M - slope_M.detach())
    sampled_by = choice(setting(component, "base", "old"), ["old", "rollout"], "base of a weight")
    log_M = scene.logp() - scene.constant(sampled_by)
    free_M = log_M.abs() <= scene.bound
    if estimator == "k3":
        free_M = free_M & (d_M.abs() <= scene.bound)
    ratio_M, moving_M = scene.bounded(log_M).exp().detach(), scene.logp() - scene.logp().detach()
    slope_M = {"k1": d_M + 1, "k2": d_M.square() / 2 + d_M, "k3": d_M, "abs": d_M.abs() + d_M.sign()}[estimator]
    return ratio_M * value_M.detach() + torch.where(free_M, ratio_M * slope_M.detach(), 0) * moving_M


def _value(scene: Scene) -> Tensor:
    """max((V - R)^2, (V clipped to V_old +- clip - R)^2) / 2."""
    value_M, return_M = scene.of_members(scene.value_T, "value"), scene.constant("returns")
    loss_M = (value_M - return_M).square()
    clip = scene.component.get("clip")
    if clip is not None:
        old_M = scene.constant("values")
        near_M = torch.minimum(torch.maximum(value_M, old_M - float(clip)), old_M + float(clip)).detach()
        # Inside the clip and on it both are one number, whose derivative is that of V.
        held_M = (near_M - return_M).square()
        loss_M = torch.where(held_M > loss_M, held_M, loss_M)
    return loss_M / 2


def _topk(scene: Scene) -> Tensor:
    """KL(q || p) or KL(p || q) summed over the ids that a teacher gave for the token; with both renormalised there, or
    as they are.
    """
    direction = choice(setting(scene.component, "direction", "forward"), ["forward", "reverse"], "direction")
    tail = choice(setting(scene.component, "tail", "drop"), ["drop", "renormalize"], "way with the tail")
    if scene.chosen is None:
        raise DataError("log-probs at a teacher's ids are needed and none were given")
    terms = [torch.zeros(0, dtype=torch.float64)]
    for t in scene.index_M.tolist():
        row, place = scene.step.where[t]
        wide = scene.step.rows[row]["wide"]
        some = [j for j, token in enumerate(wide[setting(scene.component, "ids", "teacher_ids")][place]) if token >= 0]
        given = wide[setting(scene.component, "logprobs", "teacher_logprobs")][place]
        p, q = scene.chosen[row][place][some].exp(), torch.tensor([given[j] for j in some], dtype=torch.float64).exp()
        if tail == "renormalize":
            p, q = p / p.sum(), q / q.sum()
        one, other = (q, p) if direction == "forward" else (p, q)
        terms.append((one * (one / other).log()).sum()[None])
    return torch.cat(terms)


def chosen_logprobs(logits: Tensor, row: Row) -> list[Tensor]:
    """Per token of a row the log-probs [k] at its ``teacher_ids`` (any for -1); that of the first token is unused."""
    length = len(row["tokens"])
    tau = torch.as_tensor(setting(row, "temperature", 1.0), dtype=torch.float64).expand(length)[1:, None]
    logp_V = torch.log_softmax(logits[: length - 1].to(torch.float64) / tau, dim=-1)
    ids = torch.tensor(row["wide"]["teacher_ids"]).clamp(min=0)
    return [logp_V[max(i - 1, 0)][ids[i]] for i in range(length)]


def _term(scene: Scene) -> Tensor:
    return call(scene.component, scene)[scene.index_M]


KINDS: dict[str, Callable[[Scene], Tensor]] = {
    "policy_gradient": policy_gradient,
    "kl": _kl,
    "entropy": _entropy,
    "cross_entropy": _cross_entropy,
    "topk_distill": _topk,
    "value": _value,
    "term": _term,
}
