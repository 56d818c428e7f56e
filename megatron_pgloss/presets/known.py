"""The keywords that a preset takes: its own, those of the preset that it is made of, and those that all presets
share.
"""

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
"""Keywords that presets of a policy gradient share, in the order in which errors list them."""
BESIDE = tuple(name for name in SHARED if name not in ("name", "ratio"))
"""`SHARED` without the component's name and ratio, for presets that set both themselves."""
FIELDS = ("count_rejected", *(name for name in LossSpec.model_fields if name != "components"))
"""Keywords that a preset without a policy gradient takes beside its own."""
_WITHIN = ("more",)
"""Keywords that only presets pass to each other: ``more`` has further components."""
Arguments = ParamSpec("Arguments")
_KEYWORDS: dict[str, tuple[str, ...]] = {}


def keywords(name: str) -> tuple[str, ...]:
    """All keywords of a preset: its own first, the shared ones last."""
    return _KEYWORDS[name]


def preset(
    over: Callable[..., LossSpec] | None = None, *, takes: tuple[str, ...] = SHARED, fixes: tuple[str, ...] = ()
) -> Callable[[Callable[Arguments, LossSpec]], Callable[Arguments, LossSpec]]:
    """A decorator that refuses unknown keywords of a preset before its parts are made; the error lists the known ones.

    Args:
        over: the preset to which it hands further keywords.
        takes: the further keywords that it takes where ``over`` is None.
        fixes: keywords of ``over`` or ``takes`` that it sets itself, and does not take.
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
    """``value``, after a check that it is a number.

    Raises:
        SpecError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{owner}: {name} is no number", expected="float", got=f"{type(value).__name__} {value!r}"[:64])
    return value
