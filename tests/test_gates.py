"""Gates on the current policy: which tokens each drops, worked out by hand, and that a dropped token only leaves the
numerator. KL forms and the value loss stand here too.
"""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from support.steps import NAN, near, pictured, refused, solve

# Probabilities of four actions under pi and under mu; the shift is 0.3, 0.1, -0.3, -0.1.
PI, MU = [0.6, 0.5, 0.2, 0.3], [0.3, 0.4, 0.5, 0.4]
LOGP = [log(p) for p in PI] + [NAN]
GATE = 5


def kept(gates: list[Any], advantages: list[float], *, mu: list[float] = MU, **more: Any) -> Any:
    """The answer of -r A with ratio pi/mu under these gates."""
    rl = pg.PolicyGradient(surrogate=pg.Unclipped())
    spec = pg.LossSpec(components=[rl], old="rollout", gates=gates)
    rollout = [9.0] + [log(p) for p in mu]
    batch = pictured("cAAAA", advantages=[9.0, *advantages], rollout_logprobs=rollout, **more)
    answer = solve(batch, spec, LOGP, keep_tokens=True)
    gate = answer.outs[0].tokens["rl"].gate.reshape(-1)[:4].tolist()
    flags = [code != GATE for code in gate]
    ratios = [p / m for p, m in zip(PI, mu, strict=True)]
    # What is dropped stays in the denominator of the mean.
    near(answer.grad_T, [-r * a * keep / 4 for r, a, keep in zip(ratios, advantages, flags, strict=True)] + [0.0])
    return flags, answer


def test_total_variation_drops_what_would_leave_the_region_further() -> None:
    """Bounds 0.2: A > 0 above, A < 0 below; the other side is free."""
    gate = pg.TVGate(low=0.2, high=0.2)
    assert kept([gate], [1.0] * 4)[0] == [False, True, True, True]
    flags, answer = kept([gate], [-1.0] * 4)
    assert flags == [True, True, False, True] and answer.metrics["rl/gate_tv"] == 0.25
    # Exactly on the bound is inside: 0.5 - 0.25 against 0.25.
    assert kept([pg.TVGate(low=0.25, high=0.25)], [1.0] * 4, mu=[0.3, 0.25, 0.5, 0.4])[0] == [False, True, True, True]


def test_sides_of_both_signs_and_open_sides() -> None:
    both = pg.TVGate(low=0.2, high=0.2, sides="both")
    for sign in (1.0, -1.0):
        assert kept([both], [sign] * 4)[0] == [False, True, False, True]
    below = pg.TVGate(low=0.2, sides="both")
    assert kept([below], [1.0] * 4)[0] == [True, True, False, True]


def test_zero_advantage_is_tested_against_the_lower_bound_on_request() -> None:
    """The gradient is 0 either way; what the metric counts is not."""
    for zero, share in (("passes", 0.0), ("low", 0.25)):
        rl = pg.PolicyGradient(surrogate=pg.Unclipped())
        spec = pg.LossSpec(components=[rl], old="rollout", gates=[pg.TVGate(low=0.2, high=0.2, zero=zero)])
        batch = pictured("cAAAA", advantages=0.0, rollout_logprobs=[9.0] + [log(p) for p in MU])
        answer = solve(batch, spec, LOGP)
        assert answer.metrics["rl/gate_tv"] == share and answer.loss == 0.0


def test_binary_kl_drops_by_divergence_and_direction() -> None:
    """D(mu || pi) of (0.3, 0.6): 0.3 log 0.5 + 0.7 log(0.7/0.4) = 0.1838; of (0.4, 0.5): 0.0201; of (0.5, 0.2): 0.2231;
    of (0.4, 0.3): 0.0226."""
    divergence = [m * log(m / p) + (1 - m) * log((1 - m) / (1 - p)) for p, m in zip(PI, MU, strict=True)]
    near(divergence, [0.18378689, 0.02013551, 0.22314355, 0.02258242], 1e-6)
    gate = pg.KLGate(threshold=0.1)
    assert kept([gate], [1.0] * 4)[0] == [False, True, True, True]
    assert kept([gate], [-1.0] * 4)[0] == [True, True, False, True]
    assert kept([pg.KLGate(threshold=0.2)], [1.0] * 4)[0] == [True] * 4
    assert kept([pg.KLGate(threshold=0.021)], [-1.0] * 4)[0] == [True, True, False, False]


