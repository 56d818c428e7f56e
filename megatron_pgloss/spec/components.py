"""What is added up: the components of a loss, each with its own tokens, weights, normaliser and coefficient."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part
from megatron_pgloss.spec.normalizer import Path, parse

Number = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=32)]


class Reinforce(Part):
    """Plain policy gradient: ``l = -A log pi`` (Williams 1992, eq. 4)."""

    kind: Literal["reinforce"] = "reinforce"


class Clip(Part):
    """Clipped surrogate ``l = -min(r A, clip(r, 1-low, 1+high) A)`` (PPO 1707.06347 eq. 7; two bounds: DAPO 2503.14476
    eq. 10).

    With ``dual=c`` and A < 0 the term is ``-max(min(...), c A)`` (1912.09729 eq. 5).
    """

    kind: Literal["clip"] = "clip"
    low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Distance of the lower ratio bound from 1."""
    high: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2
    """Distance of the upper ratio bound from 1."""
    dual: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Upper ratio bound for A < 0; off unless asked for."""


class Component(Part):
    """What all components share; a field's meaning is the same everywhere."""

    name: Name
    """Its name in metrics, weights, reports and ``coef=`` overrides."""
    coef: Number = 1.0
    """Coefficient lambda, applied outside the normaliser."""
    normalizer: str = "mean(token)"
    """Normaliser path, see `megatron_pgloss.spec.normalizer`."""
    count: str = "members"
    """The set whose tokens the normaliser counts: ``members``, ``observations``, or a mask's name."""
    units: Literal["counted", "all"] = "counted"
    """Whether a unit without a counted token counts at its level."""
    divide_by: Literal["tokens", "weights"] = "tokens"
    """Token counts, or the sum of the component's user weights over the counted tokens."""

    @field_validator("normalizer")
    @classmethod
    def _canonical(cls, text: str) -> str:
        return str(parse(text))

    @property
    def path(self) -> Path:
        """The parsed normaliser."""
        return parse(self.normalizer)

    @property
    def over(self) -> Literal["action", "observation"]:
        """The tokens it is defined on, before rules."""
        return "action"


class PolicyGradient(Component):
    """The policy-gradient term over the policy's own tokens."""

    kind: Literal["policy_gradient"] = "policy_gradient"
    name: Name = "rl"
    surrogate: Annotated[Reinforce | Clip, Field(discriminator="kind")] = Clip()
    ratio: Literal["token", "none"] = "token"
    """``token``: pi/old per token. ``none``: exactly 1 with the gradient of log pi (on-policy)."""


class KL(Component):
    """Per-token KL estimate from the sampled token (Schulman, "Approximating KL divergence", 2020).

    With d = log pi - log base: k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1; ``plain`` differentiates the value.
    """

    kind: Literal["kl"] = "kl"
    name: Name = "kl"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    gradient: Literal["plain"] = "plain"
    to: Literal["ref", "old", "rollout"] = "ref"


class Entropy(Component):
    """Entropy bonus: the term is ``-H(pi)``, so that a positive coefficient raises entropy."""

    kind: Literal["entropy"] = "entropy"
    name: Name = "entropy"


class CrossEntropy(Component):
    """Cross entropy ``-log pi`` on prediction targets: observations (ECHO 2605.24517), demonstrations."""

    kind: Literal["cross_entropy"] = "cross_entropy"
    name: Name = "ce"

    @property
    def over(self) -> Literal["action", "observation"]:
        """Observations."""
        return "observation"


class Term(Component):
    """A user's own term: ``fn(x) -> [T]`` of the streams of one micro-batch.

    Args (positional allowed):
        name: its name.
        fn: the function, or ``"pkg.mod:name"`` (the form that TOML can hold).

    ``needs`` names the optional streams that ``fn`` reads (``old``, ``rollout``, ``ref``, ``advantage``,
    ``entropy``): absent ones are then reported when the step is planned, and entropy is computed.
    """

    kind: Literal["term"] = "term"
    fn: Callable[[Any], Any] | str
    on: Literal["action", "observation"] = "action"
    needs: tuple[Literal["old", "rollout", "ref", "advantage", "entropy"], ...] = ()

    def __init__(self, name: str | None = None, fn: Any = None, /, **data: Any) -> None:
        given = {key: value for key, value in (("name", name), ("fn", fn)) if value is not None}
        super().__init__(**given, **data)

    @field_validator("fn")
    @classmethod
    def _resolvable(cls, fn: Any) -> Any:
        if isinstance(fn, str):
            resolve(fn)
        return fn

    @field_serializer("fn")
    def _dump_fn(self, fn: Any) -> str:
        return self.to_import_path()

    def to_import_path(self) -> str:
        """``"pkg.mod:name"`` of the function."""
        if isinstance(self.fn, str):
            return self.fn
        # An object that is called (a partial, a module) has no name of its own.
        name = getattr(self.fn, "__qualname__", f"<{type(self.fn).__qualname__}>")
        return f"{getattr(self.fn, '__module__', type(self.fn).__module__)}:{name}"

    @property
    def over(self) -> Literal["action", "observation"]:
        """As chosen by ``on``."""
        return self.on

    @property
    def function(self) -> Callable[[Any], Any]:
        """The callable itself."""
        return resolve(self.fn) if isinstance(self.fn, str) else self.fn


def resolve(path: str) -> Callable[[Any], Any]:
    """Import ``"pkg.mod:name"``.

    Raises:
        SpecError: the form is wrong, the module or the name does not exist, or it is not callable.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise SpecError("a term's function must be written 'pkg.mod:name'", got=path)
    try:
        target: Any = importlib.import_module(module)
        for step in name.split("."):
            target = getattr(target, step)
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"cannot import the term's function {path!r}: {error}", fix="name a module-level function"
        ) from error
    if not callable(target):
        raise SpecError(f"{path!r} is not callable", got=type(target).__name__)
    return target  # type: ignore[no-any-return]
