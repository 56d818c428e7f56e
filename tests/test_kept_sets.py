"""Kept sets from the batch to the loss: who is scored on what, tokens outside by policy, metrics, refusals, traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.megatron.conditions import Setup
from megatron_pgloss.megatron.finish import Collected, nonfinite
from megatron_pgloss.megatron.modes import refuse
from megatron_pgloss.metrics import Metric, merge_all
from support.steps import ONE, near, refused

V = 8
TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
"""Rows of 4 and 3; tokens 2, 3 and 6, 7 are sampled, 4 is an observation."""
LOGITS = torch.randn(2, 4, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
IDS = torch.tensor([[[-1, -1], [2, 5], [1, 3], [-1, -1]], [[-1, -1], [6, 0], [1, 0], [-1, -1]]])
"""Of the four sampled tokens the last, 7, is not among its ids."""
PARTS = [
    pg.PolicyGradient(surrogate=pg.Reinforce(), ratio="none", normalizer="mean(token)"),
    pg.CrossEntropy(normalizer="sum(token)"),
    pg.Entropy(coef=0.5, normalizer="sum(token)"),
]


def batch(**more: Any) -> pg.TokenBatch:
    given = {
        "tokens": TOKENS, "lengths": [4, 3], "advantages": torch.tensor([2.0, -1.0], dtype=torch.float64),
        "action_mask": torch.tensor([[False, True, True, False], [False, True, True, False]]),
        "observation_mask": torch.tensor([[False, False, False, True], [False] * 4]),
        "sample_ids": ["one", "two"],
    }  # fmt: skip
    return pg.TokenBatch.from_padded(**(given | more))


def spec(outside: str = "refuse", source: str = "recorded", **more: Any) -> pg.LossSpec:
    kept = pg.KeptSet(source=source, outside=outside)  # type: ignore[arg-type]
    return pg.LossSpec(**({"old": "policy", "components": PARTS, "kept": kept} | more))


def run(one: pg.TokenBatch, how: pg.LossSpec, **more: Any) -> tuple[float, Tensor, dict[str, float], pg.Plan]:
    """Loss, gradient of the logits, metrics."""
    plan = pg.plan([one], how, split=ONE)
    logits = LOGITS.clone().requires_grad_()

    def scored(micro: pg.MicroBatch) -> pg.TokenLogprobs:
        return pg.token_logprobs(logits, micro.targets, kept=micro.kept, entropy=True, temperature=micro.temperature)

    if plan.needs_statistics_pass:
        plan = pg.statistics_pass(plan, [scored(micro) for micro in plan.microbatches()])
    outs = [pg.policy_loss(scored(micro), micro) for micro in plan.microbatches()]
    loss = torch.stack([out.loss for out in outs]).sum()
    loss.backward()
    assert logits.grad is not None
    metrics = {name: metric.result() for name, metric in merge_all(out.metrics for out in outs).items()}
    return float(loss.detach()), logits.grad, metrics, plan


def on(row: int, token: int, ids: list[int] | None) -> tuple[Tensor, Tensor]:
    """Log-prob of a token and the entropy under softmax over ``ids``, in plain torch."""
    z_V = LOGITS[row, token - 1]
    keep = list(range(V)) if ids is None else ids
    logp = z_V[keep].log_softmax(0)
    where = keep.index(int(TOKENS[row, token]))
    return logp[where], -(logp.exp() * logp).sum()


def by_hand(sets: dict[tuple[int, int], list[int]], counted: int) -> float:
    """Reinforce over the tokens of ``sets``, divided by ``counted``, their entropy, the observation's likelihood."""
    total = -on(0, 3, None)[0]
    for (row, token), ids in sets.items():
        logp, entropy = on(row, token, ids)
        total = total - (2.0 if row == 0 else -1.0) * logp / counted - 0.5 * entropy
    return float(total)


THREE = {(0, 1): [2, 5], (0, 2): [1, 3], (1, 1): [6, 0]}


def test_a_token_outside_its_recorded_set_is_refused_by_name() -> None:
    refused(
        pg.DataError, lambda: pg.plan([batch(kept_sets=IDS)], spec(), split=ONE), "'two', token 2", "token 7", "drop"
    )


