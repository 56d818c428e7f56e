"""The components beside the policy gradient: KL, entropy, cross entropy, a teacher, values, the user's own term."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.component import Component, Name
from megatron_pgloss.spec.functions import Function, StreamName
from megatron_pgloss.spec.kinds import one_of
from megatron_pgloss.spec.letters import letter
from megatron_pgloss.spec.numbers import Positive
from megatron_pgloss.spec.policy_gradient import PolicyGradient
from megatron_pgloss.spec.references import Reference

__all__ = ["KL", "CrossEntropy", "Entropy", "PolicyGradient", "Term", "TopKDistill", "Value"]


class KL(Component):
    """Per-token KL(pi || base) from the sampled token (Schulman, "Approximating KL divergence", 2020).

    With d = log pi - log base: k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1, abs = |d|; ``exact`` is the sum over the
    vocabulary, ``sum_v pi_v (log pi_v - log ref_v)``, where the log-prob pass was given ``ref_logits``. Where
    ``log_ratio_bound`` holds an exp, it holds the whole term: its gradient is 0.

    ``gradient``: ``plain`` differentiates the value. ``k2``: the value as it is, the gradient of k2 (straight-through).
    ``weighted``: value ``r k`` with ``r = pi/sg(base of the weight)`` differentiable. At a given prefix, weighted k1
    and k3 have the gradient of the KL; plain k2 has it on-policy alone; plain k1 and k3 never.
    """

    kind: Literal["kl"] = "kl"
    name: Name = "kl"
    estimator: Literal["k1", "k2", "k3", "abs", "exact"] = "k3"
    gradient: Literal["plain", "k2", "weighted"] = "plain"
    to: Reference = "ref"
    """The policy that pi is compared with: ``ref``, ``old``, ``rollout``, or another reference's stream by its name."""
    base: Literal["old", "rollout"] = "old"
    """The policy that sampled the tokens, in the denominator of the weight of ``weighted``."""

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
    def takes_exp(self) -> bool:
        """Whether the estimate has an exp: k3 has, and the weight of ``weighted``."""
        return self.estimator == "k3" or self.gradient == "weighted"

    @property
    def reads(self) -> tuple[str, ...]:
        """The base of the KL, and that of its weight."""
        if self.estimator == "exact":
            return ("kl",)
        return tuple(dict.fromkeys((self.to, *((self.base,) if self.gradient == "weighted" else ()))))

    @property
    def references(self) -> tuple[str, ...]:
        """The stream of the policy that pi is compared with; none for the exact KL."""
        return () if self.estimator == "exact" else (self.to,)

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics of this kind, beside those of every component."""
        return ("kl",)

    def formula(self, base: str = "old") -> str:
        """The estimate, and its gradient where it is that of another estimate."""
        if self.estimator == "exact":
            return "sum_v pi_v (log pi_v - log ref_v)"
        value = {"k1": "d", "k2": "d^2/2", "k3": "exp(-d) + d - 1", "abs": "|d|"}[self.estimator]
        if self.gradient == "weighted":
            return f"r ({value})"
        return f"{value}, gradient of d^2/2" if self.gradient == "k2" and self.estimator != "k2" else value

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """What d is, and r where the estimate is weighted."""
        if self.estimator == "exact":
            return ()
        weight = (f"r = pi/{letter(self.base, base)}",) if self.gradient == "weighted" else ()
        return (f"d = log pi - log {letter(self.to, base)}", *weight)


class Entropy(Component):
    """Entropy bonus: the term is ``-H(pi)``, so that a positive coefficient raises entropy."""

    kind: Literal["entropy"] = "entropy"
    name: Name = "entropy"

    @property
    def reads(self) -> tuple[str, ...]:
        """The entropy."""
        return ("entropy",)

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics of this kind, beside those of every component."""
        return ("entropy",)

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "-H(pi)"


