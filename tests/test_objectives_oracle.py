"""Everything that can be trained, against the oracle: loss, every gradient, and the counts.

The rows are those of tests/support/data.py: several turns, holes in the masks, truncated rows, episodes of two rows.
What each kind means is written down once more in megatron_pgloss/verify/oracle/, token by token and unit by unit.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.objective import surrogates
from megatron_pgloss.spec.surrogates import AnySurrogate
from support.cover import paired, pairs, visited
from support.objectives import (
    CORRECTIONS,
    DECLARED,
    FORMS,
    GATES,
    MASKS,
    PAIRS,
    RATIOS,
    SURROGATES,
    answer,
    built,
    gap_is_small,
    judged,
    presets,
    rl,
    step,
)
from support.steps import NAN, pictured, solve

TOLERANCE = 1e-12
KEEP = pg.UserMask(name="keep")


def close(got: Tensor, expected: Tensor, what: str) -> None:
    """Largest difference against the largest entry."""
    worst, largest = float((got - expected).abs().max()), float(expected.abs().max())
    assert worst <= TOLERANCE * largest, f"{what}: off by {worst:.2e} of {largest:.2e}"


def agree(spec: pg.LossSpec) -> Any:
    """The package and the oracle say the same; returns the package's answer."""
    mine = answer(spec)
    found, grads = judged(spec)
    loss = float(found["loss"].detach())
    assert abs(mine.loss - loss) <= TOLERANCE * max(abs(loss), 1e-3), (mine.loss, loss)
    close(mine.grad_T, grads["logp"], "gradient by log-probs")
    close(mine.entropy_grad_T, grads["entropy"], "gradient by entropies")
    close(mine.value_grad_T, grads["value"], "gradient by values")
    for part in spec.components:
        counts, want = mine.plan.counts[part.name], found["counts"][part.name]
        for level in ("prompt", "episode", "sequence", "turn", "token"):
            if level in counts:
                assert float(counts[level]) == pytest.approx(float(want[level]), rel=1e-13), (part.name, level)
        assert mine.metrics[f"{part.name}/loss"] == pytest.approx(
            float(found["components"][part.name].detach()), rel=1e-11
        )
    return mine


def trained(case: tuple[str, str]) -> set[Any]:
    """Every surrogate, every ratio, and every surrogate with every kind of ratio."""
    surrogate, ratio = case
    kind = RATIOS[ratio]
    own = kind if isinstance(kind, str) else f"{getattr(kind, 'statistic', 'own')} {getattr(kind, 'gradient', '')}"
    by = own if own in ("token", "none") else "a unit's, its gradient the token's" if "token" in own else "a unit's"
    return {f"surrogate {surrogate}", f"ratio {ratio}", (surrogate, by)}


@pytest.mark.parametrize(("surrogate", "ratio"), visited("surrogates x ratios", PAIRS, trained))
def test_every_surrogate_of_every_ratio(surrogate: str, ratio: str) -> None:
    part = rl(surrogate=SURROGATES[surrogate], ratio=RATIOS[ratio])
    assert float(agree(pg.LossSpec(components=[part], masks=[KEEP])).grad_T.abs().max()) > 1e-6


ONES = [name for name, kind in built(AnySurrogate).items() if not isinstance(kind, pg.Surrogate)]
"""Of a user's function nothing is known but whether it read the ratio."""


def of_single_tokens(surrogate: str, advantages: list[float], bound: float = 20.0) -> Any:
    """d = 1.5 and -1.5, twice, each in a row of one action, so that a unit is a token."""
    batch = pictured(
        *["cA"] * 4, old_logprobs=-3.0, ref_logprobs=-2.0, advantages=advantages, prompt_ids=[0, 0, 1, 1],
        sample_ids=list("abcd"), streams={"room": 0.2},
    )  # fmt: skip
    spec = pg.LossSpec(components=[rl(surrogate=SURROGATES[surrogate])], log_ratio_bound=bound)
    return solve(batch, spec, [-1.5, NAN, -4.5, NAN, -1.5, NAN, -4.5, NAN])


