"""The keywords that a preset takes: its own, those of the preset that it is made of, and what all presets share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.words import nearest

SHARED = (
    "normalizer", "coef", "name", "ratio", "kl", "kl_estimator", "entropy", "count_rejected",
    *(name for name in LossSpec.model_fields if name != "components"),
)  # fmt: skip
"""What presets of a policy gradient share, in the order in which errors and `explain` list them."""
BESIDE = tuple(name for name in SHARED if name not in ("name", "ratio"))
"""The same without what a preset of another surrogate sets itself."""
FIELDS = ("count_rejected", *(name for name in LossSpec.model_fields if name != "components"))
"""What a preset of another component takes beside its own keywords."""
_WITHIN = ("more",)
"""Between presets alone: components beside those that they have."""
Arguments = ParamSpec("Arguments")
_KEYWORDS: dict[str, tuple[str, ...]] = {}


def keywords(name: str) -> tuple[str, ...]:
    """All keywords of a preset: its own first, the shared ones last."""
    return _KEYWORDS[name]


def preset(
    over: Callable[..., LossSpec] | None = None, *, takes: tuple[str, ...] = SHARED, fixes: tuple[str, ...] = ()
) -> Callable[[Callable[Arguments, LossSpec]], Callable[Arguments, LossSpec]]:
    """Refuse keywords that a preset does not have, with all that it has, before its parts are made.

    Args:
        over: the preset that it hands further keywords to.
        takes: what it hands on where that is no preset.
        fixes: keywords of ``over`` that it sets itself.
    """

    def mark(build: Callable[Arguments, LossSpec]) -> Callable[Arguments, LossSpec]:
        name, signature = build.__name__, inspect.signature(build)
        own = [key for key, item in signature.parameters.items() if item.kind is not item.VAR_KEYWORD]
        below = takes if over is None else _KEYWORDS[over.__name__]
        known = _KEYWORDS[name] = tuple(key for key in dict.fromkeys((*own, *below)) if key not in fixes)

        @functools.wraps(build)
        def checked(*args: Arguments.args, **parts: Arguments.kwargs) -> LossSpec:
            for key in parts:
                if key not in known and key not in _WITHIN:
                    fix = nearest(key, known) or f"remove {key!r}, or make a pg.LossSpec by hand"
                    raise SpecError(f"{name} has no keyword {key!r}", expected=", ".join(known), fix=fix)
            try:
                signature.bind(*args, **parts)
            except TypeError as error:
                raise SpecError(f"{name}: {error}", expected=f"{name}({', '.join(own)})") from None
            return build(*args, **parts)

        return checked

    return mark


def number(owner: str, name: str, value: Any) -> float:
    """A coefficient, before it is asked whether it is 0.

    Raises:
        SpecError: it is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{owner}: {name} is no number", expected="float", got=f"{type(value).__name__} {value!r}"[:64])
    return value
