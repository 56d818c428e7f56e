"""The spec as data: closed, immutable, the same in dicts and TOML, and refused where its parts contradict."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import megatron_pgloss as pg
from support.steps import refused


def squared(x: Any) -> Tensor:
    """A term that has an importable name."""
    return x.log_ratio.square()


def of_kind(**component: Any) -> pg.LossSpec:
    """A spec of one component, from plain data."""
    return pg.LossSpec.from_dict({"components": [component]})


OWN = {"test_spec:squared": squared}
ROLES = pg.RoleTable(ce={"tool": 0.1, "tool.search": 1, "a b": 0, "工具": 2})
ODD_NAME = 'a "quoted"\n\x7f\U0001f642 = []'

SPECS = {
    "reinforce": pg.presets.reinforce(kl=0.1, kl_estimator="k2", entropy=0.01),
    "ppo": pg.presets.ppo(dual=3.0),
    "grpo": pg.presets.grpo(),
    "dr_grpo": pg.presets.dr_grpo(4096),
    "dapo": pg.presets.dapo(overlong="drop"),
    "echo paper": pg.presets.echo(),
    "echo prime_rl": pg.presets.echo("prime_rl", roles=ROLES),
    "policy_gradient": pg.LossSpec(
        components=[pg.PolicyGradient(surrogate=pg.Clip(low=0.1, high=1e-7, dual=None), ratio="none", coef=-1e300)]
    ),
    "kl": pg.LossSpec(components=[pg.KL(estimator="k1"), pg.KL(estimator="k2", to="old", name="kl_old")]),
    "entropy": pg.LossSpec(components=[pg.Entropy(normalizer="sum(turn)/sqrt > sum(token)/pow(0.3)", units="all")]),
    "cross_entropy": pg.LossSpec(components=[pg.CrossEntropy(count="observations", divide_by="weights")]),
    "term": pg.LossSpec(components=[pg.Term("sq", squared, on="observation", needs=("old", "entropy"))]),
    "rules": pg.presets.ppo(
        corrections=[pg.TruncatedIS(high=1.5)],
        masks=[pg.DropTruncated(on=("rl",)), pg.DropZeroAdvantage(), pg.UserMask(name=ODD_NAME)],
        empty_sequences="exclude",
        log_ratio_bound=10,
    ),
    "rollout": pg.presets.ppo(old="rollout"),
}
ALL = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@ALL
def test_dict_gives_the_same_spec_back(spec: pg.LossSpec) -> None:
    again = pg.LossSpec.from_dict(spec.to_dict(), functions=OWN)
    assert again == spec and again.to_dict() == spec.to_dict()
    assert again.digest == spec.digest and str(again) == str(spec)


@ALL
def test_toml_gives_the_same_spec_back(spec: pg.LossSpec, tmp_path: Path) -> None:
    text = spec.to_toml()
    assert pg.LossSpec.from_toml(text, functions=OWN) == spec
    path = tmp_path / "loss.toml"
    path.write_text(text, encoding="utf-8")
    for source in (path, str(path)):
        assert pg.LossSpec.from_toml(source, functions=OWN).digest == spec.digest


@ALL
def test_pickle_and_copies_are_equal_and_hash_alike(spec: pg.LossSpec) -> None:
    for again in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), spec.replace()):
        assert again == spec and hash(again) == hash(spec) and again.digest == spec.digest


def test_digests_tell_all_specs_apart() -> None:
    assert len({spec.digest for spec in SPECS.values()}) == len(SPECS)
    assert all(0 <= spec.digest < 2**63 for spec in SPECS.values())
    base = pg.presets.grpo()
    changed = [
        base.replace(old="rollout"),
        base.replace(log_ratio_bound=19.0),
        base.replace(empty_sequences="exclude"),
        base.replace(masks=(pg.DropZeroAdvantage(),)),
        base.replace(components=tuple(reversed(base.components))),
        pg.presets.grpo(kl=0.05),
        pg.presets.grpo(normalizer="mean(token)"),
        pg.presets.grpo(high=0.2000001),
    ]
    assert len({spec.digest for spec in (base, *changed)}) == len(changed) + 1


@pytest.mark.parametrize("part", [pg.presets.grpo(), pg.KL(), pg.Clip(), pg.DropTruncated(), ROLES])
def test_no_part_can_be_changed(part: Any) -> None:
    for name in type(part).model_fields:
        refused(pg.SpecError, lambda name=name: setattr(part, name, getattr(part, name)), "immutable", name)


def test_role_table_cannot_be_changed_from_outside() -> None:
    given = {"tool": 0.1}
    table = pg.RoleTable(ce=given)
    given["tool"] = 9.0
    assert table.ce == {"tool": 0.1}
    with pytest.raises(TypeError):
        table.ce["tool"] = 9.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: pg.Clip(lo=0.2), ("Clip has no field 'lo'", "'low'")),
        (lambda: pg.KL(estimater="k1"), ("'estimater'", "did you mean 'estimator'?")),
        (lambda: pg.LossSpec(component=[pg.KL()]), ("'component'", "did you mean 'components'?")),
        (lambda: of_kind(kind="kl", estimtor="k1"), ("did you mean 'estimator'?",)),
        (lambda: of_kind(kind="entropi"), ("'entropi'", "did you mean 'entropy'?")),
        (lambda: of_kind(), ("unknown kind None", "policy_gradient")),
        (
            lambda: of_kind(kind="policy_gradient", surrogate={"kind": "clp"}),
            ("PolicyGradient.surrogate", "did you mean 'clip'?"),
        ),
        (lambda: pg.presets.ppo(masks=[{"kind": "drop_truncatd"}]), ("did you mean 'drop_truncated'?",)),
        (lambda: pg.presets.ppo(corrections=[{"kind": "truncated_iss"}]), ("did you mean 'truncated_is'?",)),
        (lambda: pg.presets.ppo(old="gven"), ("LossSpec.old", "'gven'", "did you mean 'given'?")),
        (lambda: pg.presets.ppo(empty_sequences="exlude"), ("did you mean 'exclude'?",)),
        (lambda: pg.KL(gradient="weigthed"), ("KL.gradient", "did you mean 'weighted'?")),
        (lambda: pg.PolicyGradient(ratio="sequense"), ("no ratio 'sequense'", "did you mean 'sequence'?")),
        (lambda: pg.KL(normalizer="mean(sequenc) > mean(token)"), ("mean(sequenc)", "did you mean 'sequence'?")),
        (lambda: pg.KL(normalizer="seq-mean-tokn-mean"), ("did you mean 'seq-mean-token-mean'?",)),
        (lambda: pg.presets.ppo().component("rll"), ("no component 'rll'", "did you mean 'rl'?")),
        (lambda: pg.presets.grpo(masks=[pg.DropTruncated(on=("k1",))]), ("DropTruncated", "did you mean 'kl'?")),
        (lambda: pg.presets.grpo(masks=[pg.DropZeroAdvantage(on=("rl", "kll"))]), ("'kll'", "did you mean 'kl'?")),
        (lambda: pg.LossSpec.from_toml("old = 'given'\nmask = []"), ("'mask'", "did you mean 'masks'?")),
    ],
)
def test_unknown_words_are_refused_with_the_nearest_one(build: Any, words: tuple[str, ...]) -> None:
    refused(pg.SpecError, build, *words)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: pg.LossSpec(components=[]), ("at least one component",)),
        (lambda: pg.LossSpec(components=None), ("LossSpec.components",)),
        (lambda: pg.LossSpec(components=[pg.KL()], masks=None), ("LossSpec.masks",)),
        (lambda: pg.LossSpec(components=[pg.Clip()]), ("'clip'", "'policy_gradient'")),
        (lambda: pg.LossSpec(components=[pg.KL(), pg.KL(to="old")]), ("two components are named 'kl'", "name=")),
        (lambda: pg.KL(name="a/b"), ("KL.name",)),
        (lambda: pg.KL(coef=float("nan")), ("KL.coef",)),
        (lambda: pg.KL(coef=float("inf")), ("KL.coef",)),
        (lambda: pg.Clip(low=1.0), ("Clip.low",)),
        (lambda: pg.Clip(low=-0.1), ("Clip.low",)),
        (lambda: pg.Clip(low=float("nan")), ("Clip.low",)),
        (lambda: pg.Clip(dual=1.0), ("Clip.dual",)),
        (lambda: pg.TruncatedIS(high=0.0), ("TruncatedIS.high",)),
        (lambda: pg.presets.ppo(log_ratio_bound=0.0), ("LossSpec.log_ratio_bound",)),
        (lambda: pg.presets.ppo(log_ratio_bound=100.0), ("LossSpec.log_ratio_bound",)),  # float32's exp ends at 88.7
        (lambda: pg.RoleTable(ce={}), ("empty table",)),
        (lambda: pg.RoleTable(ce={"tool": float("inf")}), ("RoleTable.ce",)),
        (lambda: pg.LossSpec.from_toml("components = ["), ("not TOML",)),
        (lambda: pg.LossSpec.from_toml("no/such/file.toml"), ("no such spec file", "no/such/file.toml")),
    ],
)
def test_values_out_of_range_are_refused(build: Any, words: tuple[str, ...]) -> None:
    refused(pg.SpecError, build, *words)


def test_contradictions_are_refused() -> None:
    weighed = [pg.TruncatedIS()]
    refused(pg.SpecError, lambda: pg.presets.ppo(old="rollout", corrections=weighed), "TruncatedIS", "identically 1")
    refused(pg.SpecError, lambda: pg.presets.reinforce(corrections=weighed), "old='policy'")
    refused(
        pg.SpecError,
        lambda: pg.LossSpec(components=[pg.PolicyGradient(count="observations")]),
        "counts observations but runs over actions",
    )
    refused(
        pg.SpecError,
        lambda: pg.LossSpec(components=[pg.PolicyGradient(name="pg")], masks=[pg.DropZeroAdvantage(on=["rl"])]),
        "'rl'", "not a component",
    )  # fmt: skip
    pg.LossSpec(components=[pg.CrossEntropy()], masks=[pg.DropZeroAdvantage()])  # idle, and no fault


def test_readers_and_entropy_follow_from_the_parts() -> None:
    assert pg.presets.reinforce().readers == {"advantages": ("rl",)}
    assert pg.presets.ppo().readers == {"old": ("rl",), "advantages": ("rl",)}
    assert pg.presets.grpo().readers == {"old": ("rl",), "ref": ("kl",), "advantages": ("rl",)}
    assert pg.presets.ppo(old="rollout").readers == {"rollout": ("rl",), "advantages": ("rl",)}
    rules = pg.presets.ppo(corrections=[pg.TruncatedIS()], masks=[pg.DropZeroAdvantage()]).readers
    assert rules == {
        "old": ("rl", "TruncatedIS"), "rollout": ("TruncatedIS",), "advantages": ("rl", "DropZeroAdvantage"),
    }  # fmt: skip
    term = pg.Term("t", squared, needs=("old", "advantage", "entropy", "ref"))
    assert pg.LossSpec(components=[term]).readers == {"old": ("t",), "ref": ("t",), "advantages": ("t",)}
    assert pg.LossSpec(components=[term], old="policy").readers == {"ref": ("t",), "advantages": ("t",)}
    assert pg.LossSpec(components=[pg.KL(to="old")], old="rollout").readers == {"rollout": ("kl",)}
    assert [spec.needs_entropy for spec in (pg.presets.ppo(), pg.presets.ppo(entropy=0.1))] == [False, True]
    assert pg.LossSpec(components=[term]).needs_entropy and not pg.LossSpec(components=[pg.KL()]).needs_entropy


def test_term_is_a_lambda_a_function_or_an_object() -> None:
    assert pg.Term("t", squared).fn is squared and pg.Term("t", squared).to_import_path() == "test_spec:squared"
    nameless = (lambda x: x.logp, functools.partial(squared), type("Net", (), {"__call__": lambda self, x: x.logp})())
    for fn in nameless:
        spec = pg.presets.ppo().add(pg.Term("t", fn))
        assert spec.component("t").fn is fn and spec.digest > 0  # type: ignore[attr-defined]
        refused(pg.SpecError, spec.to_toml, "'t'", "importable name", "<")


def test_equation_says_what_is_trained() -> None:
    assert str(pg.presets.grpo(entropy=0.01)).splitlines() == [
        "L = 1 rl + 0.04 kl + 0.01 entropy",
        "  rl = [mean(sequence) > mean(token)] of -min(r A, clip(r, 0.8, 1.2) A), r = pi/old",
        "  kl = [mean(sequence) > mean(token)] of exp(-d) + d - 1, d = log pi - log ref",
        "  entropy = [mean(sequence) > mean(token)] of -H(pi)",
        "  old = given; log-ratios bounded to +-20",
    ]
    text = str(pg.presets.echo(masks=[pg.DropTruncated()], corrections=[pg.TruncatedIS()]))
    assert "ce = [mean(sequence) > mean(token), counting observations, all units] of -log pi on observations" in text
    assert "mask: truncated on all" in text and "times min(old/mu, 2) on rl" in text
    assert "rl = [mean(token)] of -A log pi" in str(pg.presets.reinforce())
    assert "of -(min(r A, clip(r, 0.8, 1.2) A), at least 3 A where A < 0), r = " in str(pg.presets.ppo(dual=3.0))
    assert "r = pi/mu" in str(pg.presets.ppo(old="rollout"))
    assert "test_spec:squared on actions" in str(pg.presets.ppo().add(pg.Term("t", squared)))
