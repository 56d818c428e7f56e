"""The whole of plan and objective against the oracle, and against itself under every way of cutting the step.

Rows (tests/support/data.py) are multi-turn, with holes in the masks, truncated rows, and prompts and episodes of
several rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.verify.oracle import oracle_loss
from support import jobs
from support.data import Dice, Row, attach_streams
from support.steps import NAN, Answer, near, solve

CLIP = pg.Clip(low=0.2, high=0.28, dual=1.4)


def curious(x: Any) -> Tensor:
    """A term through statistics of turns and sequences."""
    per_turn, per_row = x.unit_mean(x.log_ratio, "turn"), x.unit_sum(x.logp, "sequence")
    return per_turn.exp() * x.advantage + 0.01 * per_row * x.logp + x.prefix_sum(x.log_ratio).square()


def rl(normalizer: str, **more: Any) -> pg.PolicyGradient:
    return pg.PolicyGradient(**({"surrogate": CLIP, "normalizer": normalizer} | more))


def spec(*components: Any, **more: Any) -> pg.LossSpec:
    return pg.LossSpec(components=components, **more)


KEEP = pg.UserMask(name="keep")
SPECS: dict[str, pg.LossSpec] = {
    "token mean": spec(rl("mean(token)")),
    "sequence mean": spec(rl("mean(sequence) > mean(token)"), masks=[KEEP]),
    "sequence sum": spec(rl("mean(sequence) > sum(token)"), masks=[pg.DropZeroAdvantage()]),
    "budget": spec(rl("mean(sequence) > sum(token)/4096", surrogate=pg.Clip()), pg.Entropy(coef=0.01)),
    "old budget": spec(rl("sum(sequence) > sum(token)/4096"), old="rollout"),
    "prompt mean": spec(rl("mean(prompt) > mean(token)"), masks=[pg.DropTruncated(), KEEP]),
    "every task, every rollout": spec(
        rl("mean(prompt) > mean(episode) > mean(token)"),
        pg.KL(normalizer="mean(episode) > sum(sequence)/avg > mean(token)"),
    ),
    "turns": spec(
        rl("mean(episode) > mean(turn) > mean(token)"), pg.KL(estimator="k2", normalizer="sum(turn)/avg > sum(token)")
    ),
    "five levels": spec(rl("mean(prompt) > mean(episode) > sum(sequence)/sqrt > mean(turn) > sum(token)/pow(0.5)")),
    "reinforce": spec(
        rl("sum(token)/sqrt", surrogate=pg.Reinforce(), ratio="none"), pg.KL(estimator="k1", to="old"), old="policy"
    ),
    "units all": spec(
        rl("mean(prompt) > mean(sequence) > mean(turn) > mean(token)", units="all"),
        masks=[pg.DropTruncated(), pg.DropZeroAdvantage(), KEEP],
    ),
    "divided by weights": spec(
        rl("mean(prompt) > mean(sequence) > mean(token)", divide_by="weights"),
        pg.CrossEntropy(divide_by="weights"),
        masks=[KEEP],
    ),
    "echo, paper": pg.presets.echo(masks=[pg.UserMask(name="keep", on=("ce",))], kl=0.01),
    "echo, prime-rl": pg.presets.echo(
        "prime_rl", masks=[pg.UserMask(name="keep", on=("ce",)), pg.DropTruncated(on=("ce",))]
    ),
    "corrected": pg.presets.grpo(kl_estimator="k1", entropy=0.01, corrections=[pg.TruncatedIS(high=1.1)], masks=[KEEP]),
    "own term": spec(pg.Term("t", curious, coef=0.3, normalizer="mean(turn) > mean(token)"), masks=[KEEP]),
}
EVERY_SPEC = pytest.mark.parametrize("name", SPECS)
SPLITS = {
    **{f"{n} rows": pg.Split(sequences=n) for n in (1, 2, 5)},
    **{f"{n} micro-batches": pg.Split(microbatches=n) for n in (2, 7)},
    "packed": pg.Split(max_tokens=48),
    "packed to multiples": pg.Split(max_tokens=64, multiple_of=8),
    "packed whole": pg.Split(max_tokens=4096),
}


@dataclass(frozen=True)
class Case:
    """Rows, and log-probs and entropies per row in token order."""

    rows: list[Row]
    logp: list[Tensor]
    entropy: list[Tensor]

    def aligned(self, order: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Both as target-aligned streams [T] of the rows in ``order``."""
        places = order if order is not None else range(len(self.rows))
        end = torch.full((1,), NAN, dtype=torch.float64)
        logp_T, entropy_T = (torch.cat([x for i in places for x in (s[i][1:], end)]) for s in (self.logp, self.entropy))
        return logp_T, entropy_T


@functools.cache
def case(seed: int = 3) -> Case:
    rows = jobs.rows_of_step(seed)
    dice = Dice(seed + 1)
    logp = [dice.normal(len(row["tokens"]), 0.5) - 2.0 for row in rows]
    attach_streams(rows, logp, seed)
    return Case(rows, logp, [dice.normal(len(row["tokens"])).abs() for row in rows])


