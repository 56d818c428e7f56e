"""Every part that a spec can have, found in the spec's own unions, and a step in which each of them can show.

A new kind of surrogate, correction or gate is found in its union, and built from its defaults and its ``example``. If
it does nothing on this step under these numbers, `ARGUMENTS` gives it others.
"""

from __future__ import annotations

import functools
from typing import Any, get_args

import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.spec.corrections import Correction
from megatron_pgloss.spec.gates import AnyGate
from megatron_pgloss.spec.masks import Mask
from megatron_pgloss.spec.ratios import SHORT
from megatron_pgloss.spec.surrogates import AnySurrogate
from megatron_pgloss.verify.oracle import oracle_loss
from support import jobs
from support.data import Dice, Row, attach_streams
from support.steps import NAN, ONE, Answer, solve

NOW = 9
"""Version of the policy."""


def softer(x: Any) -> Tensor:
    """A surrogate of one's own."""
    return -(x.ratio.tanh() * x.advantage + 0.1 * x.log_ratio.square())


def declaring(x: Any) -> Tensor:
    """A surrogate with statistics that it declares."""
    return (x.statistic("gap").square() + 0.1 * x.statistic("so_far")) * x.advantage + x.statistic("all") * x.ratio


def gap_is_small(x: Any) -> Tensor:
    """A gate of one's own, by a statistic that it declares."""
    return x.statistic("gap") < 0.1


DECLARED = (
    pg.Statistic(name="gap"),
    pg.Statistic(name="so_far", of="logp", how="prefix", unit="turn", over="members"),
    pg.Statistic(name="all", of="advantage", how="sum"),
)


def from_here_on(x: Any) -> Tensor:
    """A ratio of one's own: half the token's, half the mean of its turn."""
    return 0.5 * x.log_ratio + 0.5 * x.unit_mean(x.log_ratio, "turn")


def agreeing(x: Any) -> Tensor:
    """A gate of one's own."""
    return x.advantage * (x.logp - x.old) > -0.1


def fading(x: Any) -> Tensor:
    """A soft gate of one's own."""
    return (-(x.logp - x.old).abs()).exp()


ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "CISPO": ((), {"high": 0.1}),
    "TOPR": ((), {"positive": (0.9, 1.3), "negative": (0.5, 1.0)}),
    "Surrogate": ((softer,), {}),
    "RatioMask": ((), {"low": 0.93, "high": 1.07}),
    "IcePop": ((), {"low": 0.8, "high": 1.4}),
    "TruncatedIS": ((), {"high": 1.1}),
    "Reject": ((), {"high": 0.05}),
    "Veto": ((), {"low": 0.6}),
    "Staleness": ((), {"max_lag": 3}),
    "TVGate": ((), {"low": 0.02, "high": 0.03}),
    "KLGate": ((), {"threshold": 0.002}),
    "RatioGate": ((), {"low": 0.8, "high": 1.3}),
    "SequenceGate": ((), {"threshold": 0.02}),
    "CovarianceGate": ((), {"share": 0.1, "low": 0.0}),
    "Gate": ((agreeing,), {}),
    "GMPO": ((), {"low": 0.2, "high": 0.2}),
    "FIPO": ((), {"half_life": 4.0, "safe_ratio": 1.2, "delta": 1.5}),
    "UserMask": ((), {"name": "keep"}),
}


def built(union: Any) -> dict[str, Any]:
    """Build one of each kind in a union of spec parts, by name."""
    kinds = get_args(get_args(union)[0]) if get_args(union) else ()
    found = {}
    for kind in kinds:
        args, kwargs = ARGUMENTS.get(kind.__name__, ((), dict(kind.example)))
        found[kind.__name__] = kind(*args, **kwargs)
    return found


SURROGATES: dict[str, Any] = built(AnySurrogate) | {
    "Clip, dual": pg.Clip(low=0.2, high=0.28, dual=1.4),
    "Clip, delta": pg.Clip(low=0.2, high=0.28, delta=1.4),
    "Clip, bounds as streams": pg.Clip(low="room", high="room"),
    "CISPO, two bounds": pg.spec.CISPO(low=0.1, high=0.2),
    "CISPO, absolute": pg.spec.CISPO(low=0.9, high=1.2, bound="absolute"),
    "FIPO, both": pg.spec.FIPO(half_life=8.0, both=True, delta=None),
    "Surrogate, declaring": pg.Surrogate(declaring, statistics=DECLARED),
    "Distill, to a teacher": pg.Distill(to="teacher"),
    "GMPO by turn": pg.spec.GMPO(low=0.2, high="room", unit="turn"),
}
RATIOS: dict[str, Any] = {name: name for name in SHORT} | {
    "of members": pg.spec.Ratio(over="members"),
    "token, held": pg.spec.Ratio(level="token", gradient="token"),
    "sum, through": pg.spec.Ratio(statistic="sum", level="turn"),
    "prefix, through": pg.spec.Ratio(statistic="prefix"),
    "prefix of turns": pg.spec.Ratio(statistic="prefix", level="turn", gradient="token"),
    "of episodes": pg.spec.Ratio(level="episode"),
    "of episodes, held": pg.spec.Ratio(level="episode", gradient="token"),
    "of prompts, sum, through, over members": pg.spec.Ratio(level="prompt", statistic="sum", over="members"),
    "own": pg.spec.CustomRatio(from_here_on, needs=("old",)),
}
PAIRS = [(s, r) for s in SURROGATES for r in RATIOS if r == "token" or not SURROGATES[s].token_ratio_only]

