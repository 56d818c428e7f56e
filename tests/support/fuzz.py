"""Random specs on random rows under random cuts, each held against the oracle.

A case is a function of its seed and number alone. All that a spec offers is drawn: components with normalisers of
any nesting, surrogates, ratios, gates, corrections, masks, sources of ``old``; log-ratios from exactly 0 to far beyond
the bound; rows with holes, of one token, without any token of a component, that broke; NaN wherever nothing may look.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.verify.data.rows import Dice, Row, attach_streams, make_rows
from megatron_pgloss.verify.oracle import oracle_loss
from support import objectives
from support.steps import solve

NOW = objectives.NOW
TOLERANCE = 1e-10
"""The project's for float64: of gradients against the largest entry, of the loss against its absolute summands."""
UNITS = ("prompt", "episode", "sequence", "turn")
DIVISORS = ("", "/7", "/0.5", "/sqrt", "/pow(0.3)", "/avg")
SCALES = (0.0, 1e-3, 0.25, 0.25, 1.0, 6.0, 15.0, 40.0)
"""Standard deviations of log pi - log old; the bound on log-ratios is 20."""
STREAMS = ("advantages", "old", "rollout", "ref", "values", "returns")


@dataclass(frozen=True)
class Outcome:
    """Of one case."""

    kind: str
    """``equal``, ``refused`` (a PGLossError that names its reason), or what is wrong: ``off``, ``raised``."""
    what: str
    case: str
    """The spec, and how it was cut."""