@pytest.mark.parametrize("name", ONES)
def test_every_surrogate_says_what_the_bound_took(name: str) -> None:
    """A of both signs on d of both signs. The bound of 1 took what is 0 under it and not under a bound of 20."""
    signs = [1.0, 1.0, -1.0, -1.0]
    held, free = of_single_tokens(name, signs, bound=1.0), of_single_tokens(name, signs)
    took = float(((held.grad_T == 0) & (free.grad_T != 0)).sum()) / 4
    assert held.metrics.get("rl/bounded", 0.0) == took, f"{name}: held_N is not where the bound took the gradient"


@pytest.mark.parametrize("name", ONES)
def test_every_surrogate_says_what_it_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``bounds``: whether its term says which bound decided; ``moves_at_zero_advantage``: whether A = 0 has a slope."""
    part, seen = SURROGATES[name], []
    term = surrogates.SURROGATES[part.kind]
    monkeypatch.setitem(surrogates.SURROGATES, part.kind, lambda *x: seen.append(term(*x)) or seen[-1])
    moved = bool(of_single_tokens(name, [0.0] * 4).grad_T.any())
    assert part.bounds == (seen[0].clipped is not None), f"{name}: bounds is not whether bounds decide some tokens"
    assert part.moves_at_zero_advantage == moved, f"{name}: moves_at_zero_advantage is not what a token of A = 0 does"


@pytest.mark.parametrize("ratio", ["sequence_sum", "prefix", "own"])
def test_a_declared_statistic_over_a_ratio_that_is_one_itself(ratio: str) -> None:
    """The mean of a sum is not the mean of what it is a sum of."""
    part = rl(surrogate=SURROGATES["Surrogate, declaring"], ratio=RATIOS[ratio])
    agree(pg.LossSpec(components=[part], gates=[pg.Gate(gap_is_small, statistics=DECLARED)], masks=[KEEP]))


def formed(case: tuple[str, str]) -> set[Any]:
    """Every two of estimator, gradient, target, base and source of old."""
    return pairs([*FORM_PARTS[case[0]], f"old {case[1]}"])


FORM_PARTS = {
    name: (kl.estimator, f"gradient {kl.gradient}", f"to {kl.to}", f"of {kl.base}") for name, kl in FORMS.items()
}
SOURCES = ["given", "rollout", "policy"]


@pytest.mark.parametrize(("form", "old"), visited("forms of the KL x old", list(product(FORMS, SOURCES)), formed))
def test_every_form_of_the_kl(form: str, old: str) -> None:
    agree(pg.LossSpec(components=[rl(), FORMS[form].replace(normalizer="mean(turn) > mean(token)")], old=old))


@pytest.mark.parametrize(
    ("name", "count_rejected", "of"),
    paired("corrections x denominators x of", name=CORRECTIONS, count_rejected=[True, False], of=["old", "policy"]),
)
def test_every_correction(name: str, count_rejected: bool, of: str) -> None:
    rule = CORRECTIONS[name]
    if of == "policy":
        if rule.kind == "staleness":
            return  # versions have no log-prob
        rule = rule.replace(of="policy")
    parts = [rl(count_rejected=count_rejected), pg.KL(coef=0.1, count_rejected=count_rejected)]
    spec = pg.LossSpec(components=parts, corrections=[rule], masks=[KEEP])
    corrected, bare = agree(spec), answer(spec.replace(corrections=()))
    assert not torch.equal(corrected.grad_T, bare.grad_T)


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str) -> None:
    spec = pg.LossSpec(components=[rl(), pg.KL(coef=0.1), pg.CrossEntropy(coef=0.1)], masks=[MASKS[name]])
    masked, bare = agree(spec), answer(spec.replace(masks=()))
    assert not torch.equal(masked.grad_T, bare.grad_T)


@pytest.mark.parametrize("count_rejected", [True, False])
@pytest.mark.parametrize("name", GATES)
def test_every_gate(name: str, count_rejected: bool) -> None:
    if name == "soft" and not count_rejected:
        with pytest.raises(pg.DataError, match="a factor rejects nothing"):
            answer(pg.LossSpec(components=[rl(count_rejected=False)], gates=[GATES["soft"]]))
        return
    part = rl(surrogate=pg.spec.Unclipped(), count_rejected=count_rejected)
    spec = pg.LossSpec(components=[part, pg.Entropy(coef=0.01)], gates=[GATES[name]], masks=[KEEP])
    gated, bare = agree(spec), answer(spec.replace(gates=()))
    assert not torch.equal(gated.grad_T, bare.grad_T)


@pytest.mark.parametrize("old", ["given", "rollout", "policy", "interpolate", "record"])
@pytest.mark.parametrize("ratio", ["token", "sequence", "none"])
def test_every_source_of_old(old: str, ratio: str) -> None:
    rules = [pg.TruncatedIS(high=1.1, of="old" if old in ("given", "interpolate") else "policy")]
    if old == "rollout":
        rules = []
    parts = [rl(ratio=ratio), pg.KL(to="old", gradient="weighted", coef=0.1)]
    agree(pg.LossSpec(components=parts, old=old, corrections=rules, masks=[KEEP]))


@pytest.mark.parametrize("name", pg.presets.PRESETS)
def test_every_preset(name: str) -> None:
    mine = agree(presets()[name].replace(masks=(*presets()[name].masks, KEEP)))
    assert float((mine.grad_T + mine.value_grad_T).abs().max()) > 1e-6


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_counts_for_itself(clip: float | None) -> None:
    value = pg.spec.Value(clip=clip, coef=0.5, normalizer="mean(turn) > mean(token)")
    mine = agree(pg.LossSpec(components=[rl(), value], masks=[KEEP]))
    assert float(mine.value_grad_T.abs().max()) > 1e-6


def test_rules_together() -> None:
    """Masks, three corrections, two gates, kept denominators, user weights that divide, every level named."""
    spec = pg.LossSpec(
        components=[
            rl(
                "mean(prompt) > mean(episode) > sum(sequence)/sqrt > mean(turn) > mean(token)",
                surrogate=pg.Clip(low=0.2, high=0.28, dual=1.4), ratio="turn_token", count_rejected=False, units="all",
                divide_by="weights",
            ),
            pg.KL(coef=0.1, gradient="weighted", count_rejected=False, normalizer="mean(episode) > mean(token)"),
            pg.CrossEntropy(coef=0.3, count="observations", normalizer="mean(sequence) > mean(token)"),
            pg.spec.Value(coef=0.2),
        ],
        corrections=[
            *(CORRECTIONS[name] for name in ("IS by turn, geometric", "stale turns", "k3 max by sequence")),
            CORRECTIONS["veto on both sides"].replace(of="policy"),
        ],
        gates=[GATES["TVGate"], GATES["EntropyGate"].replace(share=0.7), GATES["RatioGate"].replace(on=("kl",))],
        masks=[pg.DropTruncated(), pg.DropZeroAdvantage(), pg.UserMask(name="keep", on=("rl", "ce"))],
    )  # fmt: skip
    agree(spec)


def test_what_is_tested_can_tell() -> None:
    """Each rule touches some tokens and leaves some."""
    rows, _ = step()
    total = sum(map(sum, (row["action"] for row in rows)))
    for name, rule in CORRECTIONS.items():
        spec = pg.LossSpec(components=[rl(count_rejected=False), pg.KL()], corrections=[rule])
        left = answer(spec).plan.counts["rl"]["token"]
        assert 0 < left < total or (left == total and not rule.rejects), (name, left, total)
    for name, gate in GATES.items():
        if name != "soft":
            spec = pg.LossSpec(components=[rl(surrogate=pg.spec.Unclipped(), count_rejected=False)], gates=[gate])
            assert 0 < answer(spec).plan.counts["rl"]["token"] < total, name
