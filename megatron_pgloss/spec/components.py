"""What is added up: the components of a loss, each with its own tokens, weights, normaliser and coefficient."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.base import Part
from megatron_pgloss.spec.functions import Function, StreamName
from megatron_pgloss.spec.normalizer import Path, parse
from megatron_pgloss.spec.ratios import SHORT, CustomRatio, Ratio, canonical
from megatron_pgloss.spec.surrogates import REAL, TOKEN_RATIO_ONLY, AnySurrogate, Clip

_WHOLE = ("mean", "sum")
Number = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=32)]


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
    rejected: Literal["original", "kept"] = "original"
    """Whether what a correction or gate rejected stays in the denominators; what a mask took never does."""

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

    @property
    def reads(self) -> tuple[str, ...]:
        """Optional inputs: ``old`` (the base of the ratio), ``rollout``, ``ref``, ``advantages``, ``entropy``,
        ``values``, ``returns``, or a stream of the user's own.
        """
        return ()


class PolicyGradient(Component):
    """The policy-gradient term over the policy's own tokens: a surrogate of a ratio and an advantage."""

    kind: Literal["policy_gradient"] = "policy_gradient"
    name: Name = "rl"
    surrogate: AnySurrogate = Clip()
    ratio: str | Annotated[Ratio | CustomRatio, Field(discriminator="kind")] = "token"
    """A short name of `megatron_pgloss.spec.ratios`, a `Ratio`, or a `CustomRatio`. ``token``: pi/old per token.
    ``none``: exactly 1 with the gradient of log pi (on-policy)."""

    @field_validator("ratio", mode="before")
    @classmethod
    def _short_name(cls, given: Any) -> Any:
        return canonical(given)

    @model_validator(mode="after")
    def _one_statistic(self) -> PolicyGradient:
        if isinstance(self.surrogate, TOKEN_RATIO_ONLY) and self.ratio != "token":
            name = type(self.surrogate).__name__
            raise SpecError(f"{name} forms its own statistic of token ratios", got=f"ratio={self.ratio!r}",
                            fix="ratio='token'")  # fmt: skip
        if self.by_group:
            if not isinstance(self.axis, Ratio) or self.axis.level != "sequence" or self.axis.statistic not in _WHOLE:
                raise SpecError("REAL(form='group') takes one log-ratio of each sequence", got=f"ratio={self.ratio!r}",
                                expected="a mean or sum over the sequence", fix="ratio='sequence'")  # fmt: skip
            if self.path.units != ("prompt", "sequence", "token") or self.path.levels[-1].operation != "mean":
                raise SpecError("REAL(form='group') weighs all sequences of a prompt alike", got=self.normalizer,
                                expected="prompt > sequence > mean(token)",
                                fix="'mean(prompt) > sum(sequence) > mean(token)'")  # fmt: skip
        return self

    @property
    def by_group(self) -> bool:
        """Whether its surrogate reads all sequences of a prompt at once, which a statistics pass brings together."""
        return isinstance(self.surrogate, REAL) and self.surrogate.form == "group"

    @property
    def axis(self) -> Ratio | CustomRatio | None:
        """The ratio spelled out; None for ``none``."""
        return SHORT[self.ratio] if isinstance(self.ratio, str) else self.ratio

    @property
    def reads(self) -> tuple[str, ...]:
        """What surrogate and ratio read."""
        found = [name for name in self.surrogate.reads if name != "ratio"]
        if "ratio" in self.surrogate.reads and self.ratio != "none":
            found.insert(0, "old")
        for part in (self.surrogate, self.ratio):
            if isinstance(part, Function):
                found += [{"advantage": "advantages"}.get(name, name) for name in part.needs]
        return tuple(dict.fromkeys(found))


class KL(Component):
    """Per-token KL(pi || base) from the sampled token (Schulman, "Approximating KL divergence", 2020).

    With d = log pi - log base: k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1, abs = |d|; ``exact`` is the sum over the
    vocabulary, ``sum_v pi_v (log pi_v - log ref_v)``, where the log-prob pass was given ``ref_logits``.

    ``gradient``: ``plain`` differentiates the value. ``k2``: the value as it is, the gradient of k2 (straight-through).
    ``weighted``: value ``r k`` with ``r = pi/sg(base of the weight)`` differentiable. At a given prefix, weighted k1
    and k3 have the gradient of the KL; plain k2 has it on-policy alone; plain k1 and k3 never.
    """

    kind: Literal["kl"] = "kl"
    name: Name = "kl"
    estimator: Literal["k1", "k2", "k3", "abs", "exact"] = "k3"
    gradient: Literal["plain", "k2", "weighted"] = "plain"
    to: Literal["ref", "old", "rollout"] = "ref"
    """What pi is compared with."""
    base: Literal["old", "rollout"] = "old"
    """Which policy the tokens were sampled from, for the weight of ``weighted``."""

    @model_validator(mode="after")
    def _exact_alone(self) -> KL:
        if self.estimator == "exact" and (self.gradient, self.to) != ("plain", "ref"):
            raise SpecError(
                "KL(estimator='exact') is the KL to the reference, and its gradient is its own",
                expected="gradient='plain', to='ref'",
                got=f"{self.gradient!r}, {self.to!r}",
            )
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        """The base of the KL, and that of its weight."""
        if self.estimator == "exact":
            return ("kl",)
        return tuple(dict.fromkeys((self.to, *((self.base,) if self.gradient == "weighted" else ()))))


