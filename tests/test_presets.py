"""Presets, pinned: their parts, their keywords, and their numbers on one batch."""

from __future__ import annotations

from math import log
from typing import Any

import pytest

import megatron_pgloss as pg
from support.steps import NAN, near, pictured, refused, solve

SEQUENCE = "mean(sequence) > mean(token)"


def parts(spec: pg.LossSpec) -> list[dict[str, Any]]:
    """Every component's fields that differ from its kind's defaults."""
    return [part.model_dump(exclude_defaults=True) | {"kind": part.kind} for part in spec.components]


@pytest.mark.parametrize(
    ("spec", "old", "normalizers", "coefs"),
    [
        (pg.presets.reinforce(), "policy", {"rl": "mean(token)"}, {"rl": 1.0}),
        (pg.presets.ppo(), "given", {"rl": "mean(token)"}, {"rl": 1.0}),
        (pg.presets.grpo(), "given", {"rl": SEQUENCE, "kl": SEQUENCE}, {"rl": 1.0, "kl": 0.04}),
        (pg.presets.grpo(kl=0), "given", {"rl": SEQUENCE}, {"rl": 1.0}),
        (pg.presets.dr_grpo(4096), "given", {"rl": "mean(sequence) > sum(token)/4096"}, {"rl": 1.0}),
        (pg.presets.dapo(), "given", {"rl": "mean(token)"}, {"rl": 1.0}),
        (pg.presets.echo(), "given", {"rl": "mean(token)", "ce": SEQUENCE}, {"rl": 1.0, "ce": 0.05}),
        (pg.presets.echo("prime_rl"), "given", {"rl": "mean(token)", "ce": "mean(token)"}, {"rl": 1.0, "ce": 0.1}),
    ],
)
def test_the_table_of_presets(
    spec: pg.LossSpec, old: str, normalizers: dict[str, str], coefs: dict[str, float]
) -> None:
    assert spec.old == old and not spec.masks and not spec.corrections and spec.empty_sequences == "refuse"
    assert {part.name: part.normalizer for part in spec.components} == normalizers
    assert {part.name: part.coef for part in spec.components} == coefs
    rl = spec.components[0]
    assert isinstance(rl, pg.PolicyGradient)
    if old == "policy":
        assert rl.surrogate == pg.Reinforce() and rl.ratio == "none"
    else:
        assert rl.ratio == "token"
        assert rl.surrogate == pg.Clip(low=0.2, high=0.28 if spec == pg.presets.dapo() else 0.2, dual=None)
    ce = spec.components[-1]
    if isinstance(ce, pg.CrossEntropy):
        paper = spec == pg.presets.echo()
        assert (ce.count, ce.units) == (("observations", "all") if paper else ("members", "counted"))
    for part in spec.components:
        if isinstance(part, pg.KL):
            assert (part.estimator, part.gradient, part.to) == ("k3", "plain", "ref")


# Ratios 2 with A = 1, 0.5 with A = -1 in a row of two, 1.25 with A = 1 in a row of one; log pi - log ref = log 2 each.
ROWS = ("cAAo", "cAo")
LOGP = [-2 + log(2.0), -2 + log(0.5), -0.4, NAN, -2 + log(1.25), -0.6, NAN]
REF = [9.0, -2.0, -2.0 - 2 * log(2.0), 9.0, 9.0, -2.0 + log(0.625), 9.0]
K3 = 0.5 + log(2.0) - 1


@pytest.mark.parametrize(
    ("spec", "loss"),
    [
        (pg.presets.ppo(), (-1.2 + 0.8 - 1.2) / 3),
        (pg.presets.grpo(kl=0), ((-1.2 + 0.8) / 2 - 1.2) / 2),
        (pg.presets.grpo(), ((-1.2 + 0.8) / 2 - 1.2) / 2 + 0.04 * K3),
        (pg.presets.dr_grpo(8), ((-1.2 + 0.8) / 8 - 1.2 / 8) / 2),
        (pg.presets.dapo(), (-1.28 + 0.8 - 1.25) / 3),
        (pg.presets.reinforce(), -(LOGP[0] - LOGP[1] + LOGP[4]) / 3),
        (pg.presets.echo(), (-1.2 + 0.8 - 1.2) / 3 + 0.05 * (0.4 + 0.6) / 2),
        (pg.presets.echo("prime_rl"), (-1.2 + 0.8 - 1.2) / 3 + 0.1 * (0.4 + 0.6) / 2),
    ],
)
def test_preset_matches_numbers_worked_out_by_hand(spec: pg.LossSpec, loss: float) -> None:
    batch = pictured(*ROWS, advantages=[9.0, 1.0, -1.0, 9.0, 9.0, 1.0, 9.0], old_logprobs=-2.0, ref_logprobs=REF)
    near(solve(batch, spec, LOGP).loss, loss, 1e-13)


