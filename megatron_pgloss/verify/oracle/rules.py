"""The oracle's corrections: constant weights of tokens, and which tokens are rejected.

They look at ``log r = log of - log mu``: of frozen log-probs before the step, or of the policy (held fixed) inside it.
Statistics of a unit run over its actions as sampled whose log-ratio is finite.

Shapes: T all tokens of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.verify.oracle.ratios import statistic_of
from megatron_pgloss.verify.oracle.scene import Scene
from megatron_pgloss.verify.oracle.step import choice, setting

KINDS = ["truncated_is", "icepop", "ratio_mask", "reject", "veto", "staleness"]
LEVELS = {
    "sequence": ("sequence", "sum"),
    "turn": ("turn", "sum"),
    "episode": ("episode", "sum"),
    "prompt": ("prompt", "sum"),
    "geometric": ("sequence", "mean"),
    "turn_geometric": ("turn", "mean"),
    "episode_geometric": ("episode", "mean"),
    "prompt_geometric": ("prompt", "mean"),
}
UNITS = ["token", "sequence", "turn", "episode", "prompt"]
Rule = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What the corrections of one component say.

    Attributes:
        weight_T: float64, product of the weights; 1 where none acts.
        early_T: bool, False where a correction of frozen log-probs, or staleness, rejects.
        late_T: bool, False where a correction of the policy's own log-probs rejects.
    """

    weight_T: Tensor
    early_T: Tensor
    late_T: Tensor


def corrected(scene: Scene) -> Verdict:
    """All corrections on a component whose ``member_T`` is what the masks left."""
    length = len(scene.step.where)
    weight_T = torch.ones(length, dtype=torch.float64)
    early_T, late_T = torch.ones(length, dtype=torch.bool), torch.ones(length, dtype=torch.bool)
    rules = [rule for rule in setting(scene.spec, "corrections", []) if _acts(rule, scene)]
    for rule in rules:
        keep_T = _kept(rule, scene)
        if is_late(rule, scene.spec):
            late_T = late_T & keep_T
        else:
            early_T = early_T & keep_T
    early = replace(scene, member_T=scene.member_T & early_T)
    late = replace(scene, member_T=early.member_T & late_T)
    for rule in rules:
        weight_T = weight_T * _weight(rule, late if is_late(rule, scene.spec) else early)
    return Verdict(weight_T, early_T, late_T)


def is_late(rule: Rule, spec: Mapping[str, Any]) -> bool:
    """Whether a correction reads the policy: by ``of``, or because ``old`` is made from it."""
    if rule["kind"] == "staleness":
        return False
    return setting(rule, "of", "old") == "policy" or setting(spec, "old", "given") == "interpolate"


def _acts(rule: Rule, scene: Scene) -> bool:
    kind = choice(rule.get("kind"), KINDS, "correction")
    if kind == "truncated_is" or (kind == "icepop" and setting(rule, "weight", True)):
        # A weight is for the policy gradient, unless it names others.
        return scene.acts_here(rule, scene.component["kind"] == "policy_gradient")
    on = setting(scene.component, "on", "observation" if scene.component["kind"] == "cross_entropy" else "action")
    return scene.acts_here(rule, on == "action")


def _log_ratio(rule: Rule, scene: Scene) -> tuple[Tensor, Tensor]:
    """log r [T], raw and held fixed, and the voters."""
    of = choice(setting(rule, "of", "old"), ["old", "policy"], "ratio of a correction")
    top_T = scene.constant_T("old") if of == "old" else scene.logp_T.detach()
    fixed = replace(scene, logp_T=top_T)
    return fixed.log_ratio_to(scene.step.stream("rollout"))


