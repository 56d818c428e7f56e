"""References by name: the KL to, and distillation from, any stream of log-probs of the user's own. By hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.cli.explain import reads
from support.steps import NAN, ONE, near, pictured, refused, solve

POLICY = [-1.0, -2.0, NAN]
"""log pi of the two actions of one row."""
TAUGHT = {"teacher": [0.0, -1.5, -1.0], "coder": [0.0, -3.0, -2.0]}


def batch(**more: Any) -> pg.TokenBatch:
    return pictured("cAA", **({"old_logprobs": -1.0, "ref_logprobs": -2.0, "streams": TAUGHT} | more))


def loss_of(*parts: Any, **more: Any) -> pg.LossSpec:
    return pg.LossSpec(components=[part.replace(normalizer="sum(token)") for part in parts], **more)


def test_each_kl_has_its_own_target_and_metrics() -> None:
    """d to the teacher: 0.5 and -1; to the coder: 2 and 0; to ref: 1 and 0."""
    spec = loss_of(
        pg.KL(estimator="k2"), pg.KL(name="taught", to="teacher", estimator="k2"),
        pg.KL(name="coded", to="coder", estimator="k1", coef=0.1),
    )  # fmt: skip
    found = solve(batch(), spec, POLICY)
    near([found.loss], [0.5 + (0.125 + 0.5) + 0.1 * 2.0], 1e-14)
    near(found.grad_T, [1.0 + 0.5 + 0.1, 0.0 - 1.0 + 0.1, 0.0], 1e-14)
    assert {n: v for n, v in found.metrics.items() if n.endswith("/loss")} == pytest.approx(
        {"kl/loss": 0.5, "taught/loss": 0.625, "coded/loss": 2.0}
    )
    assert spec.references == ("ref", "teacher", "coder")
    assert spec.readers == {"ref": ("kl",), "teacher": ("taught",), "coder": ("coded",)}


def test_a_weighted_kl_to_a_teacher_is_weighed_by_who_sampled() -> None:
    """r = pi/old = 1 and 1/e; weighted k3 has the slope r d, d = 0.5 and -1."""
    spec = loss_of(pg.KL(to="teacher", gradient="weighted"))
    near(solve(batch(), spec, POLICY).grad_T, [0.5, -1 / torch.e, 0.0], 1e-14)


def test_each_policy_gradient_distils_from_its_own_teacher() -> None:
    """-(log teacher - log pi) r with r = 1: -(-1.5 + 1) = 0.5 and -(-1 + 2) = -1; of the coder 2 and 0."""
    parts = [pg.PolicyGradient(name=name, surrogate=pg.Distill(to=name), ratio="none") for name in ("teacher", "coder")]
    found = solve(batch(), loss_of(*parts), POLICY)
    near(found.grad_T, [0.5 + 2.0, -1.0, 0.0], 1e-14)
    assert found.metrics["teacher/loss"] == pytest.approx(-0.5) and found.metrics["coder/loss"] == pytest.approx(2.0)


def test_a_name_that_no_stream_has_is_refused_with_the_nearest() -> None:
    for name, hint in (("teachr", "did you mean 'teacher'?"), ("rolout", "streams={'rolout': ...}"), ("ref2", "'ref'")):
        spec = loss_of(pg.KL(to=name))
        refused(pg.DataError, lambda spec=spec: pg.plan([batch()], spec, split=ONE), name, "read by kl", hint)
    spec = loss_of(pg.PolicyGradient(surrogate=pg.Distill(to="nobody")))
    refused(pg.DataError, lambda: pg.plan([batch()], spec, split=ONE), "'nobody'", "read by rl", "into='nobody'")


@pytest.mark.parametrize("name", ["entropy", "kl", "value", "chosen", "policy", "pi"])
def test_what_is_no_other_policy_is_refused_by_the_spec(name: str) -> None:
    refused(pg.SpecError, lambda: pg.KL(to=name), repr(name), "to='teacher'")
    refused(pg.SpecError, lambda: pg.Distill(to=name), repr(name))


@pytest.mark.parametrize("name", ["advantages", "temperature", "ids"])
def test_a_stream_that_holds_no_log_probs_is_refused(name: str) -> None:
    given = batch(temperature=torch.ones(3)) if name == "temperature" else batch()
    if name == "ids":
        wide = torch.zeros(3, 2, dtype=torch.int64)
        given = pg.TokenBatch.from_packed(
            tokens=torch.arange(3), lengths=[3], action_mask=torch.tensor([False, True, True]), streams={"ids": wide}
        )
    refused(pg.DataError, lambda: pg.plan([given], loss_of(pg.KL(to=name)), split=ONE), name, "no log-probs", "kl")


def test_log_probs_of_a_teacher_are_checked_like_those_of_ref() -> None:
    for value, words in ((1.5, "a log-prob above 0"), (NAN, "a non-finite value")):
        given = batch(streams={"teacher": [0.0, -1.0, value]})
        error = refused(pg.DataError, lambda given=given: pg.plan([given], loss_of(pg.KL(to="teacher")), split=ONE))
        assert words in str(error) and "teacher" in str(error)
        masked = batch(streams={"teacher": [0.0, -1.0, value]}, masks={"keep": [True, True, False]})
        pg.plan([masked], loss_of(pg.KL(to="teacher"), masks=[pg.UserMask(name="keep")]), split=ONE)
    # A stream of the user's own that is no reference may hold anything above 0.
    pg.plan([batch(streams={"teacher": [0.0, -1.0, 1.5]})], loss_of(pg.KL()), split=ONE)


def test_the_exact_kl_is_that_to_ref() -> None:
    refused(pg.SpecError, lambda: pg.KL(estimator="exact", to="teacher"), "to='ref'", "'teacher'")


def test_names_come_back_from_toml_and_stand_in_explain() -> None:
    spec = loss_of(
        pg.PolicyGradient(surrogate=pg.Distill(to="math_teacher")), pg.KL(to="code_teacher", gradient="weighted")
    )
    assert pg.LossSpec.from_toml(spec.to_toml()) == spec and 'to = "math_teacher"' in spec.to_toml()
    assert "-sg(log math_teacher - log pi) r" in str(spec) and "d = log pi - log code_teacher" in str(spec)
    assert "math_teacher: rl" in reads(spec) and "code_teacher: kl" in reads(spec)
    assert r"math\_teacher" in pg.spec.latex.latex(spec)


def test_a_reference_is_added_to_a_batch_by_its_name() -> None:
    bare = batch(streams={})
    with_it = bare.with_stream("teacher", torch.full((3,), -1.0), add=True)
    assert with_it.streams["teacher"].tolist() == [-1.0] * 3
    refused(pg.DataError, lambda: bare.with_stream("teacher", torch.ones(3)), "no stream 'teacher'", "add=True")
    for taken in ("targets", "advantage", "two words"):
        refused(pg.DataError, lambda taken=taken: bare.with_stream(taken, torch.ones(3), add=True), taken)
    reward = pg.advantages.kl_penalty(with_it, coef=1.0, to="teacher")
    assert reward.tolist() == [-0.0, -0.0, 0.0] or reward.abs().sum() == 0  # old is -1 too