def outcome(seed: int, number: int) -> Outcome:
    """Draw a case and judge it."""
    dice = random.Random(f"{seed}/{number}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec = draw_spec(dice)
    except pg.PGLossError as error:
        return Outcome("refused", str(error).splitlines()[0], "spec")
    rows, says = draw_rows(dice, spec)
    order = dice.sample(range(len(rows)), len(rows))
    split = dice.choice([pg.Split(sequences=dice.randint(1, 4)), pg.Split(microbatches=dice.randint(1, 5))])
    if dice.random() < 0.4:
        split = pg.Split(max_tokens=max(len(row["tokens"]) for row in rows) * dice.randint(1, 3))
    cuts = dice.randint(1, min(3, len(rows)))
    named = f"{seed}/{number}: {spec.to_dict()} {split} order {order} in {cuts}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine = _solved(spec, rows, says, split, order, cuts)
    except pg.PGLossError as error:
        return Outcome("refused", str(error).splitlines()[0], named)
    except Exception as error:  # noqa: BLE001  whatever it is, it is what a fuzz looks for
        return Outcome("raised", f"{type(error).__name__}: {error}", named)
    return Outcome(*_judged(spec, rows, says, mine, order), named)


# ---- what is drawn -------------------------------------------------------------------------------------------------


def draw_path(dice: random.Random) -> str:
    """A normaliser of any nesting."""
    units = [unit for unit in UNITS if dice.random() < 0.4] + ["token"]
    return " > ".join(
        f"mean({unit})" if dice.random() < 0.5 else f"sum({unit}){dice.choice(DIVISORS)}" for unit in units
    )


def draw_spec(dice: random.Random) -> pg.LossSpec:
    """A spec of one to four components; most are right, some the package refuses."""
    ratio = dice.choice(list(objectives.RATIOS.values()))
    token_only = ratio == "token" or dice.random() < 0.3
    surrogates = [s for s in objectives.SURROGATES.values() if token_only or not s.token_ratio_only]
    surrogate = dice.choice(surrogates)
    ratio = "token" if surrogate.token_ratio_only else ratio

    def shared(**more: Any) -> dict[str, Any]:
        found = dict(normalizer=draw_path(dice), coef=dice.choice([1.0, 0.3, 2.5]), **more)
        if dice.random() < 0.2:
            found["units"] = "all"
        if dice.random() < 0.2:
            found["divide_by"] = "weights"
        if dice.random() < 0.2:
            found["count_rejected"] = False
        if dice.random() < 0.15:
            found["count"] = "keep"
        return found

    form = dice.choice(list(objectives.FORMS.values()))
    pool: list[Any] = [
        lambda: pg.PolicyGradient(surrogate=surrogate, ratio=ratio, **shared(name="rl")),
        lambda: pg.KL(estimator=form.estimator, gradient=form.gradient, to=form.to, base=form.base, **shared()),
        lambda: pg.Entropy(**shared()),
        lambda: pg.CrossEntropy(**shared()),
        lambda: pg.spec.Value(clip=dice.choice([None, 0.2]), **shared()),
    ]
    chosen = [pool[0]] if dice.random() < 0.8 else []
    chosen += [make for make in pool[1:] if dice.random() < 0.35]
    parts = [make() for make in chosen or [dice.choice(pool)]]
    rules: dict[str, Any] = {}
    if dice.random() < 0.4:
        rules["corrections"] = [
            rule if rule.kind == "staleness" or dice.random() < 0.6 else rule.replace(of="policy")
            for rule in dice.sample(list(objectives.CORRECTIONS.values()), dice.choice([1, 1, 2]))
        ]
    if dice.random() < 0.25:
        rules["gates"] = [dice.choice(list(objectives.GATES.values()))]
    every = (pg.UserMask(name="keep"), pg.DropTruncated(), pg.DropZeroAdvantage())
    masks: list[Any] = [mask for mask in every if dice.random() < 0.2]
    if "rl" in {part.name for part in parts} and dice.random() < 0.1:
        masks.append(pg.spec.KeepPositiveAdvantage(on=("rl",)))
    return pg.LossSpec(
        components=parts, masks=masks, old=dice.choice(["given"] * 5 + ["rollout", "policy", "interpolate"]),
        empty_sequences="exclude" if dice.random() < 0.8 else "refuse", **rules,
    )  # fmt: skip


def draw_rows(dice: random.Random, spec: pg.LossSpec) -> tuple[list[Row], dict[str, list[Tensor]]]:
    """Rows with every stream that anything reads; and what the model says, per row in token order."""
    seed = dice.randint(0, 2**31)
    longest = dice.choice([4, 9, 20])
    rows = make_rows(
        seed, dice.randint(1, 3), dice.randint(1, 3), min_length=min(4, longest), max_length=longest,
        split_episodes=dice.random() < 0.5, truncated=dice.choice([0.0, 0.3]),
    )  # fmt: skip
    made = Dice(seed % 2**31 + 1)
    says = {name: [made.normal(len(row["tokens"]), 0.5) for row in rows] for name in ("logp", "entropy", "value")}
    says["logp"] = [x - 2.0 for x in says["logp"]]
    says["entropy"] = [x.abs() for x in says["entropy"]]
    scale = dice.choice(SCALES)
    says["logp"] = [x - 3 * scale for x in says["logp"]]  # log-probs of every stream stay below 0
    attach_streams(rows, says["logp"], seed % 2**31, scale=scale)
    rotten, empty, broken = (dice.random() < share for share in (0.5, 0.2, 0.2))
    for i, (row, value) in enumerate(zip(rows, says["value"], strict=True)):
        size = len(row["tokens"])
        row["name"] = f"r{i}"
        row["version"] = [made.whole(NOW - 6, NOW) for _ in range(size)]
        row["returns"] = (value + made.normal(size, 0.5)).tolist()
        row["values"] = (value + made.normal(size, 0.3)).tolist()
        row["streams"] = {
            "room": [0.1 + made.whole(0, 3) / 10 for _ in range(size)], "teacher": objectives.taught(row),
        }  # fmt: skip
        weights = [dice.choice([1.0, 0.5, 2.0, 0.0 if i else 1.0]) for _ in range(size)]
        row["weights"] = {name: weights for name in ("rl", "ce") if name in spec.names and seed % 3 == 0}
        if empty and i % 3 == 1:
            row["action"], row["observation"] = [False] * size, [False] * size
        if broken and i % 3 == 2:
            row["termination"] = "fault"
        if rotten:  # what is no action is nobody's
            for name in STREAMS:
                row[name] = [x if a else float("nan") for x, a in zip(row[name], row["action"], strict=True)]
    return rows, says


# ---- the two answers -----------------------------------------------------------------------------------------------


def _solved(spec: Any, rows: Any, says: Any, split: pg.Split, order: list[int], cuts: int) -> Any:
    size = -(-len(order) // cuts)
    parts = [[rows[i] for i in order[k : k + size]] for k in range(0, len(order), size)]
    batches = [objectives.batch(part, spec if part[0]["weights"] else _Unweighted) for part in parts]
    logp_T, entropy_T, value_T = (
        objectives.aligned([says[name][i] for i in order]) for name in ("logp", "entropy", "value")
    )
    has_value = any(part.kind == "value" for part in spec.components)
    return solve(batches, spec, logp_T, entropy_T, value=value_T if has_value else None, split=split, version=NOW)


class _Unweighted:
    names = ()


def _judged(spec: pg.LossSpec, rows: list[Row], says: Any, mine: Any, order: list[int]) -> tuple[str, str]:
    leaves = {name: [x.clone().requires_grad_() for x in parts] for name, parts in says.items()}
    found = oracle_loss(leaves["logp"], leaves["entropy"], rows, spec.to_dict(), values=leaves["value"], version=NOW)
    loss = found["loss"]
    if loss.requires_grad:
        loss.backward()
    # Rounding goes with the summands, which may cancel; in k3 of nearly equal policies, e^-d - 1 and d do.
    size = sum(
        abs(part.coef) * float((weight * value).abs().sum())
        for part in spec.components
        for weight, value in zip(found["weights"][part.name], found["token_losses"][part.name], strict=True)
    )
    pairs = {"loss": (torch.tensor(mine.loss, dtype=torch.float64), loss.detach(), max(size, 1e-3))}
    for name, got in (("logp", mine.grad_T), ("entropy", mine.entropy_grad_T), ("value", mine.value_grad_T)):
        parts = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves[name]]
        want = objectives.aligned([parts[i] for i in order], 0.0)
        pairs[f"gradient by {name}"] = (got, want, max(float(want.abs().max()), 1e-9))
    for name, (got, want, largest) in pairs.items():
        error = float((got - want).abs().max()) / largest
        if not error <= TOLERANCE:
            return "off", f"{name}: {error:.1e} of {largest:.1e}"
    return "equal", f"{float(pairs['gradient by logp'][1].abs().max()):.1e}"
