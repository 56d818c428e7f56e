"""The table of metrics, one row each. `N` positions of a micro-batch.

``when(part, known)`` says whether a component (`megatron_pgloss.spec.Component`) has the metric, given what every rank
knows of the step (`Known`), so that all ranks agree. ``value(measured)`` gives a number or a bool of every token, or a
sum (`megatron_pgloss.objective.measure.Measured`, which computes each property once). Both classes belong to higher
layers, which this one does not import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["mean", "sum", "min", "max"]
Over = Literal["", "members", "kept", "before", "applied", "first", "taught"]
"""The tokens that a mean or an extreme is taken over; empty: the value is the partial result itself."""
DIVIDED_BY: dict[Over, str] = {
    "": "",
    "members": "member tokens",
    "kept": "member tokens, and tokens outside their kept set",
    "before": "tokens before any rejection",
    "applied": "member tokens that no correction rejected",
    "first": "sequences, before any rejection",
    "taught": "member tokens with teacher ids",
}


class Known(Protocol):
    """What every rank knows of the step before the loss runs."""

    @property
    def streams(self) -> frozenset[str]:
        """Streams that the step carries."""

    @property
    def entropy(self) -> bool:
        """Whether the entropy is computed."""

    @property
    def kept(self) -> bool:
        """Whether tokens are scored on kept sets."""

    @property
    def samplers_old(self) -> bool:
        """Whether the base of the ratio and the sampler are two policies, both with log-probs."""

    def weighs(self, part: Any) -> bool:
        """Whether a correction weighs the component."""

    def rejects(self, part: Any) -> bool:
        """Whether a correction rejects tokens of the component."""

    def gated(self, part: Any, kind: str) -> bool:
        """Whether a gate of this kind acts on the component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One metric."""

    suffix: str
    """Name below the component's own, as in ``rl/ratio``."""
    kind: Kind
    over: Over
    first_step: str
    """What it should be on the first on-policy step."""
    meaning: str
    when: Callable[[Any, Known], bool]
    value: Callable[[Any], Any]
    """float or bool [N]; a 0-d number where ``over`` is empty."""

    @property
    def divided_by(self) -> str:
        """What a mean is divided by; empty for sums and extremes."""
        return DIVIDED_BY[self.over] if self.kind == "mean" else ""


def _row(
    suffix: str,
    first_step: str,
    meaning: str,
    when: Callable[[Any, Known], bool],
    value: Callable[[Any], Any],
    kind: Kind = "mean",
    over: Over = "members",
) -> MetricRow:
    return MetricRow(
        suffix=suffix, kind=kind, over=over, first_step=first_step, meaning=meaning, when=when, value=value
    )


def _own(suffix: str, first_step: str, meaning: str, value: Callable[[Any], Any], over: Over = "members") -> MetricRow:
    """A metric of one kind of component, which names it in ``reports``."""
    return _row(suffix, first_step, meaning, lambda part, known: suffix in part.reports, value, over=over)


def _gate(kind: str, first_step: str, what: str) -> MetricRow:
    meaning = f"share of tokens that {what} took out of the numerator"
    when, value = lambda part, known: known.gated(part, kind), lambda m: m.gated[kind]
    return _row(f"gate_{kind}", first_step, meaning, when, value)


def _always(part: Any, known: Known) -> bool:
    return True


def _ratio(part: Any, known: Known) -> bool:
    return bool(part.has_ratio)


def _joined(part: Any, known: Known) -> bool:
    return bool(part.has_ratio and part.joins_ratio)


def _clips(part: Any, known: Known) -> bool:
    return bool(part.clips)


def _weighs(part: Any, known: Known) -> bool:
    return known.weighs(part)