def test_dropped_from_a_recorded_set_it_leaves_members_and_counts_with_a_reason() -> None:
    loss, grad, metrics, plan = run(batch(kept_sets=IDS), spec("drop"))
    near(loss, by_hand(THREE, 3), 1e-13)
    assert plan.counts["rl"]["outside the kept set"] == 1 and plan.counts["rl"]["token"] == 3
    assert plan.counts["ce"]["outside the kept set"] == 0
    assert "1 tokens out: outside the kept set" in plan.report() and "recorded by the sampler" in plan.report()
    assert not grad[1, 1].any() and metrics["rl/fault"] == 0 and metrics["rl/outside"] == 0
    assert metrics["rl/kept_fraction"] == 2 / V


def test_it_may_join_its_set() -> None:
    loss, grad, metrics, _ = run(batch(kept_sets=IDS), spec("add"))
    near(loss, by_hand(THREE | {(1, 2): [1, 0, 7]}, 4), 1e-13)
    assert grad[1, 1].nonzero().flatten().tolist() == [0, 1, 7]
    assert metrics["rl/outside"] == 1 / 4 and metrics["rl/kept_fraction"] == (2 + 2 + 2 + 3) / (4 * V)


def test_observations_and_tokens_without_ids_keep_the_whole_vocabulary() -> None:
    ids = IDS.clone()
    ids[1, 2], ids[0, 3] = -1, 2  # what is recorded at an observation is not read
    loss, grad, _, _ = run(batch(kept_sets=ids), spec())
    near(loss, by_hand(THREE | {(1, 2): list(range(V))}, 4), 1e-13)
    assert bool((grad[0, 2] != 0).all())


def likeliest(row: int, token: int, k: int) -> list[int]:
    return LOGITS[row, token - 1].topk(k).indices.tolist()  # type: ignore[no-any-return]


def test_dropped_from_a_recomputed_set_it_leaves_the_numerator_alone() -> None:
    k = 5
    inside = {place: likeliest(*place, k) for place in [(0, 1), (0, 2), (1, 1), (1, 2)]}
    kept = {place: ids for place, ids in inside.items() if int(TOKENS[place]) in ids}
    assert 0 < len(kept) < 4
    loss, grad, metrics, plan = run(batch(top_k=k), spec("drop", "recomputed"))
    near(loss, by_hand(kept, 4), 1e-13)
    assert metrics["rl/fault"] == 0 and metrics["rl/outside"] == 1 - len(kept) / 4
    assert plan.counts["rl"]["token"] == 4 and plan.counts["rl"]["outside the kept set"] == 0
    assert "recomputed from the logits" in plan.report()
    for place in set(inside) - set(kept):
        assert not grad[place[0], place[1] - 1].any()
    loss, grad, metrics, _ = run(batch(top_k=k), spec("refuse", "recomputed"))
    assert metrics["rl/fault"] == 4 - len(kept) and grad.isfinite().all()
    loss, _, metrics, _ = run(batch(top_k=k), spec("add", "recomputed"))
    added = {place: [*ids, *([int(TOKENS[place])] if place not in kept else [])] for place, ids in inside.items()}
    near(loss, by_hand(added, 4), 1e-13)
    assert metrics["rl/fault"] == 0 and metrics["rl/outside"] == 1 - len(kept) / 4


def test_the_fault_says_that_a_token_may_lie_outside() -> None:
    found = Collected(metrics={"rl/fault": Metric.sum(torch.ones(()))}, place="rank 0", updated=True)
    plan = pg.plan([batch(top_k=3)], spec("refuse", "recomputed"), split=pg.Split(sequences=1))
    error = nonfinite(found, plan, gradients=True)
    assert error is not None and "outside of its set" in str(error)


def test_the_sampler_s_numbers_are_one_or_one_a_row_or_one_a_token() -> None:
    want = run(batch(top_k=torch.tensor([[3, 3, 3, 3], [6, 6, 6, 6]])), spec("add", "recomputed"))
    got = run(batch(top_k=torch.tensor([3, 6])), spec("add", "recomputed"))
    assert got[0] == want[0] and torch.equal(got[1], want[1])
    off = run(batch(top_k=0, top_p=1.0, min_p=0.0), spec("refuse", "recomputed"))
    near(off[0], run(batch(), spec(kept=None))[0], 1e-13)
    heat = batch(top_p=0.8, temperature=torch.tensor([0.5, 2.0], dtype=torch.float64))
    kept = next(iter(pg.plan([heat], spec("add", "recomputed"), split=ONE).microbatches())).kept
    assert (
        kept is not None
        and kept.add_target
        and kept.top_p.tolist()
        == [  # type: ignore[union-attr]
            [0.8] * 2 + [1.0] * 2,
            [0.8] * 2 + [1.0] * 2,
        ]
    )


