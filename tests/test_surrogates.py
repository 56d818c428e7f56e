"""Every surrogate's value and gradient against the closed form, token by token, stop-gradient parts as constants.

Four tokens of one row, three of another; A of both signs and 0. Terms are summed (``sum(token)``), so that the gradient
at a token is the slope of its own term; where a surrogate joins tokens the test says how.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import megatron_pgloss as pg
from support.steps import NAN, near, pictured, refused, solve

ROWS = ("cAAAA", "cAAA")
D = [0.5, -0.5, 0.05, 2.5, -2.0, 0.2, -0.1]
"""log pi - log old of the seven actions: above, below and inside every bound."""
A = [1.5, -1.0, 2.0, -0.5, 0.75, -2.0, 0.0]
OLD = [-1.0, -2.0, -0.5, -3.0, -1.5, -0.7, -1.1]
REF = [-0.8, -2.2, -0.6, -3.5, -1.0, -0.9, -1.3]
LOGP = [old + d for old, d in zip(OLD, D, strict=True)]
R = [math.exp(d) for d in D]


def laid(values: list[float], end: float, first: bool) -> list[float]:
    """Values of the actions in the rows; ``first``: in token order, else target-aligned."""
    one, two = values[:4], values[4:]
    return [end, *one, end, *two] if first else [*one, end, *two, end]


def spec_of(surrogate: Any, **more: Any) -> pg.LossSpec:
    part = pg.PolicyGradient(surrogate=surrogate, normalizer="sum(token)", **more)
    return pg.LossSpec(components=[part])


def answer_of(spec: pg.LossSpec, logp: list[float] = LOGP, **more: Any) -> Any:
    given = {"advantages": A, "old_logprobs": OLD, "ref_logprobs": REF, "rollout_logprobs": OLD} | more
    streams = {name: laid(values, 9.0, True) for name, values in given.pop("streams", {}).items()}
    batch = pictured(
        *ROWS, **{name: laid(values, 9.0, True) for name, values in given.items()},
        **({"streams": streams} if streams else {}),
    )  # fmt: skip
    return solve(batch, spec, laid(logp, NAN, False), keep_tokens=True)


def check(spec: pg.LossSpec, terms: list[float], slopes: list[float], rtol: float = 1e-12, **more: Any) -> Any:
    answer = answer_of(spec, **more)
    report = answer.outs[0].tokens["rl"].loss.reshape(-1)
    near(report[report.abs() > 0], [term for term in terms if term != 0], rtol)
    near(answer.loss, sum(terms), 1e-10)
    near(answer.grad_T, laid(slopes, 0.0, False), rtol)
    return answer


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


Form = tuple[float, float]


def clip(low: float = 0.2, high: float = 0.28, cap: float = math.inf) -> Callable[[float, float, float], Form]:
    def form(r: float, a: float, logp: float) -> Form:
        if a > 0 and r > 1 + high:
            return -a * (1 + high), 0.0
        if a < 0 and r < 1 - low:
            return -a * (1 - low), 0.0
        if a < 0 and r > cap:
            return -a * cap, 0.0
        return -a * r, -a * r

    return form


def weighed(weight: Callable[[float, float], float]) -> Callable[[float, float, float], Form]:
    return lambda r, a, logp: (-weight(r, a) * a * logp, -weight(r, a) * a)


def sapo(r: float, a: float, logp: float) -> Form:
    tau = 1.0 if a > 0 else 1.05
    gate = sigmoid(tau * (r - 1))
    return -4 / tau * gate * a, -4 * gate * sigmoid(-tau * (r - 1)) * r * a


def gamma(r: float, a: float) -> float:
    k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return float(r**k * math.exp(lam * (1 - r)))


def real(r: float, a: float, logp: float) -> Form:
    sign, s = (a > 0) - (a < 0), math.log(r)
    if not sign:
        return 0.0, 0.0
    return math.log1p(math.exp(-sign * s / 0.5)), -sign / 0.5 * sigmoid(-sign * s / 0.5)


CASES: dict[str, tuple[Any, Callable[[float, float, float], Form]]] = {
    "reinforce": (pg.Reinforce(), lambda r, a, logp: (-a * logp, -a)),
    "unclipped": (pg.Unclipped(), lambda r, a, logp: (-a * r, -a * r)),
    "clip": (pg.Clip(low=0.2, high=0.28), clip()),
    "dual": (pg.Clip(low=0.2, high=0.28, dual=3.0), clip(cap=3.0)),
    "delta": (pg.Clip(low=0.2, high=0.28, delta=3.0), clip(cap=3.0)),
    "clip by streams": (pg.Clip(low="lo", high="hi"), clip(0.3, 0.5)),
    "cispo relative": (pg.CISPO(low=0.2, high=0.28), weighed(lambda r, a: min(max(r, 0.8), 1.28))),
    "cispo open below": (pg.CISPO(high=0.28), weighed(lambda r, a: min(r, 1.28))),
    "cispo absolute": (pg.CISPO(high=0.28, bound="absolute"), weighed(lambda r, a: min(r, 0.28))),
    "cispo by streams": (pg.CISPO(low="lo", high="hi"), weighed(lambda r, a: min(max(r, 0.7), 1.5))),
    "topr": (pg.TOPR(), weighed(lambda r, a: 1.0 if a > 0 else min(r, 1.0))),
    "topr wide": (
        pg.TOPR(positive=(0.5, 2.0), negative=(0.1, 0.9)),
        weighed(lambda r, a: min(max(r, 0.5), 2.0) if a > 0 else min(max(r, 0.1), 0.9)),
    ),
    "vespo": (pg.VESPO(), weighed(gamma)),
    "sapo": (pg.SAPO(), sapo),
    "dro": (pg.DRO(beta=0.3), lambda r, a, logp: (-a * math.log(r) + 0.15 * math.log(r) ** 2, -a + 0.3 * math.log(r))),
    "real": (pg.REAL(tau=0.5), real),
    "nll": (pg.NLL(), lambda r, a, logp: (-logp, -1.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_closed_form(name: str) -> None:
    surrogate, form = CASES[name]
    pairs = [form(r, a, logp) for r, a, logp in zip(R, A, LOGP, strict=True)]
    bounds = {"streams": {"lo": [0.3] * 7, "hi": [0.5] * 7}} if "streams" in name else {}
    check(spec_of(surrogate), [value for value, _ in pairs], [slope for _, slope in pairs], **bounds)


ON_BOUNDS = {
    "clip": pg.Clip(low=0.5, high=1.0, dual=2.0),
    "cispo": pg.CISPO(low=0.5, high=1.0),
    "topr": pg.TOPR(positive=(0.5, 2.0), negative=(0.5, 2.0)),
    "gmpo": pg.GMPO(low=math.log(2), high=math.log(2)),
}


@pytest.mark.parametrize("name", ON_BOUNDS)
def test_a_ratio_exactly_on_a_bound_is_inside(name: str) -> None:
    """exp(+-log 2) is 2 and 1/2 to the last bit: free there, and not counted as clipped; nor is a token with A = 0."""
    assert math.exp(math.log(2)) == 2 and math.exp(-math.log(2)) == 0.5
    d = [math.log(2), -math.log(2), math.log(2), -math.log(2), 0.0, 3.0, -3.0]
    a = [1.0, -1.0, -1.0, 1.0, 1.0, 0.0, 0.0]
    given = {"advantages": a, "old_logprobs": [0.0] * 7}
    answer = answer_of(spec_of(ON_BOUNDS[name]), d, **given)
    free = name in ("cispo", "topr")  # whose bounds do not ask for the sign of A alone
    counts = {side: answer.metrics[f"rl/clip_{side}"] for side in ("low", "high", "dual")}
    assert counts == {"low": free / 7, "high": free / 7, "dual": 0.0}
    if name != "gmpo":  # whose slope is that of the row: here the advantages of a row add up to 0
        assert all(float(answer.grad_T[t]) != 0 for t in range(4))


def test_topr_says_which_bound_held_the_weight() -> None:
    """Each of the four bounds holds one token: r = 1/4 under 1/2 (A > 0) and under 1/3 (A < 0), 4 over 2 and over 3."""
    d = [math.log(r) for r in (0.25, 0.25, 4.0, 4.0, 0.4, 2.5, 1.0)]
    a = [1.0, -1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    surrogate = pg.TOPR(positive=(0.5, 2.0), negative=(1 / 3, 3.0))
    answer = answer_of(spec_of(surrogate), d, advantages=a, old_logprobs=[0.0] * 7)
    assert (answer.metrics["rl/clip_low"], answer.metrics["rl/clip_high"]) == (2 / 7, 2 / 7)
    weights = [0.5, 1 / 3, 2.0, 3.0, 0.4, 2.5, 1.0]
    near(answer.grad_T, laid([-w * x for w, x in zip(weights, a, strict=True)], 0.0, False), 1e-12)


def test_delta_stands_back_where_a_bound_of_the_batch_lies_above_it() -> None:
    """A = -1, delta = 1.5. A clip at 1.1: r = 1.4 is free, 1.6 capped at 1.5. At 2: 1.6 is free, 2.2 capped at 2."""
    d = [math.log(r) for r in (1.4, 1.6, 1.6, 2.2, 1.0, 1.0, 1.0)]
    answer = answer_of(
        spec_of(pg.Clip(low=0.2, high="room", delta=1.5)), d, advantages=[-1.0] * 7, old_logprobs=[0.0] * 7,
        streams={"room": [0.1, 0.1, 1.0, 1.0, 0.1, 0.1, 0.1]},
    )  # fmt: skip
    near(answer.loss, 1.4 + 1.5 + 1.6 + 2.0 + 3.0, 1e-13)
    near(answer.grad_T, laid([1.4, 0.0, 1.6, 0.0, 1.0, 1.0, 1.0], 0.0, False), 1e-13)
    assert answer.metrics["rl/clip_dual"] == 2 / 7


def test_distillation_pulls_towards_the_reference_by_the_ratio() -> None:
    """-(log ref - log pi) r with the gap held fixed: the slope is the value."""
    values = [-(ref - logp) * r for ref, logp, r in zip(REF, LOGP, R, strict=True)]
    check(spec_of(pg.Distill()), values, values)


def test_both_of_cispos_bounds_cut_at_the_same_place_where_they_say_so() -> None:
    relative, absolute = pg.CISPO(low=0.2, high=0.28), pg.CISPO(low=0.8, high=1.28, bound="absolute")
    one, two = (answer_of(spec_of(surrogate)) for surrogate in (relative, absolute))
    near(one.grad_T, two.grad_T)
    assert one.metrics["rl/clip_high"] == 2 / 7 and one.metrics["rl/clip_low"] == 2 / 7
    # The same numbers under the other convention are another loss.
    assert answer_of(spec_of(pg.CISPO(high=0.28, bound="absolute"))).loss != one.loss


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    """Row 1: m = 0.4 (clipped), -0.4 (clipped), 0.05, 2.5 (A < 0 is open above). Row 2: m = -2 (A > 0 is open below),
    0.2, and 0 for A = 0. The slope of a free token is exp(mean) / |row| times the sum of -A over the row."""
    rows = [([0.4, -0.4, 0.05, 2.5], A[:4], [0, 0, 1, 1]), ([-2.0, 0.2, 0.0], A[4:], [1, 1, 0])]
    terms, slopes = [], []
    for m, a, free in rows:
        mean = math.exp(sum(m) / len(m))
        terms += [-x * mean for x in a]
        slopes += [-sum(a) * mean / len(m) * f for f in free]
    answer = check(spec_of(pg.GMPO()), terms, slopes)
    assert (answer.metrics["rl/clip_low"], answer.metrics["rl/clip_high"]) == (1 / 7, 1 / 7)


def test_fipo_weighs_each_token_by_what_follows_it() -> None:
    """Half-life 1: gamma = 1/2. F of row 1 without the token of ratio e^2.5 > 10: third 0.05, second -0.5 + 0.025 =
    -0.475, first 0.5 - 0.2375; of row 2: -0.1, 0.15, -1.925. f = clip(exp(F), 1, 1.2); where A < 0 and r > 1.2, at most
    1."""
    future = [0.2625, -0.475, 0.05, 0.0, -1.925, 0.15, -0.1]
    form = clip(cap=10.0)
    terms, slopes = [], []
    for f, r, a, logp in zip(future, R, A, LOGP, strict=True):
        weight = min(max(math.exp(f), 1.0), 1.2)
        weight = min(max(weight, 0.8), 1.0) if a < 0 and r > 1.2 else weight
        value, slope = form(r, a, logp)
        terms.append(weight * value)
        slopes.append(weight * slope)
    check(spec_of(pg.FIPO(half_life=1.0, delta=10.0, safe_ratio=1.2)), terms, slopes)


def test_fipo_may_weigh_both_ways() -> None:
    one = answer_of(spec_of(pg.FIPO(half_life=1.0, both=True))).outs[0].tokens["rl"].loss.reshape(-1)
    near(one[4 + 1], -0.8 * A[4] * R[4], 1e-12)  # F = -1.925 here: exp(F) = 0.15, held at 0.8


def test_real_takes_the_sequence_as_its_logit() -> None:
    """s = mean d, one label per row: a softplus per row, its slope spread over the tokens."""
    labels = [1.0] * 4 + [-1.0] * 3
    means = [sum(D[:4]) / 4, sum(D[4:]) / 3]
    spec = pg.presets.real(form="binary")
    answer = answer_of(spec, advantages=labels)
    terms = [math.log1p(math.exp(-means[0] / 0.5)), math.log1p(math.exp(means[1] / 0.5))]
    near(answer.loss, sum(terms) / 2, 1e-12)
    slopes = [-sigmoid(-means[0] / 0.5) / 0.5 / 8] * 4 + [sigmoid(means[1] / 0.5) / 0.5 / 6] * 3
    near(answer.grad_T, laid(slopes, 0.0, False), 1e-12)


GROUP, PROMPTS = pg.REAL(form="group"), "mean(prompt) > sum(sequence) > mean(token)"


def squared(x: Any) -> Tensor:
    return x.advantage * x.ratio.square()


def test_a_surrogate_of_ones_own_sees_the_ratio_of_its_axis() -> None:
    """A r^2: slope 2 A r^2 by the token's own log-prob; with the sequence ratio, r = exp(mean d)."""
    own = pg.Surrogate(squared)
    check(
        spec_of(own), [a * r * r for a, r in zip(A, R, strict=True)], [2 * a * r * r for a, r in zip(A, R, strict=True)]
    )
    answer = answer_of(spec_of(own, ratio="sequence"))
    r = math.exp(sum(D[:4]) / 4)
    near(answer.grad_T[0], 2 * sum(A[:4]) * r * r / 4, 1e-12)
    spec = spec_of(pg.Surrogate(squared))
    assert pg.LossSpec.from_toml(spec.to_toml(), functions={"test_surrogates:squared": squared}) == spec


