"""`LossSpec`: the whole of what is trained, as data."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec import toml
from megatron_pgloss.spec.base import Part, nearest
from megatron_pgloss.spec.components import COMPONENT_KINDS, AnyComponent, Component, PolicyGradient, TopKDistill
from megatron_pgloss.spec.corrections import CORRECTION_KINDS, Correction, Staleness
from megatron_pgloss.spec.functions import Function
from megatron_pgloss.spec.gates import GATE_KINDS, AnyGate
from megatron_pgloss.spec.kept import KeptSet
from megatron_pgloss.spec.reads import BASE, by_token, readers, reads_computed, streams_of
from megatron_pgloss.spec.rules import DropZeroAdvantage, Mask, RoleTable, acts_on

Old = Literal["given", "policy", "record", "rollout", "interpolate"]
__all__ = ["BASE", "LossSpec", "Old"]


class LossSpec(Part):
    """``L = sum_c coef_c * sum_{t in M_c} u_ct * w_ct * l_ct``: components, rules, and where ``old`` comes from.

    Raises:
        SpecError: on any value that does not fit, with the nearest right name where a word is unknown.
    """

    components: tuple[AnyComponent, ...]
    """At least one; names unique."""
    old: Old = "given"
    """Where the base of the ratio comes from: the batch's old stream (``given``); the policy itself (``policy``:
    on-policy, ratio exactly 1, one update per batch); the same in a row's first update, and its log-probs of then
    afterwards (``record``); the sampler's stream (``rollout``: two policies); between the sampler's and the policy's by
    version (``interpolate``, see `megatron_pgloss.terms.interpolated`)."""
    corrections: tuple[Correction, ...] = ()
    gates: tuple[AnyGate, ...] = ()
    masks: tuple[Mask, ...] = ()
    kept: KeptSet | None = None
    """The policy's tokens scored on the sets that the sampler drew from; None: on the whole vocabulary."""
    roles: RoleTable = RoleTable()
    empty_sequences: Literal["refuse", "exclude"] = "refuse"
    """A sequence that has no member of any component before rules: an error that names it, or left out and reported."""
    log_ratio_bound: Annotated[float, Field(gt=0, le=80)] = 20.0
    """Log-ratios are bounded to plus or minus this before exp; the gradient beyond is 0 and counted."""

    @field_validator("components")
    @classmethod
    def _names_unique(cls, components: tuple[Component, ...]) -> tuple[Component, ...]:
        if not components:
            raise SpecError("a spec needs at least one component")
        names = [component.name for component in components]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"two components are named {twice[0]!r}", fix="give each its own name=")
        return components

    @field_validator("components", "masks", "corrections", "gates", mode="before")
    @classmethod
    def _known_kinds(cls, parts: Any, info: ValidationInfo) -> Any:
        # Pydantic names the tag it could not match; the nearest one is ours to say.
        known = {
            "components": COMPONENT_KINDS,
            "masks": ["drop_truncated", "drop_zero_advantage", "keep_positive_advantage", "user_mask"],
            "corrections": CORRECTION_KINDS,
            "gates": GATE_KINDS,
        }[info.field_name or ""]
        for part in parts if isinstance(parts, list | tuple) else ():
            kind = part.get("kind") if isinstance(part, dict) else known[0]
            if kind not in known:
                raise SpecError(
                    f"{info.field_name}: unknown kind {kind!r}",
                    expected=" | ".join(known),
                    fix=nearest(str(kind), known),
                )
        return parts

    @model_validator(mode="after")
    def _consistent(self) -> LossSpec:
        names = self.names
        policy = any(isinstance(part, PolicyGradient) for part in self.components)
        for rule in (*self.masks, *self.corrections, *self.gates):
            for name in rule.on or ():
                # A rule that names rl by default is at home in a spec without a policy gradient, and idle there.
                idle = isinstance(rule, DropZeroAdvantage) and rule.on == ("rl",) and not policy
                if name not in names and not idle:
                    raise SpecError(
                        f"{type(rule).__name__} acts on {name!r}, which is not a component",
                        expected=", ".join(names),
                        fix=nearest(name, list(names)),
                    )
        for component in self.components:
            if component.count == "observations" and component.over != "observation":
                raise SpecError(f"{component.name} counts observations but runs over actions", fix='count="members"')
        teachers = {part.ids for part in self.components if isinstance(part, TopKDistill)}
        if len(teachers) > 1:
            raise SpecError("the log-prob pass takes the ids of one teacher", got=", ".join(sorted(teachers)))
        for rule in self.corrections:
            self._check_correction(rule)
        self._check_kept()
        return self

    def _check_kept(self) -> None:
        if self.kept is None:
            return
        if self.needs_exact_kl:
            raise SpecError(
                "the exact KL on kept sets: it is infinite where the reference's set lacks a token of the policy's",
                fix="KL(estimator='k3') of log-probs on the sets",
            )
        if self.chosen is not None:
            raise SpecError("a teacher's top-k on kept sets: its tokens may lie outside of them", fix="kept=None")
        late = self.kept.source == "recomputed" and self.kept.outside == "drop"
        for part in self.components:
            if late and part.rejected == "kept" and part.over == "action":
                raise SpecError(
                    f"{part.name}: rejected='kept', but what lies outside recomputed sets is known in the loss alone",
                    expected="rejected='original'",
                    fix="KeptSet(outside='refuse') or 'add', or recorded sets",
                )

    def _check_correction(self, rule: Correction) -> None:
        of, name = getattr(rule, "of", None), type(rule).__name__
        if of == "old" and self.old in ("policy", "record", "rollout"):
            one = "the weight old/mu is identically 1: leave the correction out, or say of='policy'"
            raise SpecError(
                f"{name}(of='old') needs an old stream, but old={self.old!r}",
                expected="old='given' or 'interpolate'",
                fix=f"with old='rollout' {one}" if self.old == "rollout" else "of='policy': sg(pi)/mu inside the loss",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Component names in order."""
        return tuple(component.name for component in self.components)

    @property
    def needs_entropy(self) -> bool:
        """Whether any component or gate reads the entropy of the policy."""
        return reads_computed(self, "entropy")

    @property
    def needs_exact_kl(self) -> bool:
        """Whether any component reads the exact KL: ``token_logprobs(..., ref_logits=...)``."""
        return reads_computed(self, "kl")

    @property
    def chosen(self) -> str | None:
        """Name of the stream of ids at which a component reads the policy's log-probs, or None:
        ``token_logprobs(..., chosen_ids=micro.wide(spec.chosen))``.
        """
        return next((part.ids for part in self.components if isinstance(part, TopKDistill)), None)

    @property
    def by_token(self) -> bool:
        """Whether the loss at a token depends on the model through that token's own log-prob and entropy alone."""
        return by_token(self)

    @property
    def needs_statistics(self) -> bool:
        """Whether something is decided over the whole step, by a statistics pass: a gate that says so, the mean of the
        policy's own weights, a surrogate of a whole group, or what gates and late corrections leave in denominators
        (``rejected="kept"``).
        """
        if any(isinstance(part, PolicyGradient) and part.by_group for part in self.components):
            return True
        late = [rule for rule in self.corrections if self.is_late(rule)]
        if any(gate.needs_statistics for gate in self.gates) or any(getattr(rule, "normalize", False) for rule in late):
            return True
        rejecting = [*self.gates, *(rule for rule in late if rule.rejects)]
        kept = [part for part in self.components if part.rejected == "kept"]
        return any(acts_on(rule, part) for rule in rejecting for part in kept)

    @property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Optional stream of the batch to the components and rules that read it."""
        return readers(self)

    def streams_of(self, component: Component) -> tuple[str, ...]:
        """The batch's streams that ``component`` and the gates on it read at its members."""
        return streams_of(self, component)

    @property
    def functions(self) -> tuple[tuple[str, Function], ...]:
        """The user's own functions, with what they belong to."""
        found: list[tuple[str, Function]] = []
        for part in self.components:
            parts = (part, getattr(part, "surrogate", None), getattr(part, "ratio", None))
            found += [(f"{part.kind} {part.name!r}", item) for item in parts if isinstance(item, Function)]
        found += [("gate", gate) for gate in self.gates if isinstance(gate, Function)]
        return tuple(found)

    @property
    def version_readers(self) -> tuple[str, ...]:
        """Who reads the versions of the tokens."""
        rules = tuple("Staleness" for rule in self.corrections if isinstance(rule, Staleness))
        return rules + (("old='interpolate'",) if self.old == "interpolate" else ())

    def corrections_on(self, component: Component, *, late: bool) -> tuple[Correction, ...]:
        """The corrections that act on ``component``: at plan time, or (``late``) inside the loss.

        Late are those of the policy's own log-probs, and those of an ``old`` that is made from them.
        """
        return tuple(rule for rule in self.corrections if acts_on(rule, component) and self.is_late(rule) == late)

    def is_late(self, rule: Correction) -> bool:
        """Whether ``rule`` reads the current policy and so acts inside the loss."""
        return not isinstance(rule, Staleness) and (rule.of == "policy" or self.old == "interpolate")

    def add(self, component: Component) -> LossSpec:
        """A new spec with one more component."""
        return self.replace(components=(*self.components, component))  # type: ignore[no-any-return]

    def component(self, name: str) -> Component:
        """The component of this name.

        Raises:
            SpecError: there is none.
        """
        for part in self.components:
            if part.name == name:
                return part
        raise SpecError(f"no component {name!r}", expected=", ".join(self.names), fix=nearest(name, list(self.names)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` gives the same spec back. A term's function becomes ``"pkg.mod:name"``."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LossSpec:
        """Inverse of `to_dict`; unknown keys are refused with the nearest name."""
        return cls(**data)

    def to_toml(self) -> str:
        """The spec as TOML text.

        Raises:
            SpecError: a term's function has no importable name (a lambda, a local function).
        """
        for owner, part in self.functions:
            if "<" in part.to_import_path():
                raise SpecError(
                    f"{owner} has a function without an importable name",
                    got=part.to_import_path(),
                    fix="define it at module level and pass it, or 'pkg.mod:name'",
                )
        return toml.dumps(self.to_dict())

    @classmethod
    def from_toml(cls, source: str | FilePath) -> LossSpec:
        """Read a spec from a TOML file, or from TOML text (anything that holds a line break or ``=``)."""
        text = str(source)
        if not isinstance(source, str) or ("\n" not in text and "=" not in text):
            path = FilePath(source)
            if not path.is_file():
                raise SpecError("no such spec file", got=text)
            text = path.read_text(encoding="utf-8")
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"not TOML: {error}") from error
        return cls.from_dict(data)

    @property
    def digest(self) -> int:
        """A 63-bit hash of the whole spec, equal on ranks that train the same thing."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def __str__(self) -> str:
        from megatron_pgloss.spec.equation import equation

        return equation(self)
