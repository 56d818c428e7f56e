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
from megatron_pgloss.spec.components import KL, Clip, Component, CrossEntropy, Entropy, PolicyGradient, Term
from megatron_pgloss.spec.rules import Correction, DropZeroAdvantage, Mask, RoleTable

AnyComponent = Annotated[PolicyGradient | KL | Entropy | CrossEntropy | Term, Field(discriminator="kind")]


class LossSpec(Part):
    """``L = sum_c coef_c * sum_{t in M_c} u_ct * w_ct * l_ct``: components, rules, and where ``old`` comes from.

    Raises:
        SpecError: on any value that does not fit, with the nearest right name where a word is unknown.
    """

    components: tuple[AnyComponent, ...]
    """At least one; names unique."""
    old: Literal["given", "policy", "rollout"] = "given"
    """Where the base of the ratio comes from: the batch's old stream; the policy itself (on-policy, ratio exactly
    1, one update per batch); the sampler's stream (two policies)."""
    corrections: tuple[Correction, ...] = ()
    masks: tuple[Mask, ...] = ()
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

    @field_validator("components", "masks", "corrections", mode="before")
    @classmethod
    def _known_kinds(cls, parts: Any, info: ValidationInfo) -> Any:
        # Pydantic names the tag it could not match; the nearest one is ours to say.
        known = {
            "components": ["policy_gradient", "kl", "entropy", "cross_entropy", "term"],
            "masks": ["drop_truncated", "drop_zero_advantage", "user_mask"],
            "corrections": ["truncated_is"],
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
        for rule in (*self.masks, *self.corrections):
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
        if self.corrections and self.old != "given":
            raise SpecError(
                f"TruncatedIS(of='old') needs an old stream, but old={self.old!r}",
                expected="old='given'",
                fix="with old='rollout' the weight old/mu is identically 1: leave the correction out",
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Component names in order."""
        return tuple(component.name for component in self.components)

    @property
    def needs_entropy(self) -> bool:
        """Whether any component reads the entropy of the policy."""
        return any(
            isinstance(part, Entropy) or (isinstance(part, Term) and "entropy" in part.needs)
            for part in self.components
        )

    @property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Optional stream (``old``, ``rollout``, ``ref``, ``advantages``) to the components and rules that read it."""
        found: dict[str, list[str]] = {"old": [], "rollout": [], "ref": [], "advantages": []}
        base = {"given": "old", "rollout": "rollout", "policy": None}[self.old]
        for part in self.components:
            if isinstance(part, PolicyGradient):
                found["advantages"].append(part.name)
                if isinstance(part.surrogate, Clip) and part.ratio == "token" and base:
                    found[base].append(part.name)
            elif isinstance(part, KL):
                stream = base if part.to == "old" else part.to
                if stream:
                    found[stream].append(part.name)
            elif isinstance(part, Term):
                for stream in part.needs:
                    key = {"advantage": "advantages", "old": base}.get(stream, stream)
                    if key in found:
                        found[str(key)].append(part.name)
        for _ in self.corrections:
            found["old"].append("TruncatedIS")
            found["rollout"].append("TruncatedIS")
        if any(isinstance(mask, DropZeroAdvantage) for mask in self.masks):
            found["advantages"].append("DropZeroAdvantage")
        return {stream: tuple(names) for stream, names in found.items() if names}

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
        for part in self.components:
            if isinstance(part, Term) and "<" in part.to_import_path():
                raise SpecError(
                    f"term {part.name!r} has a function without an importable name",
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
