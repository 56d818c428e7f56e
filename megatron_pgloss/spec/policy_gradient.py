"""The policy gradient: a surrogate of a ratio and an advantage."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.component import Component, Name
from megatron_pgloss.spec.kinds import Kind, kinds, name_of
from megatron_pgloss.spec.ratios import SHORT, AnyRatio, RatioKind, canonical
from megatron_pgloss.spec.surrogates import AnySurrogate, Clip
from megatron_pgloss.spec.surrogates.surrogate import SurrogateKind
from megatron_pgloss.spec.words import nearest

__all__ = ["PolicyGradient"]


class PolicyGradient(Component):
    """The policy-gradient term over the policy's own tokens: a surrogate of a ratio and an advantage."""

    kind: Literal["policy_gradient"] = "policy_gradient"
    name: Name = "rl"
    surrogate: AnySurrogate = Clip()
    ratio: str | AnyRatio = "token"
    """A short name of `megatron_pgloss.spec.ratios`, a `Ratio`, or a `CustomRatio`. ``token``: pi/old per token.
    ``none``: exactly 1 with the gradient of log pi (on-policy)."""

    @field_validator("surrogate", mode="before")
    @classmethod
    def _a_part(cls, given: Any) -> Any:
        if isinstance(given, str):
            known = {name_of(kind): kind.__name__ for kind in kinds(SurrogateKind)}
            close = nearest(given, list(known))
            name = given if given in known else close and next(word for word in known if repr(word) in close)
            raise SpecError(
                f"PolicyGradient.surrogate is given by a name, {given[:64]!r}, and is a part with numbers of its own",
                expected=", ".join(f"pg.{kind}(...)" for kind in known.values()),
                fix=f"surrogate=pg.{known[name]}(...), or in TOML {{kind = {name!r}}}" if name else None,
            )
        return given

    @field_validator("ratio", mode="before")
    @classmethod
    def _short_name(cls, given: Any) -> Any:
        return canonical(given)

    @model_validator(mode="after")
    def _suits(self) -> PolicyGradient:
        self.surrogate.check_home(self)
        return self

    @property
    def axis(self) -> RatioKind | None:
        """The ratio spelled out; None for ``none``."""
        return SHORT[self.ratio] if isinstance(self.ratio, str) else self.ratio

    @property
    def parts(self) -> tuple[Kind, ...]:
        """The component, its surrogate and its ratio."""
        return (self, self.surrogate, *(() if self.axis is None else (self.axis,)))

    @property
    def has_ratio(self) -> bool:
        """Whether the surrogate reads a ratio that has a base, and so can be other than 1."""
        return "old" in self.reads

    @property
    def reads(self) -> tuple[str, ...]:
        """The streams that surrogate and ratio read."""
        ratio = "ratio" in self.surrogate.reads and self.ratio != "none"
        found = [name for name in self.surrogate.reads if name != "ratio"]
        return tuple(dict.fromkeys((*(("old",) if ratio else ()), *found, *(self.axis.reads if self.axis else ()))))

    @property
    def joins_ratio(self) -> bool:
        """Whether its ratio axis is another than ``token``."""
        return self.ratio != "token"

    @property
    def clips(self) -> bool:
        """Whether the surrogate has bounds."""
        return self.surrogate.bounds

    @property
    def follows_policy(self) -> bool:
        """Always true."""
        return True

    @property
    def takes_exp(self) -> bool:
        """Whether it has a ratio, which is an exp."""
        return self.has_ratio

    @property
    def moves_at_zero_advantage(self) -> bool:
        """Whether the surrogate moves the policy where A = 0."""
        return self.surrogate.moves_at_zero_advantage

    @property
    def needs_statistics_pass(self) -> bool:
        """Whether the surrogate does: it may read all sequences of a prompt at once, which the pass gathers."""
        return self.surrogate.needs_statistics_pass

    def formula(self, base: str = "old") -> str:
        """The formula of the surrogate."""
        return self.surrogate.formula(base)

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """The definitions of the surrogate, and what r and d are where its formula holds them."""
        axis = self.axis
        known = {
            "d": "log pi - log sg(pi)" if axis is None else axis.formula(base),
            "r": "pi/sg(pi)" if axis is None else axis.written_out(base),
        }
        return (*self.surrogate.definitions(base), *(f"{name} = {known[name]}" for name in self.surrogate.letters))
