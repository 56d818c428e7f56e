"""What a caller hands over, in token order, becomes target-aligned streams; the shift happens once and here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.rollouts import concatenate
from support.steps import NAN, pictured, solve

# Two rollouts. Row 0: prompt, two tokens of the policy, two of a tool, one of the policy. Row 1: an initial prompt that
# the environment wrote, one token of the policy.
LENGTHS = [6, 3]
TOKENS = [[10, 11, 12, 13, 14, 15], [20, 21, 22]]
ACTION = [[0, 1, 1, 0, 0, 1], [0, 0, 1]]
ANSWER = [[0, 0, 0, 1, 1, 0], [0, 0, 0]]
MU = [[NAN, -1.0, -2.0, NAN, NAN, -3.0], [NAN, NAN, -4.0]]
# The same by hand, position t about the token after it: the first entry of each row leaves, its last is filled.
ALIGNED = {
    "tokens_T": [10, 11, 12, 13, 14, 15, 20, 21, 22],
    "targets_T": [11, 12, 13, 14, 15, 0, 21, 22, 0],
    "action_T": [1, 1, 0, 0, 1, 0, 0, 1, 0],
    "observation_T": [0, 0, 1, 1, 0, 0, 0, 0, 0],
    "target_T": [0, 0, 1, 1, 0, 0, 0, 0, 0],
    "turn_T": [0, 0, 0, 0, 1, -1, -1, 0, -1],
    "predicts_T": [1, 1, 1, 1, 1, 0, 1, 1, 0],
    "seq_T": [0, 0, 0, 0, 0, 0, 1, 1, 1],
    "cu_S1": [0, 6, 9],
    "advantages": [0.5, 0.5, 0.5, 0.5, 0.5, 0.0, -2.0, -2.0, 0.0],
    "rollout": [-1.0, -2.0, NAN, NAN, -3.0, 0.0, NAN, -4.0, 0.0],
    "temperature": [0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 2.0, 1.0],
}


def flat(rows: list[list[Any]]) -> list[Any]:
    return [x for row in rows for x in row]


def padded_rows(rows: list[list[Any]], left: bool, width: int, fill: Any, dtype: torch.dtype) -> Tensor:
    pads = [[fill] * (width - len(row)) for row in rows]
    joined = [pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)]
    return torch.tensor(joined).to(dtype)


def from_padded(left: bool = False, width: int = 8, **changes: Any) -> pg.TokenBatch:
    """The two rows in a matrix whose padding is garbage, but for the action mask, which may not mark any."""
    form = {
        "tokens": padded_rows(TOKENS, left, width, 99, torch.int64),
        "action_mask": padded_rows(ACTION, left, width, 0, torch.bool),
        "observation_mask": padded_rows(ANSWER, left, width, 0, torch.bool),
        "rollout_logprobs": padded_rows(MU, left, width, 7.0, torch.float32),
        "advantages": torch.tensor([0.5, -2.0]),
        "temperature": torch.tensor([0.5, 2.0]),
    }
    real = padded_rows([[1] * length for length in LENGTHS], left, width, 0, torch.bool)
    where = {"attention_mask": real} if left else {"lengths": torch.tensor(LENGTHS)}
    return pg.TokenBatch.from_padded(**(form | where | changes))


def from_packed() -> pg.TokenBatch:
    return pg.TokenBatch.from_packed(
        tokens=torch.tensor(flat(TOKENS)),
        lengths=LENGTHS,
        action_mask=torch.tensor(flat(ACTION)).bool(),
        observation_mask=torch.tensor(flat(ANSWER)).bool(),
        rollout_logprobs=torch.tensor(flat(MU)),
        advantages=torch.tensor([0.5] * 6 + [-2.0] * 3),
        temperature=torch.tensor([0.5] * 6 + [2.0] * 3),
    )


def from_traces() -> pg.TokenBatch:
    def policy(tokens: list[int], logprobs: list[float]) -> pg.Span:
        return pg.Span(role="assistant", author="policy", tokens=tokens, logprobs=logprobs)

    return pg.TokenBatch.from_traces(
        [
            pg.Trace(
                advantage=0.5,
                sampler=pg.Sampler(temperature=0.5),
                spans=[
                    pg.Span(role="user", author="harness", tokens=[10]),
                    policy([11, 12], [-1.0, -2.0]),
                    pg.Span(role="tool", author="environment", tokens=[13, 14]),
                    policy([15], [-3.0]),
                ],
            ),
            pg.Trace(
                advantage=-2.0,
                sampler=pg.Sampler(temperature=2.0),
                spans=[pg.Span(role="user", author="environment", tokens=[20, 21]), policy([22], [-4.0])],
            ),
        ]
    )


BUILDERS = {
    "right padded": lambda: from_padded(width=8),
    "right padded, no room": lambda: from_padded(width=6),
    "left padded": lambda: from_padded(left=True),
    "packed": from_packed,
    "traces": from_traces,
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_every_builder_gives_the_streams_worked_out_by_hand(build: Any) -> None:
    batch = build()
    for name, expected in ALIGNED.items():
        got = batch.streams[name] if name in batch.streams else getattr(batch, name)
        torch.testing.assert_close(
            got.double(), torch.tensor(expected).double(), rtol=0, atol=0, equal_nan=True, msg=name
        )
    assert len(batch) == 2 and batch.lengths_S.tolist() == LENGTHS and not batch.first_action_S.any()


@given(data=st.data())
def test_position_t_is_about_the_token_after_it(data: st.DataObject) -> None:
    """Any lengths, any masks, any side of padding; the expected streams come from a loop over the rows."""
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    width, left = max(lengths) + data.draw(st.integers(0, 2)), data.draw(st.booleans())
    rows = [[data.draw(st.integers(0, 99)) for _ in range(n)] for n in lengths]
    marks = [[data.draw(st.booleans()) for _ in range(n)] for n in lengths]
    values = [[float(10 * i + k) for k in range(n)] for i, n in enumerate(lengths)]
    real = padded_rows([[1] * n for n in lengths], left, width, 0, torch.bool)
    batch = pg.TokenBatch.from_padded(
        tokens=padded_rows(rows, left, width, 5, torch.int64).reshape(len(lengths), width),
        attention_mask=real.reshape(len(lengths), width),
        action_mask=padded_rows(marks, left, width, False, torch.bool).reshape(len(lengths), width),
        old_logprobs=padded_rows(values, left, width, NAN, torch.float64).reshape(len(lengths), width),
    )
    moved = {"targets_T": (rows, 0), "action_T": (marks, False), "old": (values, 0.0)}
    for name, (given_rows, fill) in moved.items():
        expected = [x for row in given_rows for x in (*row[1:], *([fill] if row else []))]
        got = batch.streams[name] if name in batch.streams else getattr(batch, name)
        assert got.tolist() == expected
    assert batch.tokens_T.tolist() == flat(rows)
    assert batch.first_action_S.tolist() == [bool(row and row[0]) for row in marks]
    expected_turns: list[int] = []
    for row in marks:
        turn, before, of_row = -1, False, []
        for mark in row:
            turn, before = turn + (mark and not before), mark
            of_row.append(turn)
        expected_turns += [*of_row[1:], *([-1] if row else [])]
    assert batch.turn_T.tolist() == expected_turns


def test_turns_are_unbroken_runs_and_what_follows_them() -> None:
    """Token order: c A A o A c A A / A o (a run that begins the row) / A A. Turns 0 0 0 1 1 2 2 after the shift."""
    batch = pictured("cAAoAcAA", "", "AoA", "cA")
    first = [0, 0, 0, 1, 1, 2, 2, -1]
    assert batch.turn_T.tolist() == [*first, 0, 1, -1, 0, -1]
    given_ids = pictured("cAA", "cA", turn_ids=[5, 7, 7, -1, 3])
    assert given_ids.turn_T.tolist() == [7, 7, -1, 3, -1]


def test_zero_length_rows_are_padding() -> None:
    batch = pictured("", "cAAA", "", "cA", "")
    assert batch.lengths_S.tolist() == [0, 4, 0, 2, 0] and batch.cu_S1.tolist() == [0, 0, 4, 4, 6, 6]
    assert batch.targets_T.tolist() == [2, 3, 4, 0, 6, 0] and batch.seq_T.tolist() == [1, 1, 1, 1, 3, 3]
    spec = pg.presets.reinforce(normalizer="mean(sequence) > mean(token)")
    spec = spec.replace(components=[spec.components[0].replace(units="all")])
    answer, plain = solve(batch, spec, [-1.0] * 6), solve(pictured("cAAA", "cA"), spec, [-1.0] * 6)
    assert answer.loss == plain.loss and torch.equal(answer.grad_T, plain.grad_T)
    assert answer.plan.counts["rl"]["sequence"] == 2  # not even with units="all"
    assert len(pictured("", "")) == 2 and pictured("", "").tokens_T.numel() == 0


def test_one_advantage_a_row_is_that_advantage_at_each_token() -> None:
    per_row = from_padded()
    per_token = from_padded(advantages=torch.tensor([0.5, -2.0])[:, None].expand(2, 8))  # stride 0
    assert torch.equal(per_row.streams["advantages"], per_token.streams["advantages"])
    scalar = from_padded(advantages=torch.tensor(3.0).expand(2, 8), temperature=0.5)
    assert scalar.streams["advantages"].tolist() == [3.0] * 5 + [0.0] + [3.0] * 2 + [0.0]
    assert scalar.streams["temperature"].tolist() == [0.5] * 5 + [1.0] + [0.5] * 2 + [1.0]


def test_batch_owns_its_streams_and_constants_carry_no_gradient() -> None:
    """A write into the caller's tensors after the build is not seen, and no gradient flows into any of them."""
    names = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    leaves = {name: torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True) for name in names}
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    spec = pg.presets.grpo(corrections=[pg.TruncatedIS()]).add(pg.KL(name="kl_mu", to="rollout"))
    batch = pictured("cAA", "cA", weights={"rl": weight}, **leaves)
    batch = batch.with_stream("old", leaves["old_logprobs"] * 1.5)
    before = {name: stream.clone() for name, stream in batch.streams.items()}
    answer = solve(batch, spec, [-1.1] * 5)
    assert answer.grad_T.abs().sum() > 0
    assert all(leaf.grad is None for leaf in (*leaves.values(), weight))
    assert not any(stream.requires_grad for stream in (*batch.streams.values(), *batch.weights.values()))
    with torch.no_grad():
        for leaf in leaves.values():
            leaf.fill_(9.0)
    assert all(torch.equal(stream, before[name]) for name, stream in batch.streams.items())


