"""The axes are open: a ratio, bounds and a gate that are in no list, each added here and nowhere else; and every ratio,
surrogate, gate and KL form gives one answer on every arrangement.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.megatron.context_parallel import shard
from megatron_pgloss.planning import Arrangement
from support.steps import arrange, near, pictured, refused, solve
from support.worlds import run_world

ROWS = ("cAAoAAAo", "ccAAo", "cAoAAAAA", "cAA")
TEXT = "".join(ROWS)
SPLITS = (pg.Split(sequences=4), pg.Split(sequences=1), pg.Split(max_tokens=64), pg.Split(max_tokens=16, multiple_of=4))


def wave(step: float, scale: float, shift: float = 0.0) -> Tensor:
    return torch.sin(torch.arange(len(TEXT), dtype=torch.float64) * step) * scale + shift


LOGP = wave(1.3, 0.6, -1.2)  # target-aligned


def batch(**more: Any) -> pg.TokenBatch:
    streams = {"old_logprobs": wave(0.9, 0.5, -1.1), "rollout_logprobs": wave(2.1, 0.5, -1.3)}
    streams |= {"ref_logprobs": wave(1.7, 0.4, -1.2), "advantages": wave(2.7, 1.5)}
    return pictured(*ROWS, **streams, **more)


def shifted(stream_T: Tensor) -> list[float]:
    """Target-aligned, 0 at a row's end."""
    ends = {sum(map(len, ROWS[: k + 1])) - 1 for k in range(len(ROWS))}
    return [0.0 if t in ends else float(stream_T[t + 1]) for t in range(len(TEXT))]


# ---- one: a ratio that no list has ---------------------------------------------------------------------------------


def smallest_so_far(x: Any) -> Tensor:
    """The smallest token ratio of the sequence so far, held fixed; the token keeps its own gradient."""
    return x.prefix_min(x.log_ratio) + x.logp - x.logp.detach()


@pytest.mark.parametrize("split", SPLITS)
def test_a_ratio_of_ones_own_a_running_minimum(split: pg.Split) -> None:
    part = pg.PolicyGradient(surrogate=pg.Unclipped(), ratio=pg.CustomRatio(smallest_so_far), normalizer="sum(token)")
    spec = pg.LossSpec(components=[part])
    answer = solve(batch(), spec, LOGP, split=split)
    old, advantage, expected = shifted(wave(0.9, 0.5, -1.1)), shifted(wave(2.7, 1.5)), [0.0] * len(TEXT)
    start = 0
    for row in ROWS:
        least = math.inf
        for t in range(start, start + len(row) - 1):
            if TEXT[t + 1] == "A":
                least = min(least, float(LOGP[t]) - old[t])
                expected[t] = -advantage[t] * math.exp(least)
        start += len(row)
    near(answer.grad_T, expected, 1e-12)
    near(answer.loss, sum(expected), 1e-12)
    assert answer.metrics["rl/unit_ratio_max"] <= answer.metrics["rl/ratio_max"]


# ---- two: bounds of every turn's own -------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_clip_bounds_that_each_turn_brings_along(split: pg.Split) -> None:
    """The first turn of a row may move by 0.05, later ones by 0.2: as if each part had its own clip."""
    first = [turn == 0 for row in ROWS for turn in turns(row)]
    reach = torch.tensor([0.05 if flag else 0.2 for flag in first], dtype=torch.float64)
    per_turn = pg.PolicyGradient(surrogate=pg.Clip(low="reach", high="reach"), normalizer="sum(token)")
    found = solve(batch(streams={"reach": reach}), pg.LossSpec(components=[per_turn]), LOGP, split=split)
    loss, grad_T = 0.0, torch.zeros_like(LOGP)
    for wide, flags in ((0.05, first), (0.2, [not flag for flag in first])):
        fixed = pg.PolicyGradient(surrogate=pg.Clip(low=wide, high=wide), normalizer="sum(token)")
        spec = pg.LossSpec(components=[fixed], masks=[pg.UserMask(name="mine")], empty_sequences="exclude")
        part = solve(batch(masks={"mine": flags}), spec, LOGP)
        loss, grad_T = loss + part.loss, grad_T + part.grad_T
    near(found.loss, loss, 1e-12)
    assert torch.equal(found.grad_T, grad_T)
    assert found.metrics["rl/clip_low"] > 0 and found.metrics["rl/clip_high"] > 0


