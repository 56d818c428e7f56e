"""The specs under which every layout is compared with the oracle. Together they have policy gradient, KL, entropy,
cross entropy and a user's term; masks, corrections and a gate; and normalisers over every level.

`SPECS` maps a name to the function that builds the spec; ``verify --spec`` names other specs instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_pgloss import presets
from megatron_pgloss.spec import (
    KL,
    Clip,
    CrossEntropy,
    DropTruncated,
    DropZeroAdvantage,
    Entropy,
    IcePop,
    LossSpec,
    PolicyGradient,
    RatioMask,
    SequenceGate,
    Statistic,
    Term,
    TruncatedIS,
    UserMask,
)


def shaping(x: Any) -> Tensor:
    """A user's term through every unit statistic, each with a gradient: float [T]."""
    drift = x.statistic("mean").square() + 0.1 * x.statistic("so_far").tanh()
    return drift + 0.01 * x.statistic("turns")


SHAPING = (
    Statistic(name="mean"),
    Statistic(name="so_far", how="prefix"),
    Statistic(name="turns", of="logp", how="sum", unit="turn"),
)
"""What `shaping` declares, so that it travels in one collective."""


def rich() -> LossSpec:
    """Five kinds of component, each under its own normaliser; the normalisers name every level."""
    return LossSpec(
        components=[
            PolicyGradient(
                surrogate=Clip(low=0.2, high=0.28, dual=1.3),
                normalizer="mean(prompt) > mean(episode) > mean(turn) > mean(token)",
            ),
            KL(estimator="k3", coef=0.1, normalizer="mean(episode) > mean(token)"),
            Entropy(coef=0.05, normalizer="mean(sequence) > sum(token)/avg"),
            CrossEntropy(coef=0.3, normalizer="mean(sequence) > mean(token)", count="observations", units="all"),
            Term(
                "shape", shaping, coef=0.1, needs=("old",), statistics=SHAPING, normalizer="mean(prompt) > mean(token)"
            ),
        ],
        corrections=[TruncatedIS(high=1.1)],
        masks=[DropTruncated(), DropZeroAdvantage(), UserMask(name="keep", on=("kl",))],
    )


def sequence() -> LossSpec:
    """A sequence ratio, differentiated through its mean; divisors that are constants and square roots."""
    return LossSpec(
        components=[
            PolicyGradient(
                surrogate=Clip(low=0.04, high=0.06), ratio="sequence", normalizer="sum(sequence) > sum(token)/4096",
                coef=1000.0, units="all",
            ),
            KL(estimator="k3", gradient="weighted", coef=0.2, normalizer="mean(sequence) > mean(token)"),
            KL(name="drift", estimator="k1", coef=0.2, to="old",
               normalizer="mean(prompt) > sum(episode)/sqrt > mean(token)"),
        ],
        masks=[DropTruncated()],
    )  # fmt: skip


def turn() -> LossSpec:
    """A turn ratio, averaged over turns, and a gate on a statistic of the current policy."""
    return LossSpec(
        components=[
            PolicyGradient(
                surrogate=Clip(low=0.1, high=0.1), ratio="turn", normalizer="mean(episode) > mean(turn) > mean(token)"
            ),
            PolicyGradient(
                name="held", ratio="sequence_token", coef=0.5, normalizer="mean(turn) > sum(token)/pow(0.7)"
            ),
            Entropy(coef=0.1, normalizer="mean(turn) > mean(token)"),
        ],
        masks=[DropZeroAdvantage()],
        gates=[SequenceGate(threshold=0.1, base="rollout", unit="turn", on=("held",))],
    )


def echo() -> LossSpec:
    """Cross entropy on observations: a subset is trained, all of them are counted, and units are all sequences."""
    path = "mean(sequence) > mean(token)"
    return LossSpec(
        components=[
            PolicyGradient(normalizer=path, units="all"),
            CrossEntropy(coef=0.05, normalizer=path, count="observations", units="all"),
        ],
        masks=[UserMask(name="keep", on=("ce",)), DropTruncated()],
    )


def weights() -> LossSpec:
    """User weights in the denominators, and a user's mask that names the tokens to count."""
    return LossSpec(
        components=[
            PolicyGradient(normalizer="mean(prompt) > mean(token)", divide_by="weights"),
            CrossEntropy(coef=0.2, normalizer="mean(token)", divide_by="weights"),
            KL(estimator="k2", coef=0.1, to="rollout", normalizer="mean(token)", count="keep"),
        ],
        masks=[UserMask(name="keep", on=("kl",))],
    )


def rejected() -> LossSpec:
    """Importance weights, and rules that reject tokens and sequences; one component counts rejected tokens in its
    denominators, and one does not.
    """
    return LossSpec(
        components=[
            PolicyGradient(normalizer="mean(prompt) > mean(sequence) > mean(token)", count_rejected=False),
            KL(estimator="k3", coef=0.1, normalizer="mean(sequence) > mean(token)", count_rejected=True),
        ],
        corrections=[
            TruncatedIS(high=1.2),
            IcePop(low=0.7, high=1.5, weight=False),
            RatioMask(low=0.8, high=1.2),
        ],
    )


SPECS: dict[str, Callable[[], LossSpec]] = {
    "rich": rich,
    "dapo": presets.dapo,
    "sequence": sequence,
    "turn": turn,
    "echo": echo,
    "weights": weights,
    "rejected": rejected,
}
"""Name to the function that builds the spec."""


def without_edges(spec: LossSpec) -> LossSpec:
    """The spec without gates, and with clips so wide that no token reaches them, for half precision: one token that
    rounding moves over an edge would hide every other error.
    """
    wide = Clip(low=0.95, high=19.0, dual=None)
    parts = [
        part.replace(surrogate=wide) if isinstance(part, PolicyGradient) and isinstance(part.surrogate, Clip) else part
        for part in spec.components
    ]
    return spec.replace(components=tuple(parts), gates=())  # type: ignore[no-any-return]
