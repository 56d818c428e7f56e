"""The oracle's corrections, gates and sources of ``old`` against numbers worked out by hand."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest

from megatron_pgloss.errors import DataError
from support.oracle_cases import NAN, REINFORCE, leaf, leaves, near, row, run

LN2 = log(2)
UNCLIPPED = {"kind": "policy_gradient", "surrogate": {"kind": "unclipped"}}
# log(old/mu) by row: log 2, 0 | -log 2 | log 4, log 4. Turns are the runs.
ROWS = [
    row(".AoA", old=[0, -1, 0, -1], rollout=[0, -1 - LN2, 0, -1], version=5),
    row(".A", old=[0, -1], rollout=[0, -1 + LN2], version=[0, 3]),
    row(".AA", old=[0, -1, -1], rollout=[0, -1 - 2 * LN2, -1 - 2 * LN2], version=[0, 4, 1]),
]


def weights_of(rule: dict[str, Any], **component: Any) -> list[float]:
    """Five times the weight of each action token, by the gradient of -A logp: the correction itself under mean(token),
    where no token leaves the count."""
    grads = run(ROWS, REINFORCE | component, corrections=[rule], logp=leaves(ROWS), version=6)["grads"]
    pairs = [pair for g, r in zip(grads, ROWS, strict=True) for pair in zip(g, r["action"], strict=True)]
    return [-float(grad) * 5 for grad, action in pairs if action]


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        ({"kind": "truncated_is", "high": 3.0}, [2, 1, 0.5, 3, 3]),
        ({"kind": "truncated_is", "low": 0.7, "high": 3.0}, [2, 1, 0.7, 3, 3]),
        ({"kind": "truncated_is", "level": "sequence", "high": 9.0}, [2, 2, 0.5, 9, 9]),
        ({"kind": "truncated_is", "level": "turn", "high": 9.0}, [2, 1, 0.5, 9, 9]),
        ({"kind": "truncated_is", "level": "geometric", "high": 9.0}, [2**0.5, 2**0.5, 0.5, 4, 4]),
        ({"kind": "truncated_is", "level": "turn_geometric", "high": 9.0}, [2, 1, 0.5, 4, 4]),
        # Mean over tokens (2 + 1 + 0.5 + 3 + 3) / 5 = 1.9; over sequences (2 + 0.5 + 9) / 3.
        ({"kind": "truncated_is", "high": 3.0, "normalize": True}, [x / 1.9 for x in (2, 1, 0.5, 3, 3)]),
        (
            {"kind": "truncated_is", "level": "sequence", "high": 9.0, "normalize": True},
            [x * 3 / 11.5 for x in (2, 2, 0.5, 9, 9)],
        ),
        ({"kind": "icepop", "low": 0.6, "high": 3.0}, [2, 1, 0, 0, 0]),
        ({"kind": "icepop", "low": 0.6, "high": 4.1, "weight": False}, [1, 1, 0, 1, 1]),
        ({"kind": "ratio_mask", "low": 0.6, "high": 2.0}, [1, 1, 0, 0, 0]),
        ({"kind": "ratio_mask", "low": 0.4, "high": 8.0, "mean": "product"}, [1, 1, 1, 0, 0]),
        ({"kind": "ratio_mask", "low": 1.0, "high": 1.5, "unit": "turn"}, [0, 1, 0, 0, 0]),
        # k1 = -log r: sums -log 2 | log 2 | -log 16.
        ({"kind": "reject", "estimator": "k1", "statistic": "sum", "high": 0.0}, [1, 1, 0, 1, 1]),
        ({"kind": "reject", "estimator": "k1", "statistic": "mean", "low": -1.0, "high": 1.0}, [1, 1, 1, 0, 0]),
        # k2 = (log r)^2 / 2: 0.2402, 0 | 0.2402 | 0.9609 twice.
        ({"kind": "reject", "estimator": "k2", "statistic": "max", "high": 0.2}, [0, 0, 0, 0, 0]),
        ({"kind": "reject", "estimator": "k2", "statistic": "mean", "high": 0.2}, [1, 1, 0, 0, 0]),
        ({"kind": "reject", "estimator": "k2", "unit": "token", "high": 0.2}, [0, 1, 0, 0, 0]),
        # k3 = r - 1 - log r: 0.3069, 0 | 0.1931 | 1.6137 twice.
        ({"kind": "reject", "estimator": "k3", "statistic": "max", "high": 0.3}, [0, 0, 1, 0, 0]),
        ({"kind": "reject", "estimator": "k3", "unit": "turn", "high": 0.3}, [0, 1, 1, 0, 0]),
        ({"kind": "veto", "low": 0.6}, [1, 1, 0, 1, 1]),
        ({"kind": "veto", "low": 0.6, "high": 3.0}, [1, 1, 0, 0, 0]),
        ({"kind": "veto", "high": 1.5, "unit": "turn"}, [0, 1, 1, 0, 0]),
        # Now is 6; sampled 1, 1 | 3 | 2, 5 versions ago.
        ({"kind": "staleness", "max_lag": 2}, [1, 1, 0, 1, 0]),
        ({"kind": "staleness", "max_lag": 2, "level": "sequence"}, [1, 1, 0, 0, 0]),
    ],
)
def test_a_correction_gives_these_weights(rule: dict[str, Any], weights: list[float]) -> None:
    """Rejected tokens stay in the denominator, 5."""
    near(weights_of(rule), [float(w) for w in weights])


def test_rejected_tokens_may_leave_the_denominators() -> None:
    """Row 1 is rejected: 4 tokens in place of 5, and by sequence 2 rows in place of 3."""
    veto, kept = {"kind": "veto", "low": 0.6}, {"count_rejected": False}
    near(weights_of(veto, **kept), [5 / 4, 5 / 4, 0, 5 / 4, 5 / 4])
    by_row = {"normalizer": "mean(sequence) > mean(token)"}
    near(weights_of(veto, **by_row), [5 / 6, 5 / 6, 0, 5 / 6, 5 / 6])
    near(weights_of(veto, **by_row, **kept), [5 / 4, 5 / 4, 0, 5 / 4, 5 / 4])


def test_corrections_of_the_policy_read_the_log_probs_as_they_stand() -> None:
    """pi = e^-1 as old: the same weights without an old stream, and no gradient through them."""
    rows = [{key: value for key, value in each.items() if key != "old"} for each in ROWS]
    rule = {"kind": "truncated_is", "of": "policy", "high": 3.0}
    result = run(rows, REINFORCE, corrections=[rule], old="policy", logp=leaves(rows))
    near([-float(g) * 5 for grads in result["grads"] for g in grads if g], [2.0, 1.0, 0.5, 3.0, 3.0])


def test_corrections_act_on_what_they_name_and_rejection_on_all_action_tokens() -> None:
    rows = [row(".Ao", old=[0, -1, 0], rollout=[0, 0.0, 0])]
    rules = [{"kind": "veto", "low": 0.9}, {"kind": "truncated_is", "high": 0.1}]
    parts = [REINFORCE, {"kind": "kl", "to": "rollout"}, {"kind": "cross_entropy"}]
    found = run(rows, *parts, corrections=rules, logp=leaves(rows))
    assert {name: float(value.detach()) for name, value in found["components"].items()} == {
        "rl": 0.0,
        "kl": 0.0,
        "ce": 1.0,
    }
    rules[0]["on"] = ["kl"]
    found = run(rows, *parts, corrections=rules, logp=leaves(rows))
    near(found["components"]["rl"], 0.1)
    assert float(found["components"]["kl"].detach()) == 0.0


# pi of the three tokens: 0.5, 0.5, 0.5; mu: 0.2, 0.5, 0.8.
GATED = [row(".AAA", advantages=[0, 1, 1, -1], old=[0, log(0.5), log(0.5), log(0.5)],
             rollout=[0, log(0.2), log(0.5), log(0.8)])]  # fmt: skip
GATED_LOGP = (NAN, log(0.5), log(0.5), log(0.5))


@pytest.mark.parametrize(
    ("gate", "kept"),
    [
        ({"kind": "tv", "low": 0.2, "high": 0.2}, [0, 1, 0]),
        ({"kind": "tv", "low": 0.2, "high": 0.31}, [1, 1, 0]),
        ({"kind": "tv", "low": None, "high": 0.2}, [0, 1, 1]),
        ({"kind": "tv", "low": 0.2, "high": 0.2, "base": "old"}, [1, 1, 1]),
        ({"kind": "tv", "sides": "both", "low": 0.4, "high": 0.2}, [0, 1, 1]),
        # 0.2 log(0.2/0.5) + 0.8 log(0.8/0.5) = 0.1927, and the same mirrored.
        ({"kind": "binary_kl", "threshold": 0.19}, [0, 1, 0]),
        ({"kind": "binary_kl", "threshold": 0.2}, [1, 1, 1]),
        # 2.5, 1, 0.625
        ({"kind": "ratio_band", "low": 0.7, "high": 2.0}, [0, 1, 0]),
        ({"kind": "ratio_band", "low": 0.6, "high": 2.6}, [1, 1, 1]),
        # mean of log mu - log pi = (log 0.4 + log 1.6) / 3 = log(0.64) / 3 < 0
        ({"kind": "opsm", "threshold": 0.1}, [1, 1, 1]),
        ({"kind": "entropy_quantile", "share": 0.5}, [0, 1, 1]),
        ({"kind": "entropy_quantile", "share": 0.3}, [0, 0, 1]),
        # Tokens pulled outwards from mu: 1 (A > 0, pi > mu) and 3; d^2 = 0.8396 and 0.2209; token 1 goes first.
        ({"kind": "second_moment", "threshold": 0.3, "base": "rollout"}, [0, 1, 1]),
        ({"kind": "second_moment", "threshold": 0.1, "base": "rollout"}, [0, 1, 0]),
        ({"kind": "second_moment", "threshold": 0.6, "base": "rollout"}, [1, 1, 1]),
        ({"kind": "custom", "fn": lambda x: x.advantage > 0}, [1, 1, 0]),
        ({"kind": "custom", "fn": lambda x: x.ratio * 0.25}, [0.25, 0.25, 0.25]),
    ],
    ids=str,
)
def test_a_gate_keeps_these_tokens(gate: dict[str, Any], kept: list[float]) -> None:
    """Loss -r A with r = 1; dropped tokens stay in the denominator, 3."""
    result = run(GATED, UNCLIPPED, gates=[gate], logp=leaf(*GATED_LOGP), entropies=leaf(NAN, 0.1, 0.2, 0.9))
    near(result["grads"][0], [0] + [-k * a / 3 for k, a in zip(kept, (1, 1, -1), strict=True)])


def test_a_sequence_is_masked_where_its_advantage_is_negative_and_it_is_off_policy() -> None:
    rows = [row(".AA", advantages=[0, 1, -1], old=[0, -1, -1], rollout=[0, -0.5, -0.7])]
    for threshold, kept in ((0.39, [-0.5, 0]), (0.41, [-0.5, 0.5])):
        gate = {"kind": "opsm", "threshold": threshold}
        near(run(rows, UNCLIPPED, gates=[gate], logp=leaf(NAN, -1, -1))["grads"][0], [0, *kept])


def test_the_largest_covariances_are_dropped_or_alone_kept() -> None:
    """A - mean = (1, 0, -1), log pi - mean = (1, 0, -3) + 2/3: the products are 5/3, 0, 7/3."""
    rows = [row(".AAA", advantages=[0, 2, 1, 0], old=[0, -1, -2, -5])]
    gate = {"kind": "covariance", "select": "top", "share": 0.4}
    for effect, kept in (("drop", [-2 / 3, -1 / 3, 0]), ("keep", [0, 0, 0])):
        result = run(rows, UNCLIPPED, gates=[gate | {"effect": effect}], logp=leaf(NAN, -1, -2, -5))
        near(result["grads"][0], [0, *kept])


def test_covariances_inside_a_band_are_drawn_by_name_and_position() -> None:
    """Half of four tokens go, whichever they are; the draw knows nothing of the order of the rows."""
    rows = [row(".AA", advantages=[0, 1, -1], name=name) for name in ("a", "b")]
    gate = {"kind": "covariance", "select": "band", "low": -9.0, "high": 9.0, "share": 0.5, "seed": 3}
    logp = (leaf(NAN, -1, -2), leaf(NAN, -2, -1))

    def grads(order: tuple[int, ...], **more: Any) -> list[list[float]]:
        given = [logp[i][0].detach().clone().requires_grad_() for i in order]
        found = run([rows[i] for i in order], REINFORCE, gates=[gate | more], logp=given)["grads"]
        return [found[order.index(i)].tolist() for i in (0, 1)]

    one = grads((0, 1))
    assert sum(g != 0 for row_grads in one for g in row_grads) == 2
    assert grads((1, 0)) == one
    assert len({str(grads((0, 1), seed=seed)) for seed in range(8)}) > 1


def test_gated_tokens_may_leave_the_denominators() -> None:
    gate = {"kind": "tv", "low": 0.2, "high": 0.2}
    near(
        run(GATED, UNCLIPPED | {"count_rejected": False}, gates=[gate], logp=leaf(*GATED_LOGP))["grads"][0],
        [0, 0, -1, 0],
    )


def test_old_lies_between_the_sampler_and_the_policy_by_version() -> None:
    """Now is 6; sampled at 2, 5, 6, 7: 3/4 of the way, then 0 of it. mu = -3, pi = -1, so old = -1.5, -3, -3, -3."""
    rows = [row(".AAAA", rollout=[0, -3, -3, -3, -3], version=[0, 2, 5, 6, 7])]
    result = run(rows, UNCLIPPED, old="interpolate", version=6, logp=leaf(NAN, -1, -1, -1, -1))
    near(result["token_losses"]["rl"][0][1:], [-exp(0.5), -exp(2), -exp(2), -exp(2)])
    with pytest.raises(DataError, match="which is the current one"):
        run(rows, UNCLIPPED, old="interpolate", logp=leaf(NAN, -1, -1, -1, -1))


def test_old_is_what_an_earlier_update_recorded() -> None:
    rows = [row(".A", recorded=[0, -2]), row(".A")]
    result = run(rows, UNCLIPPED, old="record", logp=[*leaf(NAN, -1), *leaf(NAN, -1)])
    near(result["loss"], -(exp(1) + 1) / 2)


def test_rows_that_broke_are_not_there() -> None:
    rows = [row(".AA"), row(".A", termination="fault", advantages=NAN)]
    by_row = REINFORCE | {"normalizer": "mean(sequence) > mean(token)", "units": "all"}
    near(run(rows, by_row, empty_sequences="refuse")["loss"], 1.0)