class Entropy(Component):
    """Entropy bonus: the term is ``-H(pi)``, so that a positive coefficient raises entropy."""

    kind: Literal["entropy"] = "entropy"
    name: Name = "entropy"

    @property
    def reads(self) -> tuple[str, ...]:
        """The entropy."""
        return ("entropy",)


class CrossEntropy(Component):
    """Cross entropy ``-log pi`` on prediction targets: observations (ECHO 2605.24517), demonstrations."""

    kind: Literal["cross_entropy"] = "cross_entropy"
    name: Name = "ce"

    @property
    def over(self) -> Literal["action", "observation"]:
        """Observations."""
        return "observation"


class TopKDistill(Component):
    """Divergence from a teacher that gave its log-probs at k ids of every token: its top-k, as a rule.

    q are the teacher's and p the policy's probabilities on these ids K, Q and P their sums. ``forward`` with
    ``tail="drop"`` is ``sum_K q (log q - log p)`` (verl's forward_kl_topk): the tail adds nothing, and the least value
    draws all of the policy's mass into K. ``tail="renormalize"`` takes q/Q and p/P in their place (NeMo-RL) and says
    nothing on P. ``reverse`` is ``sum_K (p/P) (log p/P - log q/Q)``; unless renormalised, it would reward leaving K.

    The teacher's numbers are two streams of the batch, ``streams={"teacher_ids": int64 [B, L, k] (-1 where a token has
    fewer), "teacher_logprobs": float [B, L, k]}``; the policy's come from ``token_logprobs(..., chosen_ids=
    micro.wide(spec.chosen))``. A token without ids gives 0. Teacher and policy stand under the same temperature.
    """

    kind: Literal["topk_distill"] = "topk_distill"
    name: Name = "distill"
    direction: Literal["forward", "reverse"] = "forward"
    tail: Literal["drop", "renormalize"] = "drop"
    """What becomes of the probability outside the k ids."""
    ids: StreamName = "teacher_ids"
    logprobs: StreamName = "teacher_logprobs"
    on: Literal["action", "observation"] = "action"

    @model_validator(mode="after")
    def _proper(self) -> TopKDistill:
        if self.direction == "reverse" and self.tail == "drop":
            raise SpecError(
                "TopKDistill(direction='reverse', tail='drop') is least where the policy leaves the teacher's ids",
                expected="tail='renormalize', or direction='forward'",
            )
        return self

    @property
    def over(self) -> Literal["action", "observation"]:
        """As chosen by ``on``."""
        return self.on

    @property
    def reads(self) -> tuple[str, ...]:
        """The teacher's two streams, and the policy's log-probs at its ids."""
        return (self.ids, self.logprobs, "chosen")


class Value(Component):
    """Clipped value loss ``l = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2`` (PPO 1707.06347 eq. 9;
    the clip as in OpenAI baselines' PPO2); without ``clip``: ``(V - R)^2 / 2``.

    V is given to `policy_loss` as ``value=``; R and V_old are the batch's streams ``returns`` and ``values``.
    """

    kind: Literal["value"] = "value"
    name: Name = "value"
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest step of the value that is rewarded, in its own units; None: no clip."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Returns, and old values where clipped."""
        return ("returns",) if self.clip is None else ("returns", "values")


class Term(Component, Function):
    """A user's own term: ``fn(x) -> [T]`` of the streams of one micro-batch.

    Args (positional allowed):
        name: its name.
        fn: the function, or ``"pkg.mod:name"`` (the form that TOML can hold).

    ``needs`` names what ``fn`` reads beside the log-probs, as in `megatron_pgloss.spec.functions.Function`.
    """

    kind: Literal["term"] = "term"
    on: Literal["action", "observation"] = "action"

    def __init__(self, name: str | None = None, fn: Any = None, /, **data: Any) -> None:
        given = {key: value for key, value in (("name", name), ("fn", fn)) if value is not None}
        super().__init__(**given, **data)

    @property
    def over(self) -> Literal["action", "observation"]:
        """As chosen by ``on``."""
        return self.on

    @property
    def reads(self) -> tuple[str, ...]:
        """What it says that it needs."""
        return tuple("advantages" if name == "advantage" else name for name in self.needs)


AnyComponent = Annotated[
    PolicyGradient | KL | Entropy | CrossEntropy | TopKDistill | Value | Term, Field(discriminator="kind")
]
COMPONENT_KINDS = ["policy_gradient", "kl", "entropy", "cross_entropy", "topk_distill", "value", "term"]