def test_parts_are_keywords() -> None:
    spec = pg.presets.dapo(
        low=0.1, high=0.3, dual=4.0, normalizer=SEQUENCE, coef=2.0, kl=0.5, kl_estimator="k1", entropy=0.01,
        old="rollout", overlong="drop", masks=[pg.DropZeroAdvantage()], empty_sequences="exclude", log_ratio_bound=5.0,
    )  # fmt: skip
    assert parts(spec) == [
        {
            "kind": "policy_gradient",
            "coef": 2.0,
            "normalizer": SEQUENCE,
            "surrogate": {"low": 0.1, "high": 0.3, "dual": 4.0},
        },
        {"kind": "kl", "coef": 0.5, "normalizer": SEQUENCE, "estimator": "k1"},
        {"kind": "entropy", "coef": 0.01, "normalizer": SEQUENCE},
    ]
    assert spec.masks == (pg.DropZeroAdvantage(), pg.DropTruncated()) and spec.old == "rollout"
    assert spec.empty_sequences == "exclude" and spec.log_ratio_bound == 5.0
    # The normaliser of rl is that of the terms over the same tokens, never of ce.
    echo = pg.presets.echo("prime_rl", normalizer=SEQUENCE, entropy=0.1, ce=0.7)
    assert [(p.name, p.normalizer, p.coef) for p in echo.components] == [
        ("rl", SEQUENCE, 1.0), ("entropy", SEQUENCE, 0.1), ("ce", "mean(token)", 0.7),
    ]  # fmt: skip
    assert pg.presets.echo(ce=0.0).component("ce").coef == 0.0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: pg.presets.grpo(entopy=0.1), ("'entopy'", "did you mean 'entropy'?")),
        (lambda: pg.presets.dapo(hihg=0.3), ("'hihg'", "did you mean 'high'?")),
        (lambda: pg.presets.ppo(mask=[]), ("'mask'", "did you mean 'masks'?")),
        (lambda: pg.presets.ppo(components=[]), ("'components'",)),
        (lambda: pg.presets.dapo(overlong="mask"), ("overlong='mask'", "'drop'")),
        (lambda: pg.presets.echo("papper"), ("variant='papper'", "'paper' or 'prime_rl'")),
        (lambda: pg.presets.dr_grpo(0), ("divisor must be positive",)),
        (lambda: pg.presets.get("dpao"), ("no preset 'dpao'", "did you mean 'dapo'?")),
        (lambda: pg.presets.get("rloo"), ("no preset 'rloo'", "pg.advantages.rloo")),
    ],
)
def test_unknown_parts_are_refused_with_the_nearest_name(build: Any, words: tuple[str, ...]) -> None:
    refused(pg.SpecError, build, *words)


def test_every_preset_has_a_name_a_paper_and_a_place_in_it() -> None:
    assert list(pg.presets.PRESETS)[:6] == ["reinforce", "ppo", "grpo", "dr_grpo", "dapo", "echo"]
    for name, preset in pg.presets.PRESETS.items():
        built = pg.presets.get(name, **preset.example)
        assert preset.build is getattr(pg.presets, name) and preset.source and preset.equation
        assert built == pg.LossSpec.from_toml(built.to_toml()), name
        assert preset.build.__doc__, name


