"""The text of `Plan.report`."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_pgloss.planning.component_table import ComponentTable
from megatron_pgloss.planning.members import reasons
from megatron_pgloss.planning.wire import Counts
from megatron_pgloss.spec import LEVELS, Component, LossSpec


def report(
    *,
    spec: LossSpec | None,
    coef: Mapping[str, float],
    counts: Counts,
    components: Mapping[str, ComponentTable],
    job: Mapping[str, int],
    data_ranks: int,
    microbatches: int,
    needs_statistics_pass: bool,
    has_signal: bool,
) -> str:
    """Layout, then every component with its normaliser, counts at each level, and tokens each rule took out."""
    lines = [
        f"step of {job['rows']} sequences, {job['tokens']} tokens, on {data_ranks} data-parallel "
        f"rank{'s' if data_ranks > 1 else ''} x {microbatches} micro-batches",
    ]
    if job["empty_ranks"]:
        lines.append(f"  {job['empty_ranks']} ranks have no rows")
    if job["empty_microbatches"]:
        total = data_ranks * microbatches
        lines.append(
            f"  {job['empty_microbatches']} of {total} micro-batches are empty (terms that Megatron averages over "
            f"micro-batches, MoE aux and z-loss, see that share of padding)"
        )
    if job["excluded"]:
        lines.append(f"  {job['excluded']} sequences left out: no member of any component")
    if spec is None:
        return "\n".join(lines)
    lines.append(f"  old log-probs: {_OLD[spec.old]}")
    if spec.kept is not None:
        lines.append(f"  {spec.kept.formula()}")
    if needs_statistics_pass:
        lines.append("  a statistics pass is to come: what it decides is not counted yet")
    for part in spec.components:
        here = counts[part.name]
        lines.append(f"{part.name}: coefficient {coef[part.name]:g}, {part.normalizer}")
        levels = ", ".join(f"{here[level.name]:g} {level.plural}" for level in LEVELS if level.name in here)
        what = "members" if part.count == "members" else part.count
        lines.append(f"  counted ({what}, units {part.units}): {levels}")
        lines.append(f"  trains {here['members']} of {here['base']} tokens, {here['live']} can move the policy")
        for reason in dict.fromkeys(reasons(spec)):
            if here[reason]:
                lines.append(f"  {here[reason]} tokens out: {reason}")
        lines += _corrected(spec, part, components[part.name])
        if not here["members"]:
            lines.append("  nothing left: this component contributes exactly 0")
    if not has_signal:
        lines.append("no component can move the policy in this step (plan.has_signal is False)")
    return "\n".join(lines)


def _corrected(spec: LossSpec, part: Component, table: ComponentTable) -> list[str]:
    """What corrections and gates do to the component."""
    lines = []
    for i, rule in enumerate(spec.corrections):
        if rule.acts_on(part):
            mean = table.means.get(i)
            lines.append(
                f"  {'in the loss' if spec.is_late(rule) else 'corrected'}: {rule.formula()}"
                + ("" if mean is None else f" (mean {mean:.6g})")
            )
    for i, gate in enumerate(spec.gates):
        if gate.acts_on(part):
            thresholds = table.thresholds.get(i, {})
            found = [f"{name} {number:.6g}" for name, number in thresholds.items()]
            lines.append(f"  in the loss: gate {gate.reason}" + (f" ({', '.join(found)})" if found else ""))
    if lines:
        stays = "stays in" if part.count_rejected else "leaves"
        lines.append(f"  what is rejected {stays} its denominators")
    return lines


_OLD = {
    "given": "given with the batch",
    "policy": "the policy itself, ratio exactly 1, one update per batch",
    "record": "the policy itself in a row's first update, and what it had then afterwards",
    "rollout": "the sampler's (two policies)",
    "interpolate": "between the sampler's and the policy's, by version",
}
