"""What must hold for everything that can be trained, drawn by hypothesis over all parts that the spec offers.

Values outside never matter, by a bit; neither do the order of the rows, their ids, or how the step is cut; policies
that are equal have ratio exactly 1 and the plain policy gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megatron_pgloss as pg
from support.cover import EXHAUSTIVE, paired
from support.objectives import (
    CORRECTIONS,
    FORMS,
    GATES,
    NOW,
    RATIOS,
    SURROGATES,
    aligned,
    answer,
    batch,
    rl,
    step,
)
from support.steps import ONE, Answer, solve

KEEP = pg.UserMask(name="keep")
NORMALIZERS = [
    "mean(token)",
    "mean(sequence) > sum(token)/64",
    "mean(prompt) > mean(episode) > mean(turn) > mean(token)",
    "sum(sequence)/avg > sum(token)/sqrt",
]


def whole(part: Any, **rules: Any) -> pg.LossSpec:
    """A spec of one component."""
    return pg.LossSpec(components=[part], masks=[KEEP], **rules)


def over_units(surrogate: Any) -> bool:
    """Whether it takes a statistic over units of its own."""
    return surrogate.token_ratio_only or bool(getattr(surrogate, "statistics", ()))


BY_TOKEN: dict[str, pg.LossSpec] = {
    **{f"surrogate {k}": whole(rl(surrogate=s)) for k, s in SURROGATES.items() if not over_units(s)},
    **{f"KL {name}": whole(form) for name, form in FORMS.items()},
    **{f"normaliser {n}": whole(rl(n)) for n in NORMALIZERS},
    **{f"gate {k}": whole(rl(surrogate=pg.spec.Unclipped()), gates=[g]) for k, g in GATES.items() if g.kind != "opsm"},
    "ratio none": whole(rl(ratio="none")),
    "entropy": whole(pg.Entropy()),
    "value": whole(pg.spec.Value(clip=0.2)),
    "cross entropy": whole(pg.CrossEntropy()),
}
"""Whatever is no member may hold anything."""
BY_UNIT: dict[str, pg.LossSpec] = {
    **{f"ratio {name}": whole(rl(ratio=ratio)) for name, ratio in RATIOS.items() if name not in ("token", "none")},
    **{f"surrogate {k}": whole(rl(surrogate=s)) for k, s in SURROGATES.items() if over_units(s)},
    **{f"gate {k}": whole(rl(surrogate=pg.spec.Unclipped()), gates=[g]) for k, g in GATES.items() if g.kind == "opsm"},
    **{
        f"correction {name}, of {of}": whole(rl(), corrections=[rule if of == "old" else rule.replace(of=of)])
        for name, rule in CORRECTIONS.items()
        for of in (("old", "policy") if rule.kind != "staleness" else ("old",))
        if rule.on is None or set(rule.on) == {"rl"}
    },
}
"""Actions that a mask took still vote in the statistics of their unit; what was not sampled may hold anything."""
SPECS = BY_TOKEN | BY_UNIT
GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e4, -1e4]


def read(name: str, row: dict[str, Any]) -> list[bool]:
    """The tokens of a row whose streams may matter."""
    if name == "cross entropy":
        return [o and k for o, k in zip(row["observation"], row["masks"]["keep"], strict=True)]
    if name in BY_UNIT:
        return list(row["action"])
    return [a and k for a, k in zip(row["action"], row["masks"]["keep"], strict=True)]


def poisoned(name: str, garbage: list[float]) -> Answer:
    """The answer with ``garbage``, by turns, in every stream outside."""
    rows, says = step()
    spec, turn = SPECS[name], 0
    part = spec.components[0].name

    def filled(values: Any, where: list[bool]) -> list[float]:
        nonlocal turn
        turn += 1
        return [
            x if here else garbage[(turn + k) % len(garbage)]
            for k, (x, here) in enumerate(zip(values, where, strict=True))
        ]

    changed, streams = [], {key: [] for key in says}
    for i, row in enumerate(rows):
        where = read(name, row)
        new = row | {
            key: filled(row[key], where) for key in ("advantages", "old", "rollout", "ref", "values", "returns")
        }
        new["streams"] = {key: filled(values, where) for key, values in row["streams"].items()}
        new["weights"] = {k: filled(w, where) if k == part else w for k, w in row["weights"].items()}
        new["version"] = [v if here else -(10**9) for v, here in zip(row["version"], row["action"], strict=True)]
        changed.append(new)
        for key, parts in says.items():
            streams[key].append(torch.tensor(filled(parts[i].tolist(), where), dtype=torch.float64))
    return solved(batch(changed, spec), spec, streams)


def solved(given: pg.TokenBatch, spec: pg.LossSpec, says: dict[str, list[Tensor]]) -> Answer:
    worth = aligned(says["value"]) if spec.components[0].kind == "value" else None
    return solve(given, spec, aligned(says["logp"]), aligned(says["entropy"]), value=worth, version=NOW)


@functools.cache
def clean(name: str) -> Answer:
    return answer(SPECS[name])


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=3 if EXHAUSTIVE else 1)
@given(garbage=st.lists(st.sampled_from(GARBAGE), min_size=7, max_size=7))
def test_values_outside_never_matter_by_a_bit(name: str, garbage: list[float]) -> None:
    bare, other = clean(name), poisoned(name, garbage)
    assert other.loss == bare.loss != 0.0
    for key in ("grad_T", "entropy_grad_T", "value_grad_T"):
        assert torch.equal(getattr(other, key), getattr(bare, key)), key
    assert other.metrics[f"{SPECS[name].components[0].name}/fault"] == 0.0


SPLITS = [pg.Split(sequences=1), pg.Split(sequences=4), pg.Split(microbatches=3), pg.Split(max_tokens=64), ONE]


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=2 if EXHAUSTIVE else 1)
@given(data=st.data())
def test_order_ids_and_cuts_never_matter(name: str, data: st.DataObject) -> None:
    """Beyond the order of summation. Rows in any order, dealt to any number of batches; ids under other names."""
    rows, says = step()
    order = data.draw(st.permutations(range(len(rows))))
    split, cuts = data.draw(st.sampled_from(SPLITS)), data.draw(st.integers(1, 4))
    rename = data.draw(st.sampled_from([lambda x: x, lambda x: f"<{x}>", lambda x: 1000 + sum(map(ord, str(x)))]))
    spec, bare = SPECS[name], clean(name)
    moved = [rows[i] | {"prompt": rename(rows[i]["prompt"]), "episode": rename(str(rows[i]["episode"]))} for i in order]
    size = -(-len(moved) // cuts)
    batches = [batch(moved[k : k + size], spec) for k in range(0, len(moved), size)]
    parts = {key: [streams[i] for i in order] for key, streams in says.items()}
    worth = aligned(parts["value"]) if spec.components[0].kind == "value" else None
    other = solve(
        batches, spec, aligned(parts["logp"]), aligned(parts["entropy"]), value=worth, split=split, version=NOW
    )
    assert abs(other.loss - bare.loss) <= 1e-12 * max(abs(bare.loss), 1e-3)
    lengths = [len(row["tokens"]) for row in rows]
    for key in ("grad_T", "entropy_grad_T", "value_grad_T"):
        pieces = getattr(bare, key).split(lengths)
        expected = torch.cat([pieces[i] for i in order])
        worst = float((getattr(other, key) - expected).abs().max())
        assert worst <= 1e-12 * max(float(expected.abs().max()), 1e-6), (key, worst)


PLAIN = {name: s for name, s in SURROGATES.items() if s.kind not in ("real", "distill", "nll", "custom")}
"""Surrogates whose slope at ratio 1 is that of -A log pi."""


@pytest.mark.parametrize(
    ("name", "ratio"),
    paired(
        "equal policies", name=PLAIN, ratio=[name for name in RATIOS if name != "own"],
        kinds={"name": lambda name: PLAIN[name].kind, "ratio": lambda name: name.split("_")[0].split(",")[0]},
    ),
)  # fmt: skip
def test_equal_policies_have_ratio_one_and_the_plain_policy_gradient(name: str, ratio: str) -> None:
    """One advantage an episode and no user weights, for a gradient through a mean shares what its unit has."""
    surrogate = PLAIN[name]
    if surrogate.token_ratio_only and ratio != "token":
        return
    rows, says = step()
    worth = {(row["prompt"], row["episode"]): row["advantages"][-1] or 1.0 for row in rows}
    same = [row | {"old": x.tolist(), "advantages": [worth[row["prompt"], row["episode"]]] * len(x),
             "weights": {"rl": [1.0] * len(x)}}
            for row, x in zip(rows, says["logp"], strict=True)]  # fmt: skip
    unit = next((unit for unit in ("turn", "episode") if unit in str(RATIOS[ratio]) or unit in name), "sequence")
    path = f"mean({unit}) > mean(token)"
    through = (
        getattr(RATIOS[ratio], "gradient", "token") == "through" and getattr(RATIOS[ratio], "statistic", "") != "mean"
    )
    if through:
        return  # the gradient of a sum is not the mean's
    specs = [pg.LossSpec(components=[rl(path, surrogate=surrogate, ratio=RATIOS[ratio])]),
             pg.presets.reinforce(normalizer=path)]  # fmt: skip
    one, plain = (solved(batch(same, spec), spec, says) for spec in specs)
    for key in ("rl/ratio_min", "rl/ratio_max", "rl/unit_ratio_min", "rl/unit_ratio_max"):
        assert one.metrics.get(key, 1.0) == 1.0, key
    worst = float((one.grad_T - plain.grad_T).abs().max())
    assert worst <= 1e-13 * float(plain.grad_T.abs().max())