def test_what_an_earlier_pass_found_outside_is_dropped_too() -> None:
    """The old policy's own set did not hold the token: its log-prob is -inf."""
    old = torch.full((2, 4), -1.0, dtype=torch.float64)
    old[0, 1] = -torch.inf
    parts = [pg.PolicyGradient(normalizer="mean(token)")]
    how = spec("drop", "recomputed", components=parts, old="given")
    plan = run(batch(top_k=V, old_logprobs=old), how)[3]
    assert plan.counts["rl"]["outside the kept set"] == 1 and plan.counts["rl"]["members"] == 3
    how = spec("refuse", "recomputed", components=parts, old="given")
    refused(pg.DataError, lambda: pg.plan([batch(top_k=V, old_logprobs=old)], how, split=ONE), "'one', token 1")


def test_a_statistics_pass_takes_no_offence_at_what_is_dropped() -> None:
    gates = [pg.EntropyGate(share=0.5)]
    metrics = run(batch(top_k=5), spec("drop", "recomputed", gates=gates))[2]
    assert metrics["rl/fault"] == 0 and 0 < metrics["rl/outside"] < 1 and metrics["rl/gate_entropy_quantile"] > 0


def test_a_unit_s_ratio_runs_over_what_is_inside() -> None:
    """Sequence ratio: the dropped token has no vote and leaves no trace."""
    old = torch.full((2, 4), -1.0, dtype=torch.float64)
    parts = [pg.PolicyGradient(ratio="sequence", surrogate=pg.Unclipped(), normalizer="sum(token)")]
    how = spec("drop", "recomputed", components=parts, old="given")
    ids = likeliest(1, 1, 5), likeliest(1, 2, 5)
    assert [int(TOKENS[1, i + 1]) in one for i, one in enumerate(ids)].count(True) == 1
    at = 1 if int(TOKENS[1, 1]) in ids[0] else 2
    only = batch(
        top_k=5, old_logprobs=old, action_mask=torch.tensor([[False] * 4, [False, at == 1, at == 2, False]]),
        observation_mask=None,
    )  # fmt: skip
    both = batch(
        top_k=5, old_logprobs=old, action_mask=torch.tensor([[False] * 4, [False, True, True, False]]),
        observation_mask=None,
    )  # fmt: skip
    how = how.replace(empty_sequences="exclude")
    assert run(both, how)[0] == run(only, how)[0]
    assert torch.equal(run(both, how)[1], run(only, how)[1])


@pytest.mark.parametrize(
    ("given", "how", "words"),
    [
        ({"kept_sets": IDS}, {"kept": None}, ("could not draw every token (kept)", "LossSpec(kept=...)")),
        ({"top_p": 0.9}, {"kept": None}, ("could not draw every token (top_p)",)),
        ({}, {}, ("to be recorded", "kept_sets=")),
        ({"top_k": 3}, {}, ("to be recorded", "kept_sets=")),
        ({"kept_sets": IDS}, {"source": "recomputed"}, ("to be recomputed", "top_k=, top_p= or min_p=")),
        ({"top_p": 0.0}, {"source": "recomputed"}, ("top_p is off its range", "'one', token 1")),
        ({"top_p": torch.tensor([0.5, 1.1])}, {"source": "recomputed"}, ("top_p is off its range", "'two', token 1")),
        ({"min_p": -0.1}, {"source": "recomputed"}, ("min_p is off its range", "'one', token 1")),
        ({"min_p": float("nan")}, {"source": "recomputed"}, ("min_p is off its range",)),
    ],
)
def test_refused_by_the_plan(given: dict[str, Any], how: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(pg.DataError, lambda: pg.plan([batch(**given)], spec(**how), split=ONE), *words)


def test_ids_off_the_vocabulary_are_refused() -> None:
    ids = IDS.clone()
    ids[0, 2, 0] = V
    plan = {"split": ONE, "vocab_size": V}
    refused(
        pg.DataError, lambda: pg.plan([batch(kept_sets=ids)], spec("add"), **plan), "kept_sets is off", "'one', token 2"
    )
    assert pg.plan([batch(kept_sets=IDS)], spec("add"), **plan).num_microbatches == 1


@pytest.mark.parametrize(
    "value", [torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, 3), torch.full((2, 4, 1), -2)]
)
def test_kept_sets_of_another_shape_or_kind_are_refused(value: Tensor) -> None:
    with pytest.raises(pg.DataError, match="kept_sets"):
        batch(kept_sets=value)