_ENGINES, _ALIKE = "engine mismatch alone", "where engines agree"
METRICS: tuple[MetricRow, ...] = (
    _row(
        "loss", "rl: about minus the weighted mean advantage",
        "the component's own value, sum of weight times term, before its coefficient",
        _always, lambda m: m.worth, "sum", "",
    ),
    _row(
        "fault", "0", "tokens whose log-prob or term was not finite: selected out of value and gradient",
        _always, lambda m: m.faults, "sum", "",
    ),
    _row(
        "fault_at", "none", "position of the first such token in its rank's streams",
        _always, lambda m: m.first_fault, "min", "",
    ),
    _row("ratio", "1 exactly", "pi/old of the sampled token, raw (before clip and bound)", _ratio, lambda m: m.ratio),
    _row(
        "ratio_sq", "1 exactly", "squared raw ratio, for the effective sample size",
        _ratio, lambda m: m.ratio.square(),
    ),
    _row("ratio_min", "1 exactly", "smallest raw ratio", _ratio, lambda m: m.ratio, "min"),
    _row("ratio_max", "1 exactly", "largest raw ratio", _ratio, lambda m: m.ratio, "max"),
    _row("k1_old", "0", "log pi - log old, signed", _ratio, lambda m: m.log_ratio),
    _row(
        "k3_old_pi", "0", "k3 estimate of KL(old || pi), r - 1 - log r from tokens that old drew",
        _ratio, lambda m: m.k3("old", "logp"),
    ),
    _row(
        "k3_rollout_old", _ENGINES,
        "k3 estimate of KL(rollout || old) from the sampler's tokens, where rollout log-probs are given",
        lambda part, known: part.has_ratio and known.samplers_old, lambda m: m.k3("rollout", "old"),
    ),
    _row(
        "unit_ratio", "1 exactly", "the component's own ratio, by its ratio axis, where that is not the token's",
        _joined, lambda m: m.unit_ratio,
    ),
    _row("unit_ratio_min", "1 exactly", "smallest of these ratios", _joined, lambda m: m.unit_ratio, "min"),
    _row("unit_ratio_max", "1 exactly", "largest of these ratios", _joined, lambda m: m.unit_ratio, "max"),
    _row(
        "clip_low", "0",
        "share of tokens that the lower bound decided (a clip: A < 0, gradient 0; a weight: held there)",
        _clips, lambda m: m.clipped.low_N,
    ),
    _row(
        "clip_high", "0",
        "share of tokens that the upper bound decided (a clip: A > 0, gradient 0; a weight: held there)",
        _clips, lambda m: m.clipped.high_N,
    ),
    _row(
        "clip_dual", "0", "share of tokens with A < 0 and ratio above the dual bound or delta (gradient 0)",
        _clips, lambda m: m.clipped.dual_N,
    ),
    _row(
        "k3_rollout_pi", _ENGINES,
        "k3 estimate of KL(rollout || pi) from the sampler's tokens, where rollout log-probs are given",
        lambda part, known: part.follows_policy and "rollout" in known.streams, lambda m: m.k3("rollout", "logp"),
    ),
    _row(
        "k3_pi_ref", "0 while pi is the reference", "k3 estimate of KL(pi || ref), as if pi had drawn the tokens",
        lambda part, known: part.follows_policy and "ref" in known.streams, lambda m: m.k3("logp", "ref"),
    ),
    _row(
        "entropy", "the sampler's own", "exact entropy of pi at the position, where it is computed",
        lambda part, known: (part.follows_policy and known.entropy) or "entropy" in part.reports,
        lambda m: m.x.entropy,
    ),
    _row(
        "kept_fraction", "the sampler's own", "size of the kept set over that of the vocabulary",
        lambda part, known: part.follows_policy and known.kept, lambda m: m.kept_fraction,
    ),
    _row(
        "outside", "0 where the trainer's sets are the sampler's",
        "share of tokens outside their kept set, dropped inside the loss or joined to it",
        lambda part, known: part.follows_policy and known.kept, lambda m: m.x.outside, over="kept",
    ),
    _row(
        "bounded", "0",
        "share of tokens whose term log_ratio_bound holds: gradient 0, where without the bound there would be one",
        lambda part, known: bool(part.takes_exp), lambda m: m.held,
    ),
    _gate("tv", _ENGINES, "a total-variation gate"),
    _gate("binary_kl", _ENGINES, "a binary-KL gate"),
    _gate("ratio_band", _ENGINES, "a ratio band"),
    _gate("opsm", _ENGINES, "a sequence gate"),
    _gate("entropy_quantile", "its share", "an entropy gate"),
    _gate("second_moment", "0", "a second-moment gate"),
    _gate("covariance", "its share", "a covariance gate"),
    _gate("custom", "its own", "a user's gate (of a soft one: 1 minus its factor)"),
    _row(
        "is_weight", f"1 {_ALIKE}", "importance weight of the corrections as applied (truncated, divided by its mean)",
        _weighs, lambda m: m.weight, over="applied",
    ),
    _row("is_weight_sq", f"1 {_ALIKE}", "square of that weight, for its deviation",
         _weighs, lambda m: m.weight.square(), over="applied"),
    _row("is_weight_min", f"1 {_ALIKE}", "smallest of these weights", _weighs, lambda m: m.weight, "min", "applied"),
    _row("is_weight_max", f"1 {_ALIKE}", "largest of these weights", _weighs, lambda m: m.weight, "max", "applied"),
    _row(
        "is_truncated", f"0 {_ALIKE}", "share of tokens whose raw importance weight was truncated",
        _weighs, lambda m: m.truncated, over="before",
    ),
    _row(
        "is_raw", f"1 {_ALIKE}", "importance weight before truncation, division and rejection",
        _weighs, lambda m: m.raw, over="before",
    ),
    _row(
        "is_chi2", f"0 {_ALIKE}", "r^2 - 1 of the token's ratio to the sampler, an estimate of chi^2(of || mu)",
        _weighs, lambda m: m.chi2, over="before",
    ),
    _row(
        "is_chi2_sequence", f"0 {_ALIKE}", "r^2 - 1 of the product over the sequence's tokens",
        _weighs, lambda m: m.chi2_sequence, over="first",
    ),
    _row(
        "rejected", f"0 {_ALIKE}", "share of tokens that corrections rejected, at plan time or inside the loss",
        lambda part, known: known.rejects(part), lambda m: m.rejected, over="before",
    ),
    _own("nll", "the data's own", "-log pi of the target token", lambda m: -m.x.logp),
    _own("kl", "0 while pi is the base", "the KL term itself, unweighted by the normaliser", lambda m: m.term),
    _own(
        "divergence", "0 where pi is the teacher", "the top-k divergence itself, over tokens with teacher ids",
        lambda m: m.term, "taught",
    ),
    _own(
        "teacher_mass", "any", "probability that the teacher has on its ids, over tokens with some",
        lambda m: m.teacher_mass, "taught",
    ),
    _own(
        "policy_mass", "any", "probability that the policy has on the teacher's ids, over tokens with some",
        lambda m: m.policy_mass, "taught",
    ),
    _own("value", "the critic's own", "V", lambda m: m.x.value),
    _own("returns", "the data's own", "target of V", lambda m: m.x.stream("returns")),
    _own("value_error", "the critic's own", "(V - returns)^2", lambda m: m.value_error),
    _own(
        "value_clipped", "0", "share of tokens whose clipped value gave the larger error", lambda m: m.value_clipped
    ),
)  # fmt: skip
_BY_SUFFIX = {row.suffix: row for row in METRICS}


def kind_of(name: str) -> Kind:
    """How the metric ``component/suffix`` reduces; unknown suffixes are sums (a user's own)."""
    row = _BY_SUFFIX.get(name.rsplit("/", 1)[-1])
    return row.kind if row else "sum"