def test_a_clipped_token_has_gradient_exactly_zero_and_a_wild_ratio_none_that_is_not_finite() -> None:
    """Log-ratios of +-1e4 in every surrogate: bounded before exp."""
    for name, (surrogate, _) in CASES.items():
        if "streams" in name:
            continue
        wild = [old + d for old, d in zip(OLD, [1e4, -1e4, 100.0, -100.0, 30.0, -30.0, 0.0], strict=True)]
        answer = answer_of(spec_of(surrogate), logp=wild)
        assert math.isfinite(answer.loss) and answer.grad_T.isfinite().all(), name
        assert answer.metrics["rl/fault"] == 0, name


def test_bad_parts_are_refused() -> None:
    for build, words in (
        (lambda: pg.Clip(dual=3.0, delta=3.0), ("dual and delta", "one")),
        (lambda: pg.Clip(high=0.28, delta=1.2), ("delta lies inside the clip", "> 1.28")),
        (lambda: pg.CISPO(low=2.0, high=1.0, bound="absolute"), ("low lies above high",)),
        (lambda: pg.PolicyGradient(surrogate=pg.GMPO(), ratio="sequence"), ("GMPO", "ratio='token'")),
        (lambda: pg.PolicyGradient(surrogate=GROUP, normalizer=PROMPTS), ("one log-ratio", "ratio='sequence'")),
        (lambda: pg.PolicyGradient(surrogate=GROUP, normalizer=PROMPTS, ratio="prefix"), ("one log-ratio",)),
        (lambda: pg.PolicyGradient(surrogate=GROUP, ratio="sequence"), ("weighs all sequences", "mean(prompt) > sum")),
        (lambda: pg.presets.real(normalizer="mean(prompt) > sum(sequence) > sum(token)"), ("weighs all sequences",)),
        (lambda: pg.PolicyGradient(surrogate={"kind": "cipso"}), ("did you mean 'cispo'?",)),
    ):
        refused(pg.SpecError, build, *words)
    nowhere = spec_of(pg.Clip(low="lo", high=0.2))
    error = refused(pg.DataError, lambda: answer_of(nowhere), "lo is absent", "streams={'lo': ...}")
    assert "rl" in str(error)
    shape = spec_of(pg.Surrogate(lambda x: x.ratio[:2]))
    refused(pg.DataError, lambda: answer_of(shape), "surrogate", "one number per position")