def _weight(rule: Rule, scene: Scene) -> Tensor:
    """Float64 [T]; 1 where the rule does not weigh."""
    one_T = torch.ones(len(scene.step.where), dtype=torch.float64)
    if rule["kind"] == "icepop" and setting(rule, "weight", True):
        return torch.where(_kept(rule, scene), scene.bounded(_log_ratio(rule, scene)[0]).exp(), one_T)
    if rule["kind"] != "truncated_is":
        return one_T
    log_T, vote_T = _log_ratio(rule, scene)
    level = choice(setting(rule, "level", "token"), ["token", *LEVELS], "level of a correction")
    if level != "token":
        log_T = statistic_of(log_T, vote_T, *LEVELS[level], scene)
    low, high = float(setting(rule, "low", 0.0)), float(setting(rule, "high", 2.0))
    weight_T = scene.bounded(log_T).exp().clamp(low, high)
    over = setting(rule, "normalize", False)
    if not over:
        return weight_T
    if over == "sequence":
        mean_T = statistic_of(weight_T, vote_T, "sequence", "mean", scene)
        # A sequence without a voter has no mean, and its weight is 1.
        return torch.where(mean_T > 0, weight_T / torch.where(mean_T > 0, mean_T, one_T), one_T)
    if level == "token":
        chosen = scene.index_M.tolist()
    else:  # each unit once, by the first of its tokens that is trained
        chosen = [kept[0] for kept, _ in scene.step.units(LEVELS[level][0], scene.member_T) if kept]
    return weight_T / weight_T[chosen].mean() if chosen else weight_T


def _kept(rule: Rule, scene: Scene) -> Tensor:
    """Bool [T]: what the rule lets through."""
    keep_T = torch.ones(len(scene.step.where), dtype=torch.bool)
    kind = rule["kind"]
    if kind == "truncated_is":
        return keep_T
    if kind == "staleness":
        return _fresh(rule, scene)
    log_T, vote_T = _log_ratio(rule, scene)
    if kind == "icepop":
        low, high = math.log(setting(rule, "low", 0.5)), math.log(setting(rule, "high", 5.0))
        return (log_T >= low) & (log_T <= high)
    unit = choice(setting(rule, "unit", "sequence"), UNITS, "unit of a correction")
    if unit == "token":
        values = _estimates(rule, log_T, scene).tolist()
        return torch.tensor([_inside(value, rule) for value in values], dtype=torch.bool)
    logs = log_T.tolist()
    estimates = _estimates(rule, log_T, scene).tolist() if kind == "reject" else []
    for voters, whole in scene.step.units(unit, vote_T):
        if voters and not _unit_kept(rule, [logs[t] for t in voters], [estimates[t] for t in voters if estimates]):
            keep_T[whole] = False
    return keep_T


def _unit_kept(rule: Rule, logs: Sequence[float], estimates: Sequence[float]) -> bool:
    if rule["kind"] == "ratio_mask":
        how = choice(setting(rule, "mean", "geometric"), ["geometric", "product"], "mean of ratios")
        value = sum(logs) / (len(logs) if how == "geometric" else 1)
        return math.log(rule["low"]) <= value <= math.log(rule["high"])
    if rule["kind"] == "veto":
        above = rule.get("high")
        low = math.log(setting(rule, "low", 1e-4))
        return all(x >= low and (above is None or x <= math.log(above)) for x in logs)
    how = choice(setting(rule, "statistic", "mean"), ["mean", "max", "sum"], "statistic")
    return _inside(max(estimates) if how == "max" else sum(estimates) / (len(estimates) if how == "mean" else 1), rule)


def _inside(value: float, rule: Rule) -> bool:
    return value <= float(rule["high"]) and (rule.get("low") is None or value >= float(rule["low"]))


def _estimates(rule: Rule, log_T: Tensor, scene: Scene) -> Tensor:
    """k-estimates of KL(mu || of) from samples of mu, d = -log r: d, d^2 / 2, r - 1 - log r."""
    estimator = choice(setting(rule, "estimator", "k3"), ["k1", "k2", "k3"], "estimator")
    if estimator == "k1":
        return -log_T
    if estimator == "k2":
        return log_T.square() / 2
    near_T = scene.bounded(log_T)
    return near_T.exp() - 1 - near_T


def _fresh(rule: Rule, scene: Scene) -> Tensor:
    """Bool [T]: sampled at most ``max_lag`` versions ago; the oldest action of a unit may speak for all of it."""
    level = choice(setting(rule, "level", "token"), UNITS, "level of staleness")
    age_T, action_T = scene.age(), scene.step.flags("action")
    missing = (action_T & scene.step.present_T & age_T.isnan()).nonzero()
    if len(missing):
        raise DataError("a version is missing at an action", where=str(scene.step.where[int(missing[0])]))
    late_T = action_T & (age_T > rule["max_lag"])
    if level == "token":
        return ~late_T
    keep_T = torch.ones_like(late_T)
    for kept, whole in scene.step.units(level, late_T):
        if kept:
            keep_T[whole] = False
    return keep_T