class CrossEntropy(Component):
    """Cross entropy ``-log pi`` on prediction targets: observations (ECHO 2605.24517), demonstrations."""

    kind: Literal["cross_entropy"] = "cross_entropy"
    name: Name = "ce"

    @property
    def over(self) -> Literal["action", "observation"]:
        """Observations."""
        return "observation"

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics of this kind, beside those of every component."""
        return ("nll",)

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        return "-log pi on observations"


class TopKDistill(Component):
    """Divergence from a teacher that gave its log-probs at k ids of every token, usually its top-k.

    q and p are the teacher's and the policy's probabilities of these ids K; Q and P are their sums over K. ``forward``
    with ``tail="drop"`` is ``sum_K q (log q - log p)`` (verl's forward_kl_topk): the tail adds nothing, and minimising
    it draws all of the policy's mass into K. ``tail="renormalize"`` takes q/Q and p/P in their place (NeMo-RL) and
    leaves P free. ``reverse`` is ``sum_K (p/P) (log p/P - log q/Q)``; without P and Q it would reward leaving K.

    The teacher's numbers are two streams of the batch, ``streams={"teacher_ids": int64 [B, L, k] (-1 where a token has
    fewer), "teacher_logprobs": float [B, L, k]}``; the policy's come from ``token_logprobs(..., chosen_ids=
    micro.wide(spec.chosen))``. A token without ids gives 0. Give the teacher's log-probs at the temperature at which
    the policy is scored.
    """

    kind: Literal["topk_distill"] = "topk_distill"
    name: Name = "distill"
    direction: Literal["forward", "reverse"] = "forward"
    tail: Literal["drop", "renormalize"] = "drop"
    """What becomes of the probability outside the k ids."""
    ids: StreamName = "teacher_ids"
    logprobs: StreamName = "teacher_logprobs"
    on: Literal["action", "observation"] = "action"
    symbols: ClassVar[Mapping[str, str]] = {
        "K": "K", "v": "v", "in": r"\in ", "q_v": "q_v", "q_K": "q_K", "pi_K": r"\pi_{\theta,K}",
    }  # fmt: skip

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
        """The tokens that ``on`` chooses."""
        return self.on

    @property
    def reads(self) -> tuple[str, ...]:
        """The teacher's two streams, and the policy's log-probs at its ids."""
        return (self.ids, self.logprobs, "chosen")

    @property
    def chosen_ids(self) -> str:
        """The teacher's ids."""
        return self.ids

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics of this kind, beside those of every component."""
        return ("divergence", "teacher_mass", "policy_mass")

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        p, q = ("pi_v", "q_v") if self.tail == "drop" else ("pi_v/pi_K", "q_v/q_K")
        first, second = (q, p) if self.direction == "forward" else (p, q)
        return f"sum_{{v in K}} {first} (log {first} - log {second})"

    def definitions(self, base: str = "old") -> tuple[str, ...]:
        """The teacher's streams."""
        return (f"K = {self.ids}, log q_v = {self.logprobs}",)


class Value(Component):
    """Clipped value loss ``l = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2`` (PPO 1707.06347 eq. 9;
    the clip as in OpenAI baselines' PPO2); without ``clip``: ``(V - R)^2 / 2``.

    V is given to `policy_loss` as ``value=``; R and V_old are the batch's streams ``returns`` and ``values``.
    """

    kind: Literal["value"] = "value"
    name: Name = "value"
    clip: Positive | None = None
    """How far V may move from V_old before the clip acts, in the units of the value; None: no clip."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The value head's output, returns, and old values where clipped."""
        return ("value", "returns") if self.clip is None else ("value", "returns", "values")

    @property
    def reads_logprobs(self) -> bool:
        """Always false."""
        return False

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics of this kind, beside those of every component."""
        return ("value", "returns", "value_error", "value_clipped")

    def formula(self, base: str = "old") -> str:
        """The formula in one line."""
        if self.clip is None:
            return "(V - R)^2 / 2"
        c = f"{self.clip:g}"
        return f"max((V - R)^2, (clip(V, V_old - {c}, V_old + {c}) - R)^2) / 2"


class Term(Function, Component):
    """A user's own term: ``fn(x) -> [T]`` of the streams of one micro-batch.

    Args (positional allowed):
        name: its name.
        fn: the function.

    ``needs`` names what ``fn`` reads beside the log-probs, as in `megatron_pgloss.spec.functions.Function`.
    """

    kind: Literal["term"] = "term"
    example: ClassVar[Mapping[str, Any]] = {"name": "own", "fn": math.exp}
    on: Literal["action", "observation"] = "action"

    def __init__(self, name: str | None = None, fn: Any = None, /, **data: Any) -> None:
        given = {key: value for key, value in (("name", name), ("fn", fn)) if value is not None}
        super().__init__(**given, **data)

    @property
    def over(self) -> Literal["action", "observation"]:
        """The tokens that ``on`` chooses."""
        return self.on

    @property
    def takes_exp(self) -> bool:
        """Always true: the function may read ``x.ratio``."""
        return True

    @property
    def reads(self) -> tuple[str, ...]:
        """The streams that ``needs`` names."""
        return self.needed

    def formula(self, base: str = "old") -> str:
        """The function's name."""
        return f"{self.to_import_path()} on {self.on}s"


if TYPE_CHECKING:
    AnyComponent = Component
else:
    AnyComponent = one_of(Component)