TIS, REJECT = pg.TruncatedIS, pg.spec.Reject
CORRECTIONS: dict[str, Any] = built(Correction) | {
    **{f"IS by {level}": TIS(level=level, low=0.9, high=1.2) for level in ("sequence", "turn", "geometric")},
    "IS by episode": TIS(level="episode", low=0.2, high=3.0),
    "IS by episode, mean 1": TIS(level="episode", high=1.5, normalize=True),
    "IS by episode, geometric, mean 1": TIS(level="episode_geometric", high=1.07, normalize=True),
    "IS by prompt, geometric": TIS(level="prompt_geometric", low=0.9, high=1.05),
    "geometric mean of episodes": pg.spec.RatioMask(unit="episode", low=0.87, high=1.08),
    "product of prompts": pg.spec.RatioMask(unit="prompt", mean="product", low=0.01, high=50.0),
    "IS by turn, geometric": TIS(level="turn_geometric", high=1.1),
    "IS, mean 1": TIS(high=1.2, normalize=True),
    "IS, mean 1 in the sequence": TIS(high=1.2, normalize="sequence"),
    "IS by sequence, mean 1": TIS(level="sequence", high=1.5, normalize=True),
    "IS of a KL": TIS(high=1.1, on=("rl", "kl")),
    "band without weight": pg.spec.IcePop(low=0.8, high=1.4, weight=False),
    "product of turns": pg.spec.RatioMask(unit="turn", mean="product", low=0.6, high=1.4),
    **{
        f"{k} {how} by {unit}": REJECT(
            estimator=k, statistic=how, unit=unit, high=high, **({"low": -0.1} if k == "k1" else {})
        )
        for k, how, unit, high in (
            ("k1", "mean", "sequence", 0.05),
            ("k1", "sum", "turn", 0.3),
            ("k2", "max", "turn", 0.1),
            ("k2", "mean", "token", 0.05),
            ("k3", "max", "sequence", 0.3),
            ("k3", "sum", "turn", 0.2),
            ("k1", "mean", "episode", 0.15),
            ("k2", "max", "episode", 0.25),
            ("k1", "mean", "prompt", 0.1),
        )
    },
    "veto on both sides": pg.spec.Veto(low=0.5, high=2.0, unit="turn"),
    "stale sequences": pg.spec.Staleness(max_lag=5, level="sequence"),
    "stale turns": pg.spec.Staleness(max_lag=4, level="turn"),
    "veto of episodes": pg.spec.Veto(low=0.4, high=2.5, unit="episode"),
}
MASKS: dict[str, Any] = built(Mask)
GATES: dict[str, Any] = built(AnyGate) | {
    "TV on both sides": pg.spec.TVGate(low=0.03, high=0.02, sides="both"),
    "TV to old, one side": pg.spec.TVGate(low=None, high=0.02, base="old"),
    "opsm by turn": pg.spec.SequenceGate(threshold=0.01, unit="turn", base="old"),
    "opsm by episode": pg.spec.SequenceGate(threshold=0.01, unit="episode"),
    "covariance, top": pg.spec.CovarianceGate(select="top", share=0.1),
    "covariance, alone kept": pg.spec.CovarianceGate(select="top", share=0.3, effect="keep"),
    "soft": pg.spec.Gate(fading),
}
FORMS = {
    f"{k}, {g}, to {to}, of {base}": pg.KL(estimator=k, gradient=g, to=to, base=base, coef=0.3)
    for k in ("k1", "k2", "k3", "abs")
    for g in ("plain", "k2", "weighted")
    for to in ("ref", "old", "rollout", "teacher")
    for base in (("old", "rollout") if g == "weighted" else ("old",))
}


def rl(normalizer: str = "mean(sequence) > mean(token)", **more: Any) -> pg.PolicyGradient:
    """A policy gradient under a normaliser whose weights depend on the lengths of rows."""
    return pg.PolicyGradient(normalizer=normalizer, **more)


@functools.cache
def step(seed: int = 3) -> tuple[list[Row], dict[str, list[Tensor]]]:
    """Rows with every stream that some spec reads, and the model's outputs per row in token order."""
    rows = jobs.rows_of_step(seed)
    dice = Dice(seed + 1)
    says = {name: [dice.normal(len(row["tokens"]), 0.5) for row in rows] for name in ("logp", "entropy", "value")}
    says["logp"] = [x - 2.0 for x in says["logp"]]
    says["entropy"] = [x.abs() for x in says["entropy"]]
    attach_streams(rows, says["logp"], seed)
    for row, value in zip(rows, says["value"], strict=True):
        size = len(row["tokens"])
        row["version"] = [dice.whole(NOW - 6, NOW) for _ in range(size)]
        row["returns"] = (value + dice.normal(size, 0.5)).tolist()
        row["values"] = (value + dice.normal(size, 0.3)).tolist()
        row["streams"] = {"room": [0.1 + dice.whole(0, 3) / 10 for _ in range(size)], "teacher": taught(row)}
    return rows, says