TOKEN, SUM = "mean(token)", "mean(sequence) > sum(token)"
MORE: dict[str, tuple[Any, str | pg.Ratio, str, str]] = {
    # name: surrogate, ratio, normaliser, old
    "gspo": (pg.Clip(low=3e-4, high=4e-4), "sequence", SEQUENCE, "given"),
    "gspo_token": (pg.Clip(low=3e-4, high=4e-4), "sequence_token", SEQUENCE, "given"),
    "luspo": (pg.Clip(low=3e-4, high=4e-4), "sequence", SUM, "given"),
    "gmpo": (pg.GMPO(low=0.4, high=0.4), "token", SEQUENCE, "given"),
    "cispo": (pg.CISPO(low=None, high=4.0, bound="relative"), "token", TOKEN, "given"),
    "aipo": (pg.CISPO(low=None, high=4.0, bound="absolute"), "token", TOKEN, "rollout"),
    "topr": (pg.TOPR(positive=(1, 1), negative=(0, 1)), "sequence_sum", SUM, "rollout"),
    "vespo": (
        pg.VESPO(k_positive=2, lam_positive=3, k_negative=3, lam_negative=2), "sequence_sum", TOKEN, "rollout",
    ),
    "sapo": (pg.SAPO(tau_positive=1.0, tau_negative=1.05), "token", SEQUENCE, "given"),
    "gpg": (pg.Reinforce(), "none", TOKEN, "policy"),
    "dro": (pg.DRO(beta=0.1), "token", TOKEN, "given"),
    "kimi": (pg.DRO(beta=0.1), pg.Ratio(level="sequence", statistic="sum", gradient="through"), SEQUENCE, "given"),
    "fipo": (
        pg.FIPO(low=0.2, high=0.28, delta=10.0, half_life=32.0, reach=0.2, both=False, safe_ratio=4.0),
        "token", TOKEN, "given",
    ),
    "real": (pg.REAL(tau=0.5, form="group"), "sequence", "mean(prompt) > sum(sequence) > mean(token)", "given"),
    "opsm": (pg.Clip(low=0.2, high=0.2), "token", SEQUENCE, "given"),
    "dppo_tv": (pg.Unclipped(), "token", TOKEN, "rollout"),
    "dppo_kl": (pg.Unclipped(), "token", TOKEN, "rollout"),
    "prime_dppo": (pg.Unclipped(), "token", TOKEN, "rollout"),
    "prime_ipo": (pg.Unclipped(), "token", TOKEN, "rollout"),
    "icepop": (pg.Clip(low=0.2, high=0.2), "token", SEQUENCE, "given"),
    "high_entropy": (pg.Clip(low=0.2, high=0.28), "token", TOKEN, "given"),
    "clip_cov": (pg.Clip(low=0.2, high=0.2), "token", TOKEN, "given"),
    "kl_cov": (pg.Unclipped(), "token", TOKEN, "given"),
    "m2po": (pg.Unclipped(), "token", TOKEN, "given"),
    "distill": (pg.Distill(), "token", TOKEN, "rollout"),
    "opd": (pg.Distill(), "none", TOKEN, "policy"),
    "nll": (pg.NLL(), "none", TOKEN, "given"),
    "lite_ppo": (pg.Clip(low=0.2, high=0.2), "token", TOKEN, "given"),
}  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "gpg": {"masks": (pg.DropZeroAdvantage(),)},
    "opsm": {"gates": (pg.SequenceGate(threshold=0.1, base="rollout"),)},
    "dppo_tv": {"gates": (pg.TVGate(low=0.2, high=0.2, base="rollout", sides="advantage", zero="passes"),)},
    "dppo_kl": {"gates": (pg.KLGate(threshold=0.05, base="rollout"),)},
    "prime_dppo": {
        "gates": (pg.TVGate(low=0.2, high=0.2, zero="low"),), "masks": (pg.DropZeroAdvantage(on=("rl", "drift")),),
    },
    "prime_ipo": {
        "gates": (pg.TVGate(low=0.1, high=0.1, sides="both"),), "masks": (pg.DropZeroAdvantage(on=("rl", "drift")),),
    },
    "icepop": {"corrections": (pg.IcePop(of="old", low=0.5, high=5.0),)},
    "high_entropy": {"gates": (pg.EntropyGate(share=0.2),)},
    "clip_cov": {"gates": (pg.CovarianceGate(select="band", share=2e-4, low=1.0, high=5.0, effect="drop", seed=0),)},
    "kl_cov": {"gates": (pg.CovarianceGate(select="top", share=2e-3, effect="keep", on=("kl_cov",)),)},
    "m2po": {"gates": (pg.SecondMomentGate(threshold=0.04, base="old"),)},
    "distill": {"gates": (pg.TVGate(low=0.2, high=None, sides="both", on=("distill",)),)},
}  # fmt: skip
DRIFT = pg.KL(name="drift", estimator="k2", to="rollout", coef=2e-3)
TERMS = {
    "prime_dppo": (DRIFT,), "prime_ipo": (DRIFT,), "distill": (DRIFT,),
    "kl_cov": (pg.KL(name="kl_cov", estimator="abs", to="old", coef=1.0),),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_the_rest_of_the_table_and_its_defaults(name: str) -> None:
    surrogate, ratio, normalizer, old = MORE[name]
    preset = pg.presets.PRESETS[name]
    spec = preset.build(**preset.example)
    rl, *others = spec.components
    assert isinstance(rl, pg.PolicyGradient)
    assert (rl.surrogate, rl.ratio, rl.normalizer, spec.old, rl.coef) == (surrogate, ratio, normalizer, old, 1.0)
    assert tuple(others) == TERMS.get(name, ())
    for field in ("masks", "gates", "corrections"):
        assert getattr(spec, field) == RULES.get(name, {}).get(field, ()), field


def test_every_preset_is_in_a_table() -> None:
    assert set(MORE) | {"reinforce", "ppo", "grpo", "dr_grpo", "dapo", "echo", "critic"} == set(pg.presets.PRESETS)
    assert pg.presets.critic().components == (pg.Value(clip=0.2),)


def test_a_callers_own_rules_stand_beside_those_of_the_preset() -> None:
    own = pg.UserMask(name="mine")
    assert pg.presets.gpg(masks=[own]).masks == (pg.DropZeroAdvantage(), own)
    assert pg.presets.dppo_tv(gates=[pg.RatioGate()]).gates == (pg.TVGate(low=0.2, high=0.2), pg.RatioGate())
    assert pg.presets.icepop(corrections=[pg.TruncatedIS()]).corrections == (pg.IcePop(), pg.TruncatedIS())
    assert pg.presets.prime_dppo(kl_tau=0, zero_advantage="keep").names == ("rl",)
    assert pg.presets.nll(positive=True).masks == (pg.KeepPositiveAdvantage(on=("nll",)),)
    assert pg.presets.gspo(unit="turn").components[0].ratio == "turn"  # type: ignore[union-attr]
    assert pg.presets.cispo(low=0.2, high=0.2, bound="relative").components[0].surrogate.low == 0.2  # type: ignore[union-attr]
    refused(pg.SpecError, lambda: pg.presets.prime_ipo(zero_advantage="drp"), "'drop' or 'keep'")