def test_select_picks_whole_rows_and_all_that_belongs_to_them() -> None:
    batch = pictured(
        "cA", "cAAo", "", "AcA", advantages=[float(k) for k in range(9)], prompt_ids=["a", "b", "c", "d"],
        sample_ids=[4, 3, 2, 1], terminations=["success", "truncated", "fault", "failure"],
        masks={"m": [True, False, True, True, False, True, True, False, True]},
    )  # fmt: skip
    picked = batch.select([3, 1, 3])
    assert picked.cu_S1.tolist() == [0, 3, 7, 10] and picked.tokens_T.tolist() == [7, 8, 9, 3, 4, 5, 6, 7, 8, 9]
    assert picked.streams["advantages"].tolist() == [7.0, 8.0, 0.0, 3.0, 4.0, 5.0, 0.0, 7.0, 8.0, 0.0]
    assert picked.masks["m"].tolist() == [False, True, False, True, False, True, False, False, True, False]
    assert picked.prompt_ids == ("d", "b", "d") and picked.sample_ids == (1, 3, 1)
    assert [state.value for state in picked.terminations or ()] == ["failure", "truncated", "failure"]
    assert picked.first_action_S.tolist() == [True, False, True]
    assert picked.records_S[0] is batch.records_S[3]  # an update on the part is an update on the whole
    assert len(batch.select([])) == 0 and batch.select([]).tokens_T.numel() == 0


def test_concatenate_lays_rows_end_to_end() -> None:
    parts = [pictured("cA", "cAA", sample_ids=["x", "y"]), pictured("cAAAo", sample_ids=[1])]
    whole = concatenate([*parts, pictured("c").select([])])
    assert whole is not None and whole.cu_S1.tolist() == [0, 2, 5, 10] and whole.width == 5
    assert whole.sample_ids == ("x", "y", 1) and whole.tokens_T.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    assert concatenate([]) is None and concatenate([whole.select([])]) is None
    picked = concatenate([whole.select([2]), whole.select([0, 1])])
    assert picked is not None and torch.equal(picked.select([1, 2, 0]).tokens_T, whole.tokens_T)


def test_traces_and_tensors_go_into_one_step() -> None:
    """Labels are for people: a batch without them costs the others theirs, and nothing else."""
    traced, tensors = from_traces(), from_packed()
    both = concatenate([traced, tensors])
    assert both is not None and len(both) == 4 and traced.labels and not both.labels
    assert torch.equal(both.select([0, 1]).targets_T, both.select([2, 3]).targets_T)
    again = concatenate([traced, traced])
    assert again is not None and torch.equal(again.labels["role"][:9], traced.labels["role"])
