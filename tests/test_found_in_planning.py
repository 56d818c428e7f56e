"""What trying the plan from outside brought up: counts, exact sums, what statistics read, who votes; by hand."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss import advantages
from megatron_pgloss.errors import Caught, as_error
from megatron_pgloss.planning.agreement import Ranks
from megatron_pgloss.planning.select import Job, joined, pieces
from megatron_pgloss.planning.wire import MOST_TOKENS
from support.oracle_cases import row, run
from support.steps import NAN, ONE, near, pictured, refused, solve, weights_of

INF = float("inf")


def test_rows_that_are_left_out_are_in_no_count_set() -> None:
    """A9. Row 1 has two targets in the mask, of which one is trained: 1/2. Row 2, without a member, has two more."""
    rl = pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", count="wide")
    spec = pg.LossSpec(components=[rl], old="policy", empty_sequences="exclude")
    batch = pictured("cAc", "ccc", masks={"wide": True})
    near(weights_of(batch, spec), [1 / 2])
    near(weights_of(batch.select([0]), spec), [1 / 2])
    # Observations alike: of the four, two lie in a row without a member.
    watched = pg.CrossEntropy(count="observations")
    spec = pg.LossSpec(components=[watched, rl.replace(count="members")], old="policy", empty_sequences="exclude")
    near(weights_of(pictured("cAoo", "cA"), spec, "ce"), [1 / 2, 1 / 2])


# ---- exact sums (A10) -----------------------------------------------------------------------------------------------


class Many(Ranks):
    """As if so many ranks held what this one holds."""

    copies = 1

    def total(self, numbers: Tensor, group: Any) -> Tensor:
        assert int(numbers.abs().max()) * self.copies < 2**63
        return numbers * self.copies


def many(copies: int) -> Job:
    ranks = type("Copies", (Many,), {"copies": copies})()
    return Job(ranks)


def test_131136_squares_of_40000_add_up() -> None:
    """1.6e9 each: 2.098176e14, more than fixed point held; the mean of any of them is 1.6e9."""
    values_T = torch.full((131_136,), 40_000.0).square()
    every_T = torch.ones(131_136, dtype=torch.bool)
    job = Job(Ranks())
    assert job.sum(values_T, every_T) == 209_817_600_000_000.0 and job.mean(values_T, every_T) == 1.6e9
    assert job.cut(values_T, every_T, 0.04) == 1.6e9 and job.cut(values_T, every_T, 1.6e9) == INF
    # 131,135 zeros and one square: the mean of all is 1.6e9 / 131,136 = 12,201.07; below it the square goes alone.
    values_T[1:] = 0
    assert job.cut(values_T, every_T, 12_201.0) == 1.6e9 and job.cut(values_T, every_T, 12_202.0) == INF


@pytest.mark.parametrize("value", [1.7976931348623157e308, 5e-324, -2.2250738585072014e-308, 0.1, 1 / 3, -1e30])
def test_sums_hold_at_the_most_tokens_of_a_plan(value: float) -> None:
    """Eight tokens on each of 2^36 ranks, 2^39 in all: the mean is the value, whatever it is."""
    values_T, every_T = torch.full((8,), value, dtype=torch.float64), torch.ones(8, dtype=torch.bool)
    job = many(MOST_TOKENS // 8)
    assert job.mean(values_T, every_T) == value
    expected = Fraction(value) * MOST_TOKENS
    assert job.sum(values_T, every_T) == (INF if expected > Fraction(1.7976931348623157e308) else float(expected))
    if value > 0:
        assert job.cut(values_T, every_T, value) == INF and job.cut(values_T, every_T, value / 2) == value


def test_pieces_are_below_2_to_the_24_and_stand_for_the_float() -> None:
    """(2^24 - 1) 2^39 = 9.22337e18 - 5.5e11 < 2^63: no sum of them over 2^39 tokens overflows."""
    dice = random.Random(0)
    values = [dice.uniform(-1, 1) * 2.0 ** dice.randint(-1074, 1020) for _ in range(2000)]
    values += [0.0, -0.0, 5e-324, 1.7976931348623157e308, -1.7976931348623157e308]
    octave_T, pieces_T3 = pieces(torch.tensor(values, dtype=torch.float64))
    assert int(pieces_T3.abs().max()) == 2**24 - 1 or int(pieces_T3.abs().max()) < 2**24
    assert (2**24 - 1) * MOST_TOKENS < 2**63 and int(octave_T.min()) >= 0 and int(octave_T.max()) <= 127
    for value, octave, three in zip(values, octave_T.tolist(), pieces_T3.tolist(), strict=True):
        assert joined(octave, three) == Fraction(value)


def test_more_tokens_than_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_pgloss.planning.wire.MOST_TOKENS", 3)
    two = pictured("cA", "cA")
    refused(pg.LayoutError, lambda: weights_of(two, pg.presets.reinforce()), "too many tokens", "got 4")
    assert len(weights_of(pictured("cAA"), pg.presets.reinforce())) == 2


# ---- what statistics read (A11) -------------------------------------------------------------------------------------

GSPO = pg.PolicyGradient(ratio="sequence")
MASKED = {"masks": {"m": [True, True, False, True, True]}}


def spec_of(rl: pg.PolicyGradient, **more: Any) -> pg.LossSpec:
    return pg.LossSpec(components=[rl], masks=[pg.UserMask(name="m")], **more)


def hole(value: float, at: int = 2) -> list[float]:
    """-1 at each of five tokens but one."""
    return [value if t == at else -1.0 for t in range(5)]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_masked_token_that_a_statistic_reads_must_be_finite(value: float) -> None:
    """The mean over row 1 is of two tokens as sampled; without the second it would be another one, in silence."""
    batch = pictured("cAA", "cA", old_logprobs=hole(value), **MASKED)
    words = ("a statistic of component 'rl' reads", "row 0, token 2, stream 'old'")
    refused(pg.DataError, lambda: pg.plan([batch], spec_of(GSPO), split=ONE), *words)
    pg.plan([batch], spec_of(pg.PolicyGradient()), split=ONE)  # a token's own ratio does not look there
    over = pg.Ratio(level="sequence", over="members")
    pg.plan([batch], spec_of(pg.PolicyGradient(ratio=over)), split=ONE)  # nor does a mean over the members


def test_a_unit_that_nobody_trains_on_may_hold_anything() -> None:
    masks = {"masks": {"m": [False, False, False, True, True]}}
    batch = pictured("cAA", "cA", old_logprobs=hole(NAN), **masks)
    pg.plan([batch], spec_of(GSPO), split=ONE)
    turns = pg.PolicyGradient(ratio=pg.Ratio(level="turn"))
    batch = pictured("cAA", "cA", old_logprobs=hole(NAN), turn_ids=[-1, 0, 1, -1, 0], **MASKED)
    pg.plan([batch], spec_of(turns), split=ONE)  # another turn than the trained one
    words = ("a statistic of component 'rl' reads", "stream 'old'")
    whole = pictured("cAA", "cA", old_logprobs=hole(NAN), turn_ids=[-1, 0, 0, -1, 0], **MASKED)
    refused(pg.DataError, lambda: pg.plan([whole], spec_of(turns), split=ONE), *words)


@pytest.mark.parametrize(
    "rule",
    [
        pg.TruncatedIS(level="sequence"), pg.Reject(estimator="k1", statistic="mean", unit="sequence", high=1.0),
        pg.Veto(low=1e-4),
    ],
)  # fmt: skip
def test_corrections_over_a_unit_alike(rule: Any) -> None:
    batch = pictured("cAA", "cA", old_logprobs=-1.0, rollout_logprobs=hole(NAN), **MASKED)
    words = ("a statistic of component 'rl' reads", "row 0, token 2, stream 'rollout'")
    refused(pg.DataError, lambda: pg.plan([batch], spec_of(pg.PolicyGradient(), corrections=[rule]), split=ONE), *words)
    by_token = [pg.TruncatedIS()]
    pg.plan([batch], spec_of(pg.PolicyGradient(), corrections=by_token), split=ONE)


def over_units(**more: Any) -> pg.PolicyGradient:
    """A ratio of the user's own: the sequence's mean of a stream that it does not name."""
    fn = more.pop("fn", lambda x: x.unit_mean(x.log_ratio))
    return pg.PolicyGradient(ratio=pg.CustomRatio(fn, **more), count_rejected=False)


def test_a_statistic_that_a_user_s_function_declares_is_checked_like_our_own() -> None:
    batch = pictured("cAA", "cA", old_logprobs=hole(NAN), **MASKED)
    mean = pg.Statistic(name="mean", of="log_ratio")
    words = ("a statistic of component 'rl' reads", "row 0, token 2, stream 'old'")
    declared = over_units(fn=lambda x: x.statistic("mean"), statistics=(mean,))
    refused(pg.DataError, lambda: pg.plan([batch], spec_of(declared), split=ONE), *words)
    members = over_units(fn=lambda x: x.statistic("mean"), statistics=(mean.replace(over="members"),))
    pg.plan([batch], spec_of(members), split=ONE)


def test_what_a_user_s_function_reads_beside_that_is_a_fault_with_its_name() -> None:
    """Nothing says before it runs that the function reads ``old`` at the masked token: the loss finds it there."""

    def finished(batch: pg.TokenBatch, spec: pg.LossSpec) -> dict[str, float]:
        plan = pg.plan([batch], spec, split=ONE)
        micros = list(plan.microbatches())
        logp = [torch.full(micro.shape, -1.0, dtype=torch.float64, requires_grad=True) for micro in micros]
        outs = [pg.policy_loss(pg.TokenLogprobs(logprob=x), micro) for x, micro in zip(logp, micros, strict=True)]
        return pg.finish(plan, outs)

    for at, masked in ((2, MASKED["masks"]["m"]), (1, [False, False, False, True, True])):
        batch = pictured("cAA", "cA", old_logprobs=hole(NAN, at), masks={"m": masked})
        if at == 1:  # nobody trains on that row
            assert finished(batch, spec_of(over_units()))["rl/fault"] == 0
            continue
        place = "component rl, row 0, token 2, stream 'logits', of token id 3, where old is not finite"
        refused(pg.NonFiniteError, lambda b=batch: finished(b, spec_of(over_units())), "got 1 faults", place)
        by_token = pg.PolicyGradient(ratio=pg.CustomRatio(lambda x: x.logp - x.old))
        assert finished(batch, spec_of(by_token))["rl/fault"] == 0  # a token's own ratio does not look there


def test_the_statistics_pass_refuses_it_since_its_gates_run_once() -> None:
    batch = pictured("cAA", "cA", old_logprobs=hole(NAN), sample_ids=["a", "b"], **MASKED)
    gate = pg.Gate(lambda x: x.unit_sum(x.log_ratio) > -1)
    plan = pg.plan([batch], spec_of(pg.PolicyGradient(count_rejected=False), gates=[gate]), split=ONE)
    scored = [pg.TokenLogprobs(logprob=torch.full(m.shape, -1.0, dtype=torch.float64)) for m in plan.microbatches()]
    words = ("a statistic of component 'rl' reads", "sample 'a', token 2, stream 'old'")
    refused(pg.DataError, lambda: pg.statistics_pass(plan, scored), *words)


def test_gmpo_reads_the_sign_of_every_advantage() -> None:
    gmpo = pg.PolicyGradient(surrogate=pg.spec.GMPO())
    batch = pictured("cAA", "cA", old_logprobs=-1.0, advantages=hole(NAN), **MASKED)
    words = ("a statistic of component 'rl' reads", "row 0, token 2, stream 'advantages'")
    refused(pg.DataError, lambda: pg.plan([batch], spec_of(gmpo), split=ONE), *words)
    pg.plan([batch], spec_of(GSPO), split=ONE)  # its statistic is of ratios alone


def test_a_gate_over_a_sequence_alike() -> None:
    gate = pg.SequenceGate(threshold=0.1)
    batch = pictured("cAA", "cA", old_logprobs=-1.0, rollout_logprobs=hole(NAN), **MASKED)
    words = ("a statistic of component 'rl' reads", "stream 'rollout'")
    refused(pg.DataError, lambda: pg.plan([batch], spec_of(pg.PolicyGradient(), gates=[gate]), split=ONE), *words)


# ---- by kind (A14) --------------------------------------------------------------------------------------------------


def test_a_policy_gradient_of_any_name_is_corrected_gated_and_masked() -> None:
    """mu = e^-2, old = e^-1: the ratio e = 2.718 is truncated at 2. The second row has A = 0."""
    batch = pictured("cA", "cA", advantages=[1.0, 0.0], old_logprobs=-1.0, rollout_logprobs=-2.0)
    for name in ("rl", "two"):
        part = pg.PolicyGradient(name=name, normalizer="sum(token)")
        two = pg.LossSpec(components=[part], corrections=[pg.TruncatedIS(high=2.0)])
        near(weights_of(batch, two, name), [2.0, 2.0])
        fewer = pg.LossSpec(components=[part], masks=[pg.DropZeroAdvantage()])
        near(weights_of(batch, fewer, name), [1.0])
        gated = pg.LossSpec(components=[part, pg.Entropy()], gates=[pg.RatioGate(low=0.5, high=2.0, base="rollout")])
        out = solve(batch, gated, [-1.0, -1.0, -1.0, -1.0], [1.0] * 4).outs[0]
        assert out.metrics[f"{name}/gate_ratio_band"].result() == 1.0 and "entropy/gate_ratio_band" not in out.metrics
        assert f"on {name}" in str(two) and f"on {name}" in str(fewer) and f"on {name}" in str(gated)


# ---- ties and what nobody sampled (A13) -----------------------------------------------------------------------------


def test_tokens_of_equal_covariance_stand_or_fall_together() -> None:
    """A = (1, 1, -2, 0) with log pi = (-1, -1, -1, -1.4): mean A = 0, mean log pi = -1.1. The products A (log pi + 1.1)
    are 0.1, 0.1, -0.2, 0: one token of four is asked for, and the two of 0.1 go together.
    """
    gate = pg.CovarianceGate(select="top", share=0.25)
    spec = pg.presets.ppo(gates=[gate])
    batch = pictured("cA", "cA", "cA", "cA", advantages=[1.0, 1.0, -2.0, 0.0], old_logprobs=-1.0)
    answer = solve(batch, spec, [-1.0, 0.0, -1.0, 0.0, -1.0, 0.0, -1.4, 0.0])
    assert answer.plan.components["rl"].gates[0][batch.action_T].tolist() == [False, False, True, True]


def test_the_oracle_says_so_too() -> None:
    """With A = 0.1 three times and 0.4: a rounded mean of equal numbers is not the number, and no two were equal."""
    advantages = [0.1, 0.1, 0.1, 0.1]
    gate = {"kind": "covariance", "select": "top", "share": 0.25}
    part = {"kind": "policy_gradient", "surrogate": {"kind": "unclipped"}}
    rows = [row(".A", advantages=[0, a], old=-1.0, name=str(i)) for i, a in enumerate(advantages)]
    logp = [torch.tensor([NAN, x], dtype=torch.float64, requires_grad=True) for x in (-1.0, -1.3, -1.7, -2.0)]
    # Every A is the mean: all products are 0, and all four tokens are dropped together.
    assert all(float(g[1]) == 0 for g in run(rows, part, gates=[gate], logp=logp)["grads"])
    batch = pictured("cA", "cA", "cA", "cA", advantages=advantages, old_logprobs=-1.0)
    spec = pg.presets.ppo(gates=[pg.CovarianceGate(select="top", share=0.25)])
    answer = solve(batch, spec, [-1.0, 0.0, -1.3, 0.0, -1.7, 0.0, -2.0, 0.0])
    assert answer.plan.components["rl"].gates[0][batch.action_T].tolist() == [False] * 4
    rows = [row(".A", advantages=[0, a], old=-1.0, name=str(i)) for i, a in enumerate([1.0, 1.0, -2.0, 0.0])]
    logp = [torch.tensor([NAN, x], dtype=torch.float64, requires_grad=True) for x in (-1.0, -1.0, -1.0, -1.4)]
    kept = [float(g[1]) != 0 for g in run(rows, part, gates=[gate], logp=logp)["grads"]]
    assert kept == [False, False, True, False]  # the last has no gradient because A = 0


def test_what_nobody_sampled_has_no_version() -> None:
    """pi = e^-1, mu = e^-2, three versions ago: old of the action is e^(-2 + 2/3), so old/mu = e^(2/3) = 1.948. The
    observation was sampled by no version: there old is mu, the weight 1, and the loss of ce 1.
    """
    given = {"old": "interpolate", "corrections": [pg.TruncatedIS(high=9.0, on=("rl", "ce"))]}
    rl = pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", normalizer="sum(token)")
    spec = pg.LossSpec(components=[rl, pg.CrossEntropy(normalizer="sum(token)")], **given)
    batch = pictured("cAo", rollout_logprobs=-2.0, versions=torch.tensor([2, 2, 2]))
    near(solve(batch, spec, [-1.0, -1.0, 0.0], version=5).grad_T, [-(2.718281828459045 ** (2 / 3)), -1.0, 0.0])
    rule = {"kind": "truncated_is", "high": 9.0, "on": ("rl", "ce")}
    parts = [{"kind": "policy_gradient", "name": "rl", "surrogate": {"kind": "reinforce"}, "ratio": "none",
              "normalizer": "sum(token)"}, {"kind": "cross_entropy", "normalizer": "sum(token)"}]  # fmt: skip
    result = run([row(".Ao", rollout=-2.0, version=2)], *parts, old="interpolate", corrections=[rule], version=5)
    near(result["grads"][0], [0.0, -(2.718281828459045 ** (2 / 3)), -1.0])


# ---- a teacher (C15) ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "said"), [(NAN, "nan"), (-INF, "-inf"), (INF, "inf"), (0.5, "0.5")])
def test_a_teacher_s_log_prob_that_is_none_is_refused_by_the_plan(value: float, said: str) -> None:
    spec = pg.LossSpec(components=[pg.TopKDistill()])

    def batch(at: int, ids: int) -> pg.TokenBatch:
        teacher = torch.full((1, 3, 2), -1.0, dtype=torch.float64)
        teacher[0, at, 1] = value
        streams = {"teacher_ids": torch.tensor([[[1, 2], [1, 2], [1, ids]]]), "teacher_logprobs": teacher}
        return pg.TokenBatch.from_padded(
            tokens=torch.tensor([[5, 6, 7]]), lengths=[3], action_mask=torch.tensor([[False, False, True]]),
            streams=streams,
        )  # fmt: skip

    words = ("a teacher's log-prob inside component 'distill'", f"got {said} for id 2", "token 2, stream 'teacher_log")
    refused(pg.DataError, lambda: pg.plan([batch(2, 2)], spec, split=ONE), *words)
    pg.plan([batch(2, -1)], spec, split=ONE)  # no id is listed there
    pg.plan([batch(1, 2)], spec, split=ONE)  # not a member


# ---- who votes (A15) ------------------------------------------------------------------------------------------------


def test_a_rollout_without_an_action_is_nothing_to_compare_with() -> None:
    """Rewards 100 and 1, and only the second can be trained: no voter to compare it with, and not (1 - 100) / 2."""
    batch = pictured("cc", "cA", prompt_ids=["p", "p"])
    out, report = advantages.group_relative(batch, [100.0, 1.0], scale="none")
    assert out.streams["advantages"].tolist() == [0.0] * 4
    assert report.voters == 1 and report.silent[0].voters == 1
    # With a third rollout of reward 3: the mean of 1 and 3 is 2.
    three = pictured("cc", "cA", "cA", prompt_ids=["p"] * 3)
    out, report = advantages.group_relative(three, [100.0, 1.0, 3.0], scale="none")
    near(out.streams["advantages"][three.action_T], [-1.0, 1.0])
    assert report.voters == 2 and advantages.rloo(three, [100.0, 1.0, 3.0])[1].voters == 2
    # An episode acts in one of its rows: it votes, once.
    parts = pictured("cc", "cA", "cA", prompt_ids=["p"] * 3, episode_ids=[0, 0, 1])
    assert advantages.group_relative(parts, [1.0, 1.0, 3.0], scale="none")[1].voters == 2


# ---- weights that no float holds (C10) ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["sum(token)/1e-320", "sum(token)/1e-39", "sum(token)/1e39",
                                  "sum(sequence)/1e-30 > sum(token)/1e-30"])  # fmt: skip
def test_a_divisor_whose_weights_no_float_holds_is_refused(path: str) -> None:
    spec = pg.presets.reinforce(normalizer=path)
    batch = pictured("cAAAA", "cA")
    refused(pg.DataError, lambda: pg.plan([batch], spec, split=ONE), "rl's weights can be too", "2^-126", "coef=")


def test_divisors_that_cancel_are_fine() -> None:
    spec = pg.presets.reinforce(normalizer="sum(sequence)/1e-30 > sum(token)/1e30")
    near(weights_of(pictured("cA"), spec), [1.0], 1e-6)


# ---- minibatches (C2, C3) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"count": 0}, ("count must be positive", "got 0")), ({"count": -1}, ("count must be positive",)),
        ({"count": 2.0}, ("count is not an integer", "2.0")), ({"count": True}, ("count is not an integer",)),
        ({"count": 2, "by": "promt"}, ("by='promt'", "did you mean 'prompt'")),
        ({"count": 2, "seed": "x"}, ("seed is not an integer",)),
    ],
)  # fmt: skip
def test_a_deal_that_cannot_be_is_refused_at_the_call(given: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(pg.DataError, lambda: pg.minibatches([pictured("cA", "cA", prompt_ids=[0, 1])], **given), *words)


def test_a_deal_of_rows_without_ids_is_the_same_every_time() -> None:
    held = [
        [pictured("cA", "cAA", "cAAA"), pictured("cAAAA", "cAAAAA")] for _ in range(6)
    ]  # at once, so no id is reused
    deals = []
    for batches in held:
        steps = pg.minibatches(batches, 2, by="sequence", seed=4)
        deals.append([[int(n) for batch in mini for n in batch.lengths_S] for mini in steps])
    assert all(deal == deals[0] for deal in deals)
    assert sorted(n for step in deals[0] for n in step) == [2, 3, 4, 5, 6]


# ---- errors of any type (C1) ----------------------------------------------------------------------------------------


def test_an_error_of_any_type_is_kept_with_its_name_and_line() -> None:
    with Caught() as here:
        [].index(3)
    assert isinstance(here.error, pg.DataError) and "ValueError" in str(here.error)
    assert "test_found_in_planning.py, line" in str(here.error) and isinstance(here.error.__cause__, ValueError)
    known = pg.SpecError("mine")
    assert as_error(known) is known
    with pytest.raises(KeyboardInterrupt), Caught() as here:
        raise KeyboardInterrupt
    assert here.error is None


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"split": None}, pg.SpecError, ("plan takes a Split", "NoneType")),
        ({"coef": [0.5]}, pg.SpecError, ("coef is not a mapping", "list")),
        ({"coef": {"rl": 10**400}}, pg.DataError, ("coef['rl'] is not a finite number",)),
        ({"version": "3"}, pg.SpecError, ("version is not an integer",)),
        ({"vocab_size": 1.5}, pg.SpecError, ("vocab_size is not an integer",)),
    ],
)
def test_arguments_of_another_type_are_refused(given: dict[str, Any], kind: Any, words: tuple[str, ...]) -> None:
    arguments: dict[str, Any] = {"split": ONE} | given
    refused(kind, lambda: pg.plan([pictured("cA")], pg.presets.reinforce(), **arguments), *words)