def test_a_certain_token_is_judged_without_zero_times_infinity() -> None:
    gate = pg.KLGate(threshold=0.1)
    rl = pg.PolicyGradient(surrogate=pg.Unclipped())
    spec = pg.LossSpec(components=[rl], old="rollout", gates=[gate])
    # (mu, pi): (1, 1) D = 0; (1, 0.5) D = log 2, downwards; (0.5, 1) D infinite, upwards.
    batch = pictured("cAAA", advantages=[9.0, 1.0, -1.0, 1.0], rollout_logprobs=[9.0, 0.0, 0.0, log(0.5)])
    answer = solve(batch, spec, [0.0, log(0.5), 0.0, NAN], keep_tokens=True)
    assert answer.outs[0].tokens["rl"].gate.reshape(-1).tolist() == [0, GATE, GATE, -1]
    assert answer.metrics["rl/fault"] == 0


def test_a_ratio_band_is_closed_at_both_ends() -> None:
    """Ratios 2, 1.25, 0.4, 0.75."""
    assert kept([pg.RatioGate(low=0.5, high=1.5)], [1.0] * 4)[0] == [False, True, False, True]
    assert kept([pg.RatioGate(low=0.39, high=2.01)], [1.0] * 4)[0] == [True] * 4
    old = pg.RatioGate(low=0.5, high=1.5, base="old")
    assert kept([old], [1.0] * 4)[0] == [False, True, False, True]  # old is the sampler's here


def test_a_sequence_that_the_policy_left_is_dropped_where_its_advantage_is_negative() -> None:
    """mean log mu - log pi = (log 1/2 + log 0.8 + log 2.5 + log 4/3)/4 = log(4/3)/4 = 0.0719."""
    gap = log(4 / 3) / 4
    for threshold, flags in ((gap - 1e-9, [False, True, False, True]), (gap + 1e-9, [True] * 4)):
        assert kept([pg.SequenceGate(threshold=threshold)], [-1.0, 1.0, -2.0, 0.0])[0] == flags
    # A masked action was sampled all the same: it votes.
    spec = pg.LossSpec(
        components=[pg.PolicyGradient(surrogate=pg.Unclipped())], old="rollout",
        gates=[pg.SequenceGate(threshold=gap - 1e-9)], masks=[pg.UserMask(name="keep")],
    )  # fmt: skip
    batch = pictured(
        "cAAAA", advantages=-1.0, rollout_logprobs=[9.0] + [log(p) for p in MU],
        masks={"keep": [True, True, True, False, True]},
    )  # fmt: skip
    assert solve(batch, spec, LOGP).loss == 0.0


def test_gates_multiply_and_act_where_they_say() -> None:
    both = [pg.TVGate(low=0.2, high=0.2), pg.RatioGate(low=0.5, high=9.0)]
    flags, answer = kept(both, [1.0] * 4)
    assert flags == [False, True, False, True]
    assert (answer.metrics["rl/gate_tv"], answer.metrics["rl/gate_ratio_band"]) == (0.25, 0.25)
    drift = pg.KL(name="drift", estimator="k2", to="rollout")
    spec = pg.LossSpec(
        components=[pg.PolicyGradient(surrogate=pg.Unclipped()), drift], old="rollout",
        gates=[pg.TVGate(low=0.2, high=0.2, sides="both", on=("drift",))],
    )  # fmt: skip
    batch = pictured("cAAAA", rollout_logprobs=[9.0] + [log(p) for p in MU])
    found = solve(batch, spec, LOGP)
    near(found.metrics["drift/loss"], (log(1.25) ** 2 + log(0.75) ** 2) / 8)
    near(found.metrics["rl/loss"], -(2 + 1.25 + 0.4 + 0.75) / 4)


