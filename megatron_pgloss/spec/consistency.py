"""Whether the parts of a spec fit together."""

from __future__ import annotations

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.corrections import Correction
from megatron_pgloss.spec.reads import reads_computed
from megatron_pgloss.spec.spec_fields import SpecFields
from megatron_pgloss.spec.words import nearest


def check(spec: SpecFields) -> None:
    """Refuse parts that contradict each other.

    Raises:
        SpecError: a rule names an unknown component, a component counts tokens that it does not run over, there are two
            teachers, kept sets meet a part that they exclude, a correction reads an old stream that is not there.
    """
    _scopes(spec)
    for component in spec.components:
        if component.count == "observations" and component.over != "observation":
            raise SpecError(f"{component.name} counts observations but runs over actions", fix='count="members"')
    teachers = {part.chosen_ids for part in spec.components if part.chosen_ids is not None}
    if len(teachers) > 1:
        raise SpecError("the log-prob pass takes the ids of one teacher", got=", ".join(sorted(teachers)))
    for rule in spec.corrections:
        _correction(spec, rule)
    _kept(spec)


def _scopes(spec: SpecFields) -> None:
    names = spec.names
    for rule in (*spec.masks, *spec.corrections, *spec.gates):
        for name in rule.on or ():
            if name not in names:
                raise SpecError(
                    f"{type(rule).__name__} acts on {name!r}, which is not a component",
                    expected=", ".join(names),
                    fix=nearest(name, list(names)),
                )


def _kept(spec: SpecFields) -> None:
    if spec.kept is None:
        return
    if reads_computed(spec, "kl"):
        raise SpecError(
            "the exact KL on kept sets: it is infinite where the reference's set lacks a token of the policy's",
            fix="KL(estimator='k3') of log-probs on the sets",
        )
    if spec.chosen is not None:
        raise SpecError("a teacher's top-k on kept sets: its tokens may lie outside of them", fix="kept=None")
    late = spec.kept.source == "recomputed" and spec.kept.outside == "drop"
    for part in spec.components:
        if late and not part.count_rejected and part.over == "action":
            raise SpecError(
                f"{part.name}: count_rejected=False, but what lies outside recomputed sets is known in the loss alone",
                expected="count_rejected=True",
                fix="KeptSet(outside='refuse') or 'add', or recorded sets",
            )


def _correction(spec: SpecFields, rule: Correction) -> None:
    if rule.ratio_of == "old" and spec.old in ("policy", "record", "rollout"):
        one = "the weight old/mu is identically 1: leave the correction out, or say of='policy'"
        raise SpecError(
            f"{type(rule).__name__}(of='old') needs an old stream, but old={spec.old!r}",
            expected="old='given' or 'interpolate'",
            fix=f"with old='rollout' {one}" if spec.old == "rollout" else "of='policy': sg(pi)/mu inside the loss",
        )
