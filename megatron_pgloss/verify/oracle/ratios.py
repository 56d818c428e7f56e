"""The oracle's ratios: which statistic of log pi - log old a token has, and what of it is differentiated.

Written unit by unit, token by token. Shapes: T all tokens of the step; M the members of a component.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import SpecError
from megatron_pgloss.verify.oracle.scene import Scene
from megatron_pgloss.verify.oracle.step import choice, setting
from megatron_pgloss.verify.oracle.terms import call

LEVELS = ["token", "turn", "sequence", "episode", "prompt"]
# Short name to (level, statistic, what carries the gradient).
NAMED = {
    "token": ("token", "mean", "through"),
    "sequence": ("sequence", "mean", "through"),
    "turn": ("turn", "mean", "through"),
    "sequence_token": ("sequence", "mean", "token"),
    "turn_token": ("turn", "mean", "token"),
    "sequence_sum": ("sequence", "sum", "token"),
    "turn_sum": ("turn", "sum", "token"),
    "prefix": ("sequence", "prefix", "token"),
    "prefix_min": ("sequence", "prefix_min", "token"),
}


def ratio_axis(component: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """(level, statistic, gradient, over) of a component's ratio; a ratio that is always 1 has the level ``none``,
    one of the user's own ``custom``.
    """
    given = setting(component, "ratio", "token")
    if isinstance(given, str):
        if choice(given, [*NAMED, "none"], "ratio") == "none":
            return "none", "mean", "token", "sampled"
        return (*NAMED[given], "sampled")
    if given.get("kind", "ratio") == "custom":
        return "custom", "mean", "through", "sampled"
    if given.get("kind", "ratio") != "ratio":
        raise SpecError("the oracle knows no such ratio", got=given.get("kind"))
    return (
        choice(setting(given, "level", "sequence"), LEVELS, "level of a ratio"),
        choice(setting(given, "statistic", "mean"), ["mean", "sum", "prefix", "prefix_min"], "statistic of a ratio"),
        choice(setting(given, "gradient", "through"), ["through", "token"], "gradient of a ratio"),
        choice(setting(given, "over", "sampled"), ["sampled", "members"], "set of tokens"),
    )


def log_ratio(scene: Scene) -> Tensor:
    """log r of the component's members, float64 [M], as it is; for ``none`` 0 with the gradient of log pi."""
    scene.logp()  # refuses a log-prob of a member that is not finite
    return log_ratio_T(scene)[scene.index_M]


def log_ratio_T(scene: Scene) -> Tensor:
    """log r at every token, float64 [T]; outside members and voters only a user's function may read it."""
    level, statistic, gradient, over = ratio_axis(scene.component)
    finite_T = scene.logp_T.detach().isfinite()
    index = finite_T.nonzero().squeeze(1)
    logp_K = scene.logp_T[index]
    own_T = torch.zeros_like(scene.logp_T).index_put((index,), logp_K - logp_K.detach())
    if level == "none":
        return own_T
    if level == "custom":
        return call(scene.component["ratio"], scene)
    d_T, vote_T = scene.log_ratio_to(scene.constant_T("old"))
    if level != "token":
        d_T = statistic_of(d_T, scene.member_T if over == "members" else vote_T, level, statistic, scene)
    return d_T.detach() + own_T if gradient == "token" else d_T


def ratio(scene: Scene) -> Tensor:
    """r of the members: exp of their log r, which the bound holds; what the log-ratio is made of it does not."""
    return scene.bounded(log_ratio(scene)).exp()


def statistic_of(value_T: Tensor, vote_T: Tensor, unit: str, statistic: str, scene: Scene) -> Tensor:
    """The statistic of its unit's voters at each token, float64 [T]; 0 where there is none."""
    entries = list(torch.zeros_like(value_T).unbind())
    for voters, whole in scene.step.units(unit, vote_T):
        for t in whole:
            before = [k for k in voters if k < t]
            upto = [k for k in voters if k <= t]
            if statistic == "mean" and voters:
                entries[t] = value_T[voters].sum() / len(voters)
            elif statistic == "sum":
                entries[t] = value_T[voters].sum()
            elif statistic == "prefix":
                entries[t] = value_T[upto].sum()
            elif statistic == "prefix_min":
                entries[t] = value_T[t] + (value_T[before].min() if before else 0.0)
    return torch.stack(entries) if entries else value_T