def test_a_dropped_token_whose_ratio_overflows_leaves_no_trace() -> None:
    rl = pg.PolicyGradient(surrogate=pg.Unclipped())
    spec = pg.LossSpec(components=[rl], old="rollout", gates=[pg.RatioGate(low=0.5, high=2.0)])
    batch = pictured("cAA", rollout_logprobs=[9.0, -1e4, -1.0])
    answer = solve(batch, spec, [-1.0, -1.0, NAN])
    assert answer.loss == -0.5 and answer.grad_T.tolist() == [0.0, -0.5, 0.0]
    assert answer.metrics["rl/fault"] == 0.0


def test_gates_are_refused_where_they_cannot_act() -> None:
    for build, words in (
        (lambda: pg.TVGate(), ("no bound",)),
        (lambda: pg.TVGate(high=1.5), ("TVGate.high",)),
        (lambda: pg.RatioGate(low=3.0, high=2.0), ("low lies above high",)),
        (lambda: pg.presets.ppo(gates=[pg.KLGate(on=("rll",))]), ("KLGate acts on 'rll'", "did you mean 'rl'?")),
        (lambda: pg.presets.ppo(gates=[{"kind": "binary_k"}]), ("did you mean 'binary_kl'?",)),
    ):
        refused(pg.SpecError, build, *words)
    spec = pg.presets.ppo(gates=[pg.TVGate(high=0.2)])
    refused(pg.DataError, lambda: solve(pictured("cA", old_logprobs=-1.0), spec, [-1.0, NAN]), "rollout", "TVGate")


# ---- KL forms ------------------------------------------------------------------------------------------------------

FORMS = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: exp(-d) + d - 1, lambda d: 1 - exp(-d)),
    "abs": (abs, lambda d: (d > 0) - (d < 0)),
}


@pytest.mark.parametrize("to", ["ref", "old", "rollout"])
@pytest.mark.parametrize("estimator", FORMS)
def test_kl_forms_have_the_value_and_the_slope_that_they_name(estimator: str, to: str) -> None:
    """d = 0.7 and -0.4; the weight r = pi/old with old = log pi - 0.3."""
    value, slope = FORMS[estimator]
    d, logp = (0.7, -0.4), (-1.0, -1.5)
    bases = {"ref_logprobs": 5.0, "old_logprobs": [9.0, -1.3, -1.8], "rollout_logprobs": [9.0, -1.3, -1.8]}
    bases[f"{to}_logprobs"] = [9.0, logp[0] - d[0], logp[1] - d[1]]
    r = [exp(0.3)] * 2
    for base in ("old", "rollout"):
        weight = [exp(x) for x in d] if base == to else r
        forms = {
            "plain": ([value(x) for x in d], [slope(x) for x in d]),
            "k2": ([value(x) for x in d], list(d)),
            "weighted": (
                [w * value(x) for w, x in zip(weight, d, strict=True)],
                [w * (value(x) + slope(x)) for w, x in zip(weight, d, strict=True)],
            ),
        }
        for gradient, (values, slopes) in forms.items():
            part = pg.KL(estimator=estimator, gradient=gradient, to=to, base=base, normalizer="sum(token)")
            answer = solve(pictured("cAA", **bases), pg.LossSpec(components=[part]), [*logp, NAN])
            near(answer.loss, sum(values), 1e-12)
            near(answer.grad_T, [*slopes, 0.0], 1e-12)