def turns(row: str) -> list[int]:
    count, found = -1, []
    for k, letter in enumerate(row):
        count += letter == "A" and (k == 0 or row[k - 1] != "A")
        found.append(count)
    return found


# ---- three: a gate that is soft -----------------------------------------------------------------------------------


def fading(x: Any) -> Tensor:
    """1 inside the trust region, fading with the sequence's mean distance from the sampler outside it."""
    gap = x.unit_mean((x.logp - x.rollout).abs())
    return torch.where(gap < 0.3, 1.0, (0.3 - gap).mul(4).exp())


@pytest.mark.parametrize("split", SPLITS)
def test_a_soft_trust_region_as_a_gate(split: pg.Split) -> None:
    plain = pg.presets.ppo(normalizer="sum(token)")
    soft = plain.replace(gates=[pg.Gate(fading, needs=("rollout",))])
    free, gated = solve(batch(), plain, LOGP, split=split), solve(batch(), soft, LOGP, split=split)
    mu, factor, start = shifted(wave(2.1, 0.5, -1.3)), [0.0] * len(TEXT), 0
    for row in ROWS:
        acts = [t for t in range(start, start + len(row) - 1) if TEXT[t + 1] == "A"]
        gap = sum(abs(float(LOGP[t]) - mu[t]) for t in acts) / len(acts)
        for t in acts:
            factor[t] = 1.0 if gap < 0.3 else math.exp(4 * (0.3 - gap))
        start += len(row)
    near(gated.grad_T, free.grad_T * torch.tensor(factor, dtype=torch.float64), 1e-12)
    members = [f for f in factor if f]
    near(gated.metrics["rl/gate_custom"], sum(1 - f for f in members) / len(members), 1e-12)
    assert 0 < sum(f < 1 for f in members) < len(members)
    broken = plain.replace(gates=[pg.Gate(lambda x: x.logp[:1])])
    refused(pg.DataError, lambda: solve(batch(), broken, LOGP), "gate", "one bool or factor per position")


# ---- every choice, on every arrangement -----------------------------------------------------------------------------

PATH = "mean(sequence) > mean(token)"
RATIOS = (
    "token", "none", "sequence", "turn", "sequence_token", "turn_token", "sequence_sum", "turn_sum", "prefix",
    "prefix_min", pg.Ratio(statistic="sum"), pg.Ratio(statistic="prefix"), pg.Ratio(over="members"),
    pg.CustomRatio(smallest_so_far),
)  # fmt: skip
RULES: tuple[dict[str, Any], ...] = (
    {"gates": [pg.SequenceGate(threshold=0.05)]},
    {"gates": [pg.TVGate(low=0.1, high=0.1), pg.KLGate(threshold=0.02), pg.RatioGate(low=0.5, high=2.0)]},
    {"corrections": [pg.TruncatedIS(of="policy", level="sequence"), pg.Veto(of="policy", unit="turn", low=0.4)]},
)


DRIFT = (
    pg.Statistic(name="drift"),
    pg.Statistic(name="so_far", of="logp", how="prefix", unit="turn", over="members"),
    pg.Statistic(name="all", of="advantage", how="sum"),
)


def drifting(x: Any) -> Tensor:
    """A surrogate with statistics over the component's own ratio, which may be one itself."""
    return x.statistic("drift").square() + 0.1 * x.statistic("so_far") + x.statistic("all") * x.ratio


def near_the_sampler(x: Any) -> Tensor:
    """A gate of the same."""
    return x.statistic("drift") < 0.2


def choices() -> dict[str, pg.LossSpec]:
    """Specs that together name every ratio, surrogate, gate and KL form that needs no statistics pass."""
    found = {}
    for number, ratio in enumerate(RATIOS):
        part = pg.PolicyGradient(surrogate=pg.Clip(low=0.1, high=0.1), ratio=ratio, normalizer=PATH)
        found[f"ratio {number} {ratio if isinstance(ratio, str) else ratio.kind}"] = pg.LossSpec(components=[part])
    for name, preset in pg.presets.PRESETS.items():
        spec = preset.build(**preset.example)
        if not spec.needs_statistics_pass and name != "critic":
            found[name] = spec
    found["real, binary"] = pg.presets.real(form="binary")
    for ratio in ("token", "sequence"):
        surrogate = pg.Surrogate(drifting, statistics=DRIFT)
        part = pg.PolicyGradient(surrogate=surrogate, ratio=ratio, normalizer=PATH)
        found[f"declared, {ratio}"] = pg.LossSpec(
            components=[part], gates=[pg.Gate(near_the_sampler, statistics=DRIFT)]
        )  # fmt: skip
    for number, rules in enumerate(RULES):
        found[f"rules {number}"] = pg.presets.ppo(normalizer=PATH, **rules)
    for gradient in ("plain", "k2", "weighted"):
        kls = [pg.KL(name=kind, estimator=kind, gradient=gradient, to="ref") for kind in ("k1", "k2", "k3", "abs")]
        found[f"kl {gradient}"] = pg.LossSpec(components=kls)
    return found


