"""Which tokens a component trains, and which it counts, in the oracle.

Shapes: T all tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.verify.oracle.step import Step, choice, setting

DOMAIN = {
    "policy_gradient": "action",
    "kl": "action",
    "entropy": "action",
    "cross_entropy": "observation",
    "topk_distill": "action",
    "value": "action",
    "term": "action",
}
NAMES = {"policy_gradient": "rl", "kl": "kl", "entropy": "entropy", "cross_entropy": "ce", "value": "value",
         "topk_distill": "distill"}  # fmt: skip


def named_components(spec: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The components of a spec by name, or SpecError for an unknown kind, no name, a second use."""
    found: dict[str, Mapping[str, Any]] = {}
    for component in spec["components"]:
        kind = choice(component.get("kind"), list(DOMAIN), "component")
        name = setting(component, "name", NAMES.get(kind))
        if name is None or name in found:
            raise SpecError("each component needs a name of its own", got=repr(name))
        if component.get("gates"):
            raise SpecError("gates stand in the spec, not in a component", got=component["gates"])
        found[name] = component
    return found


def domain(component: Mapping[str, Any], step: Step) -> Tensor:
    """Bool [T]: the targets a component is about, before any rule."""
    on = setting(component, "on", DOMAIN[component["kind"]])
    return step.flags(choice(on, ["action", "observation", "all"], "set of tokens")) & step.present_T


def without_empty_rows(step: Step, spec: Mapping[str, Any]) -> Step:
    """Apply ``empty_sequences``: a row without a token of any component is refused, or not there.

    A spec without that field says nothing, and every row of the data stays.
    """
    wish = spec.get("empty_sequences")
    if wish is None:
        return step
    choice(wish, ["refuse", "exclude"], "way with empty sequences")
    any_T = torch.zeros_like(step.target_T)
    whole = replace(step, present_T=torch.ones_like(step.present_T))  # a row that broke is not an empty one
    for component in named_components(spec).values():
        any_T = any_T | domain(component, whole)
    alive = [bool(part.any()) for part in step.split(any_T)]
    empty = [i for i, row in enumerate(step.rows) if len(row["tokens"]) and not alive[i]]
    if empty and wish == "refuse":
        raise DataError(
            "a sequence has no token of any component",
            where=f"row {empty[0]}",
            fix="leave it out, or set empty_sequences='exclude'",
        )
    present = torch.tensor([alive[i] for i, _ in step.where], dtype=torch.bool)
    return replace(step, present_T=step.present_T & present)


def members_of(
    name: str, component: Mapping[str, Any], spec: Mapping[str, Any], step: Step
) -> tuple[Tensor, dict[str, int]]:
    """Members after the masks, bool [T], and how many tokens each mask by itself takes."""
    before_T = domain(component, step)
    member_T, taken = before_T, {}
    for mask in setting(spec, "masks", []):
        drop_T = before_T & _dropped(mask, name, component, step)
        taken[str(setting(mask, "name", mask["kind"]))] = int(drop_T.sum())
        member_T = member_T & ~drop_T
    return member_T, taken


def _dropped(mask: Mapping[str, Any], name: str, component: Mapping[str, Any], step: Step) -> Tensor:
    """Bool [T]: what one mask takes.

    Scopes by default: truncation acts on the action tokens of all components, zero advantage on
    policy-gradient components, a user mask (True keeps) on all components. Tokens whose advantage is not positive are
    taken from the named components alone.
    """
    known = ["drop_truncated", "drop_zero_advantage", "keep_positive_advantage", "user_mask"]
    kind = choice(mask.get("kind"), known, "mask")
    on = mask.get("on")
    nothing = torch.zeros_like(step.target_T)
    if on is not None and name not in on:
        return nothing
    if kind == "user_mask":
        return ~step.user_mask(mask["name"])
    if kind == "drop_zero_advantage":
        if on is None and component["kind"] != "policy_gradient":
            return nothing
        return step.stream("advantages") == 0
    if kind == "keep_positive_advantage":
        return ~(step.stream("advantages") > 0)
    truncated_T = step.laid_out("termination", lambda row: row.get("termination") == "truncated", False)
    return truncated_T if on is not None else truncated_T & step.flags("action")


def counted(component: Mapping[str, Any], member_T: Tensor, step: Step) -> Tensor:
    """Bool [T]: the tokens whose number divides.

    ``members`` (default): the members after the masks. ``observations`` or the name of a user mask:
    that set as the data has it, which no mask shrinks; the members must lie inside it.
    """
    name = setting(component, "count", "members")
    if name == "members":
        return member_T
    count_T = step.flags("observation") if name == "observations" else step.user_mask(name)
    count_T = count_T & step.present_T
    outside = (member_T & ~count_T).nonzero()
    if len(outside):
        row, k = step.where[int(outside[0])]
        raise DataError(f"a member lies outside the count set {name!r}", where=f"row {row}, token {k}")
    return count_T