def test_on_policy_a_weight_is_one_and_weighted_k1_has_the_scores_gradient() -> None:
    """r = pi/sg(pi) = 1: value k1, slope k1 + 1."""
    spec = pg.LossSpec(old="policy", components=[pg.KL(estimator="k1", gradient="weighted")])
    answer = solve(pictured("cA", ref_logprobs=-2.0), spec, [-1.5, NAN])
    near([answer.loss, float(answer.grad_T[0])], [0.5, 1.5])


def test_exact_kl_is_its_own_and_needs_the_reference_logits() -> None:
    spec = pg.LossSpec(components=[pg.KL(estimator="exact")])
    assert spec.needs_exact_kl and spec.readers == {}
    refused(pg.DataError, lambda: solve(pictured("cA"), spec, [-1.5, NAN]), "reads the kl", "ref_logits")
    for form in ({"gradient": "k2"}, {"to": "old"}):
        refused(pg.SpecError, lambda form=form: pg.KL(estimator="exact", **form), "exact", "plain")


# ---- value ---------------------------------------------------------------------------------------------------------


def test_the_value_loss_is_the_larger_of_two_squares() -> None:
    """R = 1, V_old = 0, clip 0.2. V = 0.5: clipped to 0.2, (0.8)^2 > (0.5)^2, slope 0. V = -0.5: clipped to -0.2, the
    unclipped 1.5 is larger. V = 0.1: inside, both alike. V = 3: the unclipped 2 is larger than 0.8."""
    values = [0.5, -0.5, 0.1, 3.0]
    spec = pg.presets.critic(normalizer="sum(token)")
    batch = pictured("cAAAA", values=[9.0, 0.0, 0.0, 0.0, 0.0], returns=[9.0, 1.0, 1.0, 1.0, 1.0])
    answer = solve(batch, spec, [-1.0] * 4 + [NAN], value=[*values, NAN])
    near(answer.loss, (0.64 + 2.25 + 0.81 + 4.0) / 2)
    near(answer.value_grad_T, [0.0, -1.5, -0.9, 2.0, 0.0])
    assert answer.grad_T.tolist() == [0.0] * 5
    assert answer.metrics["value/value_clipped"] == 0.25
    near(answer.metrics["value/value_error"], (0.25 + 2.25 + 0.81 + 4.0) / 4)
    free = solve(batch, pg.presets.critic(clip=None), [-1.0] * 5, value=[*values, NAN])
    near(free.value_grad_T, [(v - 1) / 4 for v in values] + [0.0])


def test_a_critic_has_its_own_count_and_needs_no_log_probs() -> None:
    spec = pg.presets.ppo().add(pg.Value(normalizer="mean(token)", coef=0.5))
    masks = {"mine": [True, True, False]}
    alone = pg.presets.critic(masks=[pg.UserMask(name="mine", on=("value",))])
    batch = pictured("cAA", old_logprobs=-1.0, values=0.0, returns=1.0, masks=masks)
    near(solve(batch, spec, [-1.0, -1.0, NAN], value=[0.0, 0.0, NAN]).loss, -1.0 + 0.5 * 0.5)
    (micro,) = pg.plan([batch], alone, split=pg.Split(sequences=1)).microbatches()
    head = torch.tensor([[0.1, NAN, NAN]], dtype=torch.float64, requires_grad=True)
    out = pg.policy_loss(None, micro, value=head)
    out.loss.backward()
    near(out.loss, 0.81 / 2)
    near(head.grad, [[-0.9, 0.0, 0.0]])
    refused(pg.DataError, lambda: pg.policy_loss(None, micro), "reads the value", "value=V")
    refused(pg.DataError, lambda: pg.policy_loss(None, micro, value=head[:, :2]), "value has the wrong shape")
    (mixed,) = pg.plan([batch], spec, split=pg.Split(sequences=1)).microbatches()
    refused(pg.DataError, lambda: pg.policy_loss(None, mixed, value=head), "reads log-probs")
    without = pictured("cAA", old_logprobs=-1.0)
    refused(pg.DataError, lambda: pg.plan([without], spec, split=pg.Split(sequences=1)), "returns", "value")