def given() -> pg.TokenBatch:
    return batch(terminations=["success"] * 4)


@pytest.mark.parametrize("name", choices())
def test_every_choice_gives_one_answer_on_every_arrangement(name: str) -> None:
    spec = choices()[name]
    whole = solve(given(), spec, LOGP)
    for split in SPLITS:
        other = solve(given(), spec, LOGP, split=split)
        near(other.loss, whole.loss, 1e-11)
        torch.testing.assert_close(other.grad_T, whole.grad_T, rtol=1e-11, atol=1e-14)


def sharded(rank: int, world: int, wholes: dict[str, tuple[float, Tensor]]) -> dict[str, tuple[float, float]]:
    """Every choice on context-parallel shards, padded and packed: error of loss and of the gradient by each token."""
    found = {}
    for name, spec in choices().items():
        loss, grad_T = wholes[name]
        for split in (pg.Split(sequences=2), pg.Split(max_tokens=32)):
            made = pg.plan([given()], spec, split=split, group="local",
                           arrangement=Arrangement(multiple=2 * world, fixed=True, left=True))  # fmt: skip
            leaf = LOGP.clone().requires_grad_()
            total = torch.zeros((), dtype=torch.float64)
            for micro in made.microbatches():
                part = shard(micro, rank, world, dist.group.WORLD)
                total = total + pg.policy_loss(pg.TokenLogprobs(logprob=arrange(part, leaf)), part).loss
            total.backward()
            assert leaf.grad is not None
            both = torch.cat([total.detach()[None], leaf.grad])
            dist.all_reduce(both)
            scale = max(float(grad_T.abs().max()), 1e-9)
            found[f"{name}, {'packed' if split.packed else 'padded'}"] = (
                abs(float(both[0]) - loss) / max(abs(loss), 1e-9), float((both[1:] - grad_T).abs().max()) / scale,
            )  # fmt: skip
    return found


@pytest.mark.multiproc
def test_every_choice_gives_one_answer_on_context_parallel_shards() -> None:
    answers = {name: solve(given(), spec, LOGP) for name, spec in choices().items()}
    wholes = {name: (answer.loss, answer.grad_T) for name, answer in answers.items()}
    for by_choice in run_world(sharded, 2, wholes):
        assert len(by_choice) == 2 * len(wholes)
        for name, (loss, gradient) in by_choice.items():
            assert loss < 1e-11 and gradient < 1e-11, name


def test_a_statistic_that_is_not_declared_is_refused_by_name() -> None:
    part = pg.PolicyGradient(surrogate=pg.Surrogate(lambda x: x.statistic("gap"), statistics=DRIFT))
    refused(pg.SpecError, lambda: solve(batch(), pg.LossSpec(components=[part]), LOGP), "no statistic 'gap'", "so_far")


def test_which_presets_stand_on_their_own_token() -> None:
    joined = {"gspo", "gspo_token", "luspo", "gmpo", "topr", "vespo", "kimi", "fipo", "real", "opsm", "critic"}
    for name, preset in pg.presets.PRESETS.items():
        assert preset.build(**preset.example).by_token == (name not in joined), name
    ppo = pg.presets.ppo()
    assert not ppo.add(pg.Term("own", lambda x: x.logp)).by_token
    assert not ppo.replace(gates=[pg.Gate(fading)]).by_token
    assert not ppo.replace(corrections=[pg.TruncatedIS(of="policy", level="geometric")]).by_token
    assert ppo.replace(corrections=[pg.TruncatedIS(of="policy"), pg.TruncatedIS(level="sequence")]).by_token
