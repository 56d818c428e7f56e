"""`LossSpec`: the whole of what is trained, as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationInfo, field_validator, model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec import consistency, reads, toml
from megatron_pgloss.spec.component import Component
from megatron_pgloss.spec.corrections import Correction
from megatron_pgloss.spec.equation import equation
from megatron_pgloss.spec.families import FAMILIES
from megatron_pgloss.spec.functions import Function, Functions, looked_up
from megatron_pgloss.spec.kinds import Kind, kinds, name_of
from megatron_pgloss.spec.reads import BASE
from megatron_pgloss.spec.spec_fields import Old, SpecFields
from megatron_pgloss.spec.words import nearest

__all__ = ["BASE", "LossSpec", "Old"]


class LossSpec(SpecFields):
    """``L = sum_c coef_c * sum_{t in M_c} u_ct * w_ct * l_ct``: components, rules, and where ``old`` comes from.

    Raises:
        SpecError: on any value that does not fit, with the nearest right name where a word is unknown.
    """

    @field_validator("log_ratio_bound")
    @classmethod
    def _within_float32(cls, bound: float) -> float:
        if bound > 80:
            raise SpecError(
                "LossSpec.log_ratio_bound is above 80: exp of it would leave float32, which ends at exp(88.7), with no "
                "room for an advantage beside it",
                expected="above 0, at most 80",
                got=f"{bound:g}",
                fix="20 (the default) holds ratios up to 4.9e8; a bound that never acts is 80",
            )
        return bound

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
        known = [name_of(kind) for kind in kinds(FAMILIES[info.field_name or ""])]
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
        consistency.check(self)
        return self

    @property
    def needs_entropy(self) -> bool:
        """Whether any component or gate reads the entropy of the policy."""
        return reads.reads_computed(self, "entropy")

    @property
    def needs_exact_kl(self) -> bool:
        """Whether any component reads the exact KL: ``token_logprobs(..., ref_logits=...)``."""
        return reads.reads_computed(self, "kl")

    @property
    def needs_value(self) -> bool:
        """Whether any component reads the output of a value head: ``policy_loss(..., value=V)``."""
        return reads.reads_computed(self, "value")

    @property
    def needs_logprobs(self) -> bool:
        """Whether any component reads the policy's log-probs."""
        return any(part.reads_logprobs for part in self.components)

    @property
    def by_token(self) -> bool:
        """Whether the loss at a token depends on the model through that token's own log-prob and entropy alone."""
        return reads.by_token(self)

    @property
    def needs_statistics_pass(self) -> bool:
        """Whether something is decided over the whole step, by a statistics pass: a gate or surrogate that says so, a
        statistic of the policy over prompts or episodes, the mean of the policy's own weights, or what gates and late
        corrections take out of denominators (``count_rejected=False``).
        """
        late = [rule for rule in self.corrections if self.is_late(rule)]
        if any(part.needs_statistics_pass for part in (*self.components, *self.gates)):
            return True
        pieces = [piece for part in self.components for piece in part.parts]
        if any(piece.straddles for piece in (*pieces, *self.gates, *late)):
            return True
        if any(rule.normalizes for rule in late):
            return True
        rejecting = [*self.gates, *(rule for rule in late if rule.rejects)]
        shrinking = [part for part in self.components if not part.count_rejected]
        return any(rule.acts_on(part) for rule in rejecting for part in shrinking)

    @property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Optional stream of the batch to the components and rules that read it."""
        return reads.stream_readers(self)

    @property
    def references(self) -> tuple[str, ...]:
        """Streams that hold another policy's log-probs: ``ref``, ``rollout``, and teachers by their own names."""
        return reads.references(self)

    @property
    def field_readers(self) -> dict[str, tuple[str, ...]]:
        """Optional field of the batch beside its streams (``terminations``, ``sample_ids``, ``versions``) to the parts
        that read it.
        """
        return reads.field_readers(self)

    @property
    def unit_readers(self) -> dict[str, tuple[str, ...]]:
        """``prompt`` or ``episode`` to the components and rules that take a statistic over it."""
        return reads.unit_readers(self)

    @property
    def masks_read(self) -> set[str]:
        """Names of the batch's masks that a mask rule or a normaliser reads."""
        counted = {part.count for part in self.components} - {"members", "observations"}
        return counted | {mask.reads_mask for mask in self.masks if mask.reads_mask is not None}

    def streams_of(self, component: Component) -> tuple[str, ...]:
        """The batch's streams that ``component`` and the gates on it read at its members."""
        return reads.streams_of(self, component)

    def statistic_streams(self, part: Kind) -> tuple[str, ...]:
        """The batch's streams that the statistic of ``part`` reads at every token of a unit."""
        return reads.statistic_streams(self, part)

    def reads_turns(self, component: Component) -> bool:
        """Whether a ratio, surrogate or gate of ``component`` is a statistic of turns."""
        return reads.reads_turns(self, component)

    @property
    def functions(self) -> tuple[tuple[str, Function], ...]:
        """The user's own functions, with what they belong to."""
        found: list[tuple[str, Function]] = []
        for part in self.components:
            for item in part.parts:
                found += [(f"{part.kind} {part.name!r}", item)] if isinstance(item, Function) else []
        for gate in self.gates:
            found += [("gate", gate)] if isinstance(gate, Function) else []
        return tuple(found)

    @property
    def version_readers(self) -> tuple[str, ...]:
        """The parts of the spec that read the versions of the tokens."""
        return self.field_readers.get("versions", ())

    def corrections_on(self, component: Component, *, late: bool) -> tuple[Correction, ...]:
        """The corrections that act on ``component``: at plan time, or (``late``) inside the loss.

        A correction acts late where it reads the policy's own log-probs, or an ``old`` that is made from them.
        """
        return tuple(rule for rule in self.corrections if rule.acts_on(component) and self.is_late(rule) == late)

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
    def from_dict(cls, data: Mapping[str, Any], *, functions: Functions | None = None) -> LossSpec:
        """Inverse of `to_dict`; unknown keys are refused with the nearest name.

        Args:
            functions: what the names of the user's own functions stand for; nothing is imported.
        """
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            got = type(data).__name__ if not isinstance(data, Mapping) else "a key that is no text"
            raise SpecError("a spec is made from a dict of its fields", expected="{'components': [...], ...}", got=got)
        return cls(**looked_up(data, functions))

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
                    fix="define it at module level and pass it",
                )
        return toml.dumps(self.to_dict())

    @classmethod
    def from_toml(cls, source: str | FilePath, *, functions: Functions | None = None) -> LossSpec:
        """Read a spec from a TOML file, or from TOML text (anything that holds a line break or ``=``).

        Args:
            functions: as in `from_dict`: ``{"my.loss:fn": fn}``.

        Raises:
            SpecError: the file does not exist, is not TOML, or holds a spec that is refused; the error names the file.
        """
        data, place = toml.read(source)
        try:
            return cls.from_dict(data, functions=functions)
        except SpecError as error:
            raise (error if place is None else error.located(place)) from error.__cause__

    @property
    def digest(self) -> int:
        """A 63-bit hash of the whole spec, equal on ranks that train the same thing."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def __str__(self) -> str:
        return equation(self)