def weights_given(loss: pg.LossSpec) -> list[str]:
    return [name for name in ("rl", "ce") if name in loss.names]


def answer(loss: pg.LossSpec, split: pg.Split) -> Answer:
    return solve(jobs.batch_of(case().rows, weights_given(loss)), loss, *case().aligned(), split=split)


@functools.cache
def whole(name: str) -> Answer:
    return answer(SPECS[name], pg.Split(microbatches=1))


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Largest difference against the largest entry."""
    assert float((got - expected).abs().max()) <= tolerance * float(expected.abs().max())


@EVERY_SPEC
def test_loss_gradient_and_counts_equal_the_oracles(name: str) -> None:
    loss, data = SPECS[name], case()
    plain = loss.to_dict()
    for part, given in zip(plain["components"], loss.components, strict=True):
        if part["kind"] == "term":
            part["fn"] = given.fn  # type: ignore[union-attr]
    rows = [row | {"weights": {key: row["weights"][key] for key in weights_given(loss)}} for row in data.rows]
    logp, entropy = ([x.clone().requires_grad_() for x in part] for part in (data.logp, data.entropy))
    found = oracle_loss(logp, entropy, rows, plain)
    found["loss"].backward()
    mine = whole(name)
    near(mine.loss, found["loss"], 1e-12)
    end = torch.zeros(1, dtype=torch.float64)

    def moved(parts: list[Tensor]) -> Tensor:
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in parts]
        assert not any(g[0] for g in grads)
        return torch.cat([piece for g in grads for piece in (g[1:], end)])

    close(mine.grad_T, moved(logp))
    assert mine.grad_T.abs().max() > 1e-6
    if loss.needs_entropy:
        close(mine.entropy_grad_T, moved(entropy))
    for part in loss.components:
        counts = found["counts"][part.name]
        levels = [
            level
            for level in ("prompt", "episode", "sequence", "turn", "token")
            if level in mine.plan.counts[part.name]
        ]
        assert mine.plan.counts[part.name]["members"] == counts["members"]
        for level in levels:
            near(float(mine.plan.counts[part.name][level]), float(counts[level]), 1e-13)
        near(mine.metrics[f"{part.name}/loss"], found["components"][part.name], 1e-12)
        if f"{part.name}/clip_low" in mine.metrics:
            clipped = sum(mine.metrics[f"{part.name}/clip_{side}"] for side in ("low", "high", "dual"))
            near(clipped, found["clip_fraction"][part.name], 1e-12)


def test_the_data_can_tell() -> None:
    """5 to 40 percent of the tokens are clipped on each side, advantages have both signs, rows uneven lengths."""
    metrics = whole("token mean").metrics
    for side in ("low", "high"):
        assert 0.05 < metrics[f"rl/clip_{side}"] < 0.4
    assert metrics["rl/clip_dual"] > 0 and len({len(row["tokens"]) for row in case().rows}) > 4
    assert whole("corrected").metrics["rl/is_truncated"] > 0.1


@EVERY_SPEC
@pytest.mark.parametrize("split", SPLITS)
def test_gradient_is_invariant_to_microbatches_and_packing(name: str, split: str) -> None:
    one, other = whole(name), answer(SPECS[name], SPLITS[split])
    near(other.loss, one.loss, 1e-12)
    close(other.grad_T, one.grad_T)
    assert torch.equal(
        other.plan.components[SPECS[name].names[0]].weight_T, one.plan.components[SPECS[name].names[0]].weight_T
    )


@EVERY_SPEC
def test_order_of_rows_and_cut_into_batches_never_matter(name: str) -> None:
    """Rows dealt out to three batches in another order: the same loss, and the same gradient of each token."""
    data, loss = case(), SPECS[name]
    order = [i for start in (2, 0, 1) for i in range(start, len(data.rows), 3)]
    batches = [
        jobs.batch_of([data.rows[i] for i in range(s, len(data.rows), 3)], weights_given(loss)) for s in (2, 0, 1)
    ]
    other = solve(batches, loss, *data.aligned(order), split=pg.Split(sequences=4))
    near(other.loss, whole(name).loss, 1e-12)
    lengths = [len(row["tokens"]) for row in data.rows]
    mine = whole(name).grad_T.split(lengths)
    close(other.grad_T, torch.cat([mine[i] for i in order]))


def test_token_mean_without_whole_counts_depends_on_the_cut() -> None:
    """The negative: each row planned by itself, averaged, is another loss under token mean."""
    data, loss = case(), SPECS["token mean"]
    logp_T, entropy_T = data.aligned()
    lengths = [len(row["tokens"]) for row in data.rows]
    parts = zip(data.rows, logp_T.split(lengths), entropy_T.split(lengths), strict=True)
    apart = [solve(jobs.batch_of([row], ["rl"]), loss, *streams).loss for row, *streams in parts]
    assert abs(sum(apart) / len(apart) - whole("token mean").loss) > 1e-3