def taught(row: Row) -> list[float]:
    """Log-probs of a second reference: 0.3 above the first, where that stays below 0."""
    return [min(x + 0.3, -0.1) for x in row["ref"]]


def batch(rows: list[Row], spec: pg.LossSpec) -> pg.TokenBatch:
    """The rows, with all their streams, as a user hands them over."""

    def flat(values: list[list[Any]], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([x for row in values for x in row], dtype=dtype)

    def stream(name: str) -> Tensor:
        return flat([row[name] for row in rows])

    return pg.TokenBatch.from_packed(
        tokens=flat([row["tokens"] for row in rows], torch.int64),
        lengths=[len(row["tokens"]) for row in rows],
        action_mask=flat([row["action"] for row in rows], torch.bool),
        observation_mask=flat([row["observation"] for row in rows], torch.bool),
        advantages=stream("advantages"), old_logprobs=stream("old"), rollout_logprobs=stream("rollout"),
        ref_logprobs=stream("ref"), values=stream("values"), returns=stream("returns"),
        versions=flat([row["version"] for row in rows], torch.int64),
        streams={name: flat([row["streams"][name] for row in rows]) for name in ("room", "teacher")},
        masks={"keep": flat([row["masks"]["keep"] for row in rows], torch.bool)},
        weights={key: flat([row["weights"][key] for row in rows]) for key in ("rl", "ce") if key in spec.names},
        prompt_ids=[row["prompt"] for row in rows], episode_ids=[row["episode"] for row in rows],
        sample_ids=[row["name"] for row in rows], terminations=[row["termination"] for row in rows],
    )  # fmt: skip


def aligned(parts: list[Tensor], last: float = NAN) -> Tensor:
    """Per row in token order to a target-aligned stream [T]."""
    return torch.cat([piece for part in parts for piece in (part[1:], part.new_full((1,), last))])


def answer(
    spec: pg.LossSpec, split: pg.Split = ONE, order: list[int] | None = None, cuts: int = 1, **more: Any
) -> Answer:
    """The package's answer, with the rows in ``order`` and dealt to ``cuts`` batches."""
    rows, says = step()
    places = order if order is not None else list(range(len(rows)))
    size = -(-len(places) // cuts)
    batches = [batch([rows[i] for i in places[k : k + size]], spec) for k in range(0, len(places), size)]
    logp_T, entropy_T, value_T = (aligned([says[name][i] for i in places]) for name in ("logp", "entropy", "value"))
    return solve(
        batches, spec, logp_T, entropy_T, value=value_T if "value" in {p.kind for p in spec.components} else None,
        split=split, version=NOW, **more,
    )  # fmt: skip


def plain(spec: pg.LossSpec) -> dict[str, Any]:
    """The spec as the oracle reads it."""
    return spec.to_dict()


def judged(spec: pg.LossSpec, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The oracle's answer, and its gradients by log-probs, entropies and values, target-aligned."""
    rows, says = step()
    rows = [
        row | {"weights": {k: w for k, w in row["weights"].items() if k in spec.names}} | changes.get(row["name"], {})
        for row in rows
    ]
    leaves = {name: [x.clone().requires_grad_() for x in parts] for name, parts in says.items()}
    found = oracle_loss(leaves["logp"], leaves["entropy"], rows, plain(spec), values=leaves["value"], version=NOW)
    found["loss"].backward()
    grads = {
        name: aligned([torch.zeros_like(x) if x.grad is None else x.grad for x in parts], 0.0)
        for name, parts in leaves.items()
    }
    return found, grads


NO_MODEL = {"critic"}
"""Presets that read no log-prob: their value head is the user's own."""
MORE: dict[str, dict[str, Any]] = {
    "clip_cov": dict(share=0.05, floor=0.0), "kl_cov": dict(share=0.05), "opsm": dict(threshold=0.02),
    "icepop": dict(floor=0.8, ceiling=1.3), "dppo_tv": dict(low=0.01, high=0.01), "dppo_kl": dict(threshold=0.001),
    "prime_dppo": dict(low=0.01, high=0.01), "prime_ipo": dict(eps=0.01), "distill": dict(drop=0.01),
    "cispo": dict(high=0.1), "aipo": dict(cap=1.1), "fipo": dict(half_life=4.0),
}  # fmt: skip
"""Preset to keywords under which its rules act on a step as small as this."""


def presets() -> dict[str, pg.LossSpec]:
    """Every preset with its defaults, except for the keywords of `MORE`."""
    return {
        name: preset.build(**(dict(preset.example) | MORE.get(name, {}))) for name, preset in pg.presets.PRESETS.items()
    }