def test_log_probs_of_the_whole_vocabulary_are_refused() -> None:
    micro = next(iter(pg.plan([batch(kept_sets=IDS)], spec("add"), split=ONE).microbatches()))
    lp = pg.token_logprobs(LOGITS, micro.targets, entropy=True)
    refused(pg.DataError, lambda: pg.policy_loss(lp, micro), "kept=micro.kept")


def test_what_is_not_defined_on_sets_is_refused_by_the_spec() -> None:
    exact = [*PARTS, pg.KL(estimator="exact")]
    refused(pg.SpecError, lambda: spec(components=exact), "exact KL on kept sets")
    kept = [pg.PolicyGradient(count_rejected=False)]
    refused(pg.SpecError, lambda: spec("drop", "recomputed", components=kept), "count_rejected=False")
    assert spec("drop", components=kept).kept is not None
    taught = [pg.PolicyGradient(), pg.TopKDistill()]
    refused(pg.SpecError, lambda: spec(components=taught), "teacher's top-k on kept sets")
    layout: Any = None  # not reached
    with pytest.raises(pg.UnsupportedError, match="kept sets"):
        refuse(Setup(config=None, chunks=[], bare=[], layout=layout, spec=spec(), head="auto"))


def test_the_spec_says_so_in_words_and_in_toml() -> None:
    how = spec("drop", "recomputed")
    assert "recomputed from the logits; a sampled token outside of it is dropped" in str(how)
    assert pg.LossSpec.from_toml(how.to_toml()) == how and how.digest != spec("add", "recomputed").digest


# ---- traces --------------------------------------------------------------------------------------------------------


def trace(sampler: pg.Sampler, kept_sets: Any = None, **more: Any) -> pg.Trace:
    spans = [
        pg.Span(role="user", author="environment", tokens=[1]),
        pg.Span(role="assistant", author="policy", tokens=[2, 3], logprobs=[-0.5, -0.25], kept_sets=kept_sets),
    ]
    return pg.Trace(spans=spans, advantage=1.0, sampler=sampler, **more)


def test_traces_carry_the_sampler_s_processors_and_recorded_sets() -> None:
    made = pg.TokenBatch.from_traces([trace(pg.Sampler(top_k=5, top_p=0.9)), trace(pg.Sampler(min_p=0.1))])
    assert made.streams["top_k"].tolist() == [5, 5, 0, 0, 0, 0]
    near(made.streams["top_p"], [0.9, 0.9, 1.0, 1.0, 1.0, 1.0], 1e-6)
    near(made.streams["min_p"], [0.0, 0.0, 0.0, 0.1, 0.1, 0.0], 1e-6)
    made = pg.TokenBatch.from_traces([trace(pg.Sampler(), [[2, 4, 6], []])])
    assert made.streams["kept"].tolist() == [[2, 4, 6], [-1] * 3, [-1] * 3] and "top_k" not in made.streams
    assert not {"kept", "top_k", "top_p", "min_p"} & set(pg.TokenBatch.from_traces([trace(pg.Sampler())]).streams)
    refused(pg.DataError, lambda: pg.TokenBatch.from_traces([trace(pg.Sampler(), [[2]])]), "number of kept sets")


@pytest.mark.parametrize(
    ("sampler", "sets", "word"),
    [
        ({"temperature": 0.7}, None, "temperature=0.7"),
        ({"top_k": 4}, None, "top_k=4"),
        ({"top_p": 0.9}, None, "top_p=0.9"),
        ({"min_p": 0.1}, None, "min_p=0.1"),
        ({}, [[2], [3, 1]], "kept set"),
    ],
)
def test_raw_log_probs_under_a_processor_are_no_behaviour_stream(sampler: dict[str, Any], sets: Any, word: str) -> None:
    raw = trace(pg.Sampler(logprobs="raw", **sampler), sets, sample_id="s")
    refused(pg.DataError, lambda: pg.TokenBatch.from_traces([raw]), "raw log-probs", word, "'s'")
    made = pg.TokenBatch.from_traces([trace(pg.Sampler(logprobs="processed", **sampler), sets)])
    assert made.streams["rollout"].tolist() == [-0.5, -0.25, 0.0]
