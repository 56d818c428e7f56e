"""The base of every part of a spec: frozen, closed, and with errors that name the nearest right word."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.words import nearest


class Part(BaseModel):
    """An immutable, validated piece of a `LossSpec`; unknown keys are refused with the nearest name."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, strict=False)

    def __init__(self, **data: Any) -> None:
        unknown = [key for key in data if key not in type(self).model_fields]
        if unknown:
            raise unknown_key(type(self).__name__, unknown[0], list(type(self).model_fields))
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _as_spec_error(type(self).__name__, error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise SpecError(f"{type(self).__name__} is immutable", got=f"{name} = {value!r}", fix=f"x.replace({name}=...)")

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed, validated like a new one."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling by fields: the spec travels to spawned processes and through broadcasts.
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        # A read-only view of a mapping does not pickle; a dict of the same content does.
        return _rebuild, (
            type(self),
            {name: dict(value) if isinstance(value, MappingProxyType) else value for name, value in fields.items()},
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self  # immutable


def _rebuild(kind: type[Part], fields: dict[str, Any]) -> Part:
    return kind(**fields)


def unknown_key(owner: str, key: str, known: list[str]) -> SpecError:
    """The error for a key that ``owner`` does not have."""
    return SpecError(
        f"{owner} has no field {key!r}",
        expected=f"one of {', '.join(known)}",
        fix=nearest(key, known) or f"remove {key!r}",
    )


def _as_spec_error(owner: str, error: ValidationError) -> SpecError:
    found = error.errors()
    first = found[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return cause
    place = _place(first)
    # For a field of several types (a number or a name, say) pydantic has a message each; all are the answer.
    said = dict.fromkeys(item["msg"] for item in found if _place(item) == place)
    got = first.get("input")
    context = first.get("ctx", {})
    # The allowed words stand in quotes, under one key or the other; for a union they are its tags.
    words = re.findall(r"'(\w+)'", str(context.get("expected") or context.get("expected_tags") or ""))
    hint = nearest(str(context.get("tag", got)), words) if words else None
    # A number of thousands of digits has no text.
    shown = f"a number of {got.bit_length()} bits" if isinstance(got, int) and got.bit_length() > 1024 else f"{got!r}"
    return SpecError(
        f"{owner}.{place or owner}: {', or '.join(said)}",
        got=shown if len(shown) < 200 else shown[:200] + "...",
        fix=hint,
    )


def _place(error: Any) -> str:
    """Fields and indices on the way to what is wrong, without pydantic's own names of types."""
    named = error["loc"][:1] + tuple(step for step in error["loc"][1:] if isinstance(step, int))
    return ".".join(str(step) for step in named)
