"""What all components of a loss share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from megatron_pgloss.spec.kinds import Kind
from megatron_pgloss.spec.normalizer import Path, parse
from megatron_pgloss.spec.numbers import Finite, Flag

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=32, strict=True)]


class Component(Kind):
    """The family of components: what all of them share. A field's meaning is the same everywhere."""

    name: Name
    """Its name in metrics, weights, reports and ``coef=`` overrides."""
    coef: Finite = 1.0
    """Coefficient lambda, applied outside the normaliser."""
    normalizer: str = "mean(token)"
    """Normaliser path, see `megatron_pgloss.spec.normalizer`."""
    count: str = "members"
    """The set whose tokens the normaliser counts: ``members``, ``observations``, or a mask's name."""
    units: Literal["counted", "all"] = "counted"
    """Whether a unit without a counted token counts at its level."""
    divide_by: Literal["tokens", "weights"] = "tokens"
    """What stands for the number of counted tokens: that number itself, or the sum of the component's user weights over
    them."""
    count_rejected: Flag = True
    """Whether the tokens that a correction or gate rejected stay counted in the denominators; those that a mask took
    never do."""

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
        """The tokens that it runs over, before rules."""
        return "action"

    @property
    def reads_logprobs(self) -> bool:
        """Whether it reads the policy's log-probs."""
        return True

    @property
    def chosen_ids(self) -> str | None:
        """Name of the stream of ids at which it reads the policy's log-probs, or None."""
        return None

    @property
    def moves_at_zero_advantage(self) -> bool:
        """Whether a token of advantage 0 can move the policy through it."""
        return True

    @property
    def has_ratio(self) -> bool:
        """Whether it reads a ratio that has a base, and so can be other than 1."""
        return False

    @property
    def joins_ratio(self) -> bool:
        """Whether its ratio is another than the token's own pi/old."""
        return False

    @property
    def clips(self) -> bool:
        """Whether bounds decide some tokens, which the clip metrics then count."""
        return False

    @property
    def follows_policy(self) -> bool:
        """Whether its tokens tell of the policy as a whole: distances to sampler and reference, entropy, kept sets."""
        return False

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics of its own kind (`megatron_pgloss.metrics.METRICS`)."""
        return ()

    @property
    def takes_exp(self) -> bool:
        """Whether it exponentiates a log-ratio, which ``log_ratio_bound`` may then hold."""
        return False

    @property
    def parts(self) -> tuple[Kind, ...]:
        """The component, and the parts that it is made of."""
        return (self,)
