"""Agent traces: who wrote a token decides whether it is trained, its role only with what weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import megatron_pgloss as pg
from support.steps import NAN, ONE, near, solve, weights_of


def span(author: str, *tokens: int, role: str = "any") -> pg.Span:
    return pg.Span(role=role, author=author, tokens=tokens)  # type: ignore[arg-type]


def trace(*spans: pg.Span, advantage: float = 1.0, **more: object) -> pg.Trace:
    return pg.Trace(spans=spans, advantage=advantage, **more)  # type: ignore[arg-type]


def picked(batch: pg.TokenBatch, flags: torch.Tensor) -> list[int]:
    """The target tokens where ``flags``."""
    return batch.targets_T[flags].tolist()


MIXED = trace(
    span("harness", 1, 2, role="system"),
    span("environment", 3, 4, role="user"),  # the initial prompt
    span("copied", 5, role="assistant"),  # a few-shot example
    span("renderer", 6, role="assistant"),  # the turn opener
    span("policy", 7, 8, role="assistant"),
    span("renderer", 9, role="assistant"),
    span("environment", 10, 11, role="tool"),
    span("verifier", 12, role="tool"),
    span("copied", 13, role="tool"),
    span("policy", 14, role="assistant"),
    span("environment", 15, role="user"),
)


def test_the_author_decides_who_is_trained_on_what() -> None:
    """Actions are the policy's tokens alone, whatever their role; answers are the environment's after the first policy
    turn: not the initial prompt, not what was copied, rendered or said by a verifier."""
    batch = pg.TokenBatch.from_traces([MIXED])
    assert picked(batch, batch.action_T) == [7, 8, 14]
    assert picked(batch, batch.observation_T) == [10, 11, 15] == picked(batch, batch.target_T)
    assert batch.turn_T.tolist() == [-1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 1, 1, -1]
    assert batch.words == ("harness", "environment", "copied", "renderer", "policy", "verifier", "system", "user", *(
        "assistant", "tool"
    ))  # fmt: skip
    said = [batch.words[code] for code in batch.labels["author"].tolist()][:-1]
    assert said == ["harness"] + ["environment"] * 2 + ["copied", "renderer", "policy", "policy", "renderer"] + (
        ["environment"] * 2 + ["verifier", "copied", "policy", "environment"]
    )
    assert [batch.words[code] for code in batch.labels["role"].tolist()][:3] == ["system", "user", "user"]


def test_naming_a_role_replaces_the_default_table() -> None:
    """Targets are the tools' answers with weight 0.1; the set O that may be counted keeps all three."""
    table = pg.RoleTable(ce={"tool": 0.1})
    batch = pg.TokenBatch.from_traces([MIXED], roles=table)
    assert picked(batch, batch.target_T) == [10, 11] and picked(batch, batch.observation_T) == [10, 11, 15]
    everything = pg.TokenBatch.from_traces([MIXED], roles=pg.RoleTable())
    assert picked(everything, everything.target_T) == [10, 11, 15] and not everything.weights
    parts = [*pg.presets.reinforce().components, pg.CrossEntropy(count="observations")]
    spec = pg.LossSpec(old="policy", components=parts, roles=table)
    near(weights_of(batch, spec, "ce"), [0.1 / 3] * 2, 1e-7)
    near(weights_of(everything, spec, "ce"), [1 / 3] * 3, 1e-7)
    silent = pg.TokenBatch.from_traces([MIXED], roles=pg.RoleTable(ce={"tool": 0.0}))
    near(weights_of(silent, spec, "ce"), [0.0] * 2)  # trained with weight 0 is still counted


def test_a_user_mask_may_only_narrow_what_echo_trains() -> None:
    batch = pg.TokenBatch.from_traces([MIXED])
    keep = torch.tensor([token not in (11, 7) for token in batch.targets_T.tolist()])
    narrowed = replace(batch, masks={"keep": keep})
    spec = pg.presets.echo(masks=[pg.UserMask(name="keep", on=("ce",))], old="policy")
    plan = pg.plan([narrowed], spec, split=ONE)
    assert picked(batch, plan.components["ce"].member_T) == [10, 15]
    assert picked(batch, plan.components["rl"].member_T) == [7, 8, 14]
    assert plan.counts["ce"]["token"] == 3


def test_logprobs_advantage_temperature_and_ids_of_a_trace() -> None:
    policy = pg.Span(role="assistant", author=pg.Author.POLICY, tokens=[2, 3], logprobs=[-0.25, -0.5])
    traces = [
        trace(span("harness", 1), policy, advantage=0.8, prompt_id="task-7", episode_id="3", sample_id=11,
              termination=pg.Termination.SUCCESS, sampler=pg.Sampler(temperature=0.8)),
        trace(span("harness", 1), policy, span("environment", 4), advantage=-0.8, prompt_id="task-7", episode_id="4",
              sample_id=12, termination="truncated", sampler=pg.Sampler(temperature=0.5)),
    ]  # fmt: skip
    batch = pg.TokenBatch.from_traces(traces)
    rollout = batch.streams["rollout"].tolist()
    assert rollout[:3] == [-0.25, -0.5, 0.0] and rollout[3:5] == [-0.25, -0.5] and rollout[5] != rollout[5]
    near(batch.streams["advantages"][[0, 1, 3, 4]], [0.8, 0.8, -0.8, -0.8], 1e-7)
    near(batch.streams["temperature"][[0, 1, 3, 4]], [0.8, 0.8, 0.5, 0.5], 1e-7)
    assert batch.prompt_ids == ("task-7", "task-7") and batch.episode_ids == ("3", "4") and batch.sample_ids == (11, 12)
    assert batch.terminations == (pg.Termination.SUCCESS, pg.Termination.TRUNCATED)
    # Nothing reported, nothing there.
    assert "rollout" not in pg.TokenBatch.from_traces([MIXED]).streams and MIXED.prompt_id is None


def test_what_nobody_sampled_has_no_logprob_and_is_not_read() -> None:
    """Answers hold NaN in the rollout stream; a loss over actions and answers does not see it."""
    policy = pg.Span(role="assistant", author="policy", tokens=[2, 3], logprobs=[-1.0, -1.0])
    batch = pg.TokenBatch.from_traces([trace(span("harness", 1), policy, span("environment", 4))])
    spec = pg.presets.echo(old="rollout")
    answer = solve(batch, spec, [-1.0, -1.0, -0.5, NAN])
    near(answer.loss, -1.0 + 0.05 * 0.5)
    assert answer.metrics["rl/ratio"] == 1.0


def test_traces_of_no_tokens() -> None:
    assert len(pg.TokenBatch.from_traces([])) == 0
    empty = pg.TokenBatch.from_traces([trace(), trace(span("policy"), span("harness", 5), span("policy", 6, 7))])
    assert empty.lengths_S.tolist() == [0, 3] and picked(empty, empty.action_T) == [6, 7]


@pytest.mark.parametrize("author", ["policy", pg.Author.POLICY])
def test_a_policy_span_that_opens_the_row_is_found_by_the_plan(author: str) -> None:
    batch = pg.TokenBatch.from_traces([trace(span(author, 1, 2))])
    with pytest.raises(pg.DataError, match="first token of a sequence is marked as an action"):
        pg.plan([batch], pg.presets.reinforce(), split=ONE)
