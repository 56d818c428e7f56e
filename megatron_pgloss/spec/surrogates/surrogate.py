"""What is asked of every surrogate, and the surrogate of the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.functions import Function
from megatron_pgloss.spec.kinds import Kind
from megatron_pgloss.spec.normalizer import Path
from megatron_pgloss.spec.ratios import AnyRatio, RatioKind

__all__ = ["Surrogate"]


class Home(Protocol):
    """The properties of its component that a surrogate reads."""

    @property
    def ratio(self) -> str | AnyRatio:
        """The ratio in the form in which the component was given it."""

    @property
    def axis(self) -> RatioKind | None:
        """The ratio spelled out; None for ``none``."""

    @property
    def normalizer(self) -> str:
        """The normaliser as text."""

    @property
    def path(self) -> Path:
        """The normaliser parsed."""


class SurrogateKind(Kind):
    """The family of surrogates. Its defaults hold for most of them: a term of r and A that no bound cuts."""

    letters: ClassVar[tuple[str, ...]] = ("r",)
    """Those of the ratio ``r`` and its logarithm ``d`` that the formula holds; an empty tuple: it reads no ratio."""
    bounds: ClassVar[bool] = False
    """Whether bounds decide some tokens, which the clip metrics then count."""
    token_ratio_only: ClassVar[bool] = False
    """Whether it forms a statistic of token ratios by itself, and so takes no other ratio."""

    @property
    def reads(self) -> tuple[str, ...]:
        """``ratio`` (its base is read where the component has one), ``advantages``, streams that stand for numbers."""
        return (*(("ratio",) if self.letters else ()), "advantages", *self.streams)

    @property
    def streams(self) -> tuple[str, ...]:
        """Per-token streams of the batch that stand for its numbers ``low`` and ``high``."""
        bounds = (getattr(self, name, None) for name in ("low", "high"))
        return tuple(dict.fromkeys(value for value in bounds if isinstance(value, str)))

    @property
    def moves_at_zero_advantage(self) -> bool:
        """Whether a token of advantage 0 can move the policy."""
        return "advantages" not in self.reads

    def check_home(self, component: Home) -> None:
        """Refuse a component whose ratio or normaliser does not suit the surrogate.

        Raises:
            SpecError: it does not.
        """
        if self.token_ratio_only and component.ratio != "token":
            name = type(self).__name__
            raise SpecError(f"{name} forms its own statistic of token ratios", got=f"ratio={component.ratio!r}",
                            fix="ratio='token'")  # fmt: skip


class Surrogate(Function, SurrogateKind):
    """A surrogate of the user's own: ``fn(x) -> [T]``, the term to be minimised.

    Args (positional allowed):
        fn: the function. ``x.ratio`` and ``x.log_ratio`` are those
            of the component's ratio axis.

    ``needs`` as in `Term`; advantages and the base of the ratio are taken to be read.
    """

    kind: Literal["custom"] = "custom"
    example: ClassVar[Mapping[str, Any]] = {"fn": math.exp}

    @property
    def reads(self) -> tuple[str, ...]:
        """What all surrogates do, and what it says that it needs."""
        return tuple(dict.fromkeys((*super().reads, *self.needed)))

    @property
    def moves_at_zero_advantage(self) -> bool:
        """It may: nothing is known of it."""
        return True

    def formula(self, base: str = "old") -> str:
        """The function's name."""
        return self.to_import_path()
