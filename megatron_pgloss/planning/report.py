"""A plan in words a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_pgloss.planning.sets import reasons

if TYPE_CHECKING:
    from megatron_pgloss.planning.plan import Plan

_PLURAL = {"prompt": "prompts", "episode": "episodes", "sequence": "sequences", "turn": "turns", "token": "tokens"}


def report(plan: Plan) -> str:
    """Layout, then every component with its normaliser, counts at each level, and tokens each rule took out."""
    job, ranks = plan.job, plan.ranks
    lines = [
        f"step of {job['rows']} sequences, {job['tokens']} tokens, on {ranks.data_size} data-parallel "
        f"rank{'s' if ranks.data_size > 1 else ''} x {plan.num_microbatches} micro-batches",
    ]
    if job["empty_ranks"]:
        lines.append(f"  {job['empty_ranks']} ranks have no rows")
    if job["empty_microbatches"]:
        total = ranks.data_size * plan.num_microbatches
        lines.append(
            f"  {job['empty_microbatches']} of {total} micro-batches are empty (terms that Megatron averages over "
            f"micro-batches, MoE aux and z-loss, see that share of padding)"
        )
    if job["excluded"]:
        lines.append(f"  {job['excluded']} sequences left out: no member of any component")
    if plan.spec is None:
        return "\n".join(lines)
    lines.append(f"  old log-probs: {_OLD[plan.spec.old]}")
    for part in plan.spec.components:
        counts = plan.counts[part.name]
        lines.append(f"{part.name}: coefficient {plan.coef[part.name]:g}, {part.normalizer}")
        levels = ", ".join(f"{counts[unit]:g} {_PLURAL[unit]}" for unit in _PLURAL if unit in counts)
        what = "members" if part.count == "members" else part.count
        lines.append(f"  counted ({what}, units {part.units}): {levels}")
        lines.append(f"  trains {counts['members']} of {counts['base']} tokens, {counts['live']} can move the policy")
        for reason in dict.fromkeys(reasons(plan.spec)):
            if counts[reason]:
                lines.append(f"  {counts[reason]} tokens out: {reason}")
        if not counts["members"]:
            lines.append("  nothing left: this component contributes exactly 0")
    if not plan.has_signal:
        lines.append("no component can move the policy in this step (plan.has_signal is False)")
    return "\n".join(lines)


_OLD = {
    "given": "given with the batch",
    "policy": "the policy itself, ratio exactly 1, one update per batch",
    "rollout": "the sampler's (two policies)",
}
